//! The faults. Each proves that it hit, or it does not count.

mod brokers;
mod databases;
mod parking;

use std::time::{Duration, Instant};

use anyhow::Result;
use oncebox_integration_tests::cable::Cable;
use oncebox_integration_tests::proxy::Rule;
use rand::RngExt as _;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;

use crate::crew::signal;
use crate::kind::Kind;
use crate::scene::Scene;

use brokers::Down;

/// How long a fault may take to hit.
const PATIENCE: Duration = Duration::from_secs(20);
/// A fault that did not hit, for lack of an occasion, is tried again so often.
const ATTEMPTS: usize = 3;

impl Scene {
    /// One fault and the recovery from it: how long that took from the end of the fault, `None` if the fault never hit.
    pub(crate) async fn disturb(
        &mut self,
        kind: Kind,
        rng: &mut StdRng,
    ) -> Result<Option<Duration>> {
        for _ in 0..ATTEMPTS {
            // In the middle of something, not always at the same place.
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..200))).await;
            let hit = self.inject(kind, rng).await?;
            self.proxy.clear();
            self.consumers_proxy.clear();
            let start = Instant::now();
            self.recovered().await?;
            self.relays.check().await?;
            self.consumers.check().await?;
            if hit {
                return Ok(Some(start.elapsed()));
            }
        }
        Ok(None)
    }

    /// Injects one fault. Whether it hit.
    async fn inject(&mut self, kind: Kind, rng: &mut StdRng) -> Result<bool> {
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
                let deposed = self.watch.owner().await?.is_none_or(|pid| pid != leader);
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
            Kind::CutDatabase => databases::cut(&self.database).await,
            Kind::CutInventory => databases::cut(&self.inventory).await,
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
                let deposed = self.watch.owner().await?.is_none_or(|pid| pid != leader);
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
            Kind::KillWhileParking(step) => self.kill_while_parking(step, rng).await,
            Kind::PauseTopic => self.pause_topic(rng).await,
            Kind::MissingTopic => self.missing_topic(rng).await,
            Kind::ReadOnly => self.read_only(rng).await,
            Kind::NoConnections => self.no_connections(rng).await,
            Kind::Switchover => self.switchover().await,
            Kind::LossyFailover => self.lossy_failover(rng).await,
            Kind::DiskFull => self.disk_full(rng).await,
            Kind::KillOneBroker => self.one_broker_down(Down::Killed, rng).await,
            Kind::StopOneBroker => self.one_broker_down(Down::Stopped, rng).await,
            Kind::AllBrokersDown => self.all_brokers_down(rng).await,
            Kind::TooFewReplicas => self.too_few_replicas(rng).await,
        }
    }

    /// Waits, now shorter and now longer than the time-out of a transaction. Whether nothing was acknowledged meanwhile.
    async fn stands_still(&self, rng: &mut StdRng) -> Result<bool> {
        // What was under way when the fault began.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let before = self.watch.seq().await?;
        let longest = 3 * self.transaction_timeout / 2;
        tokio::time::sleep(rng.random_range(Duration::ZERO..longest)).await;
        Ok(self.watch.seq().await? == before)
    }

    /// Shorter than a transaction may take.
    fn within_a_transaction(&self, rng: &mut StdRng) -> Duration {
        rng.random_range(Duration::ZERO..self.transaction_timeout)
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
            if let Some(pid) = self.watch.owner().await?
                && self.relays.pids().contains(&pid)
            {
                return Ok(pid);
            }
            anyhow::ensure!(tokio::time::Instant::now() < deadline, "nobody leads");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

async fn hit(rule: &Rule) -> bool {
    rule.hit_within(1, PATIENCE).await
}
