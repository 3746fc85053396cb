//! Real PostgreSQL, real Apache Kafka and real Redis.
//!
//! Chosen in this order, and said on standard error: the URLs in `ONCEBOX_TEST_POSTGRES_URL`, `ONCEBOX_TEST_KAFKA` and
//! `ONCEBOX_TEST_REDIS_URL` → testcontainers when a Docker engine answers (not Redis) → local processes on free ports of 127.0.0.1. Started at first use; the
//! tests of a process share one of each. Whatever was started is stopped and removed when the process ends, however it
//! ends.
//!
//! A test that has to crash a server starts a private one ([`Postgres::start`], [`Kafka::start`], [`Redis::start`]).

pub mod jars;

mod choice;
mod container;
mod database;
mod docker;
mod images;
mod kafka;
mod node;
mod ports;
mod postgres;
pub(crate) mod process;
mod redis;
mod scratch;
mod server_properties;

use tokio::sync::OnceCell;

pub use self::choice::{KAFKA, KAFKA_PROXY, KAFKA_SASL, POSTGRES_URL, REDIS_URL, Runner, SERVICES};
pub use self::database::Database;
pub use self::kafka::{Kafka, KafkaOptions, Route};
pub use self::postgres::{PASSWORD_ROLE, Postgres, PostgresOptions};
pub use self::redis::Redis;
pub use self::server_properties::{SASL_ADMIN, SASL_USER};

/// The shared PostgreSQL.
///
/// # Panics
/// It can be neither found nor started; the text says what is missing.
pub async fn postgres() -> &'static Postgres {
    static SHARED: OnceCell<Result<Postgres, String>> = OnceCell::const_new();
    match SHARED
        .get_or_init(|| async { Postgres::obtain().await.map_err(|e| format!("{e:#}")) })
        .await
    {
        Ok(postgres) => postgres,
        Err(reason) => panic!("no PostgreSQL: {reason}"),
    }
}

/// The shared Apache Kafka.
///
/// # Panics
/// It can be neither found nor started; the text says what is missing.
pub async fn kafka() -> &'static Kafka {
    static SHARED: OnceCell<Result<Kafka, String>> = OnceCell::const_new();
    match SHARED
        .get_or_init(|| async { Kafka::obtain().await.map_err(|e| format!("{e:#}")) })
        .await
    {
        Ok(kafka) => kafka,
        Err(reason) => panic!("no Kafka: {reason}"),
    }
}

/// The shared Redis.
///
/// # Panics
/// It can be neither found nor started; the text says what is missing.
pub async fn redis() -> &'static Redis {
    static SHARED: OnceCell<Result<Redis, String>> = OnceCell::const_new();
    match SHARED
        .get_or_init(|| async { Redis::obtain().await.map_err(|e| format!("{e:#}")) })
        .await
    {
        Ok(redis) => redis,
        Err(reason) => panic!("no Redis: {reason}"),
    }
}

/// PostgreSQL and Kafka, both shared.
#[derive(Clone, Copy, Debug)]
pub struct Services {
    postgres: &'static Postgres,
    kafka: &'static Kafka,
}

impl Services {
    /// Both shared services, started side by side at the first call.
    ///
    /// # Panics
    /// As [`postgres`] and [`kafka`].
    pub async fn get() -> Self {
        let (postgres, kafka) = tokio::join!(postgres(), kafka());
        Self { postgres, kafka }
    }

    /// PostgreSQL.
    pub fn postgres(&self) -> &'static Postgres {
        self.postgres
    }

    /// Apache Kafka.
    pub fn kafka(&self) -> &'static Kafka {
        self.kafka
    }

    /// URL of PostgreSQL's administrator.
    pub fn postgres_url(&self) -> &'static str {
        self.postgres.url()
    }

    /// Kafka's bootstrap address.
    pub fn bootstrap(&self) -> &'static str {
        self.kafka.bootstrap()
    }
}
