//! What the runner promises, on SQLite.

use std::borrow::Cow;
use std::path::Path;
use std::time::Duration;

use oncebox_migrations::{Dialect, Error, LATEST, Names, sql, sqlite};
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, SqlSafeStr as _, SqliteConnection,
};
use tempfile::TempDir;

fn options(dir: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(dir.join("shop.db"))
        .create_if_missing(true)
}

async fn open() -> (TempDir, SqliteConnection) {
    let dir = tempfile::tempdir().unwrap();
    let conn = options(dir.path()).connect().await.unwrap();
    (dir, conn)
}

async fn execute(conn: &mut SqliteConnection, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))
        .execute(conn)
        .await
        .unwrap_or_else(|error| panic!("{sql}: {error}"));
}

async fn count(conn: &mut SqliteConnection, sql: &str) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(sql.to_owned()))
        .fetch_one(conn)
        .await
        .unwrap_or_else(|error| panic!("{sql}: {error}"))
}

fn all_versions() -> Vec<i64> {
    (1..=LATEST).collect()
}

#[tokio::test]
async fn the_first_run_applies_everything_and_the_second_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", dir.path().join("new.db").display());
    let names = Names::default();
    let missing = oncebox_migrations::status(&url, &names).await;
    assert!(
        matches!(missing, Err(Error::Database { .. })),
        "status creates no file"
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

    let report = oncebox_migrations::migrate(&url, &names).await.unwrap();
    assert_eq!((report.applied, report.version), (all_versions(), LATEST));
    let report = oncebox_migrations::migrate(&url, &names).await.unwrap();
    assert_eq!((report.applied, report.version), (vec![], LATEST));
    oncebox_migrations::status(&url, &names)
        .await
        .unwrap()
        .check()
        .unwrap();

    let mut conn = url
        .parse::<SqliteConnectOptions>()
        .unwrap()
        .connect()
        .await
        .unwrap();
    let mode: String = sqlx::query_scalar("PRAGMA journal_mode")
        .fetch_one(&mut conn)
        .await
        .unwrap();
    assert_eq!(mode, "wal");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn eight_concurrent_starts_succeed() {
    for busy_timeout in [Duration::from_secs(5), Duration::ZERO] {
        let dir = tempfile::tempdir().unwrap();
        let start = std::sync::Arc::new(tokio::sync::Barrier::new(8));
        let starts = (0..8).map(|_| {
            let (start, options) = (
                start.clone(),
                options(dir.path()).busy_timeout(busy_timeout),
            );
            tokio::spawn(async move {
                let mut conn = options.connect().await.unwrap();
                start.wait().await;
                sqlite::migrate(&mut conn, &Names::default()).await
            })
        });
        let mut applied = Vec::new();
        for start in starts.collect::<Vec<_>>() {
            let report = start.await.unwrap().unwrap();
            assert_eq!(report.version, LATEST);
            applied.extend(report.applied);
        }
        applied.sort_unstable();
        assert_eq!(applied, all_versions(), "every version is applied once");
        let mut conn = options(dir.path()).connect().await.unwrap();
        assert_eq!(
            count(&mut conn, "SELECT count(*) FROM oncebox_mark").await,
            1
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn eight_concurrent_starts_by_url_on_a_missing_file_succeed() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", dir.path().join("new.db").display());
    let starts = (0..8).map(|_| {
        let url = url.clone();
        tokio::spawn(async move { oncebox_migrations::migrate(&url, &Names::default()).await })
    });
    for start in starts.collect::<Vec<_>>() {
        assert_eq!(start.await.unwrap().unwrap().version, LATEST);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_in_the_way_of_the_commit_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    // Not WAL: there a reader holds up whoever commits.
    let options = options(dir.path()).busy_timeout(Duration::ZERO);
    let mut reader = options.connect().await.unwrap();
    execute(&mut reader, "CREATE TABLE mine (id INTEGER)").await;
    execute(&mut reader, "BEGIN; SELECT * FROM mine").await;
    let mut conn = options.connect().await.unwrap();
    let migration =
        tokio::spawn(async move { sqlite::migrate(&mut conn, &Names::default()).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!migration.is_finished());
    execute(&mut reader, "COMMIT").await;
    let report = migration.await.unwrap().unwrap();
    assert_eq!(report.applied, all_versions());
}

#[tokio::test]
async fn a_connection_holds_no_lock_after_a_migration() {
    let (dir, mut conn) = open().await;
    let names = Names::default();
    sqlite::migrate(&mut conn, &names).await.unwrap();
    sqlite::migrate(&mut conn, &names).await.unwrap();
    let other = options(dir.path()).busy_timeout(Duration::ZERO);
    let mut other = other.connect().await.unwrap();
    let insert = "INSERT INTO oncebox_inbox (consumer, message_id) VALUES ('c', x'00')";
    execute(&mut other, insert).await;
}

#[tokio::test]
async fn prefixes_do_not_meet() {
    let (_dir, mut conn) = open().await;
    for prefix in ["oncebox_", "second_"] {
        let names = Names::new("unused", prefix).unwrap();
        let report = sqlite::migrate(&mut conn, &names).await.unwrap();
        assert_eq!(report.applied, all_versions());
    }
    let ids = "SELECT count(DISTINCT source_id) FROM (SELECT source_id FROM oncebox_mark UNION ALL SELECT source_id FROM second_mark)";
    assert_eq!(count(&mut conn, ids).await, 2);
}

#[tokio::test]
async fn an_edited_migration_is_a_clear_error() {
    let (_dir, mut conn) = open().await;
    sqlite::migrate(&mut conn, &Names::default()).await.unwrap();
    execute(
        &mut conn,
        "UPDATE oncebox_migrations SET checksum = 'feed' WHERE version = 2",
    )
    .await;
    let error = sqlite::migrate(&mut conn, &Names::default())
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Edited { version: 2, .. }), "{error}");
    // The lock is free again.
    execute(
        &mut conn,
        "UPDATE oncebox_migrations SET checksum = 'cafe' WHERE version = 2",
    )
    .await;
}

#[tokio::test]
async fn an_old_library_on_a_newer_schema_says_so() {
    let (_dir, mut conn) = open().await;
    sqlite::migrate(&mut conn, &Names::default()).await.unwrap();
    execute(
        &mut conn,
        "INSERT INTO oncebox_migrations (version, name, checksum, library) VALUES (77, 'later', 'cafe', '7.0.0')",
    )
    .await;
    let error = sqlite::migrate(&mut conn, &Names::default())
        .await
        .unwrap_err();
    assert!(
        matches!(error, Error::NewerSchema { version: 77, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("7.0.0"));
}

#[tokio::test]
async fn a_version_that_fails_leaves_nothing_behind() {
    let (_dir, mut conn) = open().await;
    let names = Names::default();
    execute(&mut conn, "CREATE TABLE oncebox_dead_letter (mine INTEGER)").await;
    sqlite::migrate(&mut conn, &names).await.unwrap_err();
    assert_eq!(sqlite::status(&mut conn, &names).await.unwrap().version, 1);
    let left =
        "SELECT count(*) FROM sqlite_schema WHERE name IN ('oncebox_inbox', 'oncebox_position')";
    assert_eq!(count(&mut conn, left).await, 0);
    execute(&mut conn, "DROP TABLE oncebox_dead_letter").await;
    assert_eq!(
        sqlite::migrate(&mut conn, &names).await.unwrap().applied,
        (2..=LATEST).collect::<Vec<_>>()
    );
}

#[tokio::test]
async fn the_applications_own_migrations_may_have_the_same_versions() {
    let (_dir, mut conn) = open().await;
    let app = Migrator::with_migrations(vec![Migration::new(
        1,
        Cow::Borrowed("app"),
        MigrationType::Simple,
        "CREATE TABLE orders (id INTEGER PRIMARY KEY)".into_sql_str(),
        false,
    )]);
    for _ in 0..2 {
        app.run_direct(None, &mut conn, false).await.unwrap();
        sqlite::migrate(&mut conn, &Names::default()).await.unwrap();
    }
    assert_eq!(
        count(&mut conn, "SELECT count(*) FROM _sqlx_migrations").await,
        1
    );
    assert_eq!(
        count(&mut conn, "SELECT count(*) FROM oncebox_migrations").await,
        LATEST
    );
}

#[tokio::test]
async fn printed_sql_that_the_application_ran_is_recognised() {
    let (_dir, mut conn) = open().await;
    let names = Names::default();
    for version in 1..=LATEST {
        let mut tx = conn.begin().await.unwrap();
        execute(&mut tx, &sql(Dialect::Sqlite, &names, version - 1, version)).await;
        tx.commit().await.unwrap();
    }
    sqlite::status(&mut conn, &names)
        .await
        .unwrap()
        .check()
        .unwrap();
    assert_eq!(
        sqlite::migrate(&mut conn, &names).await.unwrap().applied,
        [0; 0]
    );
}

#[tokio::test]
async fn an_open_transaction_is_refused_and_left_alone() {
    let (_dir, mut conn) = open().await;
    let mut tx = conn.begin().await.unwrap();
    execute(&mut tx, "CREATE TABLE mine (id INTEGER)").await;
    let error = sqlite::migrate(&mut tx, &Names::default())
        .await
        .unwrap_err();
    assert!(matches!(error, Error::InTransaction), "{error}");
    tx.commit().await.unwrap();
    assert_eq!(
        count(
            &mut conn,
            "SELECT count(*) FROM sqlite_schema WHERE name = 'mine'"
        )
        .await,
        1
    );
}

#[tokio::test]
async fn the_tables_have_the_shape_that_the_guarantees_need() {
    let (_dir, mut conn) = open().await;
    sqlite::migrate(&mut conn, &Names::default()).await.unwrap();
    let enqueue =
        "INSERT INTO oncebox_outbox (message_id, topic, headers) VALUES (x'00', 't', x'')";
    execute(&mut conn, enqueue).await;
    let age = "SELECT abs(created_at / 1000000 - CAST(strftime('%s', 'now') AS INTEGER)) FROM oncebox_outbox";
    assert!(
        count(&mut conn, age).await <= 1,
        "microseconds since the Unix epoch"
    );
    // G2: ids go on after the table was emptied.
    execute(&mut conn, "DELETE FROM oncebox_outbox").await;
    execute(&mut conn, enqueue).await;
    assert_eq!(count(&mut conn, "SELECT id FROM oncebox_outbox").await, 2);
    for second in [
        "INSERT INTO oncebox_mark (source_id) VALUES (x'00')",
        "INSERT INTO oncebox_mark (singleton, source_id) VALUES (2, x'00')",
    ] {
        assert!(
            sqlx::raw_sql(second).execute(&mut conn).await.is_err(),
            "the mark is one row"
        );
    }
    assert_eq!(
        count(&mut conn, "SELECT length(source_id) FROM oncebox_mark").await,
        16
    );
}

#[tokio::test]
async fn urls_of_other_databases_are_refused_without_repeating_them() {
    let error = oncebox_migrations::migrate("mysql://root:secret@host/db", &Names::default())
        .await
        .unwrap_err();
    assert!(matches!(error, Error::UnsupportedUrl { .. }));
    assert!(!error.to_string().contains("secret"), "{error}");
    let error =
        oncebox_migrations::migrate("postgres://u:secret@127.0.0.1:1/db", &Names::default())
            .await
            .unwrap_err();
    assert!(
        !format!("{error} {error:?}").contains("secret"),
        "{error:?}"
    );
}
