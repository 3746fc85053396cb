//! A6: what was computed from a version is written only over that version.

use std::error::Error as StdError;
use std::sync::atomic::{AtomicU32, Ordering};

use oncebox_guard::{self as guard, Conflict, Error, Row, Versioned, key};

use super::{Db, Shop};

const ACCOUNT: &str =
    "SELECT CAST(balance AS BIGINT), CAST(version AS BIGINT) FROM account WHERE id = 1";
const BALANCE: &str = "SELECT CAST(balance AS BIGINT) FROM account WHERE id = 1";
const VERSION: &str = "SELECT CAST(version AS BIGINT) FROM account WHERE id = 1";

fn account<'v>(id: i64, balance: i64) -> Row<'v, Db> {
    key("id", id).set("balance", balance)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a6_a_version_counts_up_and_guards_the_row() {
    Shop::run(async |store| {
        let mut tx = store.begin().await;
        let found = guard::versioned(&mut tx, "account", account(1, 120), "version", 7).await.unwrap();
        assert_eq!(found, Versioned::Applied { version: 8 });
        // The same message again.
        let found = guard::versioned(&mut tx, "account", account(1, 140), "version", 7).await;
        assert!(
            matches!(&found, Err(Error::Conflict(c)) if (c.table, c.expected, c.found) == ("account", 7, 8)),
            "written over another version: {found:?}"
        );
        let found = guard::versioned(&mut tx, "account", account(2, 1), "version", 7).await.unwrap();
        assert_eq!(found, Versioned::Missing);
        // Nothing but the version, for a row that stands for others.
        let found = guard::versioned(&mut tx, "account", key("id", 1_i64), "version", 8).await.unwrap();
        assert_eq!(found, Versioned::Applied { version: 9 });
        tx.commit().await.unwrap();
        assert_eq!(store.number(BALANCE).await, 120);
    })
    .await;
}

/// A handler as a service has it: its error type is a box, and the conflict comes out of `?`.
async fn deposit(
    store: &Shop,
    attempts: u32,
    calls: &AtomicU32,
    interfere: u32,
) -> Result<i64, Box<dyn StdError + Send + Sync>> {
    guard::redo(attempts, || async {
        let mut tx = store.begin().await;
        let call = calls.fetch_add(1, Ordering::Relaxed) + 1;
        let (balance, version): (i64, i64) = sqlx::query_as(ACCOUNT).fetch_one(&mut *tx).await?;
        let line = key("sku", format!("deposit {call}")).set("quantity", balance);
        let _ = guard::insert_once(&mut tx, "stock", line).await?;
        // As if somebody else had changed the row since: an old version.
        let seen = version - i64::from(call <= interfere);
        let row = account(1, balance + 10);
        let Versioned::Applied { version } =
            guard::versioned(&mut tx, "account", row, "version", seen).await?
        else {
            return Err("no such account".into());
        };
        tx.commit().await?;
        Ok(version)
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a6_a_conflict_redoes_the_whole_handler() {
    Shop::run(async |store| {
        let calls = AtomicU32::new(0);
        let version = deposit(&store, 5, &calls, 2).await;
        assert_eq!(version.ok(), Some(8), "the third attempt succeeds");
        assert_eq!(calls.load(Ordering::Relaxed), 3);
        assert_eq!(store.number(BALANCE).await, 110);
        // What the first two attempts wrote is gone.
        let lines = store
            .text("SELECT min(sku) || ' ' || max(sku) FROM stock WHERE sku LIKE 'deposit%'")
            .await;
        assert_eq!(
            lines, "deposit 3 deposit 3",
            "only the last attempt is left"
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a6_a_redo_is_bounded() {
    Shop::run(async |store| {
        for (attempts, expected) in [(0, 1), (1, 1), (4, 4)] {
            let calls = AtomicU32::new(0);
            let error = deposit(&store, attempts, &calls, u32::MAX)
                .await
                .unwrap_err();
            assert_eq!(calls.load(Ordering::Relaxed), expected);
            let conflict = Conflict::find(error.as_ref()).expect("the conflict");
            assert_eq!((conflict.expected, conflict.found), (6, 7));
        }
        assert_eq!(store.number(VERSION).await, 7);
        assert_eq!(
            store
                .number("SELECT count(*) FROM stock WHERE sku LIKE 'deposit%'")
                .await,
            0
        );
    })
    .await;
}

#[tokio::test]
async fn a6_only_a_conflict_is_done_again() {
    let mut calls = 0;
    let found: Result<(), Box<dyn StdError + Send + Sync>> = guard::redo(5, || {
        calls += 1;
        async { Err("something else".into()) }
    })
    .await;
    assert!(found.is_err());
    assert_eq!(calls, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a6_concurrent_deposits_all_count() {
    Shop::run(async |store| {
        const DEPOSITS: i64 = 12;
        let deposits: Vec<_> = (0..DEPOSITS)
            .map(|_| {
                let store = store.clone();
                tokio::spawn(async move {
                    guard::redo(100, || async {
                        let mut tx = store.begin().await;
                        let (balance, version): (i64, i64) =
                            sqlx::query_as(ACCOUNT).fetch_one(&mut *tx).await.unwrap();
                        tokio::task::yield_now().await;
                        let row = account(1, balance + 10);
                        let found =
                            guard::versioned(&mut tx, "account", row, "version", version).await?;
                        tx.commit().await.unwrap();
                        Ok(found)
                    })
                    .await
                })
            })
            .collect();
        for deposit in deposits {
            let found: Result<Versioned, Error> = deposit.await.unwrap();
            assert!(matches!(found, Ok(Versioned::Applied { .. })), "{found:?}");
        }
        assert_eq!(
            store.number(BALANCE).await,
            100 + 10 * DEPOSITS,
            "no deposit is lost"
        );
        assert_eq!(store.number(VERSION).await, 7 + DEPOSITS);
    })
    .await;
}

#[test]
fn a6_a_conflict_is_found_through_the_errors_of_a_service() {
    #[derive(Debug)]
    struct Failed(Error);
    impl std::fmt::Display for Failed {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            self.0.fmt(f)
        }
    }
    /// As `#[error(transparent)]` does it.
    impl StdError for Failed {
        fn source(&self) -> Option<&(dyn StdError + 'static)> {
            self.0.source()
        }
    }
    assert!(Conflict::find(&Failed(Error::NegativeAmount { amount: -1 })).is_none());
    let error = Error::NegativeAmount { amount: -1 };
    assert!(!error.is_conflict() && !error.is_retriable());
}
