//! The suite on SQLite, and its transactions that only read so far.

use std::sync::Arc;
use std::time::Duration;

use oncebox_guard::{self as guard, Error, Locked, Sequenced, StateMachine, key};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{Sqlite, SqlitePool, Transaction};
use tempfile::TempDir;

use self::lock_row::{Account, BALANCE};
use crate::tables::TABLES;

#[path = "suite/insert_once.rs"]
mod insert_once;
#[path = "suite/lock_row.rs"]
mod lock_row;
#[path = "suite/names_and_keys.rs"]
mod names_and_keys;
#[path = "suite/state_machine.rs"]
mod state_machine;
#[path = "suite/stock.rs"]
mod stock;
#[path = "suite/versioned.rs"]
mod versioned;

type Db = Sqlite;

/// A database with the tables in it. A clone is another handle to it.
#[derive(Clone)]
struct Shop(
    SqlitePool,
    #[expect(dead_code, reason = "kept until the end")] Arc<TempDir>,
);

impl Shop {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options = SqliteConnectOptions::new()
            .filename(dir.path().join("shop.db"))
            .create_if_missing(true)
            .busy_timeout(Duration::from_secs(60))
            .journal_mode(SqliteJournalMode::Wal);
        let pool = SqlitePoolOptions::new().max_connections(8);
        let shop = Self(pool.connect_with(options).await.unwrap(), Arc::new(dir));
        shop.sql(TABLES).await;
        shop
    }

    /// Runs a test in a database of its own.
    async fn run<Fut: Future<Output = ()>>(test: impl FnOnce(Self) -> Fut) {
        test(Self::new().await).await;
    }

    /// A transaction that may write.
    async fn begin(&self) -> Transaction<'static, Sqlite> {
        self.0.begin_with("BEGIN IMMEDIATE").await.unwrap()
    }

    /// Runs statements outside of any transaction.
    async fn sql(&self, sql: &'static str) {
        sqlx::raw_sql(sql).execute(&self.0).await.unwrap();
    }

    async fn number(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.0).await.unwrap()
    }

    async fn text(&self, sql: &'static str) -> String {
        sqlx::query_scalar(sql).fetch_one(&self.0).await.unwrap()
    }
}

/// Also in a transaction that began as one that only reads.
#[tokio::test]
async fn a2_a_locked_row_stays_as_it_was_read_on_sqlite() {
    let store = Shop::new().await;
    let mut tx = store.0.begin().await.unwrap();
    let found: Locked<Account> = guard::lock_row(&mut tx, "account", key("id", 1_i64))
        .await
        .unwrap();
    assert!(matches!(found, Locked::Row(Account { balance: 100, .. })));

    let mut other = store.0.acquire().await.unwrap();
    let change = "PRAGMA busy_timeout = 0; UPDATE account SET balance = 0 WHERE id = 1";
    let changed = sqlx::raw_sql(change).execute(&mut *other).await;
    let code = changed
        .as_ref()
        .err()
        .and_then(|e| e.as_database_error()?.code());
    assert_eq!(code.as_deref(), Some("5"), "nobody else changes it");
}

#[tokio::test]
async fn a2_a_sqlite_transaction_that_was_overtaken_does_not_decide() {
    let store = Shop::new().await;
    let mut tx = store.0.begin().await.unwrap();
    let _: i64 = sqlx::query_scalar(BALANCE)
        .fetch_one(&mut *tx)
        .await
        .unwrap();
    store
        .sql("UPDATE account SET balance = 0 WHERE id = 1")
        .await;
    let found: Result<Locked<Account>, _> =
        guard::lock_row(&mut tx, "account", key("id", 1_i64)).await;
    let error = found.expect_err("what it has read is old");
    assert!(
        error.is_retriable() && error.to_string().contains("BEGIN IMMEDIATE"),
        "{error}"
    );
}

/// Every text is above every number: without the check each message would be stale, silently.
#[tokio::test]
async fn a5_a_sqlite_column_of_texts_is_no_sequence() {
    const LINE: Sequenced =
        StateMachine::new("log", "line", &[("a", &["b"]), ("b", &[])]).sequence("sequence");
    let store = Shop::new().await;
    store.sql("CREATE UNIQUE INDEX line ON log (line); INSERT INTO log VALUES ('a', '2026-01-01T00:00:00Z')").await;
    let mut tx = store.begin().await;
    let found = LINE
        .transition(&mut tx, key("line", "a"), "b", 1_767_225_600)
        .await;
    assert!(matches!(found, Err(Error::Database { .. })), "{found:?}");
}
