//! The inbox beside what its work costs without it, and a soak with duplicates.
//!
//! Messages of about 200 bytes lie in one partition; the handler writes one row for each. `ById` stands beside the same marks
//! and rows written by hand on one connection, `ByOffset` beside the rows alone, and beside a consumer written by hand. What is measured begins with the first message
//! that comes and ends with the last commit. Every count is checked: effects once, no more and no less.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use oncebox_inbox::{Dedup, Delivery, Inbox, Step};
use oncebox_integration_tests::services::{Database, Kafka, KafkaOptions, Postgres};
use oncebox_kafka::{
    Config, Envelope, ProducerOptions, Record, SourceTag, TopicSpec, Transaction,
    TransactionalProducer,
};
use rand::distr::Alphanumeric;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use sqlx::postgres::PgPoolOptions;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{by_hand, process};

/// Messages that share a transaction.
pub(crate) const BATCH: usize = 500;
const PAYLOAD: usize = 200;
/// So many messages the soak publishes ahead of the consumer, at most.
const AHEAD: usize = 200_000;
/// Records of one transaction of the publisher.
const PUBLISH: usize = 10_000;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Messages of the batch modes; a tenth of them one by one, and a hundredth with a handler that waits.
    #[arg(long, default_value_t = 200_000)]
    messages: usize,
    /// How often everything is measured; medians are shown.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Only the batch modes.
    #[arg(long)]
    batches: bool,
}

#[derive(clap::Args)]
pub(crate) struct Soak {
    /// Messages, duplicates included.
    #[arg(long, default_value_t = 200_000)]
    messages: usize,
    /// How many of a thousand are duplicates of earlier ones: 3 as in the seeds, 300 for a bad day.
    #[arg(long, default_value_t = 3)]
    duplicates: u32,
    /// Partitions of the topic.
    #[arg(long, default_value_t = 4)]
    partitions: i32,
}

/// What one column shows.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    dedup: Dedup,
    batch: usize,
    lanes: usize,
    /// The handler waits so long for each message.
    waits: Option<Duration>,
    /// One of so many of the messages.
    share: usize,
}

const CASES: [Case; 6] = [
    Case {
        name: "ById, batches",
        dedup: Dedup::ById,
        batch: BATCH,
        lanes: 1,
        waits: None,
        share: 1,
    },
    Case {
        name: "ByOffset, batches",
        dedup: Dedup::ByOffset,
        batch: BATCH,
        lanes: 1,
        waits: None,
        share: 1,
    },
    Case {
        name: "ById, one by one",
        dedup: Dedup::ById,
        batch: 1,
        lanes: 1,
        waits: None,
        share: 10,
    },
    Case {
        name: "ById, one by one, 4 lanes",
        dedup: Dedup::ById,
        batch: 1,
        lanes: 4,
        waits: None,
        share: 10,
    },
    Case {
        name: "5 ms a message, 1 lane",
        dedup: Dedup::ById,
        batch: 1,
        lanes: 1,
        waits: Some(Duration::from_millis(5)),
        share: 100,
    },
    Case {
        name: "5 ms a message, 8 lanes",
        dedup: Dedup::ById,
        batch: 1,
        lanes: 8,
        waits: Some(Duration::from_millis(5)),
        share: 100,
    },
];

fn cases_of(batches: bool) -> &'static [Case] {
    &CASES[..if batches { 2 } else { CASES.len() }]
}

pub(crate) async fn measure(options: Options) -> Result<()> {
    ensure!(
        options.messages >= 1_000 && options.runs > 0,
        "--messages 1000 and --runs 1 at least"
    );
    eprintln!("starting PostgreSQL and Kafka");
    let settings = [
        ("fsync", "on"),
        ("shared_buffers", "1GB"),
        ("max_wal_size", "8GB"),
    ];
    let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let (postgres, kafka) = tokio::try_join!(
        Postgres::start(oncebox_integration_tests::services::PostgresOptions {
            settings: settings.into(),
            ..Default::default()
        }),
        Kafka::start(KafkaOptions::default()),
    )?;
    eprintln!("publishing {} messages", options.messages);
    let mut ids = Ids::new(1, 0);
    let all: Vec<Record> = (0..options.messages).map(|_| ids.record()).collect();
    for (topic, share) in [("all", 1), ("tenth", 10), ("hundredth", 100)] {
        create(&kafka, topic, 1).await?;
        publish(&kafka, topic, &all[..options.messages / share]).await?;
    }
    let mut marked = Vec::new();
    let mut bare = Vec::new();
    let mut fetched = Vec::new();
    let mut cases: Vec<Vec<f64>> = vec![Vec::new(); CASES.len()];
    for run in 0..options.runs {
        let database = prepared(&postgres).await?;
        marked.push(by_hand::rows(&database, &all, true).await?);
        let database = prepared(&postgres).await?;
        bare.push(by_hand::rows(&database, &all, false).await?);
        let database = prepared(&postgres).await?;
        let rate = by_hand::consumer(&database, &kafka, "all", options.messages);
        fetched.push(rate.await?);
        for (case, rates) in cases_of(options.batches).iter().zip(&mut cases) {
            let database = prepared(&postgres).await?;
            let messages = options.messages / case.share;
            let rate = consume(&database, &kafka, case, messages, run).await?;
            eprintln!(
                "run {} of {}: {} {rate:.0}/s",
                run + 1,
                options.runs,
                case.name
            );
            rates.push(rate);
        }
    }
    let (marked, bare, fetched) = (median(&mut marked), median(&mut bare), median(&mut fetched));
    println!("{}", process::load());
    println!("{marked:>9.0}/s  marks and rows by hand, batches of {BATCH}, one connection");
    println!("{bare:>9.0}/s  rows alone by hand, the same");
    println!("{fetched:>9.0}/s  rows and offset by hand, fetched from Kafka");
    for (case, rates) in cases_of(options.batches).iter().zip(&mut cases) {
        let rate = median(rates);
        let beside = match (case.dedup, case.batch) {
            (Dedup::ById, BATCH) => {
                format!(", {:.0} % of marks and rows by hand", 100.0 * rate / marked)
            }
            (Dedup::ByOffset, BATCH) => format!(
                ", {:.0} % of the rows alone, {:.0} % of those fetched by hand",
                100.0 * rate / bare,
                100.0 * rate / fetched
            ),
            _ => String::new(),
        };
        println!("{rate:>9.0}/s  {}{beside}", case.name);
    }
    Ok(())
}

/// Consumes a topic with injected duplicates, and looks at memory and tables meanwhile.
pub(crate) async fn soak(options: Soak) -> Result<()> {
    ensure!(
        options.messages >= 10_000 && options.duplicates < 1_000,
        "--messages 10000 at least, --duplicates below 1000"
    );
    let (postgres, kafka) = tokio::try_join!(
        Postgres::start(Default::default()),
        Kafka::start(Default::default())
    )?;
    let database = prepared(&postgres).await?;
    create(&kafka, "soak", options.partitions).await?;
    let mut consumer = None;
    let mut ids = Ids::new(7, options.duplicates);
    let (mut published, mut early) = (0, 0);
    let start = Instant::now();
    let producer = producer(&kafka, "soak").await?;
    while published < options.messages {
        let count = PUBLISH.min(options.messages - published);
        let records = (0..count)
            .map(|_| ids.record())
            .map(|r| named(r, "soak"))
            .collect();
        transact(&producer, records).await?;
        published += count;
        // It begins behind, so that from the beginning it has fetched ahead as much as it ever does.
        if consumer.is_none() && published >= AHEAD.min(options.messages / 20) {
            consumer = Some(process_of(&database, &kafka)?);
        }
        // Not more than a few seconds ahead of the consumer: the broker's disk is no part of this.
        while published > settled(&database).await? + AHEAD {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        if published % (options.messages / 10).max(PUBLISH) < PUBLISH {
            let memory = consumer.as_ref().map_or(0, memory_of);
            if early == 0 {
                early = memory;
            }
            println!(
                "{published:>9} published after {:>5.0} s, consumer {}",
                start.elapsed().as_secs_f64(),
                mib(memory)
            );
        }
    }
    let distinct = ids.distinct;
    let deadline = Instant::now() + Duration::from_secs(600);
    while effects(&database).await? < distinct {
        ensure!(Instant::now() < deadline, "the consumer does not get on");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    // A second effect would come now.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let late = consumer.as_ref().map_or(0, memory_of);
    drop(consumer);
    let rate = published as f64 / start.elapsed().as_secs_f64();
    let found = effects(&database).await?;
    let mut conn = database.connect().await;
    let (once, marks, mark_bytes): (i64, i64, i64) = sqlx::query_as(
        "SELECT (SELECT count(DISTINCT message) FROM effect), (SELECT count(*) FROM oncebox_inbox), \
         pg_total_relation_size('oncebox_inbox')",
    )
    .fetch_one(&mut conn)
    .await?;
    println!(
        "{published} messages ({distinct} distinct), {rate:.0}/s; effects {found}, duplicate effects {}, lost {}; \
         {marks} marks of {:.0} bytes; memory {} at a tenth, {} at the end ({:.2})",
        found - usize::try_from(once)?,
        distinct - usize::try_from(once)?,
        mark_bytes as f64 / marks as f64,
        mib(early),
        mib(late),
        late as f64 / early as f64,
    );
    ensure!(
        found == distinct && usize::try_from(once)? == distinct,
        "an effect is missing or there twice"
    );
    ensure!(
        options.messages < 1_000_000 || late as f64 <= 1.1 * early as f64,
        "the memory has grown"
    );
    Ok(())
}

#[derive(clap::Args, Debug)]
pub(crate) struct Process {
    #[arg(long)]
    database_url: String,
    #[arg(long)]
    kafka: String,
}

/// The consumer of the soak, in a process of its own: its memory is its own.
pub(crate) async fn process(options: Process) -> Result<()> {
    let pool = PgPoolOptions::new()
        .max_connections(8)
        .connect(&options.database_url)
        .await?;
    let stop = CancellationToken::new();
    let ended = stop.clone();
    tokio::spawn(async move {
        let _ = tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await;
        ended.cancel();
    });
    Inbox::new(pool, Config::new(options.kafka))
        .consumer("soak")
        .topic("soak")
        .batch(BATCH)
        .handle_batch(|tx, deliveries| Box::pin(write(tx, deliveries)))
        .run(stop)
        .await?;
    Ok(())
}

/// Of a process that has not ended.
fn memory_of(process: &tokio::process::Child) -> u64 {
    process.id().map_or(0, process::memory_of)
}

/// Ends with the value: its standard input ends.
fn process_of(database: &Database, kafka: &Kafka) -> Result<tokio::process::Child> {
    tokio::process::Command::new(std::env::current_exe()?)
        .args([
            "soak-process",
            "--database-url",
            database.url(),
            "--kafka",
            kafka.bootstrap(),
        ])
        .stdin(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("cannot start the consumer")
}

pub(crate) async fn effects(database: &Database) -> Result<usize> {
    let mut conn = database.connect().await;
    let count: i64 = sqlx::query_scalar("SELECT count(*) FROM effect")
        .fetch_one(&mut conn)
        .await?;
    Ok(usize::try_from(count)?)
}

/// Messages below the positions; markers count, which does no harm here.
async fn settled(database: &Database) -> Result<usize> {
    let mut conn = database.connect().await;
    let next: i64 =
        sqlx::query_scalar("SELECT coalesce(sum(next), 0)::bigint FROM oncebox_position")
            .fetch_one(&mut conn)
            .await?;
    Ok(usize::try_from(next)?)
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Where messages come from.
struct Ids {
    rng: StdRng,
    /// Of a thousand.
    duplicates: u32,
    recent: Vec<Record>,
    distinct: usize,
    count: i64,
}

impl Ids {
    fn new(seed: u64, duplicates: u32) -> Self {
        Self {
            rng: StdRng::seed_from_u64(seed),
            duplicates,
            recent: Vec::new(),
            distinct: 0,
            count: 0,
        }
    }

    fn record(&mut self) -> Record {
        self.count += 1;
        if !self.recent.is_empty() && self.rng.random_range(0..1_000) < self.duplicates {
            return self.recent[self.rng.random_range(0..self.recent.len())].clone();
        }
        let id = Uuid::now_v7();
        self.distinct += 1;
        let record = Record {
            topic: "all".into(),
            key: Some(Bytes::from(format!(
                "key {}",
                self.rng.random_range(0..10_000)
            ))),
            // Not one that compresses to nothing: what a consumer fetches would be many times as large in its memory.
            payload: Some(
                (&mut self.rng)
                    .sample_iter(Alphanumeric)
                    .take(PAYLOAD)
                    .collect(),
            ),
            headers: Bytes::new(),
            envelope: Some(Envelope {
                message_id: id,
                outbox_id: self.count,
                created_at_micros: 1_764_447_713_123_456,
            }),
        };
        if self.duplicates > 0 {
            // Those of the last while come again, most of them soon.
            if self.recent.len() < 20_000 {
                self.recent.push(record.clone());
            } else {
                let at = self.rng.random_range(0..self.recent.len());
                self.recent[at] = record.clone();
            }
        }
        record
    }
}

fn named(mut record: Record, topic: &str) -> Record {
    record.topic = topic.into();
    record
}

async fn create(kafka: &Kafka, topic: &str, partitions: i32) -> Result<()> {
    let config = Config::new(kafka.bootstrap());
    oncebox_kafka::ensure_topic(&config, topic, &TopicSpec::new(partitions)).await?;
    Ok(())
}

async fn producer(kafka: &Kafka, topic: &str) -> Result<TransactionalProducer> {
    let config = Config::new(kafka.bootstrap()).set("compression.type", "lz4");
    let id = format!("bench.{topic}");
    Ok(TransactionalProducer::open(&config, &id, ProducerOptions::default()).await?)
}

async fn transact(producer: &TransactionalProducer, records: Vec<Record>) -> Result<()> {
    let transaction = Transaction {
        source: Some(SourceTag {
            source: "bench".into(),
            epoch: 1,
        }),
        records,
        ..Transaction::default()
    };
    producer.transact(transaction).await?;
    Ok(())
}

async fn publish(kafka: &Kafka, topic: &str, records: &[Record]) -> Result<()> {
    let producer = producer(kafka, topic).await?;
    for chunk in records.chunks(PUBLISH) {
        transact(
            &producer,
            chunk.iter().map(|r| named(r.clone(), topic)).collect(),
        )
        .await?;
    }
    producer.close().await;
    Ok(())
}

/// A database with the tables and the handler's.
async fn prepared(postgres: &Postgres) -> Result<Database> {
    let database = crate::migrated(postgres).await?;
    let mut conn = database.connect().await;
    sqlx::query("CREATE TABLE effect (message uuid NOT NULL, payload bytea NOT NULL)")
        .execute(&mut conn)
        .await?;
    Ok(database)
}

/// Handler of whole batches: one statement.
async fn write(
    tx: &mut sqlx::Transaction<'static, sqlx::Postgres>,
    deliveries: &[Delivery],
) -> Result<(), oncebox_inbox::HandlerError> {
    let ids: Vec<Uuid> = deliveries.iter().map(|d| d.message_id).collect();
    let payloads: Vec<&[u8]> = deliveries
        .iter()
        .map(|d| d.payload.as_deref().unwrap_or_default())
        .collect();
    sqlx::query(INSERT)
        .bind(ids)
        .bind(payloads)
        .execute(&mut **tx)
        .await?;
    Ok(())
}

pub(crate) const INSERT: &str =
    "INSERT INTO effect (message, payload) SELECT * FROM unnest($1::uuid[], $2::bytea[])";

/// The inbox over a topic, from the first message that comes to the last commit.
async fn consume(
    database: &Database,
    kafka: &Kafka,
    case: &Case,
    messages: usize,
    run: usize,
) -> Result<f64> {
    let pool = PgPoolOptions::new()
        .max_connections(10)
        .connect(database.url())
        .await?;
    let first = Arc::new(Mutex::new(None::<Instant>));
    let noted = Arc::clone(&first);
    let stop = CancellationToken::new();
    let topic = match case.share {
        1 => "all",
        10 => "tenth",
        _ => "hundredth",
    };
    let name = case
        .name
        .to_lowercase()
        .replace(|c: char| !c.is_ascii_alphanumeric(), "-");
    let inbox = Inbox::new(pool, Config::new(kafka.bootstrap()))
        .consumer(format!("{name}-{run}"))
        .topic(topic)
        .dedup(case.dedup)
        .batch(case.batch)
        .lanes(case.lanes)
        .on_step(Arc::new(move |step| {
            if step == Step::Received {
                let mut first = noted.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert_with(Instant::now);
            }
        }));
    let waits = case.waits;
    let consumer = if case.batch > 1 {
        inbox.handle_batch(|tx, deliveries| Box::pin(write(tx, deliveries)))
    } else {
        inbox.handle(move |tx, delivery| {
            Box::pin(async move {
                if let Some(waits) = waits {
                    tokio::time::sleep(waits).await;
                }
                write(tx, &[delivery]).await
            })
        })
    };
    let stats = consumer.stats();
    let running = tokio::spawn(consumer.run(stop.clone()));
    let expected = u64::try_from(messages)?;
    while stats.effects() < expected {
        ensure!(!running.is_finished(), "the consumer has ended");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let end = Instant::now();
    stop.cancel();
    running.await??;
    ensure!(
        effects(database).await? == messages,
        "every message has one effect"
    );
    let first = first.lock().unwrap_or_else(PoisonError::into_inner);
    let first = first.context("nothing was received")?;
    Ok(messages as f64 / (end - first).as_secs_f64())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}
