//! An in-process Kafka broker with real transactions, for `oncebox demo` without anything installed.
//!
//! It is krafka's test broker behind a small shim (`shim`): librdkafka speaks an older `EndTxn` than that broker serves.
//! Records, transactions with their markers, fencing by producer epoch, `read_committed`, transactional offsets with
//! metadata and consumer groups behave as on Apache Kafka, also for clients in other processes, as long as they connect
//! to 127.0.0.1.
//!
//! What it is not: nothing is stored on disk or ever deleted; one broker without replication; one live member per
//! consumer group (a new member replaces the old one); a transaction whose producer died stays open until the same
//! `transactional.id` is initialised again; a topic's properties are accepted and ignored. It shows how Oncebox works. What
//! Oncebox keeps is proved on Apache Kafka by the integration tests.

mod end_txn;
mod shim;

use std::time::Duration;

use anyhow::{Context, Result};
use krafka::testing::{ApiKey, FakeBroker};
use tokio::task::AbortHandle;

/// The broker. Dropped = stopped, with its data.
#[derive(Debug)]
pub struct Embedded {
    bootstrap: String,
    shim: AbortHandle,
    housekeeping: AbortHandle,
}

impl Embedded {
    /// Starts it on a free port of 127.0.0.1, on the current tokio runtime.
    ///
    /// # Errors
    /// No port can be bound.
    pub async fn start() -> Result<Self> {
        let broker = FakeBroker::start()
            .await
            .context("cannot start the in-process broker")?;
        let address = broker
            .broker_addr(0)
            .context("the in-process broker has no address")?;
        let (port, shim) = shim::start(address)
            .await
            .context("cannot start the in-process broker's listener")?;
        // clients are told the shim's port, not the broker's
        broker.with_state(|state| state.brokers[0].port = i32::from(port));
        broker.set_api_versions(ApiKey::EndTxn, 0, 5);
        // the body of v3 is the body of v5
        broker.set_api_versions(ApiKey::TxnOffsetCommit, 3, 5);
        let housekeeping = tokio::spawn(keep_house(broker)).abort_handle();
        Ok(Self {
            bootstrap: format!("127.0.0.1:{port}"),
            shim,
            housekeeping,
        })
    }

    /// Its bootstrap address. Topics are created through the admin API, as anywhere.
    pub fn bootstrap(&self) -> String {
        self.bootstrap.clone()
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        self.shim.abort();
        self.housekeeping.abort();
    }
}

/// Owns the broker and forgets what it records for assertions: its cost per request grows with that record.
async fn keep_house(broker: FakeBroker) {
    let mut tick = tokio::time::interval(Duration::from_millis(250));
    loop {
        tick.tick().await;
        broker.clear_requests();
        broker.with_state(|state| {
            state.list_offsets_lookups.clear();
            state.leave_group_members.clear();
        });
    }
}
