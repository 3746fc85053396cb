//! A2: look, decide, and nobody changes the row before the commit.

use oncebox_guard::{self as guard, Error, Locked, key};

use super::Shop;

#[derive(Debug, PartialEq, Eq, sqlx::FromRow)]
pub(super) struct Account {
    pub(super) balance: i32,
    version: i32,
}

pub(super) const BALANCE: &str = "SELECT CAST(balance AS BIGINT) FROM account WHERE id = 1";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a2_a_row_is_read_or_missing() {
    Shop::run(async |store| {
        let mut tx = store.begin().await;
        let found: Locked<Account> = guard::lock_row(&mut tx, "account", key("id", 1_i64))
            .await
            .unwrap();
        assert_eq!(
            found,
            Locked::Row(Account {
                balance: 100,
                version: 7
            })
        );
        let found: Locked<Account> = guard::lock_row(&mut tx, "account", key("id", 2_i64))
            .await
            .unwrap();
        assert_eq!(found, Locked::Missing);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a2_a_row_whose_columns_do_not_fit_is_an_error() {
    Shop::run(async |store| {
        let mut tx = store.begin().await;
        let found: Result<Locked<Account>, _> =
            guard::lock_row(&mut tx, "stock", key("sku", "apple")).await;
        assert!(
            matches!(found, Err(Error::Database { table: "stock", .. })),
            "{found:?}"
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a2_a_table_that_was_altered_is_read_with_its_new_columns() {
    Shop::run(async |store| {
        // On connections that have read it before.
        for alter in ["SELECT 1", "ALTER TABLE account ADD COLUMN note TEXT"] {
            store.sql(alter).await;
            for _ in 0..2 {
                let mut tx = store.begin().await;
                let found: Result<Locked<Account>, _> =
                    guard::lock_row(&mut tx, "account", key("id", 1_i64)).await;
                assert!(matches!(found, Ok(Locked::Row(_))), "{alter}: {found:?}");
                tx.rollback().await.unwrap();
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a2_prechecks_of_one_payment_settle_it_once() {
    Shop::run(async |store| {
        let callbacks: Vec<_> = (0..16)
            .map(|_| {
                let store = store.clone();
                tokio::spawn(async move {
                    let mut tx = store.begin().await;
                    let found = guard::lock_row(&mut tx, "account", key("id", 1_i64))
                        .await
                        .unwrap();
                    let Locked::Row(Account { balance, .. }) = found else {
                        panic!("no account");
                    };
                    if balance == 100 {
                        let _ = guard::give(&mut tx, "account", key("id", 1_i64), "balance", 50)
                            .await
                            .unwrap();
                    }
                    tx.commit().await.unwrap();
                })
            })
            .collect();
        for callback in callbacks {
            callback.await.unwrap();
        }
        assert_eq!(store.number(BALANCE).await, 150, "settled once");
    })
    .await;
}
