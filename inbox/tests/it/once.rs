//! Effect, mark and position commit together, once per message (G5); the offset follows (G7).

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncebox_inbox::{Dedup, Step};
use sqlx::Row;
use uuid::Uuid;

use crate::scene::{Running, Scene, at, effect, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_effect_and_mark_commit_together() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    scene.publish_numbers(0..3).await;
    // The second message's transaction stands still before its COMMIT: neither half of it may be seen.
    let (go, wait) = channel::<()>();
    let wait = Mutex::new(wait);
    let hook = at(Step::BeforeCommit, 2, move || {
        let _ = wait.lock().unwrap().recv();
    });
    let running = Running::new(
        scene
            .inbox()
            .on_step(hook)
            .handle(|tx, delivery| Box::pin(effect(tx, delivery))),
    );
    scene.effects_reach(1).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(scene.effects().await, ["0"]);
    assert_eq!(scene.marks().await, 1);
    assert_eq!(scene.next(0).await, 1);
    go.send(()).unwrap();
    scene.effects_reach(3).await;
    running.stop().await.unwrap();
    let together = sqlx::query(
        "SELECT (SELECT count(DISTINCT xmin::text) FROM effect) AS transactions, \
         (SELECT count(*) FROM oncebox_inbox i JOIN effect e ON e.xmin = i.xmin) AS pairs",
    )
    .fetch_one(&scene.pool)
    .await
    .unwrap();
    assert_eq!(together.get::<i64, _>("transactions"), 3);
    assert_eq!(
        together.get::<i64, _>("pairs"),
        3,
        "each effect has a mark of the same transaction"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_duplicate_deliveries_have_one_effect() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    let ids: Vec<Uuid> = (0..10).map(|_| Uuid::now_v7()).collect();
    // The producer's duplicates: published three times.
    for _ in 0..3 {
        scene.publish(ids.iter().map(|id| ("key", "x", *id))).await;
    }
    let running = scene.start();
    until(async || running.stats.effects() + running.stats.duplicates() == 30).await;
    running.stop().await.unwrap();
    assert_eq!(scene.effects().await.len(), 10);
    // Kafka's redelivery: somebody sets the position back, the marks stay.
    sqlx::query("UPDATE oncebox_position SET next = 0")
        .execute(&scene.pool)
        .await
        .unwrap();
    let running = scene.start();
    until(async || running.stats.duplicates() == 30).await;
    let stats = running.stats.clone();
    running.stop().await.unwrap();
    assert_eq!((stats.effects(), stats.duplicates()), (0, 30));
    assert_eq!(scene.effects().await.len(), 10);
    assert_eq!(scene.marks().await, 10);
}

/// Nothing is lost with the effect that went with a transaction which the handler ended by itself, and the position of which
/// would have moved alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_a_handler_that_ends_its_transaction_moves_no_position() {
    for (dedup, end) in [
        (Dedup::ByOffset, "ROLLBACK"),
        (Dedup::ByOffset, "ROLLBACK AND CHAIN"),
        (Dedup::ById, "ROLLBACK"),
    ] {
        let Some(scene) = Scene::new(1).await else {
            return;
        };
        scene.publish_numbers(0..1).await;
        let calls = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&calls);
        let inbox = scene.inbox().dedup(dedup);
        let running = Running::new(inbox.handle(move |tx, delivery| {
            let first = count.fetch_add(1, SeqCst) == 0;
            Box::pin(async move {
                effect(tx, delivery).await?;
                if first {
                    sqlx::query(end).execute(&mut **tx).await?;
                }
                Ok(())
            })
        }));
        scene.effects_reach(1).await;
        until(async || scene.next(0).await == 1).await;
        let retries = running.stats.retries();
        running.stop().await.unwrap();
        assert_eq!((scene.effects().await, retries), (vec!["0".to_owned()], 1));
        assert_eq!(calls.load(SeqCst), 2, "{dedup:?} {end}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_envelope_reaches_the_handler() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    let id = Uuid::now_v7();
    scene.publish([("key", "{\"n\": 7}", id)]).await;
    let seen = std::sync::Arc::new(Mutex::new(None));
    let slot = std::sync::Arc::clone(&seen);
    let running = Running::new(scene.inbox().handle(move |_tx, delivery| {
        *slot.lock().unwrap() = Some(delivery);
        Box::pin(async move { Ok(()) })
    }));
    until(async || running.stats.effects() == 1).await;
    running.stop().await.unwrap();
    let delivery = seen.lock().unwrap().take().unwrap();
    assert_eq!(delivery.message_id, id);
    assert_eq!(delivery.kind(), Some("order.paid"));
    assert_eq!(delivery.source(), Some("shop"));
    assert_eq!(
        (delivery.source_epoch, delivery.outbox_id),
        (Some(1), Some(1))
    );
    assert_eq!(
        delivery.created_at.unwrap().unix_timestamp_nanos(),
        1_764_447_713_123_456_000
    );
    assert_eq!(delivery.json::<serde_json::Value>().unwrap()["n"], 7);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g7_offset_follows_the_database() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    scene.publish_numbers(0..5).await;
    let (go, wait) = channel::<()>();
    let wait = Mutex::new(wait);
    let hook = at(Step::BeforeCommit, 3, move || {
        let _ = wait.lock().unwrap().recv();
    });
    let running = Running::new(
        scene
            .inbox()
            .on_step(hook)
            .handle(|tx, delivery| Box::pin(effect(tx, delivery))),
    );
    scene.effects_reach(2).await;
    // Longer than the interval at which offsets go to Kafka.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(scene.next(0).await, 2);
    assert!(
        scene.committed(0).await.unwrap_or(0) <= 2,
        "no offset before its transaction"
    );
    go.send(()).unwrap();
    scene.effects_reach(5).await;
    running.stop().await.unwrap();
    // Or after the transaction marker behind them.
    let next = scene.next(0).await;
    assert!((5..=6).contains(&next), "{next}");
    assert_eq!(
        scene.committed(0).await,
        Some(next),
        "a shutdown commits what is settled"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restored_database_gets_what_it_lost_again() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    scene.publish_numbers(0..10).await;
    let running = scene.start();
    scene.effects_reach(10).await;
    // The state after four messages, without a rebalance and without a new session.
    let mut tx = scene.pool.begin().await.unwrap();
    for sql in [
        "DELETE FROM oncebox_inbox WHERE xmin::text IN (SELECT xmin::text FROM effect WHERE place >= 4)",
        "DELETE FROM effect WHERE place >= 4",
        "UPDATE oncebox_position SET next = 4, seq = seq - 6",
    ] {
        sqlx::query(sql).execute(&mut *tx).await.unwrap();
    }
    tx.commit().await.unwrap();
    scene.effects_reach(10).await;
    running.stop().await.unwrap();
    let expected: Vec<String> = (0..10).map(|n| n.to_string()).collect();
    assert_eq!(scene.effects().await, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g6_a_transaction_that_began_before_the_row_was_taken_is_rejected() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    scene.publish_numbers(0..3).await;
    let (go, wait) = channel::<()>();
    let wait = Mutex::new(wait);
    let calls = std::sync::Arc::new(Mutex::new(Vec::new()));
    let seen = std::sync::Arc::clone(&calls);
    let hook = at(Step::Handled, 2, move || {
        let _ = wait.lock().unwrap().recv();
    });
    let running = Running::new(scene.inbox().on_step(hook).handle(move |tx, delivery| {
        seen.lock().unwrap().push(delivery.offset);
        Box::pin(effect(tx, delivery))
    }));
    until(async || calls.lock().unwrap().len() == 2).await;
    // What a new owner does first.
    sqlx::query("UPDATE oncebox_position SET owner = gen_random_uuid(), seq = seq + 1")
        .execute(&scene.pool)
        .await
        .unwrap();
    go.send(()).unwrap();
    scene.effects_reach(3).await;
    let stats = running.stats.clone();
    running.stop().await.unwrap();
    assert_eq!(scene.effects().await, ["0", "1", "2"]);
    assert_eq!(
        *calls.lock().unwrap(),
        [0, 1, 1, 2],
        "handled again after the rejection"
    );
    assert_eq!(stats.ownership(), 2);
}
