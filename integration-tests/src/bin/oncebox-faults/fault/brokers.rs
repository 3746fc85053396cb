//! Brokers of a cluster of three.

use std::time::Duration;

use anyhow::{Context as _, Result};
use futures_util::future::try_join_all;
use rand::RngExt as _;
use rand::rngs::StdRng;

use super::PATIENCE;
use crate::scene::Scene;

/// How a broker goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Down {
    Killed,
    Stopped,
}

impl Scene {
    /// Hits when another broker leads its partition.
    pub(super) async fn one_broker_down(&self, how: Down, rng: &mut StdRng) -> Result<bool> {
        let partition = rng.random_range(0..4);
        let leader = self.kafka.leader(&self.topic, partition).await?;
        let leader = leader.context("the partition has no leader")?;
        match how {
            Down::Killed => self.kafka.kill_broker(leader).await?,
            Down::Stopped => self.kafka.stop_broker(leader).await?,
        }
        let moved = async {
            loop {
                if let Ok(Some(now)) = self.kafka.leader(&self.topic, partition).await
                    && now != leader
                {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let moved = tokio::time::timeout(PATIENCE, moved).await.is_ok();
        tokio::time::sleep(self.within_a_transaction(rng)).await;
        self.kafka.start_broker(leader).await?;
        // The next one that goes must not be the last that has everything.
        self.kafka.in_sync().await?;
        Ok(moved)
    }

    pub(super) async fn all_brokers_down(&self, rng: &mut StdRng) -> Result<bool> {
        let all = 0..self.kafka.brokers();
        try_join_all(all.clone().map(|broker| self.kafka.kill_broker(broker))).await?;
        let hit = self.stands_still(rng).await;
        try_join_all(all.map(|broker| self.kafka.start_broker(broker))).await?;
        self.kafka.in_sync().await?;
        hit
    }

    /// The topic wants three replicas in sync and has two.
    pub(super) async fn too_few_replicas(&self, rng: &mut StdRng) -> Result<bool> {
        let name = "min.insync.replicas";
        self.kafka.set_topic(&self.topic, &[(name, "3")]).await;
        let broker = rng.random_range(0..self.kafka.brokers());
        self.kafka.kill_broker(broker).await?;
        let hit = self.stands_still(rng).await;
        self.kafka.start_broker(broker).await?;
        self.kafka.set_topic(&self.topic, &[(name, "2")]).await;
        self.kafka.in_sync().await?;
        hit
    }
}
