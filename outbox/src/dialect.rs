//! The databases a message can be enqueued in.

use oncebox_migrations::Names;

/// A database that Oncebox can enqueue in: [`sqlx::Postgres`] and [`sqlx::Sqlite`], each behind a feature.
///
/// Sealed: the guarantees depend on how a database draws ids and holds locks, not only on its SQL.
pub trait Dialect: sealed::Store {}

#[cfg(feature = "postgres")]
impl Dialect for sqlx::Postgres {}
#[cfg(feature = "sqlite")]
impl Dialect for sqlx::Sqlite {}

/// Every statement, built once from the names.
#[derive(Debug, Clone)]
pub struct Statements {
    #[cfg(feature = "postgres")]
    pub(crate) postgres: crate::postgres::Statements,
    #[cfg(feature = "sqlite")]
    pub(crate) sqlite: crate::sqlite::Statements,
}

impl Statements {
    pub(crate) fn new(names: &Names) -> Self {
        // Used by no database when neither feature is on.
        let _ = names;
        Self {
            #[cfg(feature = "postgres")]
            postgres: crate::postgres::Statements::new(names),
            #[cfg(feature = "sqlite")]
            sqlite: crate::sqlite::Statements::new(names),
        }
    }
}

pub(crate) mod sealed {
    use std::future::Future;

    use super::Statements;
    use crate::check::Row;

    /// What a database must be able to do.
    pub trait Store: sqlx::Database {
        /// Makes sure that the transaction holds the lock of (topic, key) until it ends.
        fn lock(
            conn: &mut Self::Connection,
            statements: &Statements,
            topic: &str,
            key: &[u8],
        ) -> impl Future<Output = sqlx::Result<()>> + Send;

        /// Inserts one row.
        fn insert(
            conn: &mut Self::Connection,
            statements: &Statements,
            row: Row,
        ) -> impl Future<Output = sqlx::Result<()>> + Send;

        /// Inserts all rows or none; the ids ascend in the order of the rows.
        fn insert_all(
            conn: &mut Self::Connection,
            statements: &Statements,
            rows: Vec<Row>,
        ) -> impl Future<Output = sqlx::Result<()>> + Send;
    }
}
