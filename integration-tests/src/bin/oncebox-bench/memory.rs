//! The relay's memory while Kafka accepts nothing and the outbox grows.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use oncebox_integration_tests::services::{Database, Kafka, Postgres};

use crate::rows::{self, Rows};
use crate::topic::Topic;
use crate::{process, relay};

/// What may come on top of the memory that the relay had with a broker that took everything.
const LIMIT: f64 = 1.5;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// How long the broker accepts nothing.
    #[arg(long, default_value_t = 10)]
    minutes: u32,
    /// Rows of about 1 KiB that wait meanwhile.
    #[arg(long, default_value_t = 300_000)]
    rows: usize,
}

/// Publishes a backlog, then meets a frozen broker with another, and lets it go on.
pub(crate) async fn measure(options: Options) -> Result<()> {
    let (postgres, kafka) = tokio::try_join!(
        Postgres::start(Default::default()),
        Kafka::start(Default::default())
    )?;
    let rows = Rows::generate(options.rows);
    let database = crate::migrated(&postgres).await?;
    let topic = Topic::create(kafka.bootstrap(), rows::TOPIC).await?;
    rows.insert(&database).await?;
    let mut relay = relay::start(&database, kafka.bootstrap(), "lz4", "memory", true)?;
    let pid = relay.id().context("the relay has ended")?;
    published(&database, options.rows).await?;
    let before = process::peak_memory_of(pid);
    println!("{} rows published: peak {}", options.rows, mib(before));

    kafka.pause_broker(0).await?;
    rows.insert(&database).await?;
    let start = Instant::now();
    let frozen = Duration::from_secs(60 * u64::from(options.minutes));
    while start.elapsed() < frozen {
        tokio::time::sleep(frozen / 10).await;
        println!(
            "{:>4.0} s with a frozen broker: now {}, peak {}",
            start.elapsed().as_secs_f64(),
            mib(process::memory_of(pid)),
            mib(process::peak_memory_of(pid))
        );
        ensure!(relay.try_wait()?.is_none(), "the relay has ended");
    }
    let peak = process::peak_memory_of(pid);
    kafka.resume_broker(0).await?;
    published(&database, 2 * options.rows).await?;
    let after = process::peak_memory_of(pid);
    println!(
        "the other {} rows published: peak {}",
        options.rows,
        mib(after)
    );
    drop(relay.stdin.take());
    relay.wait().await?;
    topic.expect(2 * options.rows).await?;
    topic.delete().await?;
    ensure!(
        ratio(peak.max(after), before) <= LIMIT,
        "more than {LIMIT} times the memory with a broker that takes everything"
    );
    Ok(())
}

/// Waits until the mark says that so many rows are published.
async fn published(database: &Database, rows: usize) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(300);
    let mut conn = database.connect().await;
    loop {
        let position: String = sqlx::query_scalar("SELECT position FROM oncebox_mark")
            .fetch_one(&mut conn)
            .await?;
        if position.contains(&format!(" high={rows} ")) {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("not published: {position}");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[allow(clippy::cast_precision_loss, reason = "bytes")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}

fn mib(bytes: u64) -> String {
    format!("{:.0} MiB", ratio(bytes, 1 << 20))
}
