//! Questions to the cluster.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::config::Config;
use crate::error::Error;

/// How to read a committed offset while a transaction that would change it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stability {
    /// Wait for the outcome of an open transaction (KIP-447 `RequireStable`).
    Stable,
    /// Take the last committed one.
    Any,
}

/// The offset and metadata of a group.
pub async fn committed(
    _config: &Config,
    _group: &str,
    _topic: &str,
    _partition: i32,
    _stability: Stability,
    _timeout: Duration,
) -> Result<Option<(i64, String)>, Error> {
    todo!()
}

/// What a topic should look like when it is created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicSpec {
    /// Number of partitions.
    pub partitions: i32,
    /// Number of replicas; `None` = the broker's default.
    pub replication: Option<i16>,
    /// Topic configuration, for example `cleanup.policy`.
    pub properties: BTreeMap<String, String>,
}

/// Creates a topic if it does not exist.
pub async fn ensure_topic(
    _config: &Config,
    _topic: &str,
    _spec: &TopicSpec,
) -> Result<bool, Error> {
    todo!()
}

/// The cluster as a client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Cluster id.
    pub cluster_id: String,
    /// Number of live brokers.
    pub brokers: usize,
    /// Topics that this principal may describe.
    pub topics: Vec<TopicInfo>,
}

/// A topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicInfo {
    /// Name.
    pub name: String,
    /// Number of partitions.
    pub partitions: usize,
    /// Smallest number of replicas of a partition.
    pub replicas: usize,
}

/// Describes the cluster.
pub async fn cluster(_config: &Config, _timeout: Duration) -> Result<Cluster, Error> {
    todo!()
}

/// The id of a topic (KIP-516).
pub async fn topic_id(_config: &Config, _topic: &str) -> Result<Option<String>, Error> {
    todo!()
}
