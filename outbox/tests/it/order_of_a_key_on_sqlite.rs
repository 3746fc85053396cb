//! G4 on SQLite: the write lock is the lock of every key, also in transactions that were begun deferred.

use std::time::Duration;

use oncebox_outbox::Message;
use sqlx::{ConnectOptions as _, Connection as _};

use crate::conformance::{OnSqlite, Store as _, outbox, plain};

#[tokio::test]
async fn enqueue_ordered_holds_the_write_lock_in_a_deferred_transaction() {
    let store = OnSqlite::new().await;
    let mut deferred = store.0.begin().await.unwrap();
    outbox()
        .enqueue_ordered(&mut deferred, plain("k"))
        .await
        .unwrap();

    let options = (*store.0.connect_options())
        .clone()
        .busy_timeout(Duration::ZERO);
    let mut other = options.connect().await.unwrap();
    let mut overtaking = other.begin().await.unwrap();
    let error = outbox()
        .enqueue_ordered(&mut overtaking, plain("k"))
        .await
        .unwrap_err();
    assert!(error.is_retriable(), "{error}");
    overtaking.rollback().await.unwrap();

    deferred.commit().await.unwrap();
    let mut again = other.begin().await.unwrap();
    outbox()
        .enqueue_ordered(&mut again, plain("k"))
        .await
        .unwrap();
    again.commit().await.unwrap();
    assert_eq!(store.rows().await.len(), 2);
}

#[tokio::test]
async fn a_deferred_transaction_that_was_overtaken_fails_and_inverts_nothing() {
    let store = OnSqlite::new().await;
    let mut slow = store.0.begin().await.unwrap();
    store
        .run(&mut slow, "SELECT count(*) FROM shop_outbox")
        .await
        .unwrap();

    let mut fast = store.begin().await;
    outbox()
        .enqueue_ordered(&mut fast, plain("k"))
        .await
        .unwrap();
    fast.commit().await.unwrap();

    let error = outbox()
        .enqueue_ordered(&mut slow, plain("k"))
        .await
        .unwrap_err();
    assert!(error.is_retriable(), "{error}");
    assert!(error.to_string().contains("BEGIN IMMEDIATE"), "{error}");
    slow.rollback().await.unwrap();
    assert_eq!(store.rows().await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn g4_a_hot_key_keeps_the_order_of_its_transactions() {
    let store = OnSqlite::new().await;
    let mut tx = store.begin().await;
    store
        .run(
            &mut tx,
            "CREATE TABLE truth (n INTEGER PRIMARY KEY AUTOINCREMENT, message_id BLOB)",
        )
        .await
        .unwrap();
    tx.commit().await.unwrap();
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let pool = store.0.clone();
            tokio::spawn(async move {
                for n in 0..25 {
                    // Deferred on purpose: the INSERT takes the lock.
                    let mut tx = pool.begin().await.unwrap();
                    let id = outbox()
                        .enqueue_ordered(&mut tx, plain("hot"))
                        .await
                        .unwrap();
                    sqlx::query("INSERT INTO truth (message_id) VALUES (?)")
                        .bind(id.as_uuid())
                        .execute(&mut *tx)
                        .await
                        .unwrap();
                    if (writer + n) % 7 == 0 {
                        tx.rollback().await.unwrap();
                    } else {
                        tx.commit().await.unwrap();
                    }
                }
            })
        })
        .collect();
    for writer in writers {
        writer.await.unwrap();
    }
    let truth: Vec<uuid::Uuid> = sqlx::query_scalar("SELECT message_id FROM truth ORDER BY n")
        .fetch_all(&store.0)
        .await
        .unwrap();
    let outbox: Vec<_> = store
        .rows()
        .await
        .into_iter()
        .map(|row| row.message_id)
        .collect();
    assert_eq!(outbox, truth);
}

#[tokio::test]
async fn a_batch_that_fails_half_way_leaves_nothing() {
    let store = OnSqlite::new().await;
    let mut tx = store.begin().await;
    store
        .run(
            &mut tx,
            "CREATE TRIGGER full BEFORE INSERT ON shop_outbox WHEN new.key = CAST('299' AS BLOB) \
             BEGIN SELECT raise(FAIL, 'disk full'); END",
        )
        .await
        .unwrap();
    outbox().enqueue(&mut tx, plain("before")).await.unwrap();
    let batch = (0..400)
        .map(|n| Message::new("t").key(n.to_string()).payload("p"))
        .collect();
    let error = outbox().enqueue_all(&mut tx, batch).await.unwrap_err();
    assert!(error.to_string().contains("disk full"), "{error}");
    tx.commit().await.unwrap();
    assert_eq!(store.rows().await.len(), 1);
}
