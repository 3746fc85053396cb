//! A poison message is neither dropped nor a wall (G8).

use oncebox_inbox::HandlerError;
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
