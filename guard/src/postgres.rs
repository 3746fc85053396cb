//! PostgreSQL, at READ COMMITTED: a statement that waited for a row looks at its conditions again.

use sqlx::error::BoxDynError;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::{Arguments as _, PgConnection, Postgres, Row as _, SqlStr};

use crate::dialect::sealed::Store;

impl Store for Postgres {
    const QUOTE: char = '"';
    const FOR_UPDATE: &'static str = " FOR UPDATE";

    fn write_lock(_: &str, _: &str) -> Option<String> {
        None
    }

    fn above(column: &str, value: &str) -> String {
        format!("CAST(CASE WHEN {column} > {value} THEN 1 ELSE 0 END AS BIGINT)")
    }

    async fn fetch_all(
        conn: &mut PgConnection,
        sql: SqlStr,
        arguments: PgArguments,
        persistent: bool,
    ) -> sqlx::Result<Vec<PgRow>> {
        sqlx::query_with(sql, arguments)
            .persistent(persistent)
            .fetch_all(conn)
            .await
    }

    fn bind(arguments: &mut PgArguments, value: i64) -> Result<(), BoxDynError> {
        arguments.add(value)
    }

    fn integer(row: &PgRow, index: usize) -> sqlx::Result<i64> {
        row.try_get(index)
    }

    fn text(row: &PgRow, index: usize) -> sqlx::Result<String> {
        row.try_get(index)
    }
}
