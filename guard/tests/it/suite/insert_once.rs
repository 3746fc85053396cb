//! A1, and the race of look and write (A24).

use oncebox_guard::{self as guard, Error, Inserted, Key, Row, key};

use super::{Db, Shop};

pub(super) const ORDERS: &str = "SELECT count(*) FROM orders";

pub(super) fn order<'v>(no: &'v str) -> Row<'v, Db> {
    key("order_no", no).set("amount", 5_i64)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a1_a_duplicate_business_key_does_not_abort_the_transaction() {
    Shop::run(async |store| {
        let mut tx = store.begin().await;
        let first = guard::insert_once(&mut tx, "orders", order("a")).await;
        assert!(matches!(first, Ok(Inserted::Applied)), "{first:?}");
        tx.commit().await.unwrap();

        let mut tx = store.begin().await;
        let second = guard::insert_once(&mut tx, "orders", order("a").set("note", "other")).await;
        assert!(
            matches!(second, Ok(Inserted::Duplicate)),
            "a duplicate is an outcome: {second:?}"
        );
        let third = guard::insert_once(&mut tx, "orders", order("b")).await;
        assert!(
            matches!(third, Ok(Inserted::Applied)),
            "the transaction goes on: {third:?}"
        );
        tx.commit().await.unwrap();
        assert_eq!(store.number(ORDERS).await, 2);
        assert_eq!(
            store
                .number("SELECT count(*) FROM orders WHERE note = 'other'")
                .await,
            0
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a1_a_rolled_back_insert_was_not_the_first() {
    Shop::run(async |store| {
        let mut tx = store.begin().await;
        let _ = guard::insert_once(&mut tx, "orders", order("a"))
            .await
            .unwrap();
        tx.rollback().await.unwrap();
        let mut tx = store.begin().await;
        let again = guard::insert_once(&mut tx, "orders", order("a"))
            .await
            .unwrap();
        assert_eq!(again, Inserted::Applied);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a1_every_other_constraint_is_still_an_error() {
    Shop::run(async |store| {
        let mut tx = store.begin().await;
        let row = order("a").set("id", 1_i64);
        assert_eq!(
            guard::insert_once(&mut tx, "orders", row).await.unwrap(),
            Inserted::Applied
        );
        tx.commit().await.unwrap();
        for (broken, row) in [
            ("another unique constraint", order("b").set("id", 1_i64)),
            ("not null", order("c").set("status", None::<String>)),
            ("check", key("order_no", "d").set("amount", -1_i64)),
            ("foreign key", order("e").set("customer", "nobody")),
        ] {
            let mut tx = store.begin().await;
            let found = guard::insert_once(&mut tx, "orders", row).await;
            assert!(
                matches!(&found, Err(Error::Database { source, .. }) if source.as_database_error().is_some()),
                "{broken}: {found:?}"
            );
            tx.rollback().await.unwrap();
        }
        assert_eq!(store.number(ORDERS).await, 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a1_a_key_of_several_columns_and_nothing_else() {
    Shop::run(async |store| {
        fn coupon(customer: &str, campaign: i64) -> Key<'_, Db> {
            key("customer", customer).and("campaign", campaign)
        }
        let mut tx = store.begin().await;
        for (customer, campaign, expected) in [
            ("ann", 1, Inserted::Applied),
            ("ann", 1, Inserted::Duplicate),
            ("ann", 2, Inserted::Applied),
            ("bob", 1, Inserted::Applied),
        ] {
            let found = guard::insert_once(&mut tx, "coupon", coupon(customer, campaign)).await;
            assert_eq!(found.unwrap(), expected, "{customer} {campaign}");
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a1_null_is_no_key() {
    Shop::run(async |store| {
        // A unique index lets any number of these in.
        let mut tx = store.begin().await;
        let coupon = key("customer", "ann").and("campaign", None::<i64>);
        let found = guard::insert_once(&mut tx, "coupon", coupon).await;
        assert!(
            matches!(
                found,
                Err(Error::NullKey {
                    table: "coupon",
                    column: "campaign"
                })
            ),
            "NULL is refused: {found:?}"
        );
        tx.commit().await.unwrap();
        assert_eq!(store.number("SELECT count(*) FROM coupon").await, 0);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a1_without_a_unique_constraint_nothing_is_inserted() {
    Shop::run(async |store| {
        let mut tx = store.begin().await;
        let found = guard::insert_once(&mut tx, "log", key("line", "a")).await;
        let error = found.unwrap_err().to_string();
        assert!(
            error.contains("needs a primary key or a UNIQUE constraint"),
            "{error}"
        );
        tx.rollback().await.unwrap();
        assert_eq!(store.number("SELECT count(*) FROM log").await, 0);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a24_select_then_write_race_has_one_effect() {
    Shop::run(async |store| {
        const MESSAGES: usize = 32;
        let workers: Vec<_> = (0..MESSAGES)
            .map(|n| {
                let store = store.clone();
                tokio::spawn(async move {
                    // Four orders, eight deliveries each.
                    let no = ["a", "b", "c", "d"][n % 4];
                    let mut tx = store.begin().await;
                    let found = guard::insert_once(&mut tx, "orders", order(no)).await?;
                    if found == Inserted::Applied {
                        let given =
                            guard::give(&mut tx, "stock", key("sku", "apple"), "quantity", 1);
                        let _ = given.await?;
                    }
                    tx.commit().await.unwrap();
                    Ok::<_, Error>(found)
                })
            })
            .collect();
        let mut applied = 0;
        for worker in workers {
            let found = worker.await.unwrap();
            assert!(found.is_ok(), "a duplicate is an outcome: {found:?}");
            applied += usize::from(found.unwrap() == Inserted::Applied);
        }
        assert_eq!(applied, 4, "one effect for each order");
        assert_eq!(
            store
                .number("SELECT quantity FROM stock WHERE sku = 'apple'")
                .await,
            14
        );
        assert_eq!(store.number(ORDERS).await, 4);
    })
    .await;
}
