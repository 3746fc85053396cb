//! The fault proxy does what its rules say, on real Kafka.

use std::time::Duration;

use oncebox_integration_tests::proxy::{Proxy, api};
use oncebox_integration_tests::{reader, services};
use rdkafka::config::ClientConfig;
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer, ThreadedProducer};

type TransactionalProducer = ThreadedProducer<DefaultProducerContext>;

fn producer(bootstrap: &str, id: &str) -> TransactionalProducer {
    ClientConfig::new()
        .set("bootstrap.servers", bootstrap)
        .set("transactional.id", id)
        .set("transaction.timeout.ms", "20000")
        .set("socket.timeout.ms", "2000")
        .set("retry.backoff.ms", "2")
        .set("linger.ms", "0")
        .create()
        .unwrap()
}

fn send(producer: &TransactionalProducer, topic: &str, payload: &str) {
    producer
        .send(
            BaseRecord::<str, str>::to(topic)
                .partition(0)
                .payload(payload),
        )
        .unwrap();
}

fn unique(prefix: &str) -> String {
    format!("{prefix}-{}", uuid::Uuid::new_v4().simple())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_end_txn_arrives_when_it_is_released() {
    let kafka = services::kafka().await;
    let proxy = Proxy::start(kafka).await.unwrap();
    let topic = kafka.create_topic("held", 1).await;
    let id = unique("held");
    let a = producer(proxy.bootstrap(), &id);
    tokio::task::block_in_place(|| a.init_transactions(Duration::from_secs(30))).unwrap();
    a.begin_transaction().unwrap();
    send(&a, &topic, "a");
    let held = proxy.on_request(api::END_TXN).hold();
    // librdkafka gives up after socket.timeout.ms, sends EndTxn again and says OK: the trap itself
    tokio::task::block_in_place(|| a.commit_transaction(Duration::from_secs(30))).unwrap();
    held.hit().await;
    assert_eq!(proxy.requests(api::END_TXN), 2);
    assert_eq!(reader::committed(kafka.bootstrap(), &topic).await.len(), 1);

    // without the cure, the late commit ends the next transaction
    a.begin_transaction().unwrap();
    send(&a, &topic, "b");
    tokio::task::block_in_place(|| a.flush(Duration::from_secs(10))).unwrap();
    assert_eq!(reader::committed(kafka.bootstrap(), &topic).await.len(), 1);
    let answer = held.release().await.expect("the broker answered");
    assert_eq!(
        (answer.api_key, answer.error_code()),
        (api::END_TXN, Some(0))
    );
    assert_eq!(reader::committed(kafka.bootstrap(), &topic).await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_response_is_a_request_that_happened() {
    let kafka = services::kafka().await;
    let proxy = Proxy::start(kafka).await.unwrap();
    let topic = kafka.create_topic("cut", 1).await;
    let a = producer(proxy.bootstrap(), &unique("cut"));
    tokio::task::block_in_place(|| a.init_transactions(Duration::from_secs(30))).unwrap();
    let cut = proxy.on_response(api::PRODUCE).cut();
    a.begin_transaction().unwrap();
    send(&a, &topic, "a");
    tokio::task::block_in_place(|| a.commit_transaction(Duration::from_secs(30))).unwrap();
    assert_eq!(cut.hits(), 1);
    assert_eq!(proxy.requests(api::PRODUCE), 2); // sent again, and recognised by its sequence number
    assert_eq!(
        reader::uncommitted(kafka.bootstrap(), &topic).await.len(),
        1
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn drop_delay_and_duplicate() {
    let kafka = services::kafka().await;
    let proxy = Proxy::start(kafka).await.unwrap();
    let topic = kafka.create_topic("ddd", 1).await;
    let a = producer(proxy.bootstrap(), &unique("ddd"));
    tokio::task::block_in_place(|| a.init_transactions(Duration::from_secs(30))).unwrap();
    let rules = [
        proxy.on_request(api::PRODUCE).duplicate(),
        proxy.on_request(api::PRODUCE).drop_frame(),
        proxy
            .on_response(api::PRODUCE)
            .delay(Duration::from_millis(100)),
    ];
    for payload in ["1", "2", "3"] {
        a.begin_transaction().unwrap();
        send(&a, &topic, payload);
        tokio::task::block_in_place(|| a.commit_transaction(Duration::from_secs(30))).unwrap();
    }
    assert_eq!(rules.each_ref().map(|r| r.hits()), [1, 1, 1]);
    let seen = reader::committed(kafka.bootstrap(), &topic).await;
    let payloads: Vec<_> = seen.iter().filter_map(|r| r.payload_text()).collect();
    assert_eq!(payloads, ["1", "2", "3"]);
}
