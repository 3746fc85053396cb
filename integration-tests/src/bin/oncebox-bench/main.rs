//! The benchmarks: `cargo xtask bench relay|stallers|memory|inbox|soak`.
//!
//! Rows of realistic JSON go from PostgreSQL (fsync on) to Kafka (one broker), with lz4 and without compression, beside
//! the two limits that a relay has: COPY OUT of the same rows, and the same producer fed from memory. Ratios count: the
//! absolute numbers are those of the machine and of whatever else runs on it. Then the time from a commit to a
//! `read_committed` consumer at a modest rate. Every count is checked against an independent consumer; exit code 1 when
//! one is wrong. `stallers` measures what open transactions of others cost (G9), `memory` what a broker costs that accepts
//! nothing; `inbox` and `soak` are about the consumer.

mod by_hand;
mod inbox;
mod latency;
mod limits;
mod memory;
mod process;
mod relay;
mod report;
mod rows;
mod stallers;
mod topic;

use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::{Parser, Subcommand};
use oncebox_integration_tests::services::{
    Database, Kafka, KafkaOptions, Postgres, PostgresOptions,
};
use oncebox_migrations::Names;

use crate::latency::Load;
use crate::report::{Measured, Report};
use crate::rows::Rows;
use crate::topic::Topic;

/// Rows of one transaction, in the relay and in the producer fed from memory.
const BATCH: usize = 20_000;

const COMPRESSIONS: [&str; 2] = ["lz4", "none"];

#[derive(Parser)]
#[command(
    name = "cargo xtask bench",
    about = "Benchmarks of Oncebox on real PostgreSQL and Kafka"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// The relay beside its two limits, its memory, and its latency.
    Relay(Options),
    /// G9: the time from a commit to a consumer while somebody else holds something open, beside the same without.
    Stallers(stallers::Options),
    /// The relay's memory while Kafka accepts nothing.
    Memory(memory::Options),
    /// The inbox beside what its work costs without it.
    Inbox(inbox::Options),
    /// The inbox with injected duplicates: effects, memory, table sizes.
    Soak(inbox::Soak),
    /// A consumer in a process of its own; used by the soak.
    #[command(hide = true)]
    SoakProcess(inbox::Process),
    /// A relay in a process of its own; used by the benchmark.
    #[command(hide = true)]
    RelayProcess(relay::Options),
}

#[derive(clap::Args)]
struct Options {
    /// Rows of about 1 KiB in the outbox; the benchmark keeps them in memory as well.
    #[arg(long, default_value_t = 300_000)]
    rows: usize,
    /// How often everything is measured; medians are shown.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// The report as JSON on standard output, the table on standard error.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Relay(options) => in_runtime(bench(options)),
        Command::Stallers(options) => in_runtime(stallers::measure(options)),
        Command::Memory(options) => in_runtime(memory::measure(options)),
        Command::Inbox(options) => in_runtime(inbox::measure(options)),
        Command::Soak(options) => in_runtime(inbox::soak(options)),
        Command::SoakProcess(options) => in_runtime(inbox::process(options)),
        Command::RelayProcess(options) => in_runtime(relay::process(options)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn in_runtime<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(work);
    // Somebody may still be reading standard input.
    runtime.shutdown_background();
    outcome
}

async fn bench(options: Options) -> Result<()> {
    if options.rows == 0 || options.runs == 0 {
        bail!("--rows and --runs must be at least 1");
    }
    let settings = [
        ("fsync", "on"),
        ("shared_buffers", "1GB"),
        ("max_wal_size", "8GB"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()));
    eprintln!("starting PostgreSQL and Kafka");
    let (postgres, kafka) = tokio::try_join!(
        Postgres::start(PostgresOptions {
            settings: settings.into(),
            ..PostgresOptions::default()
        }),
        Kafka::start(KafkaOptions::default()),
    )?;
    eprintln!("writing {} rows", options.rows);
    let rows = Rows::generate(options.rows);
    let database = migrated(&postgres).await?;
    rows.insert(&database).await?;

    let mut report = Report::new(&options, &rows, &database).await?;
    let bench = Bench {
        rows,
        database,
        bootstrap: kafka.bootstrap().to_owned(),
    };
    bench.warm_up().await?;
    for run in 0..options.runs {
        for compression in COMPRESSIONS {
            let measured = bench.measure(run, compression).await?;
            eprintln!(
                "run {} of {}, {compression}: {measured}",
                run + 1,
                options.runs
            );
            report.add(compression, measured);
        }
    }
    drop(bench);
    eprintln!("latency");
    let database = migrated(&postgres).await?;
    report.latency(latency::measure(&database, kafka.bootstrap(), Load::of(10)).await?);
    report.print(options.json)
}

/// A fresh database with an outbox.
async fn migrated(postgres: &Postgres) -> Result<Database> {
    let database = Database::create_on(postgres).await?;
    oncebox_migrations::migrate(database.url(), &Names::default())
        .await
        .context("cannot migrate")?;
    Ok(database)
}

struct Bench {
    rows: Rows,
    database: Database,
    bootstrap: String,
}

impl Bench {
    /// Nothing is counted before the broker's code is compiled and the rows are in PostgreSQL's memory.
    async fn warm_up(&self) -> Result<()> {
        eprintln!("warming up");
        limits::copy_out(&self.database, self.rows.len()).await?;
        for compression in COMPRESSIONS {
            let topic = Topic::create(&self.bootstrap, rows::TOPIC).await?;
            limits::producer(&self.bootstrap, compression, &self.rows, "warm-up").await?;
            topic.delete().await?;
        }
        Ok(())
    }

    /// One measurement of everything, side by side.
    async fn measure(&self, run: usize, compression: &str) -> Result<Measured> {
        let copy_out = limits::copy_out(&self.database, self.rows.len()).await?;

        let name = format!("memory-{compression}-{run}");
        let topic = Topic::create(&self.bootstrap, rows::TOPIC).await?;
        let producer = limits::producer(&self.bootstrap, compression, &self.rows, &name).await?;
        topic.expect(self.rows.len()).await?;
        topic.delete().await?;

        let name = format!("relay-{compression}-{run}");
        relay::forget(&self.database).await?;
        let topic = Topic::create(&self.bootstrap, rows::TOPIC).await?;
        let relay = relay::drain(&self.database, &self.bootstrap, compression, &name).await?;
        topic.expect(self.rows.len()).await?;
        let bytes = topic.bytes().await?;
        topic.delete().await?;
        Ok(Measured {
            copy_out,
            producer,
            relay,
            bytes,
        })
    }
}
