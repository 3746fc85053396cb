//! What a relay is told: which outbox, which Kafka, and how patient to be.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use oncebox_migrations::Names;
use sqlx::postgres::PgConnectOptions;
use sqlx::sqlite::SqliteConnectOptions;

use crate::error::Error;
use crate::step::StepHook;

/// The database that holds the outbox.
#[derive(Clone)]
pub enum Database {
    /// PostgreSQL 14 or newer; must be the primary, and not reached through a transaction pooler.
    Postgres(PgConnectOptions),
    /// SQLite in WAL mode.
    Sqlite(SqliteConnectOptions),
}

impl Database {
    /// Reads a URL: `postgres://…`, `postgresql://…` or `sqlite:…`.
    ///
    /// # Errors
    /// [`Error::Config`] when the scheme is unknown or the URL does not parse. The URL is not repeated in the
    /// error, as it may hold a password.
    pub fn parse(url: &str) -> Result<Self, Error> {
        let scheme = url.split(':').next().unwrap_or_default();
        let bad = |e: sqlx::Error| {
            Error::Config(format!("the database URL ({scheme}:…) does not parse: {e}"))
        };
        match scheme {
            "postgres" | "postgresql" => PgConnectOptions::from_str(url)
                .map(Self::Postgres)
                .map_err(bad),
            "sqlite" => SqliteConnectOptions::from_str(url)
                .map(Self::Sqlite)
                .map_err(bad),
            _ => Err(Error::Config(
                "the database URL must begin with postgres://, postgresql:// or sqlite:".to_owned(),
            )),
        }
    }

    /// The dialect of the SQL behind it.
    #[must_use]
    pub fn dialect(&self) -> oncebox_migrations::Dialect {
        match self {
            Self::Postgres(_) => oncebox_migrations::Dialect::Postgres,
            Self::Sqlite(_) => oncebox_migrations::Dialect::Sqlite,
        }
    }
}

impl fmt::Debug for Database {
    // The connect options print passwords; say only where.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Postgres(o) => write!(
                f,
                "postgres {}:{}/{}",
                o.get_host(),
                o.get_port(),
                o.get_database().unwrap_or("")
            ),
            Self::Sqlite(o) => write!(f, "sqlite {}", o.get_filename().display()),
        }
    }
}

/// How a relay runs. Make one with [`Config::new`] and change the fields that matter.
#[derive(Clone)]
pub struct Config {
    /// Name of the outbox towards Kafka: `^[a-z0-9][a-z0-9._-]{0,99}$`. It is part of the `transactional.id`
    /// (`oncebox.<source>`), of the checkpoint's group and of every record's envelope. Never shared by two outboxes.
    pub source: String,
    /// Schema and prefix of the tables. Defaults to `public` and `oncebox_`.
    pub names: Names,
    /// Where the outbox is.
    pub database: Database,
    /// Where the messages go.
    pub kafka: oncebox_kafka::Config,
    /// How long the lead survives a leader that shows no sign of life. Defaults to 3 s.
    pub lease: Duration,
    /// How long published rows stay, so that replay has something to read. Defaults to 24 h.
    pub retention: Duration,
    /// Most rows of one Kafka transaction. Defaults to 20 000.
    pub max_batch_rows: usize,
    /// Most payload bytes of one Kafka transaction, one row always being allowed. Defaults to 32 MiB.
    pub max_batch_bytes: usize,
    /// Kafka's `transaction.timeout.ms`: how long `read_committed` readers may stall after a crash. Defaults to 30 s.
    pub transaction_timeout: Duration,
    /// Longest time between a commit in Kafka and the mark in the database. Defaults to 250 ms.
    pub mark_interval: Duration,
    /// How often an idle leader commits its checkpoint again, because Kafka forgets offsets of idle groups after
    /// `offsets.retention.minutes` (7 days by default). Defaults to 1 h.
    pub heartbeat: Duration,
    /// Pause between two looks at the outbox while rows keep coming. Defaults to 2 ms.
    pub poll_min: Duration,
    /// Longest pause between two looks at an idle outbox. Defaults to 50 ms.
    pub poll_max: Duration,
    /// Topic that carries the checkpoint; created when missing. Defaults to `oncebox.checkpoints`.
    pub checkpoint_topic: String,
    /// Most bytes of a checkpoint: the brokers' `offset.metadata.max.bytes`. Defaults to 4096. Gaps that do not fit
    /// hold the position back until some of them close.
    pub checkpoint_bytes: usize,
    /// Called at every step, for tests. Defaults to none.
    pub on_step: Option<StepHook>,
}

impl Config {
    /// The defaults for this source, database and Kafka.
    #[must_use]
    pub fn new(
        source: impl Into<String>,
        database: Database,
        kafka: oncebox_kafka::Config,
    ) -> Self {
        Self {
            source: source.into(),
            names: Names::default(),
            database,
            kafka,
            lease: Duration::from_secs(3),
            retention: Duration::from_secs(24 * 3600),
            max_batch_rows: 20_000,
            max_batch_bytes: 32 << 20,
            transaction_timeout: Duration::from_secs(30),
            mark_interval: Duration::from_millis(250),
            heartbeat: Duration::from_secs(3600),
            poll_min: Duration::from_millis(2),
            poll_max: Duration::from_millis(50),
            checkpoint_topic: "oncebox.checkpoints".to_owned(),
            checkpoint_bytes: 4096,
            on_step: None,
        }
    }

    /// The producer's `transactional.id`, also the name of the checkpoint's group.
    #[must_use]
    pub fn transactional_id(&self) -> String {
        format!("oncebox.{}", self.source)
    }

    pub(crate) fn validate(&self) -> Result<(), Error> {
        let source_ok = !self.source.is_empty()
            && self.source.len() <= 100
            && self.source.bytes().enumerate().all(|(i, b)| {
                b.is_ascii_lowercase()
                    || b.is_ascii_digit()
                    || (i > 0 && matches!(b, b'.' | b'_' | b'-'))
            });
        if !source_ok {
            return Err(Error::Config(format!(
                "source {:?} is not a name: up to 100 of a-z, 0-9, '.', '_', '-', the first a letter or digit",
                self.source
            )));
        }
        let at_least = |name: &str, value: Duration, min: Duration| {
            if value < min {
                return Err(Error::Config(format!(
                    "{name} is {value:?}; it must be at least {min:?}"
                )));
            }
            Ok(())
        };
        at_least("lease", self.lease, Duration::from_millis(100))?;
        at_least(
            "transaction_timeout",
            self.transaction_timeout,
            Duration::from_secs(1),
        )?;
        at_least("poll_min", self.poll_min, Duration::from_millis(1))?;
        at_least("poll_max", self.poll_max, self.poll_min)?;
        at_least(
            "mark_interval",
            self.mark_interval,
            Duration::from_millis(1),
        )?;
        at_least("heartbeat", self.heartbeat, Duration::from_secs(1))?;
        if self.max_batch_bytes == 0 {
            return Err(Error::Config(
                "max_batch_bytes is 0; it must be at least 1".to_owned(),
            ));
        }
        if self.max_batch_rows == 0 {
            return Err(Error::Config(
                "max_batch_rows is 0; it must be at least 1".to_owned(),
            ));
        }
        if self.checkpoint_bytes < 512 {
            return Err(Error::Config(format!(
                "checkpoint_bytes is {}; it must be at least 512",
                self.checkpoint_bytes
            )));
        }
        Ok(())
    }

    pub(crate) fn step(&self, step: crate::Step) {
        if let Some(hook) = &self.on_step {
            hook(step);
        }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("source", &self.source)
            .field("names", &self.names)
            .field("database", &self.database)
            .field("kafka", &self.kafka)
            .field("lease", &self.lease)
            .field("retention", &self.retention)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(source: &str) -> Config {
        let database = Database::parse("sqlite::memory:").unwrap();
        Config::new(source, database, oncebox_kafka::Config::new("127.0.0.1:9"))
    }

    #[test]
    fn source_names_are_checked() {
        for good in ["shop", "0", "a.b-c_d"] {
            config(good).validate().unwrap();
        }
        for bad in ["", "Shop", ".a", "a b", &"x".repeat(101)] {
            assert!(config(bad).validate().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_password_is_never_shown() {
        let database = Database::parse("postgres://u:secret@127.0.0.1/db").unwrap();
        assert!(!format!("{database:?}").contains("secret"));
        let error = Database::parse("mysql://u:secret@h/db").unwrap_err();
        assert!(!error.to_string().contains("secret"));
    }
}
