//! SQLite: one transaction writes at a time, so that the lock of the database is the lock of every row.

use sqlx::error::{BoxDynError, UnexpectedNullError};
use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Arguments as _, Row as _, SqlStr, Sqlite, SqliteConnection};

use crate::dialect::sealed::Store;

impl Store for Sqlite {
    /// Not `"`: where no column has the name, SQLite takes `"stok" >= 5` for the text `stok`, which is above every number.
    const QUOTE: char = '`';
    const FOR_UPDATE: &'static str = "";

    /// Changes no row, and still takes the write lock. Fails in a deferred transaction that has read before and was
    /// overtaken by another writer: what it has read is old.
    fn write_lock(table: &str, column: &str) -> Option<String> {
        Some(format!(
            "UPDATE {table} SET {column} = {column} WHERE 1 = 0"
        ))
    }

    /// NULL, and so an error, for a column that holds anything but integers: every text is above every number, and each
    /// message would be stale.
    fn above(column: &str, value: &str) -> String {
        format!(
            "CASE WHEN typeof({column}) NOT IN ('integer', 'null') THEN NULL WHEN {column} > {value} THEN 1 ELSE 0 END"
        )
    }

    async fn fetch_all(
        conn: &mut SqliteConnection,
        sql: SqlStr,
        arguments: SqliteArguments,
        persistent: bool,
    ) -> sqlx::Result<Vec<SqliteRow>> {
        sqlx::query_with(sql, arguments)
            .persistent(persistent)
            .fetch_all(conn)
            .await
    }

    fn bind(arguments: &mut SqliteArguments, value: i64) -> Result<(), BoxDynError> {
        arguments.add(value)
    }

    fn integer(row: &SqliteRow, index: usize) -> sqlx::Result<i64> {
        not_null(row.try_get(index)?, index)
    }

    fn text(row: &SqliteRow, index: usize) -> sqlx::Result<String> {
        not_null(row.try_get(index)?, index)
    }
}

/// sqlx decodes a NULL of SQLite as 0 and as an empty text.
fn not_null<T>(value: Option<T>, index: usize) -> sqlx::Result<T> {
    value.ok_or_else(|| sqlx::Error::ColumnDecode {
        index: index.to_string(),
        source: Box::new(UnexpectedNullError),
    })
}
