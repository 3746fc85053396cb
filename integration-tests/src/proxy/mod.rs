//! A TCP proxy that knows Kafka's frames: it holds, drops, delays, duplicates or cuts the requests and responses it is
//! told to, and passes everything else on.
//!
//! ```no_run
//! # async fn example() -> anyhow::Result<()> {
//! use oncebox_integration_tests::proxy::{Proxy, api};
//! use oncebox_integration_tests::services;
//!
//! let proxy = Proxy::start(services::kafka().await).await?;
//! let held = proxy.on_request(api::END_TXN).hold();
//! // … a producer that bootstraps from proxy.bootstrap() commits …
//! held.hit().await; // its EndTxn is here and nowhere else
//! // … the producer times out and begins its next transaction …
//! let answer = held.release().await.expect("the broker answered");
//! assert_eq!(answer.error_code(), Some(47)); // INVALID_PRODUCER_EPOCH: it came too late
//! # Ok(()) }
//! ```

mod connection;
mod frame;
mod rule;

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use self::frame::{Answer, api};
pub use self::rule::{Rule, RuleBuilder};

use self::rule::{Rules, Side};
use crate::services::{Kafka, Route};

/// One slot of a cluster, occupied. Dropped = closed, with every connection through it.
#[derive(Debug)]
pub struct Proxy {
    bootstrap: String,
    rules: Arc<Rules>,
    _listeners: JoinSet<()>,
}

impl Proxy {
    /// Occupies a free slot of the cluster; waits while all are occupied. Whoever bootstraps from
    /// [`Proxy::bootstrap`] stays behind the proxy: the brokers advertise its ports there.
    ///
    /// # Errors
    /// The cluster has no slots (it comes from the environment without routes): start a private one.
    pub async fn start(kafka: &Kafka) -> Result<Self> {
        kafka
            .slots()
            .first()
            .context("this Kafka has no proxy listeners: start a private one")?;
        loop {
            for slot in kafka.slots() {
                if let Some(proxy) = Self::occupy(slot).await {
                    return Ok(proxy);
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn occupy(slot: &[Route]) -> Option<Self> {
        let rules = Arc::new(Rules::default());
        let mut listeners = JoinSet::new();
        for route in slot {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, route.advertised))
                .await
                .ok()?;
            listeners.spawn(accept(listener, route.target, Arc::clone(&rules)));
        }
        let bootstrap = slot
            .iter()
            .map(|r| format!("127.0.0.1:{}", r.advertised))
            .collect::<Vec<_>>()
            .join(",");
        Some(Self {
            bootstrap,
            rules,
            _listeners: listeners,
        })
    }

    /// The bootstrap address behind the proxy.
    pub fn bootstrap(&self) -> &str {
        &self.bootstrap
    }

    /// Begins a rule for requests of this api key ([`api`]), on their way to the broker.
    pub fn on_request(&self, api_key: i16) -> RuleBuilder<'_> {
        RuleBuilder::new(&self.rules, Side::Request, api_key)
    }

    /// Begins a rule for the responses to requests of this api key, on their way back: the broker has done the work.
    pub fn on_response(&self, api_key: i16) -> RuleBuilder<'_> {
        RuleBuilder::new(&self.rules, Side::Response, api_key)
    }

    /// How many requests of this api key have come, whatever happened to them.
    pub fn requests(&self, api_key: i16) -> usize {
        self.rules.requests(api_key)
    }

    /// Cuts every open connection; new ones are accepted. Returns how many there were.
    pub fn cut_all(&self) -> usize {
        self.rules.cut_all()
    }

    /// Forgets every rule. What is held stays held until its [`Rule`] releases it or is dropped.
    pub fn clear(&self) {
        self.rules.clear();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.rules.cut_all();
    }
}

async fn accept(listener: TcpListener, target: u16, rules: Arc<Rules>) {
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        let (rules, (cut, open)) = (Arc::clone(&rules), rules.connection());
        connections.spawn(async move {
            let _open = open;
            connection::serve(client, target, rules, cut).await;
        });
        while connections.try_join_next().is_some() {}
    }
}

/// Ends a connection when it fires.
type Cut = CancellationToken;
