//! The in-process broker of the demo keeps what the demo relies on, for librdkafka in this and in other processes.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests; clippy knows only #[test] functions as such"
)]
#![cfg(feature = "embedded")]

use std::collections::BTreeMap;
use std::io::BufRead;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use oncebox::embedded::Embedded;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, Headers, Message, OwnedHeaders};
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer, ThreadedProducer};
use rdkafka::{Offset, TopicPartitionList};

type TransactionalProducer = ThreadedProducer<DefaultProducerContext>;

const PATIENCE: Duration = Duration::from_secs(20);
/// Set in the environment of the child process that is killed: the bootstrap address.
const CHILD: &str = "ONCEBOX_TEST_EMBEDDED_CHILD";

/// librdkafka blocks, the broker runs on the same runtime.
fn on_threads<T>(blocking: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(blocking)
}

fn client(bootstrap: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", bootstrap)
        .set("socket.timeout.ms", "5000");
    config
}

fn producer(bootstrap: &str, id: &str) -> TransactionalProducer {
    let producer: TransactionalProducer = client(bootstrap)
        .set("transactional.id", id)
        .set("transaction.timeout.ms", "30000")
        .set("retry.backoff.ms", "2")
        .set("linger.ms", "0")
        .set("partitioner", "murmur2_random")
        .create()
        .unwrap();
    producer.init_transactions(PATIENCE).unwrap();
    producer
}

fn send(producer: &TransactionalProducer, topic: &str, key: &str, payload: &str) {
    let headers = OwnedHeaders::new().insert(Header {
        key: "h",
        value: Some(payload),
    });
    let mut record = BaseRecord::to(topic)
        .key(key)
        .payload(payload)
        .headers(headers);
    while let Err((error, back)) = producer.send(record) {
        assert_eq!(
            error,
            KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull)
        );
        std::thread::sleep(Duration::from_millis(1));
        record = back;
    }
}

/// The checkpoint, the way a relay writes it: a group without members.
fn checkpoint(producer: &TransactionalProducer, group: &BaseConsumer, offset: i64, metadata: &str) {
    let mut position = TopicPartitionList::new();
    position
        .add_partition_offset("checkpoints", 0, Offset::Offset(offset))
        .unwrap();
    position
        .find_partition("checkpoints", 0)
        .unwrap()
        .set_metadata(metadata);
    producer
        .send_offsets_to_transaction(&position, &group.group_metadata().unwrap(), PATIENCE)
        .unwrap();
}

fn group(bootstrap: &str, id: &str) -> BaseConsumer {
    client(bootstrap)
        .set("group.id", id)
        .set("enable.auto.commit", "false")
        .set("auto.offset.reset", "earliest")
        .set("session.timeout.ms", "6000")
        .create()
        .unwrap()
}

/// Offset and metadata, copied at once: no list may outlive its consumer.
fn committed(consumer: &BaseConsumer, topic: &str) -> Option<(i64, String)> {
    let mut wanted = TopicPartitionList::new();
    wanted.add_partition(topic, 0);
    let found = consumer.committed_offsets(wanted, PATIENCE).unwrap();
    let element = found.find_partition(topic, 0).unwrap();
    element.error().unwrap();
    match element.offset() {
        Offset::Offset(offset) => Some((offset, element.metadata().to_owned())),
        _ => None,
    }
}

async fn create_topics(bootstrap: &str) {
    let admin: AdminClient<DefaultClientContext> = client(bootstrap).create().unwrap();
    let orders = NewTopic::new("orders", 4, TopicReplication::Fixed(-1));
    let checkpoints = NewTopic::new("checkpoints", 1, TopicReplication::Fixed(-1))
        .set("cleanup.policy", "compact");
    for created in admin
        .create_topics([&orders, &checkpoints], &AdminOptions::new())
        .await
        .unwrap()
    {
        created.unwrap();
    }
    let again = admin
        .create_topics([&orders], &AdminOptions::new())
        .await
        .unwrap();
    assert_eq!(
        again[0].as_ref().unwrap_err().1,
        RDKafkaErrorCode::TopicAlreadyExists
    );
    on_threads(move || {
        let metadata = admin.inner().fetch_metadata(None, PATIENCE).unwrap();
        let partitions = |name| {
            metadata
                .topics()
                .iter()
                .find(|t| t.name() == name)
                .unwrap()
                .partitions()
                .len()
        };
        assert_eq!(
            (
                metadata.brokers().len(),
                partitions("orders"),
                partitions("checkpoints")
            ),
            (1, 4, 1)
        );
        assert!(
            admin
                .inner()
                .fetch_cluster_id(PATIENCE)
                .is_some_and(|id| !id.is_empty())
        );
        drop(admin);
    });
}

/// Key and payload of everything a `read_committed` reader sees, partition by partition in order.
fn read_committed(
    bootstrap: &str,
    topic: &str,
    partitions: i32,
) -> BTreeMap<i32, Vec<(String, String)>> {
    let reader: BaseConsumer = client(bootstrap)
        .set("group.id", "reader")
        .set("enable.auto.commit", "false")
        .set("enable.partition.eof", "true")
        .set("isolation.level", "read_committed")
        .create()
        .unwrap();
    let mut assignment = TopicPartitionList::new();
    for partition in 0..partitions {
        let (low, _) = reader.fetch_watermarks(topic, partition, PATIENCE).unwrap();
        assignment
            .add_partition_offset(topic, partition, Offset::Offset(low))
            .unwrap();
    }
    reader.assign(&assignment).unwrap();
    let mut seen: BTreeMap<i32, Vec<(String, String)>> = BTreeMap::new();
    let (mut ended, deadline) = (0, Instant::now() + PATIENCE);
    while ended < partitions {
        assert!(
            Instant::now() < deadline,
            "{ended} of {partitions} partitions ended"
        );
        match reader.poll(Duration::from_millis(100)) {
            None => {}
            Some(Err(KafkaError::PartitionEOF(_))) => ended += 1,
            Some(Err(other)) => panic!("{other}"),
            Some(Ok(message)) => {
                let text = |bytes: Option<&[u8]>| {
                    String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
                };
                let (key, payload) = (text(message.key()), text(message.payload()));
                assert_eq!(text(message.headers().unwrap().get(0).value), payload);
                seen.entry(message.partition())
                    .or_default()
                    .push((key, payload));
            }
        }
    }
    seen
}

fn payloads(seen: &BTreeMap<i32, Vec<(String, String)>>) -> Vec<&str> {
    let mut all: Vec<&str> = seen
        .values()
        .flatten()
        .map(|(_, payload)| payload.as_str())
        .collect();
    all.sort_unstable();
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn records_and_checkpoint_commit_or_abort_together() {
    let broker = Embedded::start().await.unwrap();
    let bootstrap = broker.bootstrap();
    create_topics(&bootstrap).await;
    on_threads(|| {
        let (relay, position) = (producer(&bootstrap, "relay"), group(&bootstrap, "relay"));
        assert_eq!(committed(&position, "checkpoints"), None);
        for (payload, commit) in [("1", true), ("2", false), ("3", true)] {
            relay.begin_transaction().unwrap();
            send(&relay, "orders", "k", payload);
            relay.flush(PATIENCE).unwrap();
            checkpoint(
                &relay,
                &position,
                payload.parse().unwrap(),
                &format!("meta {payload}"),
            );
            if commit {
                relay.commit_transaction(PATIENCE).unwrap();
            } else {
                relay.abort_transaction(PATIENCE).unwrap();
                assert_eq!(
                    committed(&position, "checkpoints"),
                    Some((1, "meta 1".to_owned()))
                );
            }
        }
        assert_eq!(
            committed(&position, "checkpoints"),
            Some((3, "meta 3".to_owned()))
        );
        // a transaction with nothing but the checkpoint
        relay.begin_transaction().unwrap();
        checkpoint(&relay, &position, 4, "heartbeat");
        relay.commit_transaction(PATIENCE).unwrap();
        assert_eq!(
            committed(&position, "checkpoints"),
            Some((4, "heartbeat".to_owned()))
        );
        assert_eq!(
            payloads(&read_committed(&bootstrap, "orders", 4)),
            ["1", "3"]
        );
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_transaction_is_invisible_and_the_older_producer_is_fenced() {
    let broker = Embedded::start().await.unwrap();
    let bootstrap = broker.bootstrap();
    create_topics(&bootstrap).await;
    on_threads(|| {
        let zombie = producer(&bootstrap, "relay");
        zombie.begin_transaction().unwrap();
        send(&zombie, "orders", "k", "zombie");
        zombie.flush(PATIENCE).unwrap();
        assert_eq!(payloads(&read_committed(&bootstrap, "orders", 4)), [""; 0]);

        let relay = producer(&bootstrap, "relay");
        let fenced = zombie.commit_transaction(PATIENCE).unwrap_err();
        let KafkaError::Transaction(reason) = &fenced else {
            panic!("{fenced}")
        };
        assert!(reason.is_fatal(), "{fenced}");
        relay.begin_transaction().unwrap();
        send(&relay, "orders", "k", "new");
        relay.commit_transaction(PATIENCE).unwrap();
        assert_eq!(payloads(&read_committed(&bootstrap, "orders", 4)), ["new"]);
    });
}

/// Not a test: the process that the next test kills.
#[test]
fn child_with_an_open_transaction() {
    let Ok(bootstrap) = std::env::var(CHILD) else {
        return;
    };
    let (relay, position) = (producer(&bootstrap, "relay"), group(&bootstrap, "relay"));
    relay.begin_transaction().unwrap();
    for n in 0..100 {
        send(&relay, "orders", &n.to_string(), "killed");
    }
    relay.flush(PATIENCE).unwrap();
    checkpoint(&relay, &position, 100, "killed");
    println!("\nready");
    std::thread::sleep(PATIENCE);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_process_left_open_is_aborted_by_its_successor() {
    let broker = Embedded::start().await.unwrap();
    let bootstrap = broker.bootstrap();
    create_topics(&bootstrap).await;
    on_threads(|| {
        for round in 0..3 {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "child_with_an_open_transaction", "--nocapture"])
                .env(CHILD, &bootstrap)
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
            assert!(lines.any(|line| line.unwrap() == "ready"));
            child.kill().unwrap(); // SIGKILL
            child.wait().unwrap();

            let (relay, position) = (producer(&bootstrap, "relay"), group(&bootstrap, "relay"));
            assert_ne!(
                committed(&position, "checkpoints").map(|c| c.1).as_deref(),
                Some("killed")
            );
            relay.begin_transaction().unwrap();
            send(&relay, "orders", "k", &format!("round {round}"));
            relay.flush(PATIENCE).unwrap();
            checkpoint(&relay, &position, round, "kept");
            relay.commit_transaction(PATIENCE).unwrap();
        }
        let seen = read_committed(&bootstrap, "orders", 4);
        assert_eq!(payloads(&seen), ["round 0", "round 1", "round 2"]);
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_thousand_records_arrive_once_and_in_order_through_a_group() {
    const TRANSACTIONS: usize = 100;
    const EACH: usize = 200;
    let broker = Embedded::start().await.unwrap();
    let bootstrap = broker.bootstrap();
    create_topics(&bootstrap).await;
    on_threads(|| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (relay, position) = (producer(&bootstrap, "relay"), group(&bootstrap, "relay"));
                for transaction in 0..TRANSACTIONS {
                    relay.begin_transaction().unwrap();
                    for n in 0..EACH {
                        let n = transaction * EACH + n;
                        send(&relay, "orders", &(n % 97).to_string(), &n.to_string());
                    }
                    while relay.in_flight_count() > 0 {
                        std::thread::sleep(Duration::from_micros(200));
                    }
                    checkpoint(&relay, &position, transaction as i64, "");
                    relay.commit_transaction(PATIENCE).unwrap();
                    if transaction % 10 == 0 {
                        // and one that nobody sees
                        relay.begin_transaction().unwrap();
                        send(&relay, "orders", "k", "aborted");
                        relay.flush(PATIENCE).unwrap();
                        relay.abort_transaction(PATIENCE).unwrap();
                    }
                }
            });
            // two members, one after the other: the second goes on where the first committed
            let mut last: BTreeMap<String, i64> = BTreeMap::new();
            let mut count = 0;
            for part in [TRANSACTIONS * EACH / 2, TRANSACTIONS * EACH] {
                let member = group(&bootstrap, "inventory");
                member.subscribe(&["orders"]).unwrap();
                let deadline = Instant::now() + Duration::from_secs(60);
                while count < part {
                    assert!(Instant::now() < deadline, "{count} of {part}");
                    let Some(message) = member.poll(Duration::from_millis(100)) else {
                        continue;
                    };
                    let message = message.unwrap();
                    let key = String::from_utf8_lossy(message.key().unwrap()).into_owned();
                    let n: i64 = String::from_utf8_lossy(message.payload().unwrap())
                        .parse()
                        .unwrap();
                    let before = last.insert(key, n);
                    assert!(
                        before.is_none_or(|before| before + 97 == n),
                        "{before:?} then {n}"
                    );
                    count += 1;
                    if count % 100 == 0 {
                        member.commit_message(&message, CommitMode::Async).unwrap();
                    }
                }
                member.commit_consumer_state(CommitMode::Sync).unwrap();
            }
            assert_eq!(count, TRANSACTIONS * EACH);
        });
        let seen = read_committed(&bootstrap, "orders", 4);
        assert_eq!(
            seen.values().map(Vec::len).sum::<usize>(),
            TRANSACTIONS * EACH
        );
        assert!(seen.len() == 4, "all partitions are used");
    });
}
