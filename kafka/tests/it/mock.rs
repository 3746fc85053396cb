//! Errors injected into librdkafka's mock cluster: what the driver makes of each.
//!
//! The mock shows error handling only: aborted records stay visible there, offsets of transactions
//! are not stored and nobody is fenced.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncebox_kafka::{Cause, Config, Outcome, ProducerOptions, Transaction, TransactionalProducer};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::types::{RDKafkaApiKey as Api, RDKafkaRespErr as E};

use crate::support::{offsets, open, payloads, read_all, record, records};

type Mock = MockCluster<'static, DefaultProducerContext>;

fn mock(topics: &[&str]) -> (Mock, Config) {
    let mock = MockCluster::new(3).unwrap();
    for topic in topics {
        mock.create_topic(topic, 12, 3).unwrap();
    }
    let config = Config::new(mock.bootstrap_servers());
    (mock, config)
}

fn with_checkpoint() -> Transaction {
    Transaction {
        offsets: Some(offsets("group", "checkpoints", 1, "m")),
        ..records("t", &["a"])
    }
}

async fn open_for(config: &Config, timeout: Duration) -> TransactionalProducer {
    let options = ProducerOptions {
        transaction_timeout: timeout,
        ..ProducerOptions::default()
    };
    TransactionalProducer::open(config, "id", options)
        .await
        .unwrap()
}

#[tokio::test]
async fn a_clean_transaction_is_not_tainted() {
    let (_mock, config) = mock(&["t", "checkpoints"]);
    let producer = open(&config, "id").await;
    for _ in 0..20 {
        assert_eq!(
            producer.transact(with_checkpoint()).await.unwrap().tainted,
            None
        );
    }
    producer.close().await;
}

#[tokio::test]
async fn an_end_txn_whose_connection_is_lost_taints_and_the_producer_refuses_to_go_on() {
    let (mock, config) = mock(&["t"]);
    let producer = open(&config, "id").await;
    mock.request_errors(Api::EndTxn, &[E::RD_KAFKA_RESP_ERR__TRANSPORT]);
    let committed = producer.transact(records("t", &["a"])).await.unwrap();
    let reason = committed.tainted.unwrap();
    assert!(reason.contains("EndTxn"), "{reason}");
    let error = producer.transact(records("t", &["b"])).await.unwrap_err();
    assert!(error.needs_rebuild() && error.is_retriable(), "{error}");
    assert_eq!(error.outcome(), Outcome::DidNotHappen);
    producer.close().await;
    // The rebuilt one is clean.
    let producer = open(&config, "id").await;
    assert_eq!(
        producer
            .transact(records("t", &["b"]))
            .await
            .unwrap()
            .tainted,
        None
    );
    producer.close().await;
}

#[tokio::test]
async fn without_the_taint_rule_it_goes_on() {
    let (mock, config) = mock(&["t"]);
    let options = ProducerOptions::default().without_taint_rule();
    let producer = TransactionalProducer::open(&config, "id", options)
        .await
        .unwrap();
    mock.request_errors(Api::EndTxn, &[E::RD_KAFKA_RESP_ERR__TRANSPORT]);
    assert_eq!(
        producer
            .transact(records("t", &["a"]))
            .await
            .unwrap()
            .tainted,
        None
    );
    producer.transact(records("t", &["b"])).await.unwrap();
    producer.close().await;
}

#[tokio::test]
async fn an_end_txn_slower_than_the_socket_time_out_taints() {
    let (mock, config) = mock(&["t"]);
    let producer = open(&config.set("socket.timeout.ms", "1000"), "id").await;
    producer.transact(records("t", &["a"])).await.unwrap();
    mock.broker_round_trip_time(-1, Duration::from_millis(1_500))
        .unwrap();
    let slow = producer.transact(records("t", &["b"]));
    let calm = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        mock.broker_round_trip_time(-1, Duration::ZERO).unwrap();
    };
    let (result, ()) = tokio::join!(slow, calm);
    let error = match result {
        Ok(committed) => committed.tainted.unwrap(),
        Err(error) => {
            assert!(error.needs_rebuild(), "{error}");
            error.to_string()
        }
    };
    println!("{error}");
    producer.close().await;
}

#[tokio::test]
async fn every_other_transactional_request_without_an_answer_taints_too() {
    for (api, name) in [
        (Api::AddPartitionsToTxn, "AddPartitionsToTxn"),
        (Api::AddOffsetsToTxn, "AddOffsetsToTxn"),
        (Api::TxnOffsetCommit, "TxnOffsetCommit"),
    ] {
        let (mock, config) = mock(&["t", "checkpoints"]);
        let producer = open(&config, "id").await;
        mock.request_errors(api, &[E::RD_KAFKA_RESP_ERR__TRANSPORT]);
        let reason = producer
            .transact(with_checkpoint())
            .await
            .unwrap()
            .tainted
            .unwrap();
        assert!(reason.contains(name), "{reason}");
        producer.close().await;
    }
}

#[tokio::test]
async fn an_answer_that_says_try_again_does_not_taint() {
    for api in [
        Api::AddPartitionsToTxn,
        Api::AddOffsetsToTxn,
        Api::TxnOffsetCommit,
    ] {
        let (mock, config) = mock(&["t", "checkpoints"]);
        let producer = open(&config, "id").await;
        let busy = E::RD_KAFKA_RESP_ERR_CONCURRENT_TRANSACTIONS;
        mock.request_errors(api, &[busy, busy, busy]);
        let start = Instant::now();
        assert_eq!(
            producer.transact(with_checkpoint()).await.unwrap().tainted,
            None,
            "{api:?}"
        );
        println!(
            "{api:?} three times CONCURRENT_TRANSACTIONS: {:?}",
            start.elapsed()
        );
        producer.close().await;
    }
}

/// librdkafka asks three times within milliseconds and then waits for a broker's connection to come or go.
#[tokio::test]
async fn a_call_that_does_not_come_back_is_given_up() {
    let (mock, config) = mock(&["t", "checkpoints"]);
    let producer = open_for(&config, Duration::from_secs(1)).await;
    let away = E::RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE;
    mock.request_errors(Api::FindCoordinator, &[away; 3]);
    let start = Instant::now();
    let error = producer.transact(with_checkpoint()).await.unwrap_err();
    println!("{error} after {:?}", start.elapsed());
    assert!(error.needs_rebuild() && error.is_retriable(), "{error}");
    assert_eq!(error.outcome(), Outcome::Unknown);
    drop(producer);
    let producer = open(&config, "id").await;
    producer.transact(with_checkpoint()).await.unwrap();
    producer.close().await;
}

#[tokio::test]
async fn a_coordinator_that_is_away_for_a_moment_costs_time_and_a_rebuild() {
    let (mock, config) = mock(&["t"]);
    let producer = open(&config, "id").await;
    let away = E::RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE;
    mock.request_errors(Api::EndTxn, &[away, away]);
    let committed = producer.transact(records("t", &["a"])).await.unwrap();
    // Nothing is late, but librdkafka gives the connection up and sends EndTxn again: a harmless
    // false positive.
    println!("{committed:?}");
    assert!(committed.tainted.unwrap().contains("EndTxn"));
    producer.close().await;
}

#[tokio::test]
async fn fencing_at_the_commit_is_fatal_and_its_outcome_unknown() {
    for code in [
        E::RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH,
        E::RD_KAFKA_RESP_ERR_PRODUCER_FENCED,
    ] {
        let (mock, config) = mock(&["t"]);
        let producer = open(&config, "id").await;
        mock.request_errors(Api::EndTxn, &[code]);
        let error = producer.transact(records("t", &["a"])).await.unwrap_err();
        assert!(
            error.is_fenced() && error.needs_rebuild() && !error.is_retriable(),
            "{error}"
        );
        assert_eq!(error.outcome(), Outcome::Unknown);
        assert!(
            producer
                .transact(records("t", &["b"]))
                .await
                .unwrap_err()
                .needs_rebuild()
        );
        producer.close().await;
    }
}

#[tokio::test]
async fn fencing_at_a_produce_is_fatal_and_nothing_happened() {
    let (mock, config) = mock(&["t"]);
    let producer = open(&config, "id").await;
    mock.request_errors(Api::Produce, &[E::RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH]);
    let error = producer.transact(records("t", &["a"])).await.unwrap_err();
    assert!(error.is_fenced() && error.needs_rebuild(), "{error}");
    assert_eq!(error.outcome(), Outcome::DidNotHappen);
    producer.close().await;
}

#[tokio::test]
async fn a_forgotten_producer_id_is_aborted_and_done_again() {
    let (mock, config) = mock(&["t"]);
    let producer = open(&config, "id").await;
    mock.request_errors(
        Api::EndTxn,
        &[E::RD_KAFKA_RESP_ERR_INVALID_PRODUCER_ID_MAPPING],
    );
    let error = producer.transact(records("t", &["a"])).await.unwrap_err();
    assert!(error.is_retriable(), "{error}");
    // Two EndTxn in one transaction, the refused commit and the abort: counted as a taint.
    assert!(
        error.needs_rebuild() && error.outcome() == Outcome::Unknown,
        "{error}"
    );
    producer.close().await;
}

#[tokio::test]
async fn a_forbidden_topic_is_named_with_its_remedy() {
    let (mock, config) = mock(&["t", "forbidden"]);
    let producer = open(&config, "id").await;
    producer.transact(records("t", &["a"])).await.unwrap();
    mock.topic_error("forbidden", E::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED)
        .unwrap();
    let mut transaction = records("t", &["b"]);
    transaction.records.push(record("forbidden", "k", b"c"));
    let error = producer.transact(transaction).await.unwrap_err();
    assert_eq!(error.topic(), Some("forbidden"), "{error}");
    assert!(error.to_string().contains("grant"), "{error}");
    assert!(
        !error.needs_rebuild() && error.outcome() == Outcome::DidNotHappen,
        "{error}"
    );
    producer.transact(records("t", &["d"])).await.unwrap();
    producer.close().await;
}

#[tokio::test]
async fn a_topic_that_may_not_join_the_transaction_is_named() {
    let (mock, config) = mock(&["t"]);
    let producer = open(&config, "id").await;
    mock.request_errors(
        Api::AddPartitionsToTxn,
        &[E::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED],
    );
    let error = producer.transact(records("t", &["a"])).await.unwrap_err();
    assert_eq!(error.topic(), Some("t"), "{error}");
    producer.close().await;
}

#[tokio::test]
async fn missing_rights_name_the_right() {
    let (mock, config) = mock(&["t", "checkpoints"]);
    let producer = open(&config, "id").await;
    mock.request_errors(
        Api::TxnOffsetCommit,
        &[E::RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED],
    );
    let error = producer.transact(with_checkpoint()).await.unwrap_err();
    assert!(
        error.to_string().contains("READ on the consumer group") && !error.is_retriable(),
        "{error}"
    );
    producer.close().await;
    mock.request_errors(
        Api::InitProducerId,
        &[E::RD_KAFKA_RESP_ERR_TRANSACTIONAL_ID_AUTHORIZATION_FAILED],
    );
    let start = Instant::now();
    let error = TransactionalProducer::open(&config, "id", ProducerOptions::default())
        .await
        .unwrap_err();
    assert!(
        error.is_authorization() && error.to_string().contains("transactional id"),
        "{error}"
    );
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test]
async fn a_refused_batch_is_not_a_certain_refusal_of_one_record() {
    let (mock, config) = mock(&["t"]);
    let producer = open(&config, "id").await;
    mock.request_errors(Api::Produce, &[E::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE]);
    let error = producer
        .transact(records("t", &["a", "the largest", "b"]))
        .await
        .unwrap_err();
    let refused = error.refused().unwrap();
    assert_eq!(
        (refused.index, &*refused.suspects),
        (1, &[0, 1, 2][..]),
        "{error}"
    );
    assert!(error.to_string().contains("batch of 3 records"), "{error}");
    assert!(!error.needs_rebuild());
    let mut attempts = 1;
    while let Err(error) = producer.transact(records("t", &["a"])).await {
        assert!(error.is_retriable() && attempts < 3, "{error}");
        attempts += 1;
    }
    println!("attempts after the refusal: {attempts}");
    producer.close().await;
}

#[tokio::test]
async fn replicas_that_are_missing_for_a_moment_are_waited_for() {
    let (mock, config) = mock(&["t"]);
    let producer = open(&config, "id").await;
    let few = E::RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS;
    mock.request_errors(Api::Produce, &[few, few, few]);
    assert_eq!(
        producer
            .transact(records("t", &["a"]))
            .await
            .unwrap()
            .tainted,
        None
    );
    producer.close().await;
}

#[tokio::test]
async fn brokers_that_are_down_for_three_seconds_are_waited_for() {
    let (mock, config) = mock(&["t"]);
    let producer = open_for(&config, Duration::from_secs(20)).await;
    producer.transact(records("t", &["a"])).await.unwrap();
    mock.broker_down(-1).unwrap();
    let up = async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        mock.broker_up(-1).unwrap();
    };
    let start = Instant::now();
    let (result, ()) = tokio::join!(producer.transact(records("t", &["b"])), up);
    println!("{result:?} after {:?}", start.elapsed());
    result.unwrap();
    producer.close().await;
}

#[tokio::test]
async fn brokers_that_are_down_longer_than_the_transaction_park_nothing() {
    let (mock, config) = mock(&["t"]);
    let producer = open_for(&config, Duration::from_secs(3)).await;
    producer.transact(records("t", &["a"])).await.unwrap();
    mock.broker_down(-1).unwrap();
    let start = Instant::now();
    let error = producer.transact(records("t", &["b"])).await.unwrap_err();
    assert!(
        start.elapsed() < Duration::from_secs(9),
        "{:?}",
        start.elapsed()
    );
    assert!(
        error.is_retriable() && !error.is_refused() && error.topic().is_none(),
        "{error}"
    );
    assert_eq!(error.outcome(), Outcome::DidNotHappen);
    println!("{error}; rebuild {}", error.needs_rebuild());
    mock.broker_up(-1).unwrap();
    let producer = if error.needs_rebuild() {
        producer.close().await;
        open_for(&config, Duration::from_secs(10)).await
    } else {
        producer
    };
    producer.transact(records("t", &["b"])).await.unwrap();
    producer.close().await;
}

#[tokio::test]
async fn a_transaction_may_be_larger_than_the_local_queue() {
    let (_mock, config) = mock(&["t"]);
    let producer = open(&config.set("queue.buffering.max.messages", "1000"), "id").await;
    let mut transaction = Transaction::default();
    for i in 0..4_000 {
        transaction
            .records
            .push(record("t", &format!("key-{i}"), b"x"));
    }
    assert_eq!(producer.transact(transaction).await.unwrap().records, 4_000);
    producer.close().await;
}

#[tokio::test]
async fn an_envelope_without_a_source_is_refused_before_anything_is_published() {
    let (_mock, config) = mock(&["t"]);
    let producer = open(&config, "id").await;
    let mut transaction = records("t", &["a"]);
    let envelope = oncebox_kafka::Envelope {
        message_id: uuid::Uuid::nil(),
        outbox_id: 1,
        created_at_micros: 0,
    };
    transaction.records[0].envelope = Some(envelope);
    let error = producer.transact(transaction).await.unwrap_err();
    assert!(
        matches!(error.cause(), Cause::Refused(r) if r.code == "LOCAL" && r.index == 0),
        "{error}"
    );
    assert!(!error.needs_rebuild());
    producer.close().await;
}

#[tokio::test]
async fn a_panic_in_a_hook_ends_the_producer_and_not_the_process() {
    let (_mock, config) = mock(&["t"]);
    let options = ProducerOptions {
        on_step: Some(Arc::new(|step| {
            assert!(step != oncebox_kafka::Step::Acked, "on purpose")
        })),
        ..ProducerOptions::default()
    };
    let producer = TransactionalProducer::open(&config, "id", options)
        .await
        .unwrap();
    let error = producer.transact(records("t", &["a"])).await.unwrap_err();
    assert!(
        error.needs_rebuild() && error.outcome() == Outcome::Unknown,
        "{error}"
    );
    assert!(
        producer
            .transact(records("t", &["a"]))
            .await
            .unwrap_err()
            .needs_rebuild()
    );
    producer.close().await;
}

#[tokio::test]
async fn keys_go_where_javas_partitioner_sends_them() {
    let (_mock, config) = mock(&["t"]);
    let producer = open(&config, "id").await;
    // The keys of Kafka's own test of its murmur2, and some more of every length modulo four.
    let keys = [
        "21",
        "foobar",
        "a-little-bit-long-string",
        "a-little-bit-longer-string",
        "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8",
        "abc",
        "",
        "1",
        "12",
        "123",
        "1234",
        "größe",
    ];
    let transaction = Transaction {
        records: keys
            .iter()
            .map(|key| record("t", key, key.as_bytes()))
            .collect(),
        ..Transaction::default()
    };
    producer.transact(transaction).await.unwrap();
    producer.close().await;
    let seen = read_all(&config.bootstrap, "t", "read_uncommitted");
    assert_eq!(payloads(&seen).len(), keys.len());
    for record in seen {
        let key = record.key.unwrap();
        let expected = oncebox_kafka::partition::for_key(&key, 12);
        assert_eq!(
            record.partition,
            i32::try_from(expected).unwrap(),
            "{}",
            String::from_utf8_lossy(&key)
        );
    }
}
