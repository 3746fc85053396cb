//! Questions to a real cluster.

use std::time::Duration;

use oncebox_kafka::{
    Stability, TopicSpec, broker_settings, cluster, committed, ensure_topic, offset_for_time,
    topic_id, topic_settings, watermarks,
};

use crate::support::{kafka, open, records, topic, unique};

const WAIT: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_topic_is_created_once_as_specified() {
    let Some(config) = kafka() else { return };
    let name = unique("created");
    assert_eq!(topic_id(&config, &name).await.unwrap(), None);
    assert!(topic_settings(&config, &name).await.unwrap().is_none());
    let spec = TopicSpec::new(3)
        .set("cleanup.policy", "compact")
        .set("max.message.bytes", "12345");
    assert!(ensure_topic(&config, &name, &spec).await.unwrap());
    assert!(
        !ensure_topic(&config, &name, &TopicSpec::new(7))
            .await
            .unwrap()
    );
    let id = topic_id(&config, &name).await.unwrap().unwrap();
    assert_eq!(id.len(), 22, "{id}");
    let settings = topic_settings(&config, &name).await.unwrap().unwrap();
    assert_eq!(
        (settings.id, settings.partitions, settings.replication),
        (id, 3, 1)
    );
    assert_eq!(settings.config["cleanup.policy"], "compact");
}

#[tokio::test]
async fn the_cluster_describes_itself() {
    let Some(config) = kafka() else { return };
    let name = topic(&config, "described", 2).await;
    let described = cluster(&config, WAIT).await.unwrap();
    assert!(!described.cluster_id.is_empty() && described.brokers >= 1);
    let one = described.topics.iter().find(|t| t.name == name).unwrap();
    assert_eq!((one.partitions, one.replicas), (2, 1));
    let brokers = broker_settings(&config, WAIT).await.unwrap();
    assert_eq!(brokers.verifies_offset_commits(), Some(true));
    assert_eq!(brokers.smallest("offset.metadata.max.bytes"), Some(4096));
    assert!(brokers.smallest("transaction.max.timeout.ms").unwrap() >= 30_000);
}

#[tokio::test]
async fn an_offset_is_found_by_time() {
    let Some(config) = kafka() else { return };
    let name = topic(&config, "by-time", 1).await;
    let producer = open(&config, &unique("oncebox.by-time")).await;
    producer
        .transact(records(&name, &["a", "b"]))
        .await
        .unwrap();
    producer.close().await;
    assert_eq!(watermarks(&config, &name, 0, WAIT).await.unwrap(), (0, 3));
    assert_eq!(
        offset_for_time(&config, &name, 0, 0, WAIT).await.unwrap(),
        Some(0)
    );
    let error = watermarks(&config, &unique("missing"), 0, WAIT)
        .await
        .unwrap_err();
    assert!(error.is_unknown_topic(), "{error}");
}

/// The broker says "none" for a topic that does not exist: who asks must have made sure of the
/// topic first.
#[tokio::test]
async fn a_missing_topic_has_no_committed_offset() {
    let Some(config) = kafka() else { return };
    let group = unique("oncebox.none");
    let read = committed(
        &config,
        &group,
        &unique("missing"),
        0,
        Stability::Stable,
        WAIT,
    )
    .await;
    assert_eq!(read.unwrap(), None);
}
