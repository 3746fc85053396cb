//! The faults. Each proves that it hit, or it does not count.

use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, Result};
use oncebox_integration_tests::cable::Cable;
use oncebox_integration_tests::proxy::{Proxy, Rule, api};
use oncebox_integration_tests::services::{Database, Kafka, Postgres};
use oncebox_relay::Step;
use rand::RngExt as _;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use sqlx::{Connection as _, PgConnection};

use crate::crew::{Crew, signal};

/// How long a fault may take to hit.
const PATIENCE: Duration = Duration::from_secs(20);

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// SIGKILL, by the relay itself, at a named step.
    KillAt(Step),
    /// SIGKILL at any time, to the leader.
    Kill,
    /// SIGTERM to the leader: it gives the lease back.
    Stop,
    /// SIGSTOP of the leader for longer than its lease, then SIGCONT.
    Pause,
    /// The answer to a request is lost with its connection: the broker has done it.
    LostAnswer(i16),
    /// The request is lost with its connection: it never happened.
    LostRequest(i16),
    /// The answer comes late.
    SlowAnswer(i16),
    /// The broker gets the request twice.
    DoubleRequest(i16),
    /// The request arrives when the relay has long given it up.
    LateRequest(i16),
    /// Every connection to Kafka is cut.
    CutKafka,
    /// The broker is frozen and goes on.
    PauseBroker,
    /// The broker is killed and started again.
    KillBroker,
    /// Every session of the database is ended by the server, those of the writers too.
    CutDatabase,
    /// The network between the relays and their database is frozen for a while.
    FreezeCable,
    /// The network between the leader and its database is frozen until another leads.
    FreezeLeader,
    /// The network between the relays and their database breaks.
    CutCable,
    /// The server of both databases is stopped in an orderly way and started again.
    RestartDatabase,
    /// The server of both databases crashes and recovers.
    CrashDatabase,
    /// SIGKILL, by the consumer itself, at a named step.
    ConsumerKillAt(&'static str),
    /// SIGKILL at any time, to a consumer.
    ConsumerKill,
    /// SIGTERM to a consumer.
    ConsumerStop,
    /// SIGSTOP of a consumer, now shorter and now longer than its session, then SIGCONT.
    ConsumerPause,
    /// The answer to a consumer's request is lost with its connection.
    ConsumerLostAnswer(i16),
    /// A consumer's request is lost with its connection.
    ConsumerLostRequest(i16),
    /// Every session of the consumer's database is ended by the server.
    CutInventory,
}

/// Where consumers kill themselves.
const CONSUMER_STEPS: [&str; 7] = [
    "owned",
    "received",
    "marked",
    "handled",
    "before-commit",
    "committed",
    "offset-stored",
];

const WATCHED: [i16; 5] = [
    api::PRODUCE,
    api::ADD_PARTITIONS_TO_TXN,
    api::ADD_OFFSETS_TO_TXN,
    api::TXN_OFFSET_COMMIT,
    api::END_TXN,
];

impl Kind {
    /// Every kind.
    pub(crate) fn all() -> Vec<Self> {
        let mut kinds: Vec<_> = Step::LOOP.into_iter().map(Self::KillAt).collect();
        kinds.extend([
            Self::Kill,
            Self::Stop,
            Self::Pause,
            Self::CutKafka,
            Self::CutDatabase,
        ]);
        let requests: [fn(i16) -> Self; 5] = [
            Self::LostAnswer,
            Self::LostRequest,
            Self::SlowAnswer,
            Self::DoubleRequest,
            Self::LateRequest,
        ];
        for kind in requests {
            kinds.extend(WATCHED.map(kind));
        }
        kinds.extend([Self::FreezeCable, Self::FreezeLeader, Self::CutCable]);
        kinds.extend([Self::PauseBroker, Self::KillBroker]);
        kinds.extend([Self::RestartDatabase, Self::CrashDatabase]);
        kinds.extend(CONSUMER_STEPS.map(Self::ConsumerKillAt));
        kinds.extend([Self::ConsumerKill, Self::ConsumerStop, Self::ConsumerPause]);
        kinds.extend([api::FETCH, api::OFFSET_COMMIT].map(Self::ConsumerLostAnswer));
        kinds.extend([api::FETCH, api::OFFSET_COMMIT].map(Self::ConsumerLostRequest));
        kinds.push(Self::CutInventory);
        kinds
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let request = |key: &i16| match *key {
            api::PRODUCE => "produce",
            api::ADD_PARTITIONS_TO_TXN => "add-partitions",
            api::ADD_OFFSETS_TO_TXN => "add-offsets",
            api::TXN_OFFSET_COMMIT | api::OFFSET_COMMIT => "offset-commit",
            api::FETCH => "fetch",
            _ => "end-txn",
        };
        match self {
            Self::KillAt(step) => write!(f, "kill-at-{step}"),
            Self::Kill => f.write_str("kill"),
            Self::Pause => f.write_str("pause"),
            Self::LostAnswer(key) => write!(f, "lost-answer-{}", request(key)),
            Self::LostRequest(key) => write!(f, "lost-request-{}", request(key)),
            Self::SlowAnswer(key) => write!(f, "slow-answer-{}", request(key)),
            Self::DoubleRequest(key) => write!(f, "double-request-{}", request(key)),
            Self::LateRequest(key) => write!(f, "late-request-{}", request(key)),
            Self::CutKafka => f.write_str("cut-kafka"),
            Self::PauseBroker => f.write_str("pause-broker"),
            Self::KillBroker => f.write_str("kill-broker"),
            Self::CutDatabase => f.write_str("cut-database"),
            Self::FreezeCable => f.write_str("freeze-cable"),
            Self::FreezeLeader => f.write_str("freeze-leader"),
            Self::CutCable => f.write_str("cut-cable"),
            Self::RestartDatabase => f.write_str("restart-database"),
            Self::CrashDatabase => f.write_str("crash-database"),
            Self::Stop => f.write_str("stop"),
            Self::ConsumerKillAt(step) => write!(f, "consumer-kill-at-{step}"),
            Self::ConsumerKill => f.write_str("consumer-kill"),
            Self::ConsumerStop => f.write_str("consumer-stop"),
            Self::ConsumerPause => f.write_str("consumer-pause"),
            Self::ConsumerLostAnswer(key) => write!(f, "consumer-lost-answer-{}", request(key)),
            Self::ConsumerLostRequest(key) => write!(f, "consumer-lost-request-{}", request(key)),
            Self::CutInventory => f.write_str("cut-inventory"),
        }
    }
}

/// What faults act on.
pub(crate) struct Scene {
    pub(crate) postgres: Postgres,
    pub(crate) kafka: Kafka,
    /// Between each relay and its database.
    pub(crate) cables: Vec<Cable>,
    /// Between the relays and Kafka.
    pub(crate) proxy: Proxy,
    /// Between the consumers and Kafka.
    pub(crate) consumers_proxy: Proxy,
    pub(crate) database: Database,
    pub(crate) inventory: Database,
    pub(crate) relays: Crew,
    pub(crate) consumers: Crew,
    pub(crate) lease: Duration,
    pub(crate) transaction_timeout: Duration,
}

impl Scene {
    /// Injects one fault. Whether it hit.
    pub(crate) async fn inject(&mut self, kind: Kind, rng: &mut StdRng) -> Result<bool> {
        match kind {
            Kind::KillAt(step) => {
                let at = format!("{step}:{}", rng.random_range(1..=4));
                let arm = ["--kill-at".to_owned(), at];
                Ok(self.relays.run_armed(&arm, PATIENCE).await)
            }
            Kind::Kill => {
                tokio::time::sleep(Duration::from_millis(rng.random_range(0..300))).await;
                Ok(signal(self.leader().await?, "KILL"))
            }
            Kind::Stop => Ok(signal(self.leader().await?, "TERM")),
            Kind::Pause => {
                let leader = self.leader().await?;
                let hit = signal(leader, "STOP");
                tokio::time::sleep(self.past_the_lease(rng)).await;
                let deposed = self.owner().await?.is_none_or(|pid| pid != leader);
                Ok(hit && signal(leader, "CONT") && deposed)
            }
            Kind::LostAnswer(key) => Ok(hit(&self.proxy.on_response(key).cut()).await),
            Kind::LostRequest(key) => Ok(hit(&self.proxy.on_request(key).cut()).await),
            Kind::SlowAnswer(key) => {
                let by = Duration::from_millis(rng.random_range(50..3_000));
                let hit = hit(&self.proxy.on_response(key).delay(by)).await;
                tokio::time::sleep(by).await;
                Ok(hit)
            }
            Kind::DoubleRequest(key) => Ok(hit(&self.proxy.on_request(key).duplicate()).await),
            Kind::LateRequest(key) => {
                let rule = self.proxy.on_request(key).hold();
                if !hit(&rule).await {
                    return Ok(false);
                }
                let kept = Duration::from_millis(rng.random_range(0..4_000));
                tokio::time::sleep(kept).await;
                // Whatever it answers: what counts is what it did to the next transactions.
                let released = tokio::time::timeout(PATIENCE, rule.release()).await;
                Ok(released.is_ok())
            }
            Kind::CutKafka => Ok(self.proxy.cut_all() > 0),
            Kind::PauseBroker => {
                self.kafka.pause_broker(0).await?;
                let hit = self.stands_still(rng).await;
                self.kafka.resume_broker(0).await?;
                hit
            }
            Kind::KillBroker => {
                self.kafka.kill_broker(0).await?;
                let hit = self.stands_still(rng).await;
                self.kafka.start_broker(0).await?;
                hit
            }
            Kind::CutDatabase => cut(&self.database).await,
            Kind::CutInventory => cut(&self.inventory).await,
            Kind::ConsumerKillAt(step) => {
                // A consumer may own a single partition.
                let most = if step == "owned" { 1 } else { 20 };
                let at = format!("{step}:{}", rng.random_range(1..=most));
                let arm = ["--kill-at".to_owned(), at];
                Ok(self.consumers.run_armed(&arm, 2 * PATIENCE).await)
            }
            Kind::ConsumerKill => Ok(self.a_consumer(rng).is_some_and(|pid| signal(pid, "KILL"))),
            Kind::ConsumerStop => Ok(self.a_consumer(rng).is_some_and(|pid| signal(pid, "TERM"))),
            Kind::ConsumerPause => {
                let Some(pid) = self.a_consumer(rng) else {
                    return Ok(false);
                };
                let hit = signal(pid, "STOP");
                tokio::time::sleep(Duration::from_millis(rng.random_range(500..9_000))).await;
                Ok(hit && signal(pid, "CONT"))
            }
            Kind::ConsumerLostAnswer(key) => {
                Ok(hit(&self.consumers_proxy.on_response(key).cut()).await)
            }
            Kind::ConsumerLostRequest(key) => {
                Ok(hit(&self.consumers_proxy.on_request(key).cut()).await)
            }
            Kind::FreezeCable => {
                self.cables.iter().for_each(Cable::freeze);
                let hit = self.stands_still(rng).await;
                self.cables.iter().for_each(Cable::thaw);
                hit
            }
            Kind::FreezeLeader => {
                let leader = self.leader().await?;
                let Some(slot) = self.relays.slot(leader) else {
                    return Ok(false);
                };
                self.cables[slot].freeze();
                tokio::time::sleep(self.past_the_lease(rng)).await;
                let deposed = self.owner().await?.is_none_or(|pid| pid != leader);
                self.cables[slot].thaw();
                Ok(deposed)
            }
            Kind::CutCable => Ok(self.cables.iter().map(Cable::cut).sum::<usize>() > 0),
            Kind::RestartDatabase => {
                self.postgres.stop().await?;
                self.postgres.start_again().await?;
                Ok(true)
            }
            Kind::CrashDatabase => {
                self.postgres.crash().await?;
                self.postgres.start_again().await?;
                Ok(true)
            }
        }
    }

    /// The acknowledged transactions, by the mark: grows while relays get on.
    pub(crate) async fn seq(&self) -> Result<i64> {
        let mut conn = PgConnection::connect_with(&self.database.options()).await?;
        let seq = sqlx::query_scalar("SELECT seq FROM oncebox_mark");
        Ok(seq.fetch_one(&mut conn).await?)
    }

    /// Waits, now shorter and now longer than the time-out of a transaction. Whether nothing was acknowledged meanwhile.
    async fn stands_still(&self, rng: &mut StdRng) -> Result<bool> {
        // What was under way when the fault began.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let before = self.seq().await?;
        let longest = 3 * self.transaction_timeout / 2;
        tokio::time::sleep(rng.random_range(Duration::ZERO..longest)).await;
        Ok(self.seq().await? == before)
    }

    /// Now past the lease only, now past the transaction's time-out as well.
    fn past_the_lease(&self, rng: &mut StdRng) -> Duration {
        let longest = self.transaction_timeout + Duration::from_secs(1);
        // A standby looks at the lease every quarter of it, and takes a moment to take over.
        let shortest = self.lease * 3 / 2;
        rng.random_range(shortest..longest.max(shortest * 2))
    }

    fn a_consumer(&self, rng: &mut StdRng) -> Option<u32> {
        self.consumers.pids().choose(rng).copied()
    }

    /// The process that leads; waits for one.
    pub(crate) async fn leader(&self) -> Result<u32> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            if let Some(pid) = self.owner().await?
                && self.relays.pids().contains(&pid)
            {
                return Ok(pid);
            }
            anyhow::ensure!(tokio::time::Instant::now() < deadline, "nobody leads");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The process in the lease: `host/pid/…`.
    pub(crate) async fn owner(&self) -> Result<Option<u32>> {
        let mut conn = PgConnection::connect_with(&self.database.options()).await?;
        let owner: Option<String> = sqlx::query_scalar("SELECT owner FROM oncebox_mark")
            .fetch_one(&mut conn)
            .await?;
        let pid = owner.as_deref().map(|owner| {
            let pid = owner
                .split('/')
                .nth(1)
                .context("an owner without a process")?;
            pid.parse().context("an owner without a process")
        });
        pid.transpose()
    }
}

/// Ends every other session of a database.
async fn cut(database: &Database) -> Result<bool> {
    let mut conn = PgConnection::connect_with(&database.options()).await?;
    let ended: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM (SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
         WHERE datname = current_database() AND pid <> pg_backend_pid()) AS ended",
    )
    .fetch_one(&mut conn)
    .await?;
    Ok(ended > 0)
}

async fn hit(rule: &Rule) -> bool {
    rule.hit_within(1, PATIENCE).await
}
