//! What a test plays in: a database of its own, a topic of its own, and a producer that writes what a relay would write.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncebox_inbox::{Consumer, Delivery, Error, HandlerError, Inbox, RetryPolicy, Stats};
use oncebox_kafka::admin::{self, TopicSpec};
use oncebox_kafka::{
    Config, Envelope, ProducerOptions, Record, SourceTag, Stability, Transaction,
    TransactionalProducer,
};
use oncebox_migrations::Names;
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgPool, Postgres};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// One test's world.
pub(crate) struct Scene {
    pub(crate) url: String,
    pub(crate) pool: PgPool,
    pub(crate) kafka: Config,
    pub(crate) topic: String,
    pub(crate) consumer: String,
    producer: TransactionalProducer,
}

/// A variable, or the reason to skip.
fn service(name: &str) -> Option<String> {
    let value = std::env::var(name).ok().filter(|v| !v.is_empty());
    if value.is_none() {
        println!("skipped: {name} is not set");
    }
    value
}

impl Scene {
    /// A world with a topic of this many partitions; `None` when a service is missing.
    pub(crate) async fn new(partitions: i32) -> Option<Self> {
        let url = service("ONCEBOX_TEST_POSTGRES_URL")?;
        let bootstrap = service("ONCEBOX_TEST_KAFKA")?;
        let name = format!("inbox_{}", Uuid::now_v7().simple());
        let admin = PgPool::connect(&url).await.unwrap();
        sqlx::query(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}")))
            .execute(&admin)
            .await
            .unwrap();
        admin.close().await;
        let (server, _) = url.rsplit_once('/').unwrap();
        let url = format!("{server}/{name}");
        let pool = PgPoolOptions::new()
            .max_connections(8)
            .connect(&url)
            .await
            .unwrap();
        let mut conn = pool.acquire().await.unwrap();
        oncebox_migrations::postgres::migrate(&mut conn, &Names::default())
            .await
            .unwrap();
        drop(conn);
        // No unique key: a second effect is seen.
        sqlx::query("CREATE TABLE effect (n bigint GENERATED ALWAYS AS IDENTITY, payload text, key text, place bigint, partition int, by text)")
            .execute(&pool)
            .await
            .unwrap();
        // The group notices a stopped process soon; a short session also makes rebalances quick.
        let kafka = Config::new(bootstrap)
            .set("session.timeout.ms", "6000")
            .set("heartbeat.interval.ms", "500");
        admin::ensure_topic(&kafka, &name, &TopicSpec::new(partitions))
            .await
            .unwrap();
        let producer = TransactionalProducer::open(
            &kafka,
            &format!("oncebox.{name}"),
            ProducerOptions::default(),
        )
        .await
        .unwrap();
        Some(Self {
            url,
            pool,
            kafka,
            topic: name.clone(),
            consumer: format!("c-{}", &name[30..]),
            producer,
        })
    }

    /// Publishes messages with these ids in one transaction, as a relay does.
    pub(crate) async fn publish<'a>(
        &self,
        messages: impl IntoIterator<Item = (&'a str, &'a str, Uuid)>,
    ) {
        let records = messages
            .into_iter()
            .enumerate()
            .map(|(n, (key, payload, id))| Record {
                topic: self.topic.as_str().into(),
                key: Some(key.to_owned().into()),
                payload: Some(payload.to_owned().into()),
                headers: oncebox_migrations::headers::encode([(
                    "oncebox-type",
                    Some(&b"order.paid"[..]),
                )])
                .unwrap()
                .into(),
                envelope: Some(Envelope {
                    message_id: id,
                    outbox_id: n as i64 + 1,
                    created_at_micros: 1_764_447_713_123_456,
                }),
            })
            .collect();
        self.transact(records).await;
    }

    /// Publishes the numbers of a range, each with a new id.
    pub(crate) async fn publish_numbers(&self, range: std::ops::Range<i32>) {
        let texts: Vec<String> = range.map(|n| n.to_string()).collect();
        self.publish(
            texts
                .iter()
                .map(|t| (t.as_str(), t.as_str(), Uuid::now_v7())),
        )
        .await;
    }

    /// Publishes a record without an envelope.
    pub(crate) async fn publish_foreign(&self, payload: &str) {
        self.transact(vec![Record {
            topic: self.topic.as_str().into(),
            key: None,
            payload: Some(payload.to_owned().into()),
            headers: bytes::Bytes::new(),
            envelope: None,
        }])
        .await;
    }

    async fn transact(&self, records: Vec<Record>) {
        self.producer
            .transact(Transaction {
                source: Some(SourceTag {
                    source: "shop".into(),
                    epoch: 1,
                }),
                records,
                offsets: None,
                ..Transaction::default()
            })
            .await
            .unwrap();
    }

    /// The inbox under test.
    pub(crate) fn inbox(&self) -> Inbox<Postgres> {
        Inbox::new(self.pool.clone(), self.kafka.clone())
            .consumer(&self.consumer)
            .topic(&self.topic)
            .check_interval(Duration::from_millis(300))
            // Most tests look at single messages.
            .batch(1)
            .retry(RetryPolicy {
                attempts: 3,
                initial: Duration::from_millis(10),
                max: Duration::from_millis(50),
                fast: 0,
            })
    }

    /// Runs the inbox with the usual handler: one row per effect.
    pub(crate) fn start(&self) -> Running {
        Running::new(
            self.inbox()
                .handle(|tx, delivery| Box::pin(effect(tx, delivery))),
        )
    }

    pub(crate) async fn effects(&self) -> Vec<String> {
        sqlx::query_scalar("SELECT payload FROM effect ORDER BY n")
            .fetch_all(&self.pool)
            .await
            .unwrap()
    }

    pub(crate) async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    pub(crate) async fn marks(&self) -> i64 {
        self.count("SELECT count(*) FROM oncebox_inbox").await
    }

    pub(crate) async fn next(&self, partition: i32) -> i64 {
        sqlx::query_scalar(
            "SELECT coalesce(max(next), -1) FROM oncebox_position WHERE partition = $1",
        )
        .bind(partition)
        .fetch_one(&self.pool)
        .await
        .unwrap()
    }

    /// The offset the Kafka group has committed.
    pub(crate) async fn committed(&self, partition: i32) -> Option<i64> {
        admin::committed(
            &self.kafka,
            &self.consumer,
            &self.topic,
            partition,
            Stability::Any,
            Duration::from_secs(10),
        )
        .await
        .unwrap()
        .map(|(offset, _)| offset)
    }

    /// Waits until this many effects are committed.
    pub(crate) async fn effects_reach(&self, count: i64) {
        until(async || self.count("SELECT count(*) FROM effect").await >= count).await;
    }
}

/// The effect of a message.
pub(crate) async fn effect(
    tx: &mut sqlx::Transaction<'static, Postgres>,
    delivery: Delivery,
) -> Result<(), HandlerError> {
    let text = |bytes: Option<bytes::Bytes>| {
        String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
    };
    sqlx::query("INSERT INTO effect (payload, key, place, partition) VALUES ($1, $2, $3, $4)")
        .bind(text(delivery.payload))
        .bind(text(delivery.key))
        .bind(delivery.offset)
        .bind(delivery.partition)
        .execute(&mut **tx)
        .await?;
    Ok(())
}

/// A running consumer.
pub(crate) struct Running {
    pub(crate) stats: Stats,
    stop: CancellationToken,
    task: JoinHandle<Result<(), Error>>,
}

impl Running {
    pub(crate) fn new<D: oncebox_inbox::InboxStore>(consumer: Consumer<D>) -> Self {
        let stop = CancellationToken::new();
        Self {
            stats: consumer.stats(),
            task: tokio::spawn(consumer.run(stop.clone())),
            stop,
        }
    }

    /// Shuts down.
    pub(crate) async fn stop(self) -> Result<(), Error> {
        self.stop.cancel();
        self.task.await.unwrap()
    }

    /// The error it stops with by itself.
    pub(crate) async fn error(self) -> Error {
        let result = tokio::time::timeout(Duration::from_secs(30), self.task).await;
        result.expect("it stops by itself").unwrap().unwrap_err()
    }
}

/// Waits for a condition; fails the test after a minute.
pub(crate) async fn until(mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition().await {
        assert!(Instant::now() < deadline, "the condition did not come true");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A hook that acts at the n-th time a step is reached.
pub(crate) fn at(
    step: oncebox_inbox::Step,
    n: u32,
    act: impl Fn() + Send + Sync + 'static,
) -> oncebox_inbox::StepHook {
    let seen = std::sync::atomic::AtomicU32::new(0);
    Arc::new(move |s| {
        if s == step && seen.fetch_add(1, std::sync::atomic::Ordering::SeqCst) + 1 == n {
            // A blocked worker thread would keep the tasks in its queue from everybody.
            match tokio::runtime::Handle::try_current() {
                Ok(_) => tokio::task::block_in_place(&act),
                Err(_) => act(),
            }
        }
    })
}
