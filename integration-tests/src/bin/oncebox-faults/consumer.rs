//! The consuming service, in a process of its own: each message becomes one row in the table of effects.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures_util::TryStreamExt as _;
use oncebox_inbox::{HandlerError, Inbox, Step};
use oncebox_integration_tests::history::{Effect, Origin, Place};
use oncebox_integration_tests::services::Database;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, PgConnection, Row as _};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::workload;

/// Of all of them: their group.
pub(crate) const NAME: &str = "inventory";
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

/// No unique index on the message: a second effect has to show. `place` and `at` are partition and offset.
pub(crate) async fn create_table(database: &Database) -> Result<()> {
    let mut conn = PgConnection::connect_with(&database.options()).await?;
    for statement in [
        "CREATE TABLE effects (n bigserial PRIMARY KEY, id uuid NOT NULL, key text NOT NULL, number bigint NOT NULL, \
         place int NOT NULL, at bigint NOT NULL, process uuid NOT NULL)",
        "CREATE INDEX ON effects (place, at)",
    ] {
        sqlx::query(statement).execute(&mut conn).await?;
    }
    Ok(())
}

/// How many effects there are.
pub(crate) async fn count(database: &Database) -> Result<i64> {
    let mut conn = PgConnection::connect_with(&database.options()).await?;
    let count = sqlx::query_scalar("SELECT count(*) FROM effects");
    Ok(count.fetch_one(&mut conn).await?)
}

/// The effects in the order of their commits: one that was written early and committed late shows as late.
pub(crate) async fn effects(database: &Database) -> Result<Vec<Effect>> {
    let mut conn = PgConnection::connect_with(&database.options()).await?;
    let effects = sqlx::query(
        "SELECT id, key, number, place, at, process FROM effects ORDER BY pg_xact_commit_timestamp(xmin), n",
    )
    .fetch(&mut conn)
    .and_then(async |row| {
        Ok(Effect {
            entry: workload::entry(&row)?,
            origin: Some(Origin {
                place: Place {
                    partition: row.try_get("place")?,
                    offset: row.try_get("at")?,
                },
                process: row.try_get::<Uuid, _>("process")?.to_string(),
            }),
        })
    });
    Ok(effects.try_collect().await?)
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
        .consumer(NAME)
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
    let process = Uuid::new_v4();
    let consumer = inbox.handle(move |tx, delivery| {
        Box::pin(async move {
            let text = |bytes: Option<&[u8]>| {
                let bytes = bytes.ok_or_else(|| HandlerError::fatal("a part is missing"))?;
                String::from_utf8(bytes.to_vec()).map_err(HandlerError::fatal)
            };
            let payload = text(delivery.payload.as_deref())?;
            let number = workload::number(&payload).map_err(HandlerError::fatal)?;
            sqlx::query(
                "INSERT INTO effects (id, key, number, place, at, process) VALUES ($1, $2, $3, $4, $5, $6)",
            )
            .bind(delivery.message_id)
            .bind(text(delivery.key.as_deref())?)
            .bind(number)
            .bind(delivery.partition)
            .bind(delivery.offset)
            .bind(process)
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
