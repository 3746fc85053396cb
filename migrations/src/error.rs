//! Why a schema could not be migrated or used.

/// Why a schema could not be migrated or used. Each text names the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A migration was changed after it had been applied.
    #[error(
        "migration {version} ({name}) was edited after it had been applied: {table} records checksum {recorded}, this \
         build carries {expected}; an applied migration never changes. Use a build with the text that was applied \
         (oncebox-migrations {library}), or, if the tables are known to be right, correct the checksum in {table}"
    )]
    Edited {
        /// Version of the migration.
        version: i64,
        /// Its name.
        name: String,
        /// Version of the library that applied it.
        library: String,
        /// The history table.
        table: String,
        /// The checksum in the history.
        recorded: String,
        /// The checksum of the text in this build.
        expected: String,
    },
    /// The schema was migrated by a newer Oncebox.
    #[error(
        "the oncebox schema is at version {version} (applied by oncebox-migrations {library}), this build knows versions \
         up to {latest}: upgrade this program to that release or a later one; a schema is never migrated downwards"
    )]
    NewerSchema {
        /// Version of the schema.
        version: i64,
        /// The newest version this build knows.
        latest: i64,
        /// Version of the library that applied it.
        library: String,
    },
    /// The schema is older than this build, or not there at all (version 0).
    #[error(
        "the oncebox schema is at version {version}, this build needs version {latest}: run `oncebox migrate`, or apply \
         the SQL of `oncebox migrate --print`"
    )]
    Behind {
        /// Version of the schema; 0 when there is none.
        version: i64,
        /// The version this build needs.
        latest: i64,
    },
    /// The history has a later version, but not this one.
    #[error(
        "{table} has no row of version {version} but one of a later version: a row was removed, or SQL was applied out of \
         order; restore the row (the output of `oncebox migrate --print` ends each version with it)"
    )]
    Hole {
        /// The missing version.
        version: i64,
        /// The history table.
        table: String,
    },
    /// The connection is inside a transaction already.
    #[error(
        "migrations need a connection without an open transaction: each version is a transaction of its own that begins \
         with a lock. Pass a fresh connection; to run the DDL in your own transaction use oncebox_migrations::sql()"
    )]
    InTransaction,
    /// The write lock of a SQLite database was not free in time.
    #[error(
        "another connection has held the write lock of the SQLite database for {} s: end it and run the migration again",
        waited.as_secs()
    )]
    Busy {
        /// How long it was waited for.
        waited: std::time::Duration,
    },
    /// The URL names no database this build supports.
    #[error(
        "database URLs begin with postgres://, postgresql:// or sqlite:, not {scheme:?} (or this build was compiled \
         without that database)"
    )]
    UnsupportedUrl {
        /// What the URL began with.
        scheme: String,
    },
    /// The database said no, or was not there.
    #[error("could not {doing}: {source}")]
    Database {
        /// What was being done.
        doing: &'static str,
        /// What the database or the driver answered.
        source: sqlx::Error,
    },
}

impl Error {
    pub(crate) fn database(doing: &'static str) -> impl FnOnce(sqlx::Error) -> Self {
        move |source| Self::Database { doing, source }
    }
}
