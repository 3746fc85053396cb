//! A7: an amount that is never negative.

use oncebox_guard::{self as guard, Error, Given, Taken, key};

use super::Shop;

pub(super) const APPLES: &str = "SELECT quantity FROM stock WHERE sku = 'apple'";

pub(super) async fn take(store: &Shop, sku: &str, amount: i64) -> Result<Taken, Error> {
    let mut tx = store.begin().await;
    let found = guard::take(&mut tx, "stock", key("sku", sku), "quantity", amount).await?;
    tx.commit().await.unwrap();
    Ok(found)
}

pub(super) async fn give(store: &Shop, sku: &str, amount: i64) -> Result<Given, Error> {
    let mut tx = store.begin().await;
    let found = guard::give(&mut tx, "stock", key("sku", sku), "quantity", amount).await?;
    tx.commit().await.unwrap();
    Ok(found)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a7_what_is_there_can_be_taken_and_no_more() {
    Shop::run(async |store| {
        for (amount, expected) in [
            (4, Taken::Applied { left: 6 }),
            (7, Taken::Insufficient { left: 6 }),
            (0, Taken::Applied { left: 6 }),
            (6, Taken::Applied { left: 0 }),
            (1, Taken::Insufficient { left: 0 }),
            (i64::MAX, Taken::Insufficient { left: 0 }),
        ] {
            assert_eq!(
                take(&store, "apple", amount).await.unwrap(),
                expected,
                "{amount}"
            );
        }
        assert_eq!(take(&store, "pear", 1).await.unwrap(), Taken::Missing);
        assert_eq!(store.number(APPLES).await, 0);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a7_what_was_taken_can_be_given_back() {
    Shop::run(async |store| {
        assert_eq!(
            give(&store, "apple", 5).await.unwrap(),
            Given::Applied { left: 15 }
        );
        assert_eq!(give(&store, "pear", 5).await.unwrap(), Given::Missing);
        let found = give(&store, "full", 1).await;
        assert!(
            matches!(found, Err(Error::Overflow { amount: 1, .. })),
            "{found:?}"
        );
        assert_eq!(
            store
                .number("SELECT quantity FROM stock WHERE sku = 'full'")
                .await,
            i64::MAX
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a7_a_negative_amount_is_refused() {
    Shop::run(async |store| {
        let found = take(&store, "apple", -1).await;
        assert!(
            matches!(found, Err(Error::NegativeAmount { amount: -1 })),
            "{found:?}"
        );
        let found = give(&store, "apple", -11).await;
        assert!(
            matches!(found, Err(Error::NegativeAmount { amount: -11 })),
            "{found:?}"
        );
        assert_eq!(store.number(APPLES).await, 10);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a7_an_unknown_amount_is_an_error() {
    Shop::run(async |store| {
        let found = take(&store, "unknown", 1).await;
        assert!(matches!(found, Err(Error::Database { .. })), "{found:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a7_a_key_of_several_columns_takes_from_one_row() {
    Shop::run(async |store| {
        let mut tx = store.begin().await;
        let shelf = key("warehouse", 2_i64).and("sku", "apple");
        let found = guard::take(&mut tx, "shelf", shelf, "quantity", 4)
            .await
            .unwrap();
        assert_eq!(found, Taken::Applied { left: 0 });
        tx.commit().await.unwrap();
        assert_eq!(
            store
                .number("SELECT CAST(quantity AS BIGINT) FROM shelf WHERE warehouse = 1")
                .await,
            3
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a7_a_key_that_is_not_unique_is_an_error() {
    Shop::run(async |store| {
        let mut tx = store.begin().await;
        let found = guard::take(&mut tx, "shelf", key("sku", "apple"), "quantity", 1).await;
        assert!(
            matches!(found, Err(Error::ManyRows { table: "shelf" })),
            "{found:?}"
        );
        tx.rollback().await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a7_stock_is_never_negative_under_concurrency() {
    Shop::run(async |store| {
        // Ten apples, sixteen customers that want two each.
        let customers: Vec<_> = (0..16)
            .map(|_| {
                let store = store.clone();
                tokio::spawn(async move { take(&store, "apple", 2).await.unwrap() })
            })
            .collect();
        let mut served = 0;
        for customer in customers {
            match customer.await.unwrap() {
                Taken::Applied { left } => {
                    assert!(left >= 0, "the stock is negative: {left}");
                    served += 1;
                }
                found => assert_eq!(found, Taken::Insufficient { left: 0 }),
            }
        }
        assert_eq!((served, store.number(APPLES).await), (5, 0));
    })
    .await;
}
