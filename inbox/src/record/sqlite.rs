//! SQLite: one table, no partitions.

use oncebox_migrations::Names;
use sqlx::{Pool, Sqlite};
use time::Date;

use super::Left;
use super::texts::{Templates, Texts};
use crate::operator::{Ask as _, Columns, Sql, Value, tables};

const OLD: &str = "SELECT count(*) FROM {record} WHERE settled_at < ?";
const DELETE: &str = "DELETE FROM {record} WHERE id IN \
    (SELECT id FROM {record} WHERE settled_at < {before} ORDER BY settled_at LIMIT {rows})";

impl Texts for Sqlite {
    const RECORDS: Templates = Templates {
        columns: "consumer, topic, partition, record_offset, message_id, business_id, status, attempts, first_at, settled_at, \
                  duration_us, error",
        groups: "consumer, topic, status, count(*), count(*) FILTER (WHERE attempts > 1), \
                 CAST(round(avg(duration_us)) AS INTEGER), max(duration_us), min(settled_at), max(settled_at)",
    };
    const PARTITIONED: bool = false;

    async fn days(_pool: &Pool<Self>, _names: &Names) -> Result<Vec<Date>, sqlx::Error> {
        Ok(Vec::new())
    }

    async fn attach(
        _pool: &Pool<Self>,
        _names: &Names,
        _day: Date,
    ) -> Result<Option<Left>, sqlx::Error> {
        Ok(None)
    }

    async fn drop_day(_pool: &Pool<Self>, _names: &Names, _day: Date) -> Result<bool, sqlx::Error> {
        Ok(true)
    }

    async fn old(
        conn: &mut Self::Connection,
        names: &Names,
        before: i64,
    ) -> Result<u64, sqlx::Error> {
        let mut sql = Sql::default();
        sql.push_with(&tables::<Self>(OLD, names), Value::Int(before));
        let rows = Self::rows(conn, sql).await?;
        let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
        Columns::<Self>::new(row).count()
    }

    async fn delete_some(
        pool: &Pool<Self>,
        names: &Names,
        before: i64,
        _place: i64,
        rows: i64,
    ) -> Result<(u64, Option<i64>), sqlx::Error> {
        let mut sql = Sql::default();
        let before = sql.bind(Value::Int(before));
        let most = sql.bind(Value::Int(rows));
        let text = DELETE.replace("{before}", &before).replace("{rows}", &most);
        sql.push(&tables::<Self>(&text, names));
        let mut conn = pool.acquire().await?;
        let deleted = Self::change(&mut conn, sql).await?;
        // The index brings the next ones to the front.
        Ok((deleted, (deleted > 0).then_some(0)))
    }
}
