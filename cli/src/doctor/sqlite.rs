//! The doctor's questions to SQLite. Writes nothing: it takes the write lock and gives it back.

use std::time::Duration;

use oncebox_migrations::{Dialect, Names};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor, Row, SqliteConnection};
use tokio::time::timeout;

use super::database::{BETWEEN_LOOKS, Findings, PATIENCE, ROWS_FOR_TOPICS, explain, late, schema};
use super::position::Mark;
use super::report::Checks;
use crate::config::DatabaseUrl;

pub(super) async fn examine(url: &DatabaseUrl, names: &Names) -> Findings {
    let mut findings = Findings::default();
    let options: SqliteConnectOptions = match url.expose().parse() {
        Ok(options) => options,
        Err(error) => {
            explain(&mut findings.checks, "database", &error);
            return findings;
        }
    };
    let file = options.get_filename().to_owned();
    let options = options
        .create_if_missing(false)
        .busy_timeout(Duration::from_secs(2));
    let mut conn = match timeout(PATIENCE, options.connect()).await {
        Ok(Ok(conn)) => conn,
        Ok(Err(error)) => {
            explain(&mut findings.checks, "database", &error);
            return findings;
        }
        Err(_) => {
            late(&mut findings.checks, "database");
            return findings;
        }
    };
    match timeout(2 * PATIENCE, ask(&mut conn, names, &file, &mut findings)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => explain(&mut findings.checks, "database", &error),
        Err(_) => late(&mut findings.checks, "database"),
    }
    let _ = conn.close().await;
    findings
}

async fn ask(
    conn: &mut SqliteConnection,
    names: &Names,
    file: &std::path::Path,
    findings: &mut Findings,
) -> Result<(), sqlx::Error> {
    let checks = &mut findings.checks;
    let version: String = sqlx::query_scalar("SELECT sqlite_version()")
        .fetch_one(&mut *conn)
        .await?;
    // Says at once whether the file is a database at all.
    let journal: String = sqlx::query_scalar("PRAGMA journal_mode")
        .fetch_one(&mut *conn)
        .await?;
    checks.ok("database", format!("SQLite {version}, {}", file.display()));
    durability(conn, &journal, checks).await?;
    if !schema(
        checks,
        oncebox_migrations::sqlite::status(conn, names).await,
    ) {
        checks.skip("rights", "no usable schema");
        checks.skip("mark", "no usable schema");
        return Ok(());
    }
    match conn.execute("BEGIN IMMEDIATE").await {
        Ok(_) => {
            conn.execute("ROLLBACK").await?;
            checks.ok("rights", "this user may write the file");
        }
        Err(error) => explain(checks, "rights", &error),
    }
    let Some(first) = mark(conn, names).await? else {
        checks.fail(
            "mark",
            "the mark row is missing",
            "restore it from a backup: it is the identity of this outbox",
        );
        return Ok(());
    };
    let table = names.outbox(Dialect::Sqlite);
    let sql = format!(
        "SELECT topic FROM (SELECT topic FROM {table} WHERE id > ?1 ORDER BY id LIMIT ?2)
         UNION SELECT topic FROM (SELECT topic FROM {table} ORDER BY id DESC LIMIT ?2)"
    );
    let topics: Vec<String> = sqlx::query_scalar(AssertSqlSafe(sql))
        .bind(first.high())
        .bind(ROWS_FOR_TOPICS)
        .fetch_all(&mut *conn)
        .await?;
    findings.topics = topics.into_iter().collect();
    tokio::time::sleep(BETWEEN_LOOKS).await;
    findings.mark = mark(conn, names).await?.map(|later| (first, later));
    Ok(())
}

async fn durability(
    conn: &mut SqliteConnection,
    journal: &str,
    checks: &mut Checks,
) -> Result<(), sqlx::Error> {
    let synchronous: i64 = sqlx::query_scalar("PRAGMA synchronous")
        .fetch_one(conn)
        .await?;
    let level = match synchronous {
        0 => "OFF",
        1 => "NORMAL",
        2 => "FULL",
        _ => "EXTRA",
    };
    let found = format!("journal_mode={journal}, synchronous={level} in this session");
    if !journal.eq_ignore_ascii_case("wal") {
        checks.warn("durability", found, "use WAL, which `oncebox migrate` turns on: otherwise readers and writers block each other");
    } else if synchronous < 2 {
        checks.fail("durability", found, "leave `synchronous` out of the URL: below FULL a commit may be lost after it was published (G2)");
    } else {
        // It belongs to each connection: those of the services cannot be seen from here.
        checks.ok(
            "durability",
            format!("{found}; every service that enqueues must use FULL as well"),
        );
    }
    Ok(())
}

async fn mark(conn: &mut SqliteConnection, names: &Names) -> Result<Option<Mark>, sqlx::Error> {
    let sql = format!(
        "SELECT source_id, source, epoch, owner, renewal, position, seq, cluster_id,
                (julianday('now') - 2440587.5) * 86400.0 - updated_at / 1e6 AS age_seconds FROM {}",
        names.mark(Dialect::Sqlite)
    );
    let row = sqlx::query(AssertSqlSafe(sql)).fetch_optional(conn).await?;
    row.map(|row| {
        Ok(Mark {
            source_id: row.try_get("source_id")?,
            source: row.try_get("source")?,
            epoch: row.try_get("epoch")?,
            owner: row.try_get("owner")?,
            renewal: row.try_get("renewal")?,
            position: row.try_get("position")?,
            seq: row.try_get("seq")?,
            cluster_id: row.try_get("cluster_id")?,
            age_seconds: row.try_get("age_seconds")?,
        })
    })
    .transpose()
}
