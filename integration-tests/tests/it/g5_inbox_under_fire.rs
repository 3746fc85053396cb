//! The inbox with everything that a service may want in front of it and behind it, on real PostgreSQL, Kafka and Redis: consumers
//! come and go, Redis is stopped, emptied and killed, and a third of the messages lie in the topic twice.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use oncebox_gate::{Cache, CacheConfig, Chain, GateConfig, Hint, Redis, RedisConfig, RedisGate};
use oncebox_inbox::{Consumer, Dedup, Inbox, RetryPolicy};
use oncebox_integration_tests::cable::Cable;
use oncebox_integration_tests::services::{self, Database, Kafka};
use oncebox_kafka::{
    Config, Envelope, ProducerOptions, Record, SourceTag, Transaction, TransactionalProducer,
};
use oncebox_migrations::Names;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{PgPool, Postgres};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const KEYS: u32 = 40;
const PARTITIONS: i32 = 4;

/// A database with the tables of the inbox and of the handler, and a topic.
struct Scene {
    /// Dropped with the scene.
    database: Database,
    pool: PgPool,
    kafka: &'static Kafka,
    topic: String,
}

impl Scene {
    async fn new() -> Self {
        let database = Database::create().await;
        let options = database.options();
        Self::in_database(database, options).await
    }

    /// All of it reaches the database by way of these options.
    async fn in_database(database: Database, through: PgConnectOptions) -> Self {
        oncebox_migrations::migrate(database.url(), &Names::default())
            .await
            .unwrap();
        let kafka = services::kafka().await;
        let topic = kafka.create_topic("fire", PARTITIONS).await;
        let pool = PgPoolOptions::new().max_connections(12);
        let pool = pool.connect_with(through).await.unwrap();
        sqlx::query("CREATE TABLE effect (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, message uuid NOT NULL, key text NOT NULL, n bigint NOT NULL)")
            .execute(&pool)
            .await
            .unwrap();
        Self {
            database,
            pool,
            kafka,
            topic,
        }
    }

    /// Publishes `count` messages from number `from` on, each key's in order, and `again` of a thousand once more somewhat later. A message that
    /// lies there twice has its effect at the first place.
    async fn publish(&self, from: i64, count: i64, again: u32) {
        let mut rng = StdRng::seed_from_u64(from.unsigned_abs());
        let mut records: Vec<Record> = Vec::new();
        for n in from..from + count {
            let key = rng.random_range(0..KEYS);
            records.push(Record {
                topic: self.topic.as_str().into(),
                key: Some(Bytes::from(format!("key {key}"))),
                payload: Some(Bytes::from(n.to_string())),
                headers: Bytes::new(),
                envelope: Some(Envelope {
                    message_id: Uuid::now_v7(),
                    outbox_id: n,
                    created_at_micros: 1_764_447_713_123_456,
                }),
            });
            if rng.random_range(0..1_000) < again {
                let back = rng.random_range(0..records.len().min(200));
                records.push(records[records.len() - 1 - back].clone());
            }
        }
        let config = Config::new(self.kafka.bootstrap());
        let id = format!("fire.{}", self.topic);
        let producer = TransactionalProducer::open(&config, &id, ProducerOptions::default())
            .await
            .unwrap();
        for chunk in records.chunks(500) {
            let transaction = Transaction {
                source: Some(SourceTag {
                    source: "fire".into(),
                    epoch: 1,
                }),
                records: chunk.to_vec(),
                ..Transaction::default()
            };
            producer.transact(transaction).await.unwrap();
        }
        producer.close().await;
    }

    fn consumer(
        &self,
        change: impl FnOnce(Inbox<Postgres>) -> Inbox<Postgres>,
    ) -> Consumer<Postgres> {
        let kafka = Config::new(self.kafka.bootstrap())
            .set("session.timeout.ms", "6000")
            .set("heartbeat.interval.ms", "500");
        let inbox = Inbox::new(self.pool.clone(), kafka)
            .consumer("fire")
            .topic(&self.topic)
            .retry(RetryPolicy {
                attempts: 20,
                initial: Duration::from_millis(5),
                ..RetryPolicy::default()
            })
            .check_interval(Duration::from_millis(300));
        change(inbox).handle(|tx, delivery| {
            Box::pin(async move {
                let key = String::from_utf8_lossy(delivery.key.as_deref().unwrap_or_default())
                    .into_owned();
                let n: i64 = delivery.json()?;
                sqlx::query("INSERT INTO effect (message, key, n) VALUES ($1, $2, $3)")
                    .bind(delivery.message_id)
                    .bind(key)
                    .bind(n)
                    .execute(&mut **tx)
                    .await?;
                Ok(())
            })
        })
    }

    /// Fails while the database is away.
    async fn effects(&self) -> sqlx::Result<i64> {
        sqlx::query_scalar("SELECT count(*) FROM effect")
            .fetch_one(&self.pool)
            .await
    }

    async fn reach(&self, count: i64) {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            let effects = self.effects().await;
            if effects.as_ref().is_ok_and(|effects| *effects >= count) {
                return;
            }
            assert!(Instant::now() < deadline, "{effects:?} of {count}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Each message once, and every key in the order of its messages.
    async fn audit(&self, count: i64) {
        self.reach(count).await;
        // A second effect would come now.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (all, once, inverted): (i64, i64, i64) = sqlx::query_as(
            "SELECT count(*), count(DISTINCT message), count(*) FILTER (WHERE n < before) FROM \
             (SELECT message, n, lag(n) OVER (PARTITION BY key ORDER BY id) AS before FROM effect) AS e",
        )
        .fetch_one(&self.pool)
        .await
        .unwrap();
        assert_eq!(
            (all, once, inverted),
            (count, count, 0),
            "effects, distinct ones, inversions"
        );
        let letters: i64 = sqlx::query_scalar("SELECT count(*) FROM oncebox_dead_letter")
            .fetch_one(&self.pool)
            .await
            .unwrap();
        assert_eq!(letters, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_redis_stopped_emptied_and_killed_costs_speed_and_nothing_else() {
    let scene = Scene::new().await;
    let redis = services::Redis::start().await.unwrap();
    let client = Redis::new(RedisConfig::new(redis.url(), "test")).unwrap();
    let window = Duration::from_secs(7 * 86_400);
    let gate = RedisGate::new(client, GateConfig::new(window, Duration::from_secs(60))).unwrap();
    let cache = Cache::new(CacheConfig::default());
    let hint: Arc<dyn Hint> = Arc::new(Chain::new(vec![Arc::new(cache), Arc::new(gate)]));
    let consumer = scene.consumer(|inbox| inbox.hint(hint).batch(20).lanes(2));
    let (stats, stop) = (consumer.stats(), CancellationToken::new());
    let running = tokio::spawn(consumer.run(stop.clone()));
    let mut expected = 0;
    for round in 0..5 {
        match round {
            1 => redis.pause().unwrap(),
            2 => {
                redis.resume().unwrap();
                redis.flush().await.unwrap();
            }
            3 => redis.kill().await.unwrap(),
            4 => redis.start_again().await.unwrap(),
            _ => {}
        }
        scene.publish(expected, 400, 300).await;
        expected += 400;
        scene.reach(expected).await;
    }
    scene.audit(expected).await;
    assert!(
        stats.duplicates() > 400,
        "{} duplicates",
        stats.duplicates()
    );
    stop.cancel();
    running.await.unwrap().unwrap();
}

/// Consumers that come and go while messages come: every rebalance takes partitions away in the middle of batches.
async fn storm(dedup: Dedup, lanes: usize, again: u32) {
    let scene = Scene::new().await;
    let mut rng = StdRng::seed_from_u64(7);
    let mut running: Vec<(CancellationToken, tokio::task::AbortHandle)> = Vec::new();
    let mut tasks = JoinSet::new();
    let mut expected = 0;
    // Two seconds each; CONTRIBUTING.md says how to have a storm of minutes.
    let rounds = std::env::var("ONCEBOX_TEST_STORM_ROUNDS").map_or(8, |n| n.parse().unwrap());
    for _ in 0..rounds {
        for _ in 0..2 {
            let consumer = scene.consumer(|inbox| inbox.dedup(dedup).batch(16).lanes(lanes));
            let stop = CancellationToken::new();
            let handle = tasks.spawn(consumer.run(stop.clone()));
            running.push((stop, handle));
        }
        scene.publish(expected, 300, again).await;
        expected += 300;
        tokio::time::sleep(Duration::from_millis(rng.random_range(200..1_500))).await;
        while running.len() > 2 {
            let (stop, _) = running.swap_remove(rng.random_range(0..running.len()));
            stop.cancel();
        }
    }
    scene.audit(expected).await;
    for (stop, _) in running {
        stop.cancel();
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap().unwrap();
    }
    // No partition without a worker: all are settled to their ends.
    let partitions: i64 = sqlx::query_scalar("SELECT count(*) FROM oncebox_position")
        .fetch_one(&scene.pool)
        .await
        .unwrap();
    assert_eq!(partitions, i64::from(PARTITIONS));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g6_a_storm_of_rebalances_repeats_loses_and_inverts_nothing() {
    storm(Dedup::ById, 3, 100).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g6_a_storm_of_rebalances_by_offset_repeats_loses_and_inverts_nothing() {
    storm(Dedup::ByOffset, 1, 0).await;
}

/// How the consumer's database comes to miss what it had.
#[derive(Clone, Copy, Debug)]
enum Loss {
    /// An asynchronous standby takes over.
    Failover,
    /// A backup is restored, and everybody is sent there.
    Restore,
}

/// The consumer runs on all the time, Kafka does not rebalance, and the offsets in Kafka are those of the lost history.
async fn loses_its_past(loss: Loss, dedup: Dedup) {
    let start = async || services::Postgres::start(Default::default()).await.unwrap();
    let primary = start().await;
    let database = Database::create_on(&primary).await.unwrap();
    let server = |database: &Database| {
        SocketAddr::from((Ipv4Addr::LOCALHOST, database.options().get_port()))
    };
    let cable = Cable::start(server(&database)).await.unwrap();
    let through = database.options().port(cable.address().port());
    let name = database.name().to_owned();
    let scene = Scene::in_database(database, through).await;
    let hint = (dedup == Dedup::ById).then(|| Arc::new(Cache::new(CacheConfig::default())));
    let consumer = scene.consumer(|inbox| {
        let inbox = inbox.dedup(dedup).batch(20);
        match hint {
            Some(hint) => inbox.hint(hint),
            None => inbox,
        }
    });
    let (stats, stop) = (consumer.stats(), CancellationToken::new());
    let running = tokio::spawn(consumer.run(stop.clone()));
    scene.publish(0, 300, 0).await;
    scene.reach(300).await;
    let other = match loss {
        Loss::Failover => {
            let standby = primary.standby().await.unwrap();
            standby.caught_up(&primary).await.unwrap();
            standby.stop().await.unwrap();
            standby
        }
        Loss::Restore => {
            let backup = start().await;
            primary.dump_into(&name, &backup).await.unwrap();
            backup
        }
    };
    // Known to the lost history alone; acknowledged to Kafka as well.
    scene.publish(300, 200, 0).await;
    scene.reach(500).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let owned = stats.ownership();
    if let Loss::Failover = loss {
        primary.crash().await.unwrap();
        other.start_again().await.unwrap();
        other.promote().await.unwrap();
    }
    // Dropped when the consumer has ended.
    let moved = scene.database.on(&other).unwrap();
    cable.redirect(server(&moved));
    cable.cut();
    scene.publish(500, 100, 0).await;
    scene.audit(600).await;
    assert!(stats.ownership() > owned, "the loss was noticed");
    assert!(!running.is_finished());
    stop.cancel();
    running.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_a_lossy_failover_under_a_running_consumer_is_made_up_for() {
    loses_its_past(Loss::Failover, Dedup::ById).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_a_restored_backup_under_a_running_consumer_is_made_up_for() {
    loses_its_past(Loss::Restore, Dedup::ById).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_a_lossy_failover_under_a_consumer_by_offset_is_made_up_for() {
    loses_its_past(Loss::Failover, Dedup::ByOffset).await;
}
