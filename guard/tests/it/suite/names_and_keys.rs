//! What the guards have in common.

use oncebox_guard::{
    self as guard, Error, Given, Inserted, Locked, Sequenced, StateMachine, Taken, Transition,
    Versioned, key,
};

use super::Shop;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_is_not_allowed_is_named() {
    Shop::run(async |store| {
        let mut tx = store.begin().await;
        let found = guard::take(
            &mut tx,
            "stock; DROP TABLE stock",
            key("sku", "apple"),
            "quantity",
            1,
        )
        .await;
        assert!(
            matches!(found, Err(Error::Name { part: "table", .. })),
            "{found:?}"
        );
        let found = guard::take(
            &mut tx,
            "stock",
            key("sku\" = '' OR \"sku", "apple"),
            "quantity",
            1,
        )
        .await;
        assert!(
            matches!(found, Err(Error::Name { part: "column", .. })),
            "{found:?}"
        );
        let found = guard::take(&mut tx, "stock", key("sku", "apple"), "", 1).await;
        let text = found.unwrap_err().to_string();
        assert_eq!(
            text,
            r#"the column "" is not allowed: it must not be empty"#
        );
        // The transaction was not touched.
        let found = guard::take(&mut tx, "stock", key("sku", "apple"), "quantity", 1).await;
        assert_eq!(found.unwrap(), Taken::Applied { left: 9 });
    })
    .await;
}

/// SQLite takes a name in double quotes that no column has for a text, which equals no key and is above every amount.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_misspelt_column_is_an_error() {
    Shop::run(async |store| {
        for (column, amount) in [("skuu", "quantity"), ("sku", "quantityy")] {
            let mut tx = store.begin().await;
            let found = guard::take(&mut tx, "stock", key(column, "apple"), amount, 1).await;
            assert!(
                matches!(&found, Err(Error::Database { source, .. }) if source.as_database_error().is_some()),
                "{column} {amount}: {found:?}"
            );
            tx.rollback().await.unwrap();
        }
        let mut tx = store.begin().await;
        let found: Result<Locked<(i64,)>, _> = guard::lock_row(&mut tx, "stock", key("skuu", "apple")).await;
        assert!(matches!(found, Err(Error::Database { .. })), "{found:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_are_bound_and_not_pasted() {
    Shop::run(async |store| {
        let no = "'; DROP TABLE orders; --";
        let mut tx = store.begin().await;
        for expected in [Inserted::Applied, Inserted::Duplicate] {
            let row = key("order_no", no).set("note", "\" $1 ` ?");
            assert_eq!(
                guard::insert_once(&mut tx, "orders", row).await.unwrap(),
                expected
            );
        }
        tx.commit().await.unwrap();
        assert_eq!(store.text("SELECT order_no FROM orders").await, no);
        assert_eq!(store.text("SELECT note FROM orders").await, "\" $1 ` ?");
    })
    .await;
}

/// Guards are called from tasks and from the inbox's boxed handlers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_futures_are_send() {
    Shop::run(async |store| {
        const HOLD: Sequenced =
            StateMachine::new("orders", "status", &[("paid", &["held"]), ("held", &[])])
                .sequence("seen");
        const ORDER: StateMachine =
            StateMachine::new("orders", "status", &[("pending", &["paid"]), ("paid", &[])]);
        let (shop, sku, no) = (store.clone(), String::from("apple"), String::from("n"));
        tokio::spawn(async move {
            guard::redo(2, || async {
                let tx = &mut shop.begin().await;
                let found = guard::insert_once(tx, "orders", key("order_no", &no)).await?;
                assert_eq!(found, Inserted::Applied);
                let found = ORDER.transition(tx, key("order_no", &no), "paid").await?;
                assert_eq!(found, Transition::Applied);
                let found = HOLD.transition(tx, key("order_no", &no), "held", 1).await?;
                assert_eq!(found, Transition::Applied);
                let found = guard::versioned(tx, "account", key("id", 1_i64), "version", 7).await?;
                assert_eq!(found, Versioned::Applied { version: 8 });
                let found = guard::take(tx, "stock", key("sku", &sku), "quantity", 1).await?;
                assert_eq!(found, Taken::Applied { left: 9 });
                let found = guard::give(tx, "stock", key("sku", &sku), "quantity", 1).await?;
                assert_eq!(found, Given::Applied { left: 10 });
                Ok::<_, Error>(())
            })
            .await
        })
        .await
        .unwrap()
        .unwrap();
    })
    .await;
}
