//! A SQLite database, a topic in memory, and workers between them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use oncebox_gate::{Hint, Scope};
use oncebox_migrations::Names;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{Sqlite, SqlitePool, Transaction};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::memory_kafka::{MemoryFeed, MemoryKafka};
use crate::dead_topic::DeadTopic;
use crate::dedup::Dedup;
use crate::delivery::Delivery;
use crate::error::Error;
use crate::foreign::ForeignId;
use crate::handler::{HandlerError, HandlerFuture};
use crate::partition::Limits;
use crate::process::{BusinessId, Hinted, Processor};
use crate::retry::{OnFailure, RetryPolicy};
use crate::stats::Stats;
use crate::step::StepHook;
use crate::store::Store;
use crate::worker::{Settings, work};

pub(super) struct Bench {
    pub(super) pool: SqlitePool,
    pub(super) kafka: MemoryKafka,
    _dir: TempDir,
}

/// What a worker is started with; every test changes what it is about.
pub(super) struct Options {
    pub(super) handler: crate::handler::Handler<Sqlite>,
    pub(super) on_step: Option<StepHook>,
    pub(super) retry: RetryPolicy,
    pub(super) foreign_id: ForeignId,
    pub(super) check_interval: Duration,
    pub(super) handler_limit: Duration,
    pub(super) dedup: Dedup,
    pub(super) on_failure: OnFailure,
    pub(super) delayed_retries: bool,
    pub(super) dead_topic: Option<DeadTopic>,
    pub(super) batch: usize,
    pub(super) lanes: usize,
    pub(super) breaker: Option<u32>,
    pub(super) record: Option<BusinessId>,
    pub(super) hint: Option<Arc<dyn Hint>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            handler: handler(|tx, delivery| Box::pin(effect(tx, delivery))),
            on_step: None,
            retry: RetryPolicy {
                attempts: 3,
                initial: Duration::from_millis(1),
                max: Duration::from_millis(5),
                fast: 0,
            },
            foreign_id: ForeignId::PartitionOffset,
            check_interval: Duration::from_millis(30),
            handler_limit: Duration::from_secs(60),
            dedup: Dedup::ById,
            on_failure: OnFailure::DeadLetter,
            delayed_retries: false,
            dead_topic: None,
            // Most tests look at single messages.
            batch: 1,
            lanes: 1,
            breaker: None,
            record: None,
            hint: None,
        }
    }
}

/// The effect of a message: one row. No unique key, so that a second effect would be seen.
pub(super) async fn effect(
    tx: &mut Transaction<'static, Sqlite>,
    delivery: Delivery,
) -> Result<(), HandlerError> {
    let payload = delivery.payload.unwrap_or_default();
    sqlx::query("INSERT INTO effect (payload, place) VALUES ($1, $2)")
        .bind(String::from_utf8_lossy(&payload))
        .bind(delivery.offset)
        .execute(&mut **tx)
        .await?;
    Ok(())
}

/// Names the higher-ranked type for closures.
pub(super) fn handler<F>(f: F) -> crate::handler::Handler<Sqlite>
where
    F: for<'a> Fn(&'a mut Transaction<'static, Sqlite>, Delivery) -> HandlerFuture<'a>
        + Send
        + Sync
        + 'static,
{
    crate::handler::Handler::Each(Arc::new(f))
}

/// The same for closures that take whole batches.
pub(super) fn whole<F>(f: F) -> crate::handler::Handler<Sqlite>
where
    F: for<'a> Fn(&'a mut Transaction<'static, Sqlite>, &'a [Delivery]) -> HandlerFuture<'a>
        + Send
        + Sync
        + 'static,
{
    crate::handler::Handler::Batch(Arc::new(f))
}

/// A hook that counts the calls of one step and does something at the n-th.
pub(super) fn at(step: crate::Step, n: u32, act: impl Fn() + Send + Sync + 'static) -> StepHook {
    let seen = AtomicU32::new(0);
    Arc::new(move |s| {
        if s == step && seen.fetch_add(1, Ordering::SeqCst) + 1 == n {
            // A blocked worker thread would keep the tasks in its queue from everybody.
            match tokio::runtime::Handle::try_current() {
                Ok(_) => tokio::task::block_in_place(&act),
                Err(_) => act(),
            }
        }
    })
}

impl Bench {
    pub(super) async fn new(partitions: i32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options = SqliteConnectOptions::new()
            .filename(dir.path().join("inventory.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .busy_timeout(Duration::from_millis(200));
        let pool = SqlitePoolOptions::new()
            .max_connections(4)
            .connect_with(options)
            .await
            .unwrap();
        let mut conn = pool.acquire().await.unwrap();
        oncebox_migrations::sqlite::migrate(&mut conn, &Names::default())
            .await
            .unwrap();
        drop(conn);
        sqlx::query("CREATE TABLE effect (payload TEXT, place INTEGER)")
            .execute(&pool)
            .await
            .unwrap();
        Self {
            pool,
            kafka: MemoryKafka::new("orders", partitions),
            _dir: dir,
        }
    }

    /// A worker that is a member of the group and has these partitions.
    pub(super) fn start(&self, partitions: &[i32], options: Options) -> Running {
        let feed = self.kafka.join();
        self.kafka.assign(feed.member, partitions);
        self.run(feed, options)
    }

    pub(super) fn processor(&self, options: Options) -> Processor<Sqlite> {
        Processor {
            pool: self.pool.clone(),
            statements: Sqlite::statements(&Names::default(), Duration::from_secs(60)),
            handler: options.handler,
            dedup: options.dedup,
            on_failure: options.on_failure,
            dead_topic: options.dead_topic,
            looks_for_blocked_keys: options.on_failure == OnFailure::BlockKey,
            hint: options.hint.map(|hint| Hinted {
                hint,
                scope: Scope::new("1", "inventory"),
            }),
            record: options.record,
            on_step: options.on_step,
            idle_limit: Duration::from_secs(60),
            handler_limit: options.handler_limit,
        }
    }

    fn run(&self, feed: MemoryFeed, options: Options) -> Running {
        let member = feed.member;
        let stop = CancellationToken::new();
        let stats = Stats::default();
        let retry = options.retry;
        let foreign_id = options.foreign_id.clone();
        let (lanes, batch, check) = (options.lanes, options.batch, options.check_interval);
        let (breaker, delayed_retries) = (options.breaker, options.delayed_retries);
        let processor = self.processor(options);
        let settings = Settings {
            consumer: "inventory".into(),
            retry,
            foreign_id,
            limits: Limits {
                lanes,
                batch,
                check,
                delayed_retries,
            },
            connections: 3,
            breaker,
            shutdown_grace: Duration::from_secs(5),
            window: None,
        };
        let worker = work(feed, processor, settings, stop.clone(), stats.clone());
        Running {
            member,
            stop,
            stats,
            task: tokio::spawn(worker),
        }
    }

    pub(super) async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    pub(super) async fn effects(&self) -> Vec<String> {
        sqlx::query_scalar("SELECT payload FROM effect ORDER BY rowid")
            .fetch_all(&self.pool)
            .await
            .unwrap()
    }

    /// The effects, which are numbers, in the order of these.
    pub(super) async fn numbers(&self) -> Vec<i32> {
        let effects = self.effects().await;
        let mut numbers: Vec<i32> = effects.iter().map(|n| n.parse().unwrap()).collect();
        numbers.sort_unstable();
        numbers
    }

    /// What was enqueued: topic, key, payload and headers.
    pub(super) async fn enqueued(
        &self,
    ) -> Vec<(String, Option<Vec<u8>>, Option<Vec<u8>>, Vec<u8>)> {
        sqlx::query_as("SELECT topic, key, payload, headers FROM oncebox_outbox ORDER BY id")
            .fetch_all(&self.pool)
            .await
            .unwrap()
    }

    pub(super) async fn marks(&self) -> i64 {
        self.count("SELECT count(*) FROM oncebox_inbox").await
    }

    pub(super) async fn next(&self, partition: i32) -> Option<i64> {
        sqlx::query_scalar("SELECT next FROM oncebox_position WHERE partition = $1")
            .bind(partition)
            .fetch_optional(&self.pool)
            .await
            .unwrap()
    }

    /// Waits until partition `partition` is settled up to `next`.
    pub(super) async fn settled(&self, partition: i32, next: i64) {
        until(async || self.next(partition).await >= Some(next)).await;
    }
}

/// Waits for a condition; fails the test after half a minute: some of them share the machine with everything else.
pub(super) async fn until(mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition().await {
        assert!(Instant::now() < deadline, "the condition did not come true");
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
}

/// A worker in its task.
pub(super) struct Running {
    pub(super) member: usize,
    pub(super) stop: CancellationToken,
    pub(super) stats: Stats,
    task: JoinHandle<Result<(), Error>>,
}

impl Running {
    /// Shuts down and returns the result.
    pub(super) async fn stop(self) -> Result<(), Error> {
        self.stop.cancel();
        self.ended().await
    }

    /// Waits for the worker to end by itself.
    pub(super) async fn ended(self) -> Result<(), Error> {
        let ended = tokio::time::timeout(Duration::from_secs(30), self.task).await;
        ended.expect("it goes on").unwrap()
    }
}
