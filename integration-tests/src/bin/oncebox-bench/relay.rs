//! The relay under measurement, in a process of its own: its memory is its own, and it starts cold.

use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use oncebox_integration_tests::services::Database;
use oncebox_migrations::{Dialect, Names};
use oncebox_relay::{Config, Health, Mode, Step};
use serde::{Deserialize, Serialize};
use sqlx::AssertSqlSafe;
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;

use crate::process::{peak_memory, processor_time};

/// What the process is told.
#[derive(clap::Args, Debug)]
pub(crate) struct Options {
    #[arg(long)]
    database_url: String,
    #[arg(long)]
    kafka: String,
    #[arg(long)]
    source: String,
    #[arg(long)]
    compression: String,
    /// Run until standard input ends, not until the outbox is empty.
    #[arg(long)]
    until_input_ends: bool,
}

/// What the process says about itself on standard output.
#[derive(Debug, Deserialize, Serialize)]
struct Answer {
    /// Seconds from the first batch read to the last one committed.
    seconds: f64,
    published: u64,
    transactions: u64,
    peak_memory: u64,
    processor_seconds: f64,
}

/// A relay that published everything.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Drained {
    /// From the first batch read to the last one committed.
    pub(crate) rows_per_second: f64,
    /// The same with start, claim and end of the process.
    pub(crate) rows_per_second_with_start: f64,
    pub(crate) transactions: u64,
    /// Peak resident memory in bytes.
    pub(crate) peak_memory: u64,
    /// Processor time of the process per row, in microseconds.
    pub(crate) processor_micros: f64,
}

/// The body of the process.
pub(crate) async fn process(options: Options) -> Result<()> {
    let database = oncebox_relay::Database::parse(&options.database_url)?;
    let kafka =
        oncebox_kafka::Config::new(options.kafka).set("compression.type", options.compression);
    let mut config = Config::new(options.source, database, kafka);
    config.max_batch_rows = crate::BATCH;
    let steps = Arc::new(Mutex::new(Steps::default()));
    let noted = Arc::clone(&steps);
    config.on_step = Some(Arc::new(move |step| {
        noted
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .note(step);
    }));
    let (health, shutdown) = (Health::new(), CancellationToken::new());
    let mode = if options.until_input_ends {
        let shutdown = shutdown.clone();
        tokio::spawn(async move {
            let _ = tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await;
            shutdown.cancel();
        });
        Mode::Forever
    } else {
        Mode::UntilEmpty
    };
    oncebox_relay::run(config, mode, health.clone(), shutdown).await?;
    let steps = steps.lock().unwrap_or_else(PoisonError::into_inner);
    let answer = Answer {
        seconds: steps.seconds(),
        published: health.snapshot().published,
        transactions: steps.committed,
        peak_memory: peak_memory(),
        processor_seconds: processor_time().as_secs_f64(),
    };
    println!("{}", serde_json::to_string(&answer)?);
    Ok(())
}

#[derive(Default)]
struct Steps {
    first_read: Option<Instant>,
    last_commit: Option<Instant>,
    committed: u64,
}

impl Steps {
    fn note(&mut self, step: Step) {
        match step {
            Step::BatchRead if self.first_read.is_none() => self.first_read = Some(Instant::now()),
            // The claim is a transaction of its own, before the first batch.
            Step::Committed if self.first_read.is_some() => {
                self.last_commit = Some(Instant::now());
                self.committed += 1;
            }
            _ => {}
        }
    }

    fn seconds(&self) -> f64 {
        let times = self.first_read.zip(self.last_commit);
        times.map_or(0.0, |(first, last)| (last - first).as_secs_f64())
    }
}

/// Makes the outbox look as if no relay had ever seen it.
pub(crate) async fn forget(database: &Database) -> Result<()> {
    let mark = Names::default().mark(Dialect::Postgres);
    let mut conn = database.connect().await;
    let fresh = format!("INSERT INTO {mark} (source_id) VALUES (gen_random_uuid())");
    for statement in [format!("DELETE FROM {mark}"), fresh] {
        sqlx::query(AssertSqlSafe(statement))
            .execute(&mut conn)
            .await?;
    }
    Ok(())
}

/// Starts a relay; it ends when it is killed or the outbox is empty, or with its standard input.
pub(crate) fn start(
    database: &Database,
    bootstrap: &str,
    compression: &str,
    source: &str,
    until_input_ends: bool,
) -> Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .arg("relay-process")
        .args(["--database-url", database.url(), "--kafka", bootstrap])
        .args(["--compression", compression, "--source", source])
        .args(until_input_ends.then_some("--until-input-ends"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    command.spawn().context("cannot start the relay")
}

/// Lets a relay publish everything.
#[allow(clippy::cast_precision_loss, reason = "counts of rows")]
pub(crate) async fn drain(
    database: &Database,
    bootstrap: &str,
    compression: &str,
    source: &str,
) -> Result<Drained> {
    let start_of_process = Instant::now();
    let relay = start(database, bootstrap, compression, source, false)?;
    let output = relay.wait_with_output().await?;
    let wall = start_of_process.elapsed();
    ensure!(
        output.status.success(),
        "the relay ended with {}",
        output.status
    );
    let answer: Answer = serde_json::from_slice(&output.stdout)?;
    let rows = answer.published as f64;
    Ok(Drained {
        rows_per_second: rows / answer.seconds,
        rows_per_second_with_start: rows / wall.as_secs_f64(),
        transactions: answer.transactions,
        peak_memory: answer.peak_memory,
        processor_micros: answer.processor_seconds * 1e6 / rows,
    })
}
