//! The consuming service, in a process of its own: each message becomes one row in the table of effects.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context as _, Result};
use oncebox_inbox::{HandlerError, Inbox, Step};
use oncebox_integration_tests::history::Entry;
use oncebox_integration_tests::services::Database;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, PgConnection};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::workload;

/// Kafka's shortest, so that a killed or stopped consumer is replaced soon.
const SESSION_TIMEOUT: &str = "6000";
/// Below the session's: the row locks of a stopped consumer are gone when its successor comes.
const IDLE_LIMIT: Duration = Duration::from_secs(3);

/// What the process is told.
#[derive(clap::Parser)]
pub(crate) struct Options {
    #[arg(long)]
    database_url: String,
    #[arg(long)]
    kafka: String,
    #[arg(long)]
    topic: String,
    /// Step and how often it is reached before the process kills itself.
    #[arg(long, value_name = "STEP:N")]
    kill_at: Option<String>,
}

/// No unique index on the message: a second effect has to show.
pub(crate) async fn create_table(database: &Database) -> Result<()> {
    let mut conn = PgConnection::connect_with(&database.options()).await?;
    sqlx::query("CREATE TABLE effects (n bigserial PRIMARY KEY, id uuid NOT NULL, key text NOT NULL, number bigint NOT NULL)")
        .execute(&mut conn)
        .await?;
    Ok(())
}

/// How many effects there are.
pub(crate) async fn count(database: &Database) -> Result<i64> {
    let mut conn = PgConnection::connect_with(&database.options()).await?;
    let count = sqlx::query_scalar("SELECT count(*) FROM effects");
    Ok(count.fetch_one(&mut conn).await?)
}

/// The effects in the order of their numbers: that of the commits of one key, because one transaction at a time works on a
/// partition.
pub(crate) async fn effects(database: &Database) -> Result<Vec<Entry>> {
    workload::entries(database, "SELECT id, key, number FROM effects ORDER BY n").await
}

/// Where the consumers stand, for a person.
pub(crate) async fn state(database: &Database) -> Result<String> {
    let mut conn = PgConnection::connect_with(&database.options()).await?;
    let positions: Option<String> = sqlx::query_scalar(
        "SELECT string_agg(partition || ' before ' || next, ', ' ORDER BY partition) FROM oncebox_position",
    )
    .fetch_one(&mut conn)
    .await?;
    let (dead, error): (i64, Option<String>) =
        sqlx::query_as("SELECT count(*), max(error) FROM oncebox_dead_letter")
            .fetch_one(&mut conn)
            .await?;
    Ok(format!(
        "partition {}; {dead} dead letters {}",
        positions.unwrap_or_default(),
        error.unwrap_or_default()
    ))
}

/// The body of the process; ends with SIGTERM. Exit code 4: going on would break a promise.
pub(crate) async fn process(options: Options) -> Result<std::process::ExitCode> {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let pool = PgPoolOptions::new()
        .max_connections(6)
        .acquire_timeout(Duration::from_secs(5))
        .connect_lazy(&options.database_url)?;
    let kafka =
        oncebox_kafka::Config::new(options.kafka).set("session.timeout.ms", SESSION_TIMEOUT);
    let mut inbox = Inbox::new(pool, kafka)
        .consumer("inventory")
        .topic(options.topic)
        .transaction_idle_limit(IDLE_LIMIT)
        .check_interval(Duration::from_millis(500));
    if let Some(at) = options.kill_at {
        inbox = inbox.on_step(kill_at(&at)?);
    }
    let shutdown = CancellationToken::new();
    let mut terminated = signal(SignalKind::terminate())?;
    let stop = shutdown.clone();
    tokio::spawn(async move {
        terminated.recv().await;
        stop.cancel();
    });
    let consumer = inbox.handle(|tx, delivery| {
        Box::pin(async move {
            let text = |bytes: Option<&[u8]>| {
                let bytes = bytes.ok_or_else(|| HandlerError::fatal("a part is missing"))?;
                String::from_utf8(bytes.to_vec()).map_err(HandlerError::fatal)
            };
            let payload = text(delivery.payload.as_deref())?;
            let number = workload::number(&payload).map_err(HandlerError::fatal)?;
            sqlx::query("INSERT INTO effects (id, key, number) VALUES ($1, $2, $3)")
                .bind(delivery.message_id)
                .bind(text(delivery.key.as_deref())?)
                .bind(number)
                .execute(&mut **tx)
                .await?;
            Ok(())
        })
    });
    match consumer.run(shutdown).await {
        Ok(()) => Ok(std::process::ExitCode::SUCCESS),
        Err(error) => {
            eprintln!("consumer: {error}");
            Ok(if error.is_stop() { 4 } else { 1 }.into())
        }
    }
}

fn kill_at(at: &str) -> Result<oncebox_inbox::StepHook> {
    let (step, nth) = at.split_once(':').context("expected STEP:N")?;
    let (step, nth): (Step, u32) = (step.parse()?, nth.parse()?);
    let seen = AtomicU32::new(0);
    Ok(Arc::new(move |reached| {
        if reached == step && seen.fetch_add(1, Relaxed) + 1 == nth {
            oncebox::kill_at::kill_self();
        }
    }))
}
