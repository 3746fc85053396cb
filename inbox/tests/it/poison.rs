//! A poison message is neither dropped nor a wall (G8).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use oncebox_inbox::{HandlerError, RetryPolicy};
use sqlx::Row;
use uuid::Uuid;

use crate::scene::{Running, Scene, effect, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_poison_goes_to_the_dead_letters_and_the_partition_goes_on() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    let payloads = [
        "before",
        "panic",
        "not json",
        "constraint",
        "data",
        "swallowed",
        "retriable",
        "after",
    ];
    let ids: Vec<Uuid> = payloads.iter().map(|_| Uuid::now_v7()).collect();
    scene
        .publish(payloads.iter().zip(&ids).map(|(p, id)| ("key", *p, *id)))
        .await;
    // Deferred: the error comes with the COMMIT.
    sqlx::query("CREATE TABLE checked (v int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        .execute(&scene.pool)
        .await
        .unwrap();
    sqlx::query("INSERT INTO checked VALUES (1)")
        .execute(&scene.pool)
        .await
        .unwrap();
    let running = Running::new(scene.inbox().handle(|tx, delivery| {
        Box::pin(async move {
            effect(tx, delivery.clone()).await?;
            match delivery.payload.as_deref().unwrap_or_default() {
                b"panic" => panic!("the panic of this test"),
                b"not json" => {
                    delivery.json::<u32>()?;
                }
                b"constraint" => {
                    sqlx::query("INSERT INTO checked VALUES (1)")
                        .execute(&mut **tx)
                        .await?;
                }
                b"data" => {
                    sqlx::query("SELECT 1 / 0").execute(&mut **tx).await?;
                }
                b"swallowed" => {
                    let _ = sqlx::query("SELECT 1 / 0").execute(&mut **tx).await;
                }
                b"retriable" => return Err(HandlerError::retriable("still not\0")),
                _ => {}
            }
            Ok(())
        })
    }));
    until(async || scene.next(0).await >= 8).await;
    let stats = running.stats.clone();
    running.stop().await.unwrap();
    assert_eq!(scene.effects().await, ["before", "after"]);
    assert_eq!(scene.marks().await, 8);
    assert_eq!(stats.dead_letters(), 6);
    let letters = sqlx::query("SELECT message_id, payload, error, attempts FROM oncebox_dead_letter ORDER BY record_offset")
        .fetch_all(&scene.pool)
        .await
        .unwrap();
    let found: Vec<(Uuid, Vec<u8>)> = letters
        .iter()
        .map(|r| (r.get("message_id"), r.get("payload")))
        .collect();
    let expected: Vec<_> = (1..7)
        .map(|n| (ids[n], payloads[n].as_bytes().to_vec()))
        .collect();
    assert_eq!(found, expected);
    let attempts: Vec<i32> = letters.iter().map(|r| r.get("attempts")).collect();
    assert_eq!(
        attempts,
        [1, 1, 1, 1, 3, 3],
        "fatal at once, the others after their retries"
    );
    let errors: Vec<String> = letters.iter().map(|r| r.get("error")).collect();
    for (error, part) in errors.iter().zip([
        "the panic",
        "expected",
        "checked",
        "division by zero",
        "aborted",
        "still not",
    ]) {
        assert!(error.contains(part), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_a_delayed_message_holds_nobody_and_has_its_effect_once() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    scene.publish_numbers(0..20).await;
    let repaired = Arc::new(AtomicBool::new(false));
    let start = || {
        let repaired = Arc::clone(&repaired);
        let policy = RetryPolicy {
            attempts: 1_000,
            initial: Duration::from_millis(500),
            max: Duration::from_millis(500),
            fast: 0,
        };
        let inbox = scene.inbox().batch(5).retry(policy).delayed_retries(true);
        Running::new(inbox.handle(move |tx, delivery| {
            let broken = !repaired.load(SeqCst) && delivery.offset % 4 == 0;
            Box::pin(async move {
                effect(tx, delivery).await?;
                if broken {
                    return Err(HandlerError::retriable("not yet\0"));
                }
                Ok(())
            })
        }))
    };
    // Both look for what is due.
    let (one, two) = (start(), start());
    scene.effects_reach(15).await;
    let delayed = "SELECT count(*) FROM oncebox_dead_letter WHERE delayed AND attempts > 1";
    until(async || scene.count(delayed).await == 5).await;
    repaired.store(true, SeqCst);
    let letters = "SELECT count(*) FROM oncebox_dead_letter";
    until(async || scene.count(letters).await == 0).await;
    for running in [one, two] {
        running.stop().await.unwrap();
    }
    let mut effects = scene.effects().await;
    effects.sort_by_key(|n| n.parse::<i32>().unwrap());
    let expected: Vec<String> = (0..20).map(|n| n.to_string()).collect();
    assert_eq!(effects, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_consumers_that_fail_on_the_same_message_write_one_dead_letter() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    let id = Uuid::now_v7();
    scene.publish([("key", "a", id), ("key", "a", id)]).await;
    let running = Running::new(
        scene
            .inbox()
            .handle(|_tx, _delivery| Box::pin(async move { Err(HandlerError::fatal("no")) })),
    );
    until(async || scene.next(0).await >= 2).await;
    running.stop().await.unwrap();
    assert_eq!(
        scene
            .count("SELECT count(*) FROM oncebox_dead_letter")
            .await,
        1
    );
}
