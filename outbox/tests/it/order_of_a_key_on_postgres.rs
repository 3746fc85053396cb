//! G4: messages of one key appear in the order of their transactions.

use std::time::Duration;

use oncebox_outbox::{Message, Outbox};
use sqlx::PgPool;

use crate::conformance::{OnPostgres, Store as _, keys, outbox, plain};
use crate::database::run;

const WRITERS: &str = "SELECT count(*) FROM pg_locks WHERE relation = 'shop_outbox'::regclass AND mode = 'RowExclusiveLock' AND granted";
const WAITING: &str = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted \
                       AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
const LAST_ID: &str = "SELECT coalesce(pg_sequence_last_value('shop_outbox_id_seq'), 0)";

async fn number(pool: &PgPool, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(pool).await.unwrap()
}

/// Until somebody waits for an advisory lock.
async fn somebody_waits(pool: &PgPool) {
    tokio::time::timeout(Duration::from_secs(20), async {
        while number(pool, WAITING).await == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("somebody waits for the lock of the key");
}

#[tokio::test]
async fn the_lock_is_taken_before_the_id_is_drawn() {
    run(async |db| {
        let store = OnPostgres::new(&db).await;
        let pool = store.0.clone();
        let mut first = store.begin().await;
        outbox()
            .enqueue_ordered(&mut first, Message::new("t").key("k").payload("1"))
            .await
            .unwrap();

        let mut second = store.begin().await;
        let waiting = tokio::spawn(async move {
            outbox()
                .enqueue_ordered(&mut second, Message::new("t").key("k").payload("2"))
                .await
                .unwrap();
            second.commit().await.unwrap();
        });
        somebody_waits(&pool).await;
        // The second neither holds an id nor counts as a writer of the outbox.
        assert_eq!(number(&pool, LAST_ID).await, 1);
        assert_eq!(number(&pool, WRITERS).await, 1);

        // Another key, and the same key of another topic, do not wait.
        let mut third = store.begin().await;
        outbox()
            .enqueue_ordered(&mut third, Message::new("t").key("other").payload("3"))
            .await
            .unwrap();
        outbox()
            .enqueue_ordered(&mut third, Message::new("u").key("k").payload("4"))
            .await
            .unwrap();
        third.commit().await.unwrap();

        first.commit().await.unwrap();
        waiting.await.unwrap();
        let payloads: Vec<_> = store
            .rows()
            .await
            .into_iter()
            .map(|row| row.payload.unwrap())
            .collect();
        assert_eq!(payloads, [b"1", b"3", b"4", b"2"]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g4_a_hot_key_without_a_business_row_keeps_the_order_of_its_transactions() {
    run(async |db| {
        const WRITERS: usize = 16;
        const EACH: usize = 40;
        let store = OnPostgres::new(&db).await;
        let pool = store.0.clone();
        // What really happened: a number drawn under the key's lock.
        sqlx::raw_sql(
            "CREATE TABLE truth (n bigint GENERATED ALWAYS AS IDENTITY, message_id uuid)",
        )
        .execute(&pool)
        .await
        .unwrap();
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let pool = pool.clone();
                tokio::spawn(async move {
                    for n in 0..EACH {
                        let mut tx = pool.begin().await.unwrap();
                        let id = outbox()
                            .enqueue_ordered(&mut tx, plain("hot"))
                            .await
                            .unwrap();
                        sqlx::query("INSERT INTO truth (message_id) VALUES ($1)")
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
            .fetch_all(&pool)
            .await
            .unwrap();
        let outbox: Vec<_> = store
            .rows()
            .await
            .into_iter()
            .map(|row| row.message_id)
            .collect();
        assert!(outbox.len() > WRITERS * EACH / 2);
        assert_eq!(outbox, truth);
    })
    .await;
}

#[tokio::test]
async fn the_number_of_a_keys_lock_is_the_documented_one() {
    run(async |db| {
        let store = OnPostgres::new(&db).await;
        let mut tx = store.begin().await;
        outbox().enqueue_ordered(&mut tx, Message::new("orders").key([0, 255, b'k']).payload("")).await.unwrap();
        // A writer in another language takes the same lock.
        let held: bool = sqlx::query_scalar(
            r"WITH lock AS (SELECT ('x' || encode(substr(sha256(
                  'oncebox.key'::bytea || '\x00'::bytea || 'orders'::bytea || '\x00'::bytea || '\x00ff6b'::bytea
              ), 1, 8), 'hex'))::bit(64)::bigint AS number)
              SELECT NOT pg_try_advisory_lock(number) FROM lock",
        )
        .fetch_one(&store.0)
        .await
        .unwrap();
        assert!(held);
    })
    .await;
}

#[tokio::test]
async fn keys_in_opposite_order_fail_with_a_retriable_error() {
    run(async |db| {
        let store = OnPostgres::new(&db).await;
        let mut one = store.begin().await;
        let mut two = store.begin().await;
        for tx in [&mut one, &mut two] {
            sqlx::raw_sql("SET LOCAL deadlock_timeout = '50ms'")
                .execute(&mut **tx)
                .await
                .unwrap();
        }
        let outbox: Outbox = outbox();
        outbox.enqueue_ordered(&mut one, plain("a")).await.unwrap();
        outbox.enqueue_ordered(&mut two, plain("b")).await.unwrap();
        let finish = async |mut tx: sqlx::PgTransaction<'static>, key| {
            outbox.enqueue_ordered(&mut tx, plain(key)).await?;
            tx.commit().await.unwrap();
            Ok::<_, oncebox_outbox::Error>(())
        };
        let (one, two) = tokio::join!(finish(one, "b"), finish(two, "a"));
        let error = match (one, two) {
            (Err(error), Ok(())) | (Ok(()), Err(error)) => error,
            both => panic!("one of two, not {both:?}"),
        };
        assert!(error.is_retriable(), "{error}");
        assert!(error.to_string().contains("deadlock"), "{error}");
        assert_eq!(keys(&store.rows().await).len(), 2);
    })
    .await;
}

#[tokio::test]
async fn a_batch_is_one_statement() {
    run(async |db| {
        let store = OnPostgres::new(&db).await;
        let mut tx = store.begin().await;
        outbox()
            .enqueue_all(&mut tx, (0..500).map(|n| plain(&n.to_string())).collect())
            .await
            .unwrap();
        tx.commit().await.unwrap();
        // cmin is the number of the command that wrote the row.
        assert_eq!(
            number(
                &store.0,
                "SELECT count(DISTINCT cmin::text) FROM shop_outbox"
            )
            .await,
            1
        );
    })
    .await;
}
