//! The databases a guard works on.

/// A database that the guards work on: [`sqlx::Postgres`] and [`sqlx::Sqlite`], each behind the feature of its name.
///
/// Sealed: what a guard promises depends on how a database locks, not only on its SQL.
pub trait Dialect: sealed::Store {}

#[cfg(feature = "postgres")]
impl Dialect for sqlx::Postgres {}
#[cfg(feature = "sqlite")]
impl Dialect for sqlx::Sqlite {}

pub(crate) mod sealed {
    use std::future::Future;

    use sqlx::SqlStr;
    use sqlx::error::BoxDynError;

    /// In what the databases differ.
    pub trait Store: sqlx::Database<Arguments: Clone + Sync, ArgumentBuffer: Default> {
        /// Stands on both sides of a name.
        const QUOTE: char;
        /// At the end of a SELECT: the row stays as it was read until the transaction ends.
        const FOR_UPDATE: &'static str;

        /// The statement that makes a transaction one that writes, where [`FOR_UPDATE`](Self::FOR_UPDATE) does not.
        fn write_lock(table: &str, column: &str) -> Option<String>;

        /// 1 where the column is above the value, 0 where it is not.
        fn above(column: &str, value: &str) -> String;

        /// Runs one statement. Not `persistent`: it is prepared for this once.
        fn fetch_all(
            conn: &mut Self::Connection,
            sql: SqlStr,
            arguments: Self::Arguments,
            persistent: bool,
        ) -> impl Future<Output = sqlx::Result<Vec<Self::Row>>> + Send;

        /// Adds a value.
        fn bind(arguments: &mut Self::Arguments, value: i64) -> Result<(), BoxDynError>;

        fn integer(row: &Self::Row, index: usize) -> sqlx::Result<i64>;

        fn text(row: &Self::Row, index: usize) -> sqlx::Result<String>;
    }
}
