//! G1: a message enqueued in a transaction that rolled back is never published.

use oncebox_integration_tests::source::{Source, begin};
use sqlx::Acquire as _;

use crate::relays::{relay, until_empty};

#[tokio::test]
async fn g1_rolled_back_transactions_and_savepoints_are_never_published() {
    let source = Source::create().await;
    let mut conn = source.database.connect().await;
    for n in 0..20 {
        let mut tx = begin(&mut conn).await;
        source
            .enqueue(&mut tx, "k", &format!("rolled back {n}"))
            .await;
        tx.rollback().await.unwrap();
        let mut tx = begin(&mut conn).await;
        let mut savepoint = tx.begin().await.unwrap();
        source
            .enqueue(&mut savepoint, "k", &format!("savepoint {n}"))
            .await;
        savepoint.rollback().await.unwrap();
        source.enqueue(&mut tx, "k", &format!("kept {n}")).await;
        tx.commit().await.unwrap();
    }
    until_empty(&source).await;
    let kept: Vec<_> = (0..20).map(|n| format!("kept {n}")).collect();
    source
        .expect(&kept.iter().map(String::as_str).collect::<Vec<_>>())
        .await;
}

#[tokio::test]
async fn g1_a_transaction_that_rolls_back_while_the_relay_looks_is_never_published() {
    let source = Source::create().await;
    let _relay = relay(&source);
    let mut conn = source.database.connect().await;
    let mut tx = begin(&mut conn).await;
    source.enqueue(&mut tx, "k", "never").await;
    source.commit("k", "before").await;
    source.expect(&["before"]).await;
    tx.rollback().await.unwrap();
    source.commit("k", "after").await;
    source.expect(&["before", "after"]).await;
}
