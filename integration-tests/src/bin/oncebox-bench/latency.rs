//! From the commit of a business transaction to a `read_committed` consumer, at a modest rate.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use oncebox_integration_tests::services::Database;
use oncebox_outbox::{Config, Message, Outbox};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Headers as _, Message as _};
use rdkafka::{Offset, TopicPartitionList};
use serde::Serialize;
use sqlx::Connection as _;
use tokio::time::MissedTickBehavior;
use uuid::Uuid;

use crate::relay;
use crate::topic::Topic;

pub(crate) const TOPIC: &str = "oncebox-bench-latency";
/// Each writes on a connection of its own.
const WRITERS: u32 = 4;
const EVENTS_PER_SECOND: u32 = 200;
/// What comes first shows a relay and a broker that are still warming up.
const WARM_UP_SECONDS: u32 = 3;

/// What the writers do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) seconds: u32,
    /// So many of a hundred transactions are rolled back.
    pub(crate) rolled_back_percent: u32,
}

impl Load {
    /// Every transaction commits.
    pub(crate) fn of(seconds: u32) -> Self {
        Self {
            seconds,
            rolled_back_percent: 0,
        }
    }
}

/// Milliseconds from commit to consumer.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Latency {
    pub(crate) events: usize,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) max_ms: f64,
}

/// Measures with a relay and an outbox of their own.
pub(crate) async fn measure(database: &Database, bootstrap: &str, load: Load) -> Result<Latency> {
    let topic = Topic::create(bootstrap, TOPIC).await?;
    let source = database.name().replace('_', "-");
    let mut relay = relay::start(database, bootstrap, "lz4", &source, true)?;
    let consumer = Watcher::start(bootstrap)?;

    let rate = EVENTS_PER_SECOND / WRITERS;
    let pause = Duration::from_secs(1) / rate;
    let start = tokio::time::Instant::now();
    let mut writers = Vec::new();
    for writer in 0..WRITERS {
        let conn = database.connect().await;
        let first = start + Duration::from_millis(100) + pause * writer / WRITERS;
        let events = rate * (WARM_UP_SECONDS + load.seconds);
        writers.push(tokio::spawn(write(
            conn,
            first,
            pause,
            (events, load.rolled_back_percent),
        )));
    }
    let mut committed = Vec::new();
    for writer in writers {
        committed.extend(writer.await??);
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let seen = consumer.stop().await?;
    // The relay ends with its standard input.
    drop(relay.stdin.take());
    let output = relay.wait_with_output().await?;
    ensure!(
        output.status.success(),
        "the relay ended with {}",
        output.status
    );
    topic.expect(committed.len()).await?;
    topic.delete().await?;

    let counted_from = start.into_std() + Duration::from_secs(WARM_UP_SECONDS.into());
    committed.retain(|(_, at)| *at > counted_from);
    let times = committed.iter().map(|(id, at)| {
        let seen = seen.get(id).context("a committed event was never seen")?;
        Ok(seen.saturating_duration_since(*at))
    });
    Ok(Latency::of(times.collect::<Result<Vec<_>>>()?))
}

impl Latency {
    fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let at = |percent: usize| {
            let time = times.get((times.len().max(1) - 1) * percent / 100);
            time.map_or(0.0, |t| t.as_secs_f64() * 1e3)
        };
        Self {
            events: times.len(),
            p50_ms: at(50),
            p99_ms: at(99),
            max_ms: at(100),
        }
    }
}

/// Enqueues one event per `pause` and notes when its commit was known.
async fn write(
    mut conn: sqlx::PgConnection,
    first: tokio::time::Instant,
    pause: Duration,
    (events, rolled_back_percent): (u32, u32),
) -> Result<Vec<(Uuid, Instant)>> {
    let outbox = Outbox::new(Config::default());
    let mut ticks = tokio::time::interval_at(first, pause);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut committed = Vec::new();
    for event in 0..events {
        ticks.tick().await;
        let message = Message::new(TOPIC)
            .key(format!("key-{}", event % 100))
            .payload(format!(
                r#"{{"event":{event},"text":"{}"}}"#,
                "a short event ".repeat(20)
            ));
        let mut tx = conn.begin().await?;
        let id = outbox.enqueue(&mut tx, message).await?;
        if event % 100 < rolled_back_percent {
            tx.rollback().await?;
            continue;
        }
        tx.commit().await?;
        committed.push((id.as_uuid(), Instant::now()));
    }
    Ok(committed)
}

/// A consumer on a thread of its own that notes when it saw which message.
struct Watcher {
    stop: Arc<AtomicBool>,
    thread: tokio::task::JoinHandle<Result<HashMap<Uuid, Instant>>>,
}

impl Watcher {
    fn start(bootstrap: &str) -> Result<Self> {
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", bootstrap)
            .set("group.id", "oncebox-bench")
            .set("enable.auto.commit", "false")
            .set("isolation.level", "read_committed")
            .create()?;
        let metadata = consumer.fetch_metadata(Some(TOPIC), Duration::from_secs(30))?;
        let mut all = TopicPartitionList::new();
        for partition in metadata.topics().iter().flat_map(|t| t.partitions()) {
            all.add_partition_offset(TOPIC, partition.id(), Offset::Beginning)?;
        }
        consumer.assign(&all)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = tokio::task::spawn_blocking(move || {
            let mut seen = HashMap::new();
            while !stopped.load(Ordering::Relaxed) {
                let Some(message) = consumer.poll(Duration::from_millis(100)) else {
                    continue;
                };
                let (now, message) = (Instant::now(), message?);
                let headers = message.headers().context("a record without headers")?;
                let id = headers.iter().find(|h| h.key == "oncebox-id");
                let id = id
                    .and_then(|h| h.value)
                    .context("a record without oncebox-id")?;
                seen.insert(Uuid::try_parse_ascii(id)?, now);
            }
            Ok(seen)
        });
        Ok(Self { stop, thread })
    }

    async fn stop(self) -> Result<HashMap<Uuid, Instant>> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.await?
    }
}
