//! Transactions on a real broker.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use oncebox_kafka::{
    Envelope, Outcome, ProducerOptions, Record, SourceTag, Stability, Step, TopicSpec, Transaction,
    TransactionalProducer, committed, ensure_topic,
};
use oncebox_migrations::headers;
use uuid::Uuid;

use crate::support::{kafka, offsets, open, payloads, read_all, record, records, topic, unique};

const WAIT: Duration = Duration::from_secs(10);

#[tokio::test]
async fn committed_records_are_visible_and_aborted_ones_are_not() {
    let Some(config) = kafka() else { return };
    let topic = topic(&config, "visible", 1).await;
    let producer = open(&config, &unique("oncebox.visible")).await;
    let committed = producer
        .transact(records(&topic, &["a", "b"]))
        .await
        .unwrap();
    assert_eq!((committed.records, committed.tainted), (2, None));
    // A record that cannot be sent aborts the transaction after the others were handed over.
    let mut transaction = records(&topic, &["c", "d"]);
    transaction.records.push(Record {
        headers: Bytes::from_static(b"\xff"),
        ..record(&topic, "key", b"e")
    });
    let error = producer.transact(transaction).await.unwrap_err();
    assert_eq!(error.refused().unwrap().index, 2, "{error}");
    assert!(
        !error.needs_rebuild() && error.outcome() == Outcome::DidNotHappen,
        "{error}"
    );
    producer.transact(records(&topic, &["f"])).await.unwrap();
    producer.close().await;
    assert_eq!(
        payloads(&read_all(&config.bootstrap, &topic, "read_committed")),
        ["a", "b", "f"]
    );
}

#[tokio::test]
async fn a_second_producer_with_the_same_id_fences_the_first() {
    let Some(config) = kafka() else { return };
    let topic = topic(&config, "fencing", 1).await;
    let id = unique("oncebox.fencing");
    let first = open(&config, &id).await;
    first.transact(records(&topic, &["first"])).await.unwrap();
    let second = open(&config, &id).await;
    let error = first
        .transact(records(&topic, &["zombie"]))
        .await
        .unwrap_err();
    assert!(
        error.is_fenced() && error.needs_rebuild() && !error.is_retriable(),
        "{error}"
    );
    assert_eq!(error.outcome(), Outcome::DidNotHappen);
    let again = first
        .transact(records(&topic, &["zombie"]))
        .await
        .unwrap_err();
    assert!(again.needs_rebuild(), "{again}");
    second.transact(records(&topic, &["second"])).await.unwrap();
    first.close().await;
    second.close().await;
    assert_eq!(
        payloads(&read_all(&config.bootstrap, &topic, "read_committed")),
        ["first", "second"]
    );
}

/// After a refused batch the numbers of the partition have a hole, and the next transaction is refused as out of order: the
/// client then bumps its epoch within the abort.
#[tokio::test]
async fn a_producer_goes_on_after_many_refused_batches() {
    let Some(config) = kafka() else { return };
    let topic = unique("refused");
    let spec = TopicSpec::new(4).set("max.message.bytes", "20000");
    ensure_topic(&config, &topic, &spec).await.unwrap();
    let options = ProducerOptions {
        transaction_timeout: Duration::from_secs(4),
        ..ProducerOptions::default()
    };
    let producer = TransactionalProducer::open(&config, &unique("oncebox.refused"), options)
        .await
        .unwrap();
    let keys = ["a", "b", "c", "d", "e", "f", "g"];
    // What no compression makes small.
    let mut state = 1_u32;
    let large: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    })
    .take(60_000)
    .collect();
    let batch = |with_large: bool, n: usize| {
        let mut records: Vec<_> = (0..n)
            .map(|i| record(&topic, keys[i % keys.len()], b"small"))
            .collect();
        if with_large {
            records.insert(n / 2, record(&topic, keys[n % keys.len()], &large));
        }
        Transaction {
            records,
            rehearsal: n.is_multiple_of(3),
            ..Transaction::default()
        }
    };
    for round in 0..25 {
        for (with_large, n) in [(true, 40 + round), (false, 13 + round)] {
            if let Err(error) = producer.transact(batch(with_large, n)).await {
                assert!(!error.needs_rebuild(), "round {round}: {error}");
            }
        }
    }
    producer.close().await;
}

#[tokio::test]
async fn the_checkpoint_travels_with_the_records() {
    let Some(config) = kafka() else { return };
    let (data, checkpoints) = (
        topic(&config, "data", 1).await,
        topic(&config, "checkpoints", 1).await,
    );
    let group = unique("oncebox.checkpoint");
    let read = |stability| committed(&config, &group, &checkpoints, 0, stability, WAIT);
    assert_eq!(read(Stability::Stable).await.unwrap(), None);
    let producer = open(&config, &group).await;
    let metadata = "v1;seq=7;gaps=3-5;größe";
    let mut transaction = records(&data, &["a"]);
    transaction.offsets = Some(offsets(&group, &checkpoints, 42, metadata));
    producer.transact(transaction).await.unwrap();
    for stability in [Stability::Stable, Stability::Any] {
        assert_eq!(
            read(stability).await.unwrap(),
            Some((42, metadata.to_owned()))
        );
    }
    // Only offsets, and no metadata.
    let only = Transaction {
        offsets: Some(offsets(&group, &checkpoints, 43, "")),
        ..Transaction::default()
    };
    assert_eq!(producer.transact(only).await.unwrap().records, 0);
    assert_eq!(
        read(Stability::Stable).await.unwrap(),
        Some((43, String::new()))
    );
    // The number may go back, and it may be large.
    let back = Transaction {
        offsets: Some(offsets(&group, &checkpoints, i64::MAX, "x")),
        ..Transaction::default()
    };
    producer.transact(back).await.unwrap();
    assert_eq!(
        read(Stability::Any).await.unwrap(),
        Some((i64::MAX, "x".to_owned()))
    );
    // 4 096 bytes are the broker's limit; more aborts the transaction and changes nothing.
    let full = "m".repeat(4096);
    let fits = Transaction {
        offsets: Some(offsets(&group, &checkpoints, 44, &full)),
        ..Transaction::default()
    };
    producer.transact(fits).await.unwrap();
    let mut too_long = records(&data, &["b"]);
    too_long.offsets = Some(offsets(&group, &checkpoints, 45, &"m".repeat(4097)));
    let error = producer.transact(too_long).await.unwrap_err();
    assert!(
        error.to_string().contains("OFFSET_METADATA_TOO_LARGE"),
        "{error}"
    );
    assert_eq!(error.outcome(), Outcome::DidNotHappen);
    assert_eq!(read(Stability::Any).await.unwrap(), Some((44, full)));
    producer.close().await;
    assert_eq!(
        payloads(&read_all(&config.bootstrap, &data, "read_committed")),
        ["a"]
    );
}

#[tokio::test]
async fn an_empty_transaction_does_nothing() {
    let Some(config) = kafka() else { return };
    let producer = open(&config, &unique("oncebox.empty")).await;
    assert_eq!(
        producer
            .transact(Transaction::default())
            .await
            .unwrap()
            .records,
        0
    );
    producer.close().await;
}

#[tokio::test]
async fn a_record_that_the_broker_refuses_is_named_and_the_next_transaction_works() {
    let Some(config) = kafka() else { return };
    let small = unique("small");
    ensure_topic(
        &config,
        &small,
        &TopicSpec::new(3).set("max.message.bytes", "20000"),
    )
    .await
    .unwrap();
    let config = config
        .set("message.max.bytes", "10000000")
        .set("compression.type", "none");
    let producer = open(&config, &unique("oncebox.refused")).await;
    let mut transaction = records(&small, &["a", "b"]);
    // A key of its own: another partition, so that the broker refuses a batch of one.
    transaction
        .records
        .push(record(&small, "another key", &vec![b'x'; 200_000]));
    let error = producer.transact(transaction).await.unwrap_err();
    let refused = error.refused().unwrap_or_else(|| panic!("{error}"));
    assert_eq!(
        (refused.index, &*refused.code, &*refused.topic),
        (2, "MSG_SIZE_TOO_LARGE", &*small)
    );
    assert_eq!(refused.suspects, [2]);
    assert!(!error.is_retriable() && !error.needs_rebuild(), "{error}");
    // The next one may fail once more: three attempts are always enough.
    let mut attempts = 0;
    while let Err(error) = producer.transact(records(&small, &["c"])).await {
        attempts += 1;
        assert!(error.is_retriable() && attempts < 3, "{error}");
    }
    println!("attempts after the refusal: {}", attempts + 1);
    producer.close().await;
    assert_eq!(
        payloads(&read_all(&config.bootstrap, &small, "read_committed")),
        ["c"]
    );
}

#[tokio::test]
async fn a_compacted_topic_refuses_a_record_without_a_key_and_names_it() {
    let Some(config) = kafka() else { return };
    let compacted = unique("compacted");
    ensure_topic(
        &config,
        &compacted,
        &TopicSpec::new(1).set("cleanup.policy", "compact"),
    )
    .await
    .unwrap();
    let producer = open(&config, &unique("oncebox.compacted")).await;
    let mut transaction = records(&compacted, &["a", "b", "c"]);
    transaction.records[1].key = None;
    let error = producer.transact(transaction).await.unwrap_err();
    let refused = error.refused().unwrap_or_else(|| panic!("{error}"));
    println!("{error}; suspects {:?}", refused.suspects);
    assert_eq!((refused.index, &*refused.code), (1, "INVALID_RECORD"));
    producer.close().await;
}

#[tokio::test]
async fn a_record_too_large_for_the_client_is_refused_locally() {
    let Some(config) = kafka() else { return };
    let topic = topic(&config, "local", 1).await;
    let producer = open(&config, &unique("oncebox.local")).await;
    let mut transaction = records(&topic, &["a"]);
    transaction
        .records
        .push(record(&topic, "key", &vec![b'x'; 2_000_000]));
    let error = producer.transact(transaction).await.unwrap_err();
    assert_eq!(error.refused().unwrap().index, 1, "{error}");
    assert!(!error.needs_rebuild());
    producer.transact(records(&topic, &["b"])).await.unwrap();
    producer.close().await;
    assert_eq!(
        payloads(&read_all(&config.bootstrap, &topic, "read_committed")),
        ["b"]
    );
}

#[tokio::test]
async fn a_missing_topic_is_named_with_its_remedy_and_the_others_go_on() {
    let Some(config) = kafka() else { return };
    let (there, missing) = (topic(&config, "there", 1).await, unique("missing"));
    let producer = open(&config, &unique("oncebox.missing")).await;
    let mut transaction = records(&there, &["a"]);
    transaction.records.push(record(&missing, "key", b"b"));
    let error = producer.transact(transaction).await.unwrap_err();
    assert_eq!(error.topic(), Some(&*missing), "{error}");
    assert!(
        error.to_string().contains("kafka-topics.sh --create"),
        "{error}"
    );
    assert!(!error.is_refused() && !error.needs_rebuild(), "{error}");
    producer.transact(records(&there, &["c"])).await.unwrap();
    producer.close().await;
    assert_eq!(
        payloads(&read_all(&config.bootstrap, &there, "read_committed")),
        ["c"]
    );
}

#[tokio::test]
async fn a_record_is_published_as_documented() {
    let Some(config) = kafka() else { return };
    let topic = topic(&config, "format", 1).await;
    let producer = open(&config, &unique("oncebox.format")).await;
    let id = Uuid::now_v7();
    let stored = headers::encode([
        ("oncebox-type", Some(&b"order.paid"[..])),
        ("empty", Some(b"")),
        ("null", None),
    ]);
    let envelope = Envelope {
        message_id: id,
        outbox_id: 7,
        created_at_micros: 1_795_983_713_123_456,
    };
    let one = Record {
        headers: Bytes::from(stored.unwrap()),
        envelope: Some(envelope),
        ..record(&topic, "key", b"payload")
    };
    let tombstone = Record {
        payload: None,
        ..record(&topic, "key", b"")
    };
    let empty = record(&topic, "", b"");
    let keyless = Record {
        key: None,
        ..record(&topic, "", b"x")
    };
    producer
        .transact(Transaction {
            source: Some(SourceTag {
                source: Arc::from("orders"),
                epoch: 1,
            }),
            records: vec![one, tombstone, empty, keyless],
            offsets: None,
            ..Transaction::default()
        })
        .await
        .unwrap();
    producer.close().await;
    let seen = read_all(&config.bootstrap, &topic, "read_committed");
    let header = |n: &str, v: &str| (n.to_owned(), Some(v.as_bytes().to_vec()));
    let expected = [
        header("oncebox-v", "1"),
        header("oncebox-id", &id.to_string()),
        header("oncebox-source", "orders"),
        header("oncebox-epoch", "1"),
        header("oncebox-outbox-id", "7"),
        header("oncebox-created-at", "2026-11-29T20:21:53.123456Z"),
        header("oncebox-type", "order.paid"),
        header("empty", ""),
        ("null".to_owned(), None),
    ];
    assert_eq!(seen[0].headers, expected);
    assert_eq!(seen[0].payload.as_deref(), Some(&b"payload"[..]));
    assert_eq!(
        (seen[1].key.as_deref(), seen[1].payload.as_deref()),
        (Some(&b"key"[..]), None)
    );
    assert_eq!(
        (seen[2].key.as_deref(), seen[2].payload.as_deref()),
        (Some(&b""[..]), Some(&b""[..]))
    );
    assert_eq!(
        (seen[3].key.as_deref(), seen[3].payload.as_deref()),
        (None, Some(&b"x"[..]))
    );
    assert!(seen[1].headers.is_empty());
}

#[tokio::test]
async fn the_steps_come_in_their_order_and_the_clock_follows() {
    let Some(config) = kafka() else { return };
    let (data, checkpoints) = (
        topic(&config, "steps", 2).await,
        topic(&config, "steps-checkpoints", 1).await,
    );
    let steps = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&steps);
    let options = ProducerOptions {
        on_step: Some(Arc::new(move |step| seen.lock().unwrap().push(step))),
        ..ProducerOptions::default()
    };
    let id = unique("oncebox.steps");
    let producer = TransactionalProducer::open(&config, &id, options)
        .await
        .unwrap();
    let before = producer.last_step();
    let mut transaction = records(&data, &["a", "b", "c"]);
    transaction.offsets = Some(offsets(&id, &checkpoints, 1, ""));
    producer.transact(transaction).await.unwrap();
    assert!(producer.last_step() > before);
    let small = [
        Step::Begun,
        Step::OffsetsSent,
        Step::Producing,
        Step::Acked,
        Step::EndTxnSent,
        Step::Committed,
    ];
    assert_eq!(std::mem::take(&mut *steps.lock().unwrap()), small);
    let mut transaction = records(&data, &["d"; 501]);
    transaction.offsets = Some(offsets(&id, &checkpoints, 2, ""));
    producer.transact(transaction).await.unwrap();
    let large = [
        Step::Begun,
        Step::Producing,
        Step::Acked,
        Step::OffsetsSent,
        Step::EndTxnSent,
        Step::Committed,
    ];
    assert_eq!(*steps.lock().unwrap(), large);
    producer.close().await;
}

#[tokio::test]
async fn an_open_transaction_hides_the_checkpoint_from_a_stable_reader_until_a_take_over() {
    let Some(config) = kafka() else { return };
    let (data, checkpoints) = (
        topic(&config, "stable", 1).await,
        topic(&config, "stable-checkpoints", 1).await,
    );
    let id = unique("oncebox.stable");
    let producer = open(&config, &id).await;
    let first = Transaction {
        offsets: Some(offsets(&id, &checkpoints, 1, "one")),
        ..Transaction::default()
    };
    producer.transact(first).await.unwrap();
    producer.close().await;
    // A relay that dies with checkpoint and records sent and its transaction open: a step hook that blocks
    // is as good as dead.
    let (reached, mut at) = tokio::sync::mpsc::unbounded_channel();
    let (release, blocked) = std::sync::mpsc::channel::<()>();
    let blocked = Mutex::new(blocked);
    let options = ProducerOptions {
        on_step: Some(Arc::new(move |step| {
            if step == Step::Acked {
                let _ = reached.send(());
                let _ = blocked.lock().unwrap().recv();
            }
        })),
        ..ProducerOptions::default()
    };
    let zombie = TransactionalProducer::open(&config, &id, options)
        .await
        .unwrap();
    let mut second = records(&data, &["lost"]);
    second.offsets = Some(offsets(&id, &checkpoints, 2, "two"));
    let running = tokio::spawn(async move {
        let result = zombie.transact(second).await;
        zombie.close().await;
        result
    });
    at.recv().await.unwrap();
    let read = |stability, wait| {
        committed(
            &config,
            &id,
            &checkpoints,
            0,
            stability,
            Duration::from_millis(wait),
        )
    };
    assert_eq!(
        read(Stability::Any, 5_000).await.unwrap(),
        Some((1, "one".into()))
    );
    let unknown = read(Stability::Stable, 1_500).await.unwrap_err();
    assert!(unknown.is_retriable(), "{unknown}");
    // What is not decided is beyond the end.
    let end = oncebox_kafka::watermarks(&config, &data, 0, WAIT).await;
    assert_eq!(end.unwrap(), (0, 0));
    // The take-over settles the transaction; then the old checkpoint is certain.
    let successor = open(&config, &id).await;
    assert_eq!(
        read(Stability::Stable, 5_000).await.unwrap(),
        Some((1, "one".into()))
    );
    release.send(()).unwrap();
    let error = running.await.unwrap().unwrap_err();
    assert!(error.is_fenced() && error.needs_rebuild(), "{error}");
    // Its EndTxn was refused, but from its side that is not known.
    assert_eq!(error.outcome(), Outcome::Unknown);
    successor.close().await;
    assert_eq!(
        read(Stability::Stable, 5_000).await.unwrap(),
        Some((1, "one".into()))
    );
    assert!(read_all(&config.bootstrap, &data, "read_committed").is_empty());
}

#[tokio::test]
async fn a_transaction_whose_future_is_dropped_stops_the_producer() {
    let Some(config) = kafka() else { return };
    let topic = topic(&config, "dropped", 1).await;
    let producer = open(&config, &unique("oncebox.dropped")).await;
    let dropped =
        tokio::time::timeout(Duration::ZERO, producer.transact(records(&topic, &["a"]))).await;
    assert!(dropped.is_err());
    let error = producer
        .transact(records(&topic, &["b"]))
        .await
        .unwrap_err();
    assert!(
        error.needs_rebuild() && error.outcome() == Outcome::DidNotHappen,
        "{error}"
    );
    producer.close().await;
}
