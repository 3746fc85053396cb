//! Kafka's own tools, run from the jars, see what the reader sees: keys, headers and payloads of committed records.

use std::time::{Duration, Instant};

use oncebox_integration_tests::{kafka_cli, reader, services};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer, ThreadedProducer};
use rdkafka::{Offset, TopicPartitionList};

const PATIENCE: Duration = Duration::from_secs(30);

/// One committed and one aborted transaction, with a position for group `id`.
fn two_transactions(bootstrap: &str, id: &str, topic: &str) {
    let producer: ThreadedProducer<DefaultProducerContext> = ClientConfig::new()
        .set("bootstrap.servers", bootstrap)
        .set("transactional.id", id)
        .create()
        .unwrap();
    let group: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", bootstrap)
        .set("group.id", id)
        .create()
        .unwrap();
    producer.init_transactions(PATIENCE).unwrap();
    for (payload, commit) in [("committed", true), ("aborted", false)] {
        producer.begin_transaction().unwrap();
        let headers = OwnedHeaders::new().insert(Header {
            key: "h",
            value: Some("header"),
        });
        producer
            .send(
                BaseRecord::to(topic)
                    .key("key")
                    .payload(payload)
                    .headers(headers),
            )
            .unwrap();
        let mut position = TopicPartitionList::new();
        position
            .add_partition_offset(topic, 0, Offset::Offset(if commit { 42 } else { 43 }))
            .unwrap();
        producer
            .send_offsets_to_transaction(&position, &group.group_metadata().unwrap(), PATIENCE)
            .unwrap();
        if commit {
            producer.commit_transaction(PATIENCE).unwrap();
        } else {
            producer.flush(PATIENCE).unwrap();
            producer.abort_transaction(PATIENCE).unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kafkas_own_tools_see_what_the_reader_sees() {
    let kafka = services::kafka().await;
    let topic = kafka.create_topic("tools", 1).await;
    let id = format!("tools-{}", uuid::Uuid::new_v4().simple());
    tokio::task::block_in_place(|| two_transactions(kafka.bootstrap(), &id, &topic));

    let lines = kafka_cli::console_consumer(kafka.bootstrap(), &topic, 5_000)
        .await
        .unwrap();
    assert_eq!(lines, ["Partition:0\tOffset:0\th:header\tkey\tcommitted"]);
    let seen = reader::committed(kafka.bootstrap(), &topic).await;
    let seen: Vec<_> = seen
        .iter()
        .map(|r| (r.key_text(), r.header("h"), r.payload_text()))
        .collect();
    assert_eq!(seen, [(Some("key"), Some("header"), Some("committed"))]);
    assert_eq!(
        reader::uncommitted(kafka.bootstrap(), &topic).await.len(),
        2
    );

    let group = kafka_cli::describe_group(kafka.bootstrap(), &id)
        .await
        .unwrap();
    assert!(
        group
            .lines()
            .any(|line| line.contains(&topic) && line.contains(" 42 ")),
        "{group}"
    );
    let described = kafka_cli::describe_topic(kafka.bootstrap(), &topic)
        .await
        .unwrap();
    assert!(described.contains("PartitionCount: 1"), "{described}");
    let transaction = kafka_cli::describe_transaction(kafka.bootstrap(), &id)
        .await
        .unwrap();
    assert!(transaction.contains("CompleteAbort"), "{transaction}");
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_comes_with_a_password_has_the_rights_that_acls_give() {
    let kafka = services::kafka().await;
    let Some(sasl) = kafka.sasl_bootstrap() else {
        panic!("the tests' own Kafka has a SASL listener")
    };
    let topic = kafka.create_topic("acl", 1).await;
    let sees_topic = |(user, password): (&str, &str)| {
        let producer: ThreadedProducer<DefaultProducerContext> = ClientConfig::new()
            .set("bootstrap.servers", sasl)
            .set("security.protocol", "SASL_PLAINTEXT")
            .set("sasl.mechanism", "PLAIN")
            .set("sasl.username", user)
            .set("sasl.password", password)
            .create()
            .unwrap();
        let patience = Duration::from_secs(5);
        tokio::task::block_in_place(|| producer.client().fetch_metadata(Some(&topic), patience))
            .is_ok_and(|metadata| metadata.topics()[0].error().is_none())
    };
    assert!(sees_topic(services::SASL_ADMIN));
    assert!(!sees_topic((services::SASL_ADMIN.0, "wrong")));
    assert!(!sees_topic(services::SASL_USER));
    let user = format!("User:{}", services::SASL_USER.0);
    let allow = [
        "--add",
        "--allow-principal",
        &user,
        "--operation",
        "Write",
        "--topic",
        &topic,
    ];
    kafka_cli::acls(kafka.bootstrap(), &allow).await.unwrap();
    let deadline = Instant::now() + PATIENCE;
    while !sees_topic(services::SASL_USER) {
        assert!(Instant::now() < deadline);
    }
}
