//! PostgreSQL: partitions of one day, and a default one for the rows whose day has none.

use oncebox_migrations::Names;
use sqlx::{AssertSqlSafe, Connection as _, Pool, Postgres};
use time::{Date, Month};

use super::Left;
use super::texts::{Templates, Texts};
use crate::operator::{Ask as _, Columns, Sql, Value, tables};

// The bounds are printed in the session's time zone, see `days`.
const DAYS: &str = "SELECT c.relname::text, pg_get_expr(c.relpartbound, c.oid) FROM pg_catalog.pg_inherits i \
    JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
    WHERE i.inhparent = '{record}'::regclass AND n.nspname = '{schema}'";
// Of the default partition: no other can have any.
const HAS_ROWS: &str =
    "SELECT 1 FROM {record} WHERE settled_at >= '{from}' AND settled_at < '{to}' LIMIT 1";
// Not PARTITION OF, which locks the whole table against writers. The table has no identity column and its indexes are made by ATTACH.
const CREATE: &str =
    "CREATE TABLE {day} (LIKE {record} INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE)";
const ATTACH: &str =
    "ALTER TABLE {record} ATTACH PARTITION {day} FOR VALUES FROM ('{from}') TO ('{to}')";
// DETACH CONCURRENTLY is not possible beside a default partition.
const DROP: &str = "DROP TABLE {day}";
const OLD: &str = "SELECT count(*) FROM {rest} WHERE settled_at < (timestamptz 'epoch' + ? * interval '1 microsecond')";
const BLOCKS: &str = "SELECT pg_relation_size('{rest}') / current_setting('block_size')::bigint";
// By pages of the table: every page is read once, however many dead rows are left in front of it.
const DELETE: &str = "DELETE FROM {rest} WHERE ctid >= '({from},0)' AND ctid < '({to},0)' \
    AND settled_at < (timestamptz 'epoch' + ? * interval '1 microsecond')";
/// About so many rows are on one page.
const ROWS_PER_PAGE: i64 = 50;

// Who reads the default partition in a long transaction delays ATTACH and DROP, and these delay the writers behind them: brief attempts.
// A default partition that is large is searched for rows of the day while it is locked: that is brief too, or given up.
const BRIEF: &str = "SET LOCAL lock_timeout = 100; SET LOCAL statement_timeout = 2000";

impl Texts for Postgres {
    const RECORDS: Templates = Templates {
        columns: "consumer, topic, partition, record_offset, message_id, business_id, status, attempts, \
                  (extract(epoch FROM first_at) * 1000000)::bigint, (extract(epoch FROM settled_at) * 1000000)::bigint, \
                  duration_us, error",
        groups: "consumer, topic, status, count(*), count(*) FILTER (WHERE attempts > 1), round(avg(duration_us))::bigint, \
                 max(duration_us), (extract(epoch FROM min(settled_at)) * 1000000)::bigint, \
                 (extract(epoch FROM max(settled_at)) * 1000000)::bigint",
    };
    const PARTITIONED: bool = true;

    async fn days(pool: &Pool<Self>, names: &Names) -> Result<Vec<Date>, sqlx::Error> {
        let mut tx = pool.begin_with(Self::BEGIN_READ).await?;
        sqlx::query("SET LOCAL TimeZone = 'UTC'")
            .execute(&mut *tx)
            .await?;
        let text = fill(DAYS, names, None);
        let mut days = Vec::new();
        for row in Self::rows(&mut tx, Sql::new(text)).await? {
            let mut columns = Columns::<Self>::new(&row);
            let (name, bounds) = (columns.text()?, columns.text_or_none()?);
            // Only what has the name and the bounds of a day is ours to drop.
            let ours = day_of(&name, names).filter(|day| bounds == Some(bounds_of(*day)));
            days.extend(ours);
        }
        tx.rollback().await?;
        Ok(days)
    }

    async fn attach(
        pool: &Pool<Self>,
        names: &Names,
        day: Date,
    ) -> Result<Option<Left>, sqlx::Error> {
        let mut conn = pool.acquire().await?;
        let has_rows = Sql::new(fill(HAS_ROWS, names, Some(day)));
        if !Self::rows(&mut conn, has_rows).await?.is_empty() {
            return Ok(Some(Left::Rows));
        }
        let work = async {
            let mut tx = conn.begin_with(Self::BEGIN_WRITE).await?;
            execute(&mut tx, BRIEF.to_owned()).await?;
            execute(&mut tx, fill(CREATE, names, Some(day))).await?;
            execute(&mut tx, fill(ATTACH, names, Some(day))).await?;
            tx.commit().await
        };
        match work.await {
            Ok(()) => Ok(None),
            Err(error) => match code(&error).as_deref() {
                // lock_not_available, query_canceled, deadlock_detected
                Some("55P03" | "57014" | "40P01") => Ok(Some(Left::Busy)),
                // check_violation: a row of that day came in the meantime
                Some("23514") => Ok(Some(Left::Rows)),
                // insufficient_privilege
                Some("42501") => Ok(Some(Left::NotOwner)),
                // duplicate_table, unique_violation of the catalog (two at once), invalid_object_definition: overlaps
                Some("42P07" | "23505" | "42710" | "42P17") => Ok(Some(Left::Taken)),
                _ => Err(error),
            },
        }
    }

    async fn drop_day(pool: &Pool<Self>, names: &Names, day: Date) -> Result<bool, sqlx::Error> {
        let mut tx = pool.begin_with(Self::BEGIN_WRITE).await?;
        let work = async {
            execute(&mut tx, BRIEF.to_owned()).await?;
            execute(&mut tx, fill(DROP, names, Some(day))).await?;
            tx.commit().await
        };
        match work.await {
            Ok(()) => Ok(true),
            Err(error) => match code(&error).as_deref() {
                Some("55P03" | "57014" | "40P01") => Ok(false),
                // undefined_table: another process dropped it
                Some("42P01") => Ok(true),
                _ => Err(error),
            },
        }
    }

    async fn old(
        conn: &mut Self::Connection,
        names: &Names,
        before: i64,
    ) -> Result<u64, sqlx::Error> {
        let mut sql = Sql::default();
        sql.push_with(&fill(OLD, names, None), Value::Int(before));
        let rows = Self::rows(conn, sql).await?;
        let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
        Columns::<Self>::new(row).count()
    }

    async fn delete_some(
        pool: &Pool<Self>,
        names: &Names,
        before: i64,
        place: i64,
        rows: i64,
    ) -> Result<(u64, Option<i64>), sqlx::Error> {
        let mut conn = pool.acquire().await?;
        let size = Self::rows(&mut conn, Sql::new(fill(BLOCKS, names, None))).await?;
        let size = size.first().ok_or(sqlx::Error::RowNotFound)?;
        if place >= Columns::<Self>::new(size).int()? {
            return Ok((0, None));
        }
        let to = place + (rows / ROWS_PER_PAGE).max(1);
        let text = DELETE
            .replace("{from}", &place.to_string())
            .replace("{to}", &to.to_string());
        let mut sql = Sql::default();
        sql.push_with(&fill(&text, names, None), Value::Int(before));
        let mut tx = conn.begin_with(Self::BEGIN_WRITE).await?;
        let deleted = Self::change(&mut tx, sql).await?;
        tx.commit().await?;
        Ok((deleted, Some(to)))
    }
}

async fn execute(conn: &mut sqlx::PgConnection, text: String) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(AssertSqlSafe(text)).execute(conn).await?;
    Ok(())
}

fn code(error: &sqlx::Error) -> Option<String> {
    Some(error.as_database_error()?.code()?.into_owned())
}

/// Fills in tables, and the name and bounds of a day.
fn fill(text: &str, names: &Names, day: Option<Date>) -> String {
    let (schema, prefix) = (names.schema(), names.prefix());
    let text = tables::<Postgres>(text, names)
        .replace("{schema}", schema)
        .replace("{rest}", &format!(r#""{schema}"."{prefix}record_rest""#));
    let Some(day) = day else { return text };
    let next = day.next_day().unwrap_or(Date::MAX);
    text.replace("{day}", &format!(r#""{schema}"."{}""#, name(day, names)))
        .replace("{from}", &midnight(day))
        .replace("{to}", &midnight(next))
}

fn name(day: Date, names: &Names) -> String {
    let (year, month, of_month) = day.to_calendar_date();
    let month = u8::from(month);
    format!("{}record_{year:04}{month:02}{of_month:02}", names.prefix())
}

fn day_of(name: &str, names: &Names) -> Option<Date> {
    let digits = name.strip_prefix(names.prefix())?.strip_prefix("record_")?;
    let all_digits = digits.len() == 8 && digits.bytes().all(|b| b.is_ascii_digit());
    let number = |at: std::ops::Range<usize>| digits.get(at)?.parse::<u16>().ok();
    let month = Month::try_from(u8::try_from(number(4..6)?).ok()?).ok()?;
    let of_month = u8::try_from(number(6..8)?).ok()?;
    let date = Date::from_calendar_date(number(0..4)?.into(), month, of_month).ok();
    date.filter(|_| all_digits)
}

/// As the server prints it in UTC.
fn midnight(day: Date) -> String {
    let (year, month, of_month) = day.to_calendar_date();
    format!("{year:04}-{:02}-{of_month:02} 00:00:00+00", u8::from(month))
}

fn bounds_of(day: Date) -> String {
    let next = day.next_day().unwrap_or(Date::MAX);
    format!(
        "FOR VALUES FROM ('{}') TO ('{}')",
        midnight(day),
        midnight(next)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_name_of_a_day_is_a_day() {
        let names = Names::default();
        let day = Date::from_calendar_date(2026, Month::November, 30).unwrap();
        assert_eq!(name(day, &names), "oncebox_record_20261130");
        assert_eq!(day_of("oncebox_record_20261130", &names), Some(day));
        for other in [
            "oncebox_record_rest",
            "oncebox_record_20261131",
            "oncebox_record_2026113",
            "oncebox_record_202611300",
            "oncebox_record_+0261130",
            "other_record_20261130",
        ] {
            assert_eq!(day_of(other, &names), None, "{other}");
        }
    }
}
