//! Why a relay ends or starts over: whose fault it is, and what to type.

use crate::position::FormatError;

/// What ended a relay.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller's configuration is wrong.
    #[error("configuration: {0}")]
    Config(String),
    /// A promise cannot be kept: somebody has to decide. Starting again does not help.
    #[error(transparent)]
    Stop(#[from] Box<Stop>),
    /// The tables are missing or too old.
    #[error("the outbox tables are not there: {0}; run `oncebox migrate`")]
    Migrations(String),
    /// The database refuses what the relay must do: credentials, rights, a database that does not exist.
    #[error(
        "the database refuses: {0}; see `oncebox migrate --grants` for the rights a relay needs, and `oncebox doctor`"
    )]
    DatabaseRefused(sqlx::Error),
    /// The database cannot be reached; worth trying again.
    #[error("cannot connect to {0}: {1}; is the server running, and is the database URL right?")]
    Unreachable(String, sqlx::Error),
    /// The database broke off; worth trying again.
    #[error("the database is not available: {0}")]
    Database(sqlx::Error),
    /// The sessions of one relay do not show one server.
    #[error(
        "two database sessions show different servers ({0} and {1}); a proxy in between, or a switchover"
    )]
    ServersDiffer(String, String),
    /// Kafka refuses what the relay must do: credentials, rights, an unusable property.
    #[error("Kafka refuses: {0}; see `oncebox doctor`")]
    KafkaRefused(oncebox_kafka::Error),
    /// Kafka cannot be reached, or the transaction has to be repeated.
    #[error("Kafka: {0}")]
    Kafka(#[from] oncebox_kafka::Error),
    /// A transaction was not committed, or nobody knows; the checkpoint decides.
    #[error("Kafka transaction: {0}")]
    Publish(oncebox_kafka::TransactError),
    /// The producer has to be made anew before its next transaction: a late request could end it (KAFKA-17754).
    #[error("a Kafka request went unanswered ({0}); making the producer anew")]
    Tainted(String),
    /// Another relay took the lead.
    #[error("another relay leads (epoch {0}); stepping down")]
    Deposed(i64),
}

/// A guarantee is in danger (G10): what was seen, and the command that is a way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Stop {
    /// The outbox belongs to another `--source`.
    #[error(
        "this outbox belongs to source {owner:?}, not to {asked:?}; start the relay with --source {owner}, or rename it: `oncebox relay rename --source {owner} --to {asked}`"
    )]
    OtherSource {
        /// The name in the mark.
        owner: String,
        /// The name that was asked for.
        asked: String,
    },
    /// The checkpoint in Kafka was written for another database.
    #[error(
        "the checkpoint of source {source_name:?} in Kafka belongs to another database (source id {checkpoint}, this database has \
         {database}); choose another --source, or connect to the database that it belongs to, or take over its name with \
         `oncebox relay resume --from mark` (or `--from 0` when nothing was published from here)"
    )]
    OtherDatabase {
        /// The source's name.
        source_name: String,
        /// The id in the checkpoint.
        checkpoint: uuid::Uuid,
        /// The id in the mark.
        database: uuid::Uuid,
    },
    /// This server is an older timeline of the one that the checkpoint saw.
    #[error(
        "this server is on timeline {server}, but the checkpoint was written on timeline {checkpoint} of the same system: an old primary \
         that was never told of the promotion; connect to the current primary"
    )]
    OlderTimeline {
        /// The server's timeline.
        server: u32,
        /// The checkpoint's timeline.
        checkpoint: u32,
    },
    /// The mark knows more than the checkpoint, and they speak of different Kafka clusters.
    #[error(
        "the mark (seq {mark}) was written for Kafka cluster {mark_cluster:?}, but this is cluster {cluster:?} whose checkpoint is at seq {checkpoint}: the wrong \
         --kafka, or a new cluster; for a new cluster run `oncebox relay resume --from mark` or `--from <id>`"
    )]
    OtherCluster {
        /// The mark's seq.
        mark: i64,
        /// The checkpoint's seq, 0 when there is none.
        checkpoint: i64,
        /// The cluster in the mark.
        mark_cluster: String,
        /// The cluster that answered.
        cluster: String,
    },
    /// Rows that were published are not in the outbox: a lossy failover or a restored backup.
    #[error(
        "published rows are missing in the outbox: {detail}; a failover that lost commits, or a restored backup. Look at \
         `oncebox relay resume --from mark` (dry run), then add --apply"
    )]
    RowsMissing {
        /// What was expected and found.
        detail: String,
    },
    /// There are rows that the position does not know: written past `enqueue`, or below the published position.
    #[error(
        "the outbox holds rows that its position does not know: {detail}; somebody wrote past `enqueue`, or revived a rolled-back \
         transaction. Publish them again with `oncebox relay resume --from <id>`, an id below them (dry run), then add --apply"
    )]
    ForeignRows {
        /// What was expected and found.
        detail: String,
    },
    /// The identity sequence stands below the position.
    #[error(
        "the outbox's sequence stands at {sequence}, below the published position {high}: TRUNCATE … RESTART IDENTITY, setval, or an \
         older server; ids would be issued twice. Set the sequence above {high}, or run `oncebox relay resume --from <id>`"
    )]
    SequenceBehind {
        /// `pg_sequence_last_value()`.
        sequence: i64,
        /// The position's high.
        high: i64,
    },
    /// A stored position cannot be read by this build.
    #[error(
        "the {place} cannot be read: {error}; a newer Oncebox wrote it, or somebody else did. Run the newer build"
    )]
    Unreadable {
        /// Mark or checkpoint.
        place: &'static str,
        /// Why not.
        error: FormatError,
    },
    /// The table of parked rows does not belong to the position.
    #[error(
        "the parked rows are not those that the position settled: {detail}; a failover that lost commits, a restored backup, or somebody \
         changed the table. Look at `oncebox relay resume --from mark` (dry run), then add --apply; rows whose parking was lost are published \
         by `--from <id>`, an id below them"
    )]
    ParkedRows {
        /// What was expected and found.
        detail: String,
    },
    /// The record that holds most of the position's gaps is gone.
    #[error(
        "the checkpoint's base record is gone from the checkpoint's topic (somebody deleted records, or its cleanup.policy is not compact), and the \
         mark is older: rows of open transactions could be skipped. Go on with `oncebox relay resume --from mark` (dry run, then --apply), which repeats \
         what the mark lags"
    )]
    BaseMissing,
    /// A row cannot be decoded, or the rows came in an order the protocol excludes.
    #[error("the outbox cannot be read: {0}; written past `enqueue`?")]
    BadRow(String),
}

impl Error {
    /// A promise is in danger and starting again does not help: tell somebody.
    #[must_use]
    pub fn is_stop(&self) -> bool {
        matches!(self, Self::Stop(_))
    }

    /// The same call may succeed later without anybody changing anything.
    #[must_use]
    pub fn is_retriable(&self) -> bool {
        match self {
            Self::Database(_)
            | Self::Unreachable(..)
            | Self::ServersDiffer(..)
            | Self::Kafka(_)
            | Self::Publish(_)
            | Self::Tainted(_)
            | Self::Deposed(_) => true,
            Self::Config(_)
            | Self::Stop(_)
            | Self::Migrations(_)
            | Self::DatabaseRefused(_)
            | Self::KafkaRefused(_) => false,
        }
    }

    /// A transaction that was aborted cleanly: the same producer can go on.
    pub(crate) fn may_go_on(&self) -> bool {
        matches!(self, Self::Publish(error) if !error.needs_rebuild() && error.is_retriable())
    }

    /// A short label for metrics and logs.
    pub(crate) fn cause(&self) -> &'static str {
        match self {
            Self::Config(_) => "config",
            Self::Stop(_) => "stop",
            Self::Migrations(_) => "migrations",
            Self::DatabaseRefused(_) => "database_refused",
            Self::Database(_) | Self::Unreachable(..) => "database",
            Self::ServersDiffer(..) => "servers_differ",
            Self::KafkaRefused(_) => "kafka_refused",
            Self::Kafka(_) => "kafka",
            Self::Publish(e) if e.is_fenced() => "fenced",
            Self::Publish(_) => "transaction",
            Self::Tainted(_) => "tainted",
            Self::Deposed(_) => "deposed",
        }
    }
}

impl From<Stop> for Error {
    fn from(stop: Stop) -> Self {
        Self::Stop(Box::new(stop))
    }
}

impl From<sqlx::Error> for Error {
    /// Sorts a database error by its SQLSTATE: what an operator must change, or what passes by itself.
    fn from(error: sqlx::Error) -> Self {
        let code = error
            .as_database_error()
            .and_then(|e| e.code())
            .map(|c| c.into_owned());
        let message = error.to_string();
        match code.as_deref() {
            // undefined_table, undefined_column, invalid_schema_name
            Some("42P01" | "42703" | "3F000") => Self::Migrations(message),
            // SQLite reports a missing table as a generic error
            Some("1") if message.contains("no such table") => Self::Migrations(message),
            // invalid authorization, insufficient privilege, invalid catalog, undefined function
            Some("28000" | "28P01" | "42501" | "3D000" | "42883") => Self::DatabaseRefused(error),
            // SQLITE_CANTOPEN, SQLITE_NOTADB
            Some("14" | "26") => Self::DatabaseRefused(error),
            _ => Self::Database(error),
        }
    }
}
