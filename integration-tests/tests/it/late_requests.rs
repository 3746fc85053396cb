//! The hole of Kafka's transactions V1 (KAFKA-17754) on the real broker: a request that comes late ends or changes the
//! next transaction. Shown with the cure switched off; with it, the broker refuses the late request.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncebox_integration_tests::proxy::{Answer, Proxy, Rule, api};
use oncebox_integration_tests::reader;
use oncebox_integration_tests::services::{self, Kafka};
use oncebox_kafka::{
    Config, Offsets, ProducerOptions, Record, Stability, Transaction, TransactionalProducer,
    committed,
};

/// INVALID_PRODUCER_EPOCH.
const OLD_EPOCH: Option<i16> = Some(47);

/// Two transactions of one producer behind a proxy: A, whose request is held, and B, into which it is let go.
struct Stage {
    kafka: &'static Kafka,
    proxy: Proxy,
    topic: String,
    id: String,
    cure: bool,
}

impl Stage {
    async fn new(cure: bool) -> Self {
        let kafka = services::kafka().await;
        let proxy = Proxy::start(kafka).await.unwrap();
        let topic = kafka.create_topic("late", 1).await;
        let id = format!("late-{}", uuid::Uuid::new_v4().simple());
        let stage = Self {
            kafka,
            proxy,
            topic,
            id,
            cure,
        };
        // As a relay does before its first transaction. On a broker that has no `__consumer_offsets` yet, librdkafka
        // waits in `send_offsets_to_transaction` for ever.
        assert_eq!(stage.checkpoint(Stability::Any).await, -1);
        stage
    }

    fn config(&self) -> Config {
        // Short, so that the client gives the held request up and sends it again on a new connection.
        Config::new(self.proxy.bootstrap()).set("socket.timeout.ms", "1500")
    }

    async fn open(&self) -> TransactionalProducer {
        let mut options = if self.cure {
            ProducerOptions::default()
        } else {
            ProducerOptions::default().without_taint_rule()
        };
        options.transaction_timeout = Duration::from_secs(20);
        TransactionalProducer::open(&self.config(), &self.id, options)
            .await
            .unwrap()
    }

    /// Many records with this text: the checkpoint of a large transaction comes after its records.
    fn transaction(&self, text: &str, offset: i64) -> Transaction {
        let record = Record {
            topic: Arc::from(self.topic.as_str()),
            key: None,
            payload: Some(Bytes::from(text.to_owned())),
            headers: Bytes::new(),
            envelope: None,
        };
        let offsets = Offsets {
            group: self.id.clone(),
            topic: self.topic.clone(),
            partition: 0,
            offset,
            metadata: String::new(),
        };
        Transaction {
            source: None,
            records: vec![record; 501],
            offsets: Some(offsets),
            ..Transaction::default()
        }
    }

    async fn checkpoint(&self, stability: Stability) -> i64 {
        let config = Config::new(self.kafka.bootstrap());
        let stored = committed(
            &config,
            &self.id,
            &self.topic,
            0,
            stability,
            Duration::from_secs(30),
        );
        stored.await.unwrap().map_or(-1, |(offset, _)| offset)
    }

    /// The texts of the visible transactions, each once.
    async fn visible(&self) -> Vec<String> {
        let records = reader::committed(self.kafka.bootstrap(), &self.topic).await;
        let mut texts: Vec<_> = records
            .iter()
            .filter_map(|r| r.payload_text())
            .map(str::to_owned)
            .collect();
        texts.dedup();
        texts
    }

    /// Runs A with its first request of `api_key` held, and returns the producer for B: the same one without the cure, a
    /// new one with it, because A said that it was tainted.
    async fn run_a(&self, api_key: i16) -> (TransactionalProducer, Rule) {
        let producer = self.open().await;
        let held = self.proxy.on_request(api_key).times(1).hold();
        let done = producer.transact(self.transaction("a", 5)).await.unwrap();
        assert_eq!(held.hits(), 1);
        assert_eq!(done.tainted.is_some(), self.cure, "{done:?}");
        if !self.cure {
            return (producer, held);
        }
        producer.close().await;
        (self.open().await, held)
    }

    /// The same, but A is aborted, because its checkpoint is too large, and it is the abort's EndTxn that is held.
    async fn abort_a(&self) -> (TransactionalProducer, Rule) {
        let producer = self.open().await;
        let held = self.proxy.on_request(api::END_TXN).times(1).hold();
        let mut a = self.transaction("a", 5);
        if let Some(offsets) = &mut a.offsets {
            offsets.metadata = "x".repeat(5_000);
        }
        let aborted = producer.transact(a).await.unwrap_err();
        assert_eq!(held.hits(), 1, "{aborted}");
        assert_eq!(aborted.needs_rebuild(), self.cure, "{aborted}");
        if !self.cure {
            return (producer, held);
        }
        producer.close().await;
        (self.open().await, held)
    }

    /// Runs B and lets the held request of A go when B has just sent its own `before_api_key`, which waits meanwhile.
    async fn run_b(
        &self,
        producer: TransactionalProducer,
        held: Rule,
        before_api_key: i16,
    ) -> (bool, Answer) {
        let pause = self.proxy.on_request(before_api_key).times(1).hold();
        let b = self.transaction("b", 10);
        let running = tokio::spawn(async move {
            let done = producer.transact(b).await;
            producer.close().await;
            done.is_ok()
        });
        pause.hit().await;
        let answer = held
            .release()
            .await
            .expect("the broker answers the late request");
        pause.release().await;
        (running.await.unwrap(), answer)
    }
}

/// A late EndTxn of A, let go while B is open, before B's checkpoint: B's records become visible before B ends.
#[tokio::test]
async fn g3_a_late_endtxn_ends_the_next_transaction_without_the_cure() {
    let stage = Stage::new(false).await;
    let (producer, held) = stage.run_a(api::END_TXN).await;
    let pause = stage
        .proxy
        .on_request(api::ADD_OFFSETS_TO_TXN)
        .times(1)
        .hold();
    let b = stage.transaction("b", 10);
    let running = tokio::spawn(async move {
        let done = producer.transact(b).await;
        producer.close().await;
        done.is_ok()
    });
    pause.hit().await;
    let answer = held
        .release()
        .await
        .expect("the broker answers the late request");
    assert_eq!(answer.error_code(), Some(0), "accepted");
    let mut visible = stage.visible().await;
    for _ in 0..50 {
        if visible == ["a", "b"] {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        visible = stage.visible().await;
    }
    assert_eq!(
        visible,
        ["a", "b"],
        "the damage: B is visible although it has neither checkpoint nor commit"
    );
    assert_eq!(stage.checkpoint(Stability::Any).await, 5);
    drop(pause);
    let _ = running.await;
}

#[tokio::test]
async fn g3_a_late_endtxn_is_refused_with_the_cure() {
    let stage = Stage::new(true).await;
    let (producer, held) = stage.run_a(api::END_TXN).await;
    let (committed, answer) = stage.run_b(producer, held, api::ADD_OFFSETS_TO_TXN).await;
    assert_eq!(answer.error_code(), OLD_EPOCH);
    assert!(committed);
    assert_eq!(
        (
            stage.checkpoint(Stability::Stable).await,
            stage.visible().await
        ),
        (10, vec!["a".to_owned(), "b".to_owned()])
    );
}

/// A late TxnOffsetCommit of A, let go after B's own: the checkpoint goes back, and a relay would publish B twice.
#[tokio::test]
async fn g3_a_late_txnoffsetcommit_moves_the_checkpoint_back_without_the_cure() {
    let stage = Stage::new(false).await;
    let (producer, held) = stage.run_a(api::TXN_OFFSET_COMMIT).await;
    let (committed, answer) = stage.run_b(producer, held, api::END_TXN).await;
    assert_eq!(answer.error_code(), Some(0), "accepted");
    assert!(committed, "and B says it committed");
    assert_eq!(
        stage.checkpoint(Stability::Stable).await,
        5,
        "the damage: B committed 10"
    );
}

#[tokio::test]
async fn g3_a_late_txnoffsetcommit_is_refused_with_the_cure() {
    let stage = Stage::new(true).await;
    let (producer, held) = stage.run_a(api::TXN_OFFSET_COMMIT).await;
    let (committed, answer) = stage.run_b(producer, held, api::END_TXN).await;
    assert_eq!(answer.error_code(), OLD_EPOCH);
    assert!(committed);
    assert_eq!(stage.checkpoint(Stability::Stable).await, 10);
}

/// A late EndTxn(abort) of A, let go after B's records and before its checkpoint: B says it committed, its checkpoint is
/// there, and its records are aborted. A relay would go on and never publish them.
#[tokio::test]
async fn g2_a_late_abort_loses_the_next_transaction_without_the_cure() {
    let stage = Stage::new(false).await;
    let (producer, held) = stage.abort_a().await;
    let (committed, answer) = stage.run_b(producer, held, api::ADD_OFFSETS_TO_TXN).await;
    assert_eq!(answer.error_code(), Some(0), "accepted");
    assert!(committed, "and B says it committed");
    assert_eq!(stage.checkpoint(Stability::Stable).await, 10);
    assert!(stage.visible().await.is_empty(), "the damage: B is lost");
}

#[tokio::test]
async fn g2_a_late_abort_is_refused_with_the_cure() {
    let stage = Stage::new(true).await;
    let (producer, held) = stage.abort_a().await;
    let (committed, answer) = stage.run_b(producer, held, api::ADD_OFFSETS_TO_TXN).await;
    assert_eq!(answer.error_code(), OLD_EPOCH);
    assert!(committed);
    assert_eq!(stage.checkpoint(Stability::Stable).await, 10);
    assert_eq!(stage.visible().await, ["b"]);
}
