//! G9 as a figure: from a commit to a consumer while somebody else holds something open, beside the same without.

use anyhow::{Result, ensure};
use clap::ValueEnum;
use oncebox_integration_tests::services::{Database, Kafka, Postgres};
use oncebox_outbox::{Config, Message, Outbox};
use serde::Serialize;
use sqlx::{PgPool, Transaction};

use crate::latency::{self, Latency, Load};

/// What a staller may cost: at most so many times as long.
const LIMIT: f64 = 2.0;
/// Differences below this are the machine's.
const NOISE_MS: f64 = 2.0;

/// Somebody who holds something open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
pub(crate) enum Staller {
    /// A transaction in another table of the same database.
    IdleElsewhere,
    /// A transaction that enqueued a message and stays open.
    IdleWriter,
    /// A prepared transaction that enqueued a message.
    Prepared,
    /// A snapshot, as a dump holds it.
    OpenSnapshot,
    /// One writer stays open while one in twenty transactions is rolled back.
    RollBacks,
}

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 20)]
    seconds: u32,
    /// Seconds of the measurement with roll-backs: the gaps of one open writer grow with them.
    #[arg(long, default_value_t = 600)]
    roll_back_seconds: u32,
    /// Only these; may be repeated.
    #[arg(long = "staller", value_enum)]
    stallers: Vec<Staller>,
}

/// Measures every staller right after the same without it.
pub(crate) async fn measure(options: Options) -> Result<()> {
    let (postgres, kafka) = tokio::try_join!(
        Postgres::start(Default::default()),
        Kafka::start(Default::default())
    )?;
    let mut stallers = options.stallers.clone();
    if stallers.is_empty() {
        stallers = Staller::value_variants().to_vec();
    }
    // The broker's code is compiled after this.
    alone(&postgres, &kafka, options.seconds).await?;
    println!(
        "{:<16} {:>8} {:>12} {:>12} {:>12} {:>12} {:>7}",
        "staller", "events", "p50 without", "p50 with", "p99 without", "p99 with", "ratio"
    );
    let mut in_time = true;
    for staller in stallers {
        let seconds = match staller {
            Staller::RollBacks => options.roll_back_seconds,
            _ => options.seconds,
        };
        let without = alone(&postgres, &kafka, options.seconds).await?;
        let with = beside(staller, &postgres, &kafka, seconds).await?;
        let ratio = with.p99_ms / without.p99_ms;
        in_time &= ratio <= LIMIT || with.p99_ms - without.p99_ms <= NOISE_MS;
        let name = staller.to_possible_value();
        println!(
            "{:<16} {:>8} {:>9.1} ms {:>9.1} ms {:>9.1} ms {:>9.1} ms {ratio:>7.2}",
            name.as_ref().map_or("", |name| name.get_name()),
            with.events,
            without.p50_ms,
            with.p50_ms,
            without.p99_ms,
            with.p99_ms,
        );
    }
    ensure!(in_time, "a staller costs others more than {LIMIT} times");
    Ok(())
}

async fn alone(postgres: &Postgres, kafka: &Kafka, seconds: u32) -> Result<Latency> {
    let database = crate::migrated(postgres).await?;
    latency::measure(&database, kafka.bootstrap(), Load::of(seconds)).await
}

async fn beside(
    staller: Staller,
    postgres: &Postgres,
    kafka: &Kafka,
    seconds: u32,
) -> Result<Latency> {
    let database = crate::migrated(postgres).await?;
    let held = Held::hold(staller, &database).await?;
    let load = Load {
        rolled_back_percent: if staller == Staller::RollBacks { 5 } else { 0 },
        ..Load::of(seconds)
    };
    let latency = latency::measure(&database, kafka.bootstrap(), load).await?;
    held.let_go().await?;
    Ok(latency)
}

/// What is held open.
struct Held {
    pool: PgPool,
    open: Transaction<'static, sqlx::Postgres>,
    prepared: bool,
}

impl Held {
    async fn hold(staller: Staller, database: &Database) -> Result<Self> {
        let pool = database.pool(1).await;
        sqlx::query("CREATE TABLE elsewhere (n integer)")
            .execute(&pool)
            .await?;
        let mut open = pool.begin().await?;
        let statement = match staller {
            Staller::IdleElsewhere => Some("INSERT INTO elsewhere VALUES (1)"),
            Staller::OpenSnapshot => Some("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"),
            Staller::IdleWriter | Staller::Prepared | Staller::RollBacks => None,
        };
        if let Some(statement) = statement {
            sqlx::query(statement).execute(&mut *open).await?;
            sqlx::query("SELECT count(*) FROM elsewhere")
                .execute(&mut *open)
                .await?;
        } else {
            let message = Message::new(latency::TOPIC).payload("held");
            let outbox = Outbox::new(Config::default());
            outbox.enqueue(&mut open, message).await?;
        }
        let prepared = staller == Staller::Prepared;
        if prepared {
            let prepare = "PREPARE TRANSACTION 'held'";
            sqlx::query(prepare).execute(&mut *open).await?;
        }
        Ok(Self {
            pool,
            open,
            prepared,
        })
    }

    async fn let_go(self) -> Result<()> {
        self.open.rollback().await?;
        if self.prepared {
            sqlx::query("ROLLBACK PREPARED 'held'")
                .execute(&self.pool)
                .await?;
        }
        Ok(())
    }
}
