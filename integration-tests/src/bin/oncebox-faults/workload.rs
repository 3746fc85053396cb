//! Who writes: transactions that commit, roll back, stay open, and lose their connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures_util::TryStreamExt as _;
use oncebox_integration_tests::history::Entry;
use oncebox_integration_tests::services::Database;
use oncebox_outbox::{Config, Message, Outbox};
use rand::distr::Alphanumeric;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{Connection as _, PgConnection, Row as _};
use tokio::task::JoinSet;

/// Each writer holds one connection.
const WRITERS: u64 = 3;
/// Between two transactions of a writer, at most. Enough is always under way, and several scenes share the machine.
const PAUSE: u64 = 400;
/// Few, so that keys are hot and their order is at stake.
const KEYS: usize = 24;

/// What the writers did, as far as they know. A commit whose answer is lost counts as `unknown`; the table of the business
/// rows knows.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) committed: AtomicUsize,
    pub(crate) rolled_back: AtomicUsize,
    pub(crate) slow: AtomicUsize,
    pub(crate) unknown: AtomicUsize,
}

/// Bytes of a large message; most are small.
pub(crate) const LARGE: usize = 60_000;

/// The number at the beginning of a payload.
pub(crate) fn number(payload: &str) -> Result<i64> {
    let number = payload.split(' ').next().unwrap_or_default();
    number
        .parse()
        .with_context(|| format!("a payload without a number: {number:?}"))
}

/// Writers at work.
pub(crate) struct Workload {
    writers: JoinSet<Result<()>>,
    stop: Arc<AtomicBool>,
    pub(crate) counts: Arc<Counts>,
}

impl Workload {
    /// Creates the business tables and starts the writers.
    pub(crate) async fn start(database: &PgConnectOptions, topic: &str, seed: u64) -> Result<Self> {
        let mut conn = PgConnection::connect_with(database).await?;
        for statement in [
            "CREATE TABLE keys (key text PRIMARY KEY, number bigint NOT NULL)",
            "CREATE TABLE orders (id uuid PRIMARY KEY, key text NOT NULL, number bigint NOT NULL)",
        ] {
            sqlx::query(statement).execute(&mut conn).await?;
        }
        for key in 0..KEYS {
            sqlx::query("INSERT INTO keys VALUES ($1, 0)")
                .bind(format!("key-{key}"))
                .execute(&mut conn)
                .await?;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let counts = Arc::new(Counts::default());
        let mut writers = JoinSet::new();
        for n in 0..WRITERS {
            let writer = Writer {
                options: database.clone(),
                topic: topic.to_owned(),
                outbox: Outbox::new(Config::default()),
                rng: StdRng::seed_from_u64(seed.wrapping_mul(31).wrapping_add(n)),
                stop: Arc::clone(&stop),
                counts: Arc::clone(&counts),
            };
            writers.spawn(writer.run());
        }
        Ok(Self {
            writers,
            stop,
            counts,
        })
    }

    /// Ends the writers after their current transactions.
    pub(crate) async fn finish(mut self) -> Result<()> {
        self.stop.store(true, Relaxed);
        while let Some(ended) = self.writers.join_next().await {
            ended??;
        }
        Ok(())
    }
}

/// Commits messages outside the workload, one by one, numbered from `first` and on three keys. For a topic that has a
/// history of its own, without a business row.
pub(crate) async fn commit(
    database: &Database,
    topic: &str,
    first: usize,
    messages: usize,
) -> Result<Vec<Entry>> {
    let mut conn = PgConnection::connect_with(&database.options()).await?;
    let outbox = Outbox::new(Config::default());
    let mut committed = Vec::new();
    for number in first..first + messages {
        let (number, key) = (i64::try_from(number)?, format!("key-{}", number % 3));
        let mut tx = conn.begin().await?;
        let message = Message::new(topic)
            .key(key.clone())
            .payload(number.to_string());
        let id = outbox.enqueue(&mut tx, message).await?.as_uuid();
        tx.commit().await?;
        committed.push(Entry { id, key, number });
    }
    Ok(committed)
}

/// What was committed: the business rows, which were written in the same transactions as the messages.
pub(crate) async fn committed(database: &Database) -> Result<Vec<Entry>> {
    let mut conn = PgConnection::connect_with(&database.options()).await?;
    let entries = sqlx::query("SELECT id, key, number FROM orders")
        .fetch(&mut conn)
        .and_then(async |row| entry(&row));
    Ok(entries.try_collect().await?)
}

/// The message of a row.
pub(crate) fn entry(row: &PgRow) -> sqlx::Result<Entry> {
    Ok(Entry {
        id: row.try_get("id")?,
        key: row.try_get("key")?,
        number: row.try_get("number")?,
    })
}

struct Writer {
    options: PgConnectOptions,
    topic: String,
    outbox: Outbox,
    rng: StdRng,
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
}

impl Writer {
    async fn run(mut self) -> Result<()> {
        while !self.stop.load(Relaxed) {
            let Ok(mut conn) = PgConnection::connect_with(&self.options).await else {
                // The database is being disturbed.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            while !self.stop.load(Relaxed) {
                if self.transaction(&mut conn).await.is_err() {
                    // A lost connection, or a server that shuts down. Nobody is told that it was committed.
                    break;
                }
                let pause = self.rng.random_range(0..PAUSE);
                tokio::time::sleep(Duration::from_millis(pause)).await;
            }
        }
        Ok(())
    }

    /// One to five messages of one key, in the order of numbers drawn under the key's row lock.
    async fn transaction(&mut self, conn: &mut PgConnection) -> Result<()> {
        let mut tx = conn.begin().await?;
        let key = format!("key-{}", self.rng.random_range(0..KEYS));
        for _ in 0..self.rng.random_range(1..=5) {
            let number: i64 = sqlx::query_scalar(
                "UPDATE keys SET number = number + 1 WHERE key = $1 RETURNING number",
            )
            .bind(&key)
            .fetch_one(&mut *tx)
            .await?;
            let mut payload = number.to_string();
            if self.rng.random_bool(0.03) {
                payload.push(' ');
                // No compression makes it small.
                let noise = (&mut self.rng).sample_iter(Alphanumeric).take(LARGE);
                payload.extend(noise.map(char::from));
            }
            let message = Message::new(&self.topic).key(key.clone()).payload(payload);
            let id = self.outbox.enqueue(&mut tx, message).await?;
            sqlx::query("INSERT INTO orders VALUES ($1, $2, $3)")
                .bind(id.as_uuid())
                .bind(&key)
                .bind(number)
                .execute(&mut *tx)
                .await?;
        }
        if self.rng.random_bool(0.03) {
            // Its ids are low by the time it ends.
            let held = self.rng.random_range(100..1_500);
            tokio::time::sleep(Duration::from_millis(held)).await;
            self.counts.slow.fetch_add(1, Relaxed);
        }
        if self.rng.random_bool(0.1) {
            tx.rollback().await?;
            self.counts.rolled_back.fetch_add(1, Relaxed);
        } else {
            if let Err(error) = tx.commit().await {
                self.counts.unknown.fetch_add(1, Relaxed);
                return Err(error.into());
            }
            self.counts.committed.fetch_add(1, Relaxed);
        }
        Ok(())
    }
}
