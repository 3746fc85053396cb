//! The consumer on a real broker.

use std::time::{Duration, Instant};

use bytes::Bytes;
use oncebox_kafka::{Config, Consumer, ConsumerEvent, Message, Record, TransactionalProducer};
use oncebox_migrations::headers;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};

use crate::support::{kafka, open, record, records, topic, unique};

const WAIT: Duration = Duration::from_secs(20);

fn subscribe(config: &Config, group: &str, topic: &str) -> Consumer {
    Consumer::subscribe(config, group, &[topic.to_owned()]).unwrap()
}

/// The next event, whatever it is.
fn event(consumer: &Consumer) -> ConsumerEvent {
    let start = Instant::now();
    loop {
        if let Some(event) = consumer.poll(Duration::from_millis(200)) {
            return event;
        }
        assert!(start.elapsed() < WAIT, "no event");
    }
}

fn assigned(consumer: &Consumer) -> Vec<(String, i32)> {
    match event(consumer) {
        ConsumerEvent::Assigned(partitions) => partitions,
        other => panic!("{other:?}"),
    }
}

fn message(consumer: &Consumer) -> Message {
    match event(consumer) {
        ConsumerEvent::Message(message) => message,
        other => panic!("{other:?}"),
    }
}

fn quiet(consumer: &Consumer) {
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(700) {
        assert!(!matches!(
            consumer.poll(Duration::from_millis(100)),
            Some(ConsumerEvent::Message(_))
        ));
    }
}

async fn filled(config: &Config, name: &str, payloads: &[&str]) -> (String, TransactionalProducer) {
    let topic = topic(config, name, 1).await;
    let producer = open(config, &unique("oncebox.consuming")).await;
    producer.transact(records(&topic, payloads)).await.unwrap();
    (topic, producer)
}

#[tokio::test]
async fn nothing_is_fetched_before_start_and_then_from_the_given_offset() {
    let Some(config) = kafka() else { return };
    let (topic, producer) = filled(&config, "assign", &["a", "b", "c"]).await;
    let consumer = subscribe(&config, &unique("inventory"), &topic);
    assert_eq!(assigned(&consumer), [(topic.clone(), 0)]);
    quiet(&consumer);
    consumer.start(&[(topic.clone(), 0, 1)]).unwrap();
    assert_eq!(message(&consumer).payload.unwrap(), "b");
    // Three records and the commit marker.
    assert_eq!(consumer.watermarks(&topic, 0, WAIT).unwrap(), (0, 4));
    assert_eq!(message(&consumer).payload.unwrap(), "c");
    assert!(consumer.start(&[(topic.clone(), 0, -1)]).is_err());
    consumer.seek(&topic, 0, 0, WAIT).unwrap();
    assert_eq!(message(&consumer).payload.unwrap(), "a");
    // Paused = nothing; resumed = where it stopped.
    consumer.pause(&[(topic.clone(), 0)]).unwrap();
    quiet(&consumer);
    consumer.resume(&[(topic.clone(), 0)]).unwrap();
    assert_eq!(message(&consumer).payload.unwrap(), "b");
    consumer.close();
    producer.close().await;
}

/// librdkafka 2.12 stops a partition twice that it is asked to give up while it is still stopping it, and then aborts the
/// process: this one is a child.
#[tokio::test]
async fn g9_starts_in_quick_succession_do_not_abort_the_process() {
    const CHILD: &str = "ONCEBOX_TEST_CHILD";
    let Some(config) = kafka() else { return };
    if std::env::var_os(CHILD).is_none() {
        let name = "consuming::g9_starts_in_quick_succession_do_not_abort_the_process";
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success(), "{}: {said}", child.status);
        return;
    }
    let topic = topic(&config, "quick", 4).await;
    let consumer = subscribe(&config, &unique("inventory"), &topic);
    let partitions = assigned(&consumer);
    assert_eq!(partitions.len(), 4);
    for n in 0..300 {
        let some: Vec<_> = partitions
            .iter()
            .filter(|(_, p)| *p != n % 4)
            .map(|(t, p)| (t.clone(), *p, 0))
            .collect();
        consumer
            .start(&some[..some.len() - (n % 3) as usize])
            .unwrap();
    }
    consumer.start(&[(topic.clone(), 0, 0)]).unwrap();
    assert!(matches!(event(&consumer), ConsumerEvent::End { .. }));
    consumer.close();
}

#[tokio::test]
async fn what_is_committed_is_the_next_offset_and_only_what_was_stored() {
    let Some(config) = kafka() else { return };
    let (topic, producer) = filled(&config, "store", &["a", "b", "c"]).await;
    let group = unique("inventory");
    let consumer = subscribe(&config, &group, &topic);
    assert!(consumer.store(&topic, 0, 1).is_err(), "not assigned yet");
    assigned(&consumer);
    consumer.start(&[(topic.clone(), 0, 0)]).unwrap();
    for expected in ["a", "b", "c"] {
        assert_eq!(message(&consumer).payload.unwrap(), expected);
    }
    consumer.commit_stored().unwrap(); // nothing stored
    assert_eq!(consumer.committed(&topic, 0, WAIT).unwrap(), None);
    consumer.store(&topic, 0, 2).unwrap();
    consumer.commit_stored().unwrap();
    assert_eq!(consumer.committed(&topic, 0, WAIT).unwrap(), Some(2));
    consumer.store(&topic, 0, 3).unwrap();
    let start = Instant::now();
    consumer.close(); // commits what is stored
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
    let stored = oncebox_kafka::committed(
        &config,
        &group,
        &topic,
        0,
        oncebox_kafka::Stability::Stable,
        WAIT,
    )
    .await;
    assert_eq!(stored.unwrap(), Some((3, String::new())));
    producer.close().await;
}

#[tokio::test]
async fn a_position_outside_the_log_is_reported_and_moves_nothing() {
    let Some(config) = kafka() else { return };
    let (topic, producer) = filled(&config, "range", &["a"]).await;
    let consumer = subscribe(&config, &unique("inventory"), &topic);
    assigned(&consumer);
    consumer.start(&[(topic.clone(), 0, 1_000)]).unwrap();
    match event(&consumer) {
        ConsumerEvent::OutOfRange {
            topic: t,
            partition: 0,
            offset,
            reason,
        } => {
            println!("{reason}");
            assert_eq!((t, offset), (topic.clone(), Some(1_000)));
        }
        other => panic!("{other:?}"),
    }
    quiet(&consumer);
    // The way out: another offset.
    consumer.start(&[(topic.clone(), 0, 0)]).unwrap();
    assert_eq!(message(&consumer).payload.unwrap(), "a");
    consumer.close();
    producer.close().await;
}

#[tokio::test]
async fn tombstones_and_headers_arrive_as_they_were_sent() {
    let Some(config) = kafka() else { return };
    let (topic, producer) = filled(&config, "shape", &[]).await;
    let list = headers::encode([("a", Some(&b"1"[..])), ("a", Some(b"")), ("b", None)]).unwrap();
    let mut transaction = records(&topic, &["x"]);
    transaction.records[0].headers = Bytes::from(list);
    transaction.records.push(Record {
        payload: None,
        ..record(&topic, "k", b"")
    });
    transaction.records.push(Record {
        key: None,
        ..record(&topic, "", b"")
    });
    producer.transact(transaction).await.unwrap();
    let consumer = subscribe(&config, &unique("inventory"), &topic);
    assigned(&consumer);
    consumer.start(&[(topic.clone(), 0, 0)]).unwrap();
    let first = message(&consumer);
    let expected: [(&str, Option<&[u8]>); 3] = [("a", Some(b"1")), ("a", Some(b"")), ("b", None)];
    assert_eq!(first.headers.iter().collect::<Vec<_>>(), expected);
    assert!(first.timestamp_ms > 1_700_000_000_000);
    let tombstone = message(&consumer);
    assert_eq!(
        (tombstone.key, tombstone.payload),
        (Some(Bytes::from_static(b"k")), None)
    );
    let keyless = message(&consumer);
    assert_eq!((keyless.key, keyless.payload), (None, Some(Bytes::new())));
    consumer.close();
    producer.close().await;
}

/// KIP-429: only the partition that moves stops.
#[tokio::test]
async fn a_second_member_takes_one_partition_over_and_the_other_goes_on() {
    let Some(config) = kafka() else { return };
    let topic = topic(&config, "rebalance", 2).await;
    let producer = open(&config, &unique("oncebox.consuming")).await;
    // One for each partition.
    let keys = [0, 1].map(|partition| {
        let mut keys = (0..).map(|n: i32| n.to_string());
        keys.find(|key| oncebox_kafka::partition::for_key(key.as_bytes(), 2) == partition)
            .unwrap()
    });
    let publish = async |text: &str| {
        let mut transaction = records(&topic, &[]);
        let all = keys.iter().map(|key| record(&topic, key, text.as_bytes()));
        transaction.records = all.collect();
        producer.transact(transaction).await.unwrap();
    };
    publish("before").await;
    let group = unique("inventory");
    let config = config.set("heartbeat.interval.ms", "300");
    let first = subscribe(&config, &group, &topic);
    assert_eq!(assigned(&first).len(), 2);
    let both = [(topic.clone(), 0, 0), (topic.clone(), 1, 0)];
    first.start(&both).unwrap();
    let second = subscribe(&config, &group, &topic);
    let start = Instant::now();
    let (mut moved, mut got) = (None, None);
    let mut seen = Vec::new();
    while moved.is_none() || got.is_none() {
        assert!(start.elapsed() < WAIT);
        match first.poll(Duration::from_millis(50)) {
            Some(ConsumerEvent::Revoked(partitions)) => moved = Some(partitions),
            Some(ConsumerEvent::Assigned(partitions)) => assert!(partitions.is_empty()),
            Some(ConsumerEvent::Message(message)) => seen.push(message.partition),
            _ => {}
        }
        match second.poll(Duration::from_millis(50)) {
            Some(ConsumerEvent::Assigned(partitions)) if partitions.is_empty() => {}
            Some(ConsumerEvent::Assigned(partitions)) => got = Some(partitions),
            _ => {}
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, [0, 1], "each once, although the group was rebalanced");
    let moved = moved.unwrap();
    assert_eq!(got.as_ref(), Some(&moved));
    let [(_, gone)] = moved[..] else {
        panic!("{moved:?}")
    };
    assert!(first.store(&topic, gone, 0).is_err(), "not ours any more");
    // A start that crosses the revocation.
    first.start(&[(topic.clone(), gone, 0)]).unwrap();
    publish("after").await;
    let came = message(&first);
    assert_eq!(came.partition, 1 - gone, "it was never told to start again");
    assert_eq!(came.payload.unwrap(), "after");
    quiet(&first);
    second.start(&[(topic.clone(), gone, 0)]).unwrap();
    assert_eq!(message(&second).payload.unwrap(), "before");
    // A member that goes gives its partitions back.
    second.close();
    let start = Instant::now();
    let back = loop {
        assert!(start.elapsed() < WAIT);
        match first.poll(Duration::from_millis(100)) {
            Some(ConsumerEvent::Assigned(partitions)) if !partitions.is_empty() => {
                break partitions;
            }
            Some(ConsumerEvent::Revoked(partitions)) => panic!("{partitions:?}"),
            _ => {}
        }
    };
    assert_eq!(back, moved);
    first.close();
    producer.close().await;
}

#[tokio::test]
async fn a_member_of_another_kind_is_named_and_waited_for() {
    let Some(config) = kafka() else { return };
    let topic = topic(&config, "mixed", 1).await;
    let group = unique("inventory");
    let old: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", &config.bootstrap)
        .set("group.id", &group)
        .set("partition.assignment.strategy", "range")
        .create()
        .unwrap();
    old.subscribe(&[&topic]).unwrap();
    let start = Instant::now();
    while old.assignment().unwrap().count() == 0 {
        assert!(start.elapsed() < WAIT);
        let _ = old.poll(Duration::from_millis(100));
    }
    let consumer = subscribe(&config, &group, &topic);
    match event(&consumer) {
        ConsumerEvent::Error(error) => {
            let text = error.to_string();
            assert!(text.contains("another assignment strategy"), "{text}");
            assert!(!error.is_fatal(), "{text}");
        }
        other => panic!("{other:?}"),
    }
    drop(old);
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < WAIT);
        if let Some(ConsumerEvent::Assigned(partitions)) = consumer.poll(Duration::from_millis(100))
        {
            assert_eq!(partitions, [(topic, 0)]);
            break;
        }
    }
    consumer.close();
}

#[tokio::test]
async fn a_missing_topic_is_an_error_event_and_not_a_silence() {
    let Some(config) = kafka() else { return };
    let missing = unique("missing");
    let consumer = subscribe(&config, &unique("inventory"), &missing);
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < WAIT);
        match consumer.poll(Duration::from_millis(200)) {
            Some(ConsumerEvent::Error(error)) => {
                assert!(
                    error.is_unknown_topic() && error.to_string().contains(&missing),
                    "{error}"
                );
                break;
            }
            Some(ConsumerEvent::Assigned(partitions)) => assert!(partitions.is_empty()),
            _ => {}
        }
    }
    consumer.close();
}

#[tokio::test]
async fn a_consumer_without_a_broker_says_so_and_can_be_dropped() {
    let config = Config::new("127.0.0.1:1");
    let consumer = subscribe(&config, "inventory", "orders");
    match event(&consumer) {
        ConsumerEvent::Error(error) => {
            assert!(error.to_string().contains("127.0.0.1:1"), "{error}")
        }
        other => panic!("{other:?}"),
    }
    let start = Instant::now();
    drop(consumer);
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
}
