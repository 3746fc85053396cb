//! Many messages with injected duplicates: the seeds' 0.3 % and a hundred times that (A25). `cargo xtask bench soak` is the long run.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use uuid::Uuid;

use crate::scene::{Running, Scene, until};

/// Published in transactions of so many.
const CHUNK: usize = 5_000;

async fn duplicates_have_no_second_effect(of_a_thousand: u32) {
    const MESSAGES: usize = 60_000;
    let Some(scene) = Scene::new(4).await else {
        return;
    };
    let running = Running::new(scene.inbox().batch(500).handle_batch(|tx, deliveries| {
        Box::pin(async move {
            let ids: Vec<Uuid> = deliveries.iter().map(|d| d.message_id).collect();
            sqlx::query("INSERT INTO effect (payload) SELECT unnest($1::uuid[])::text")
                .bind(ids)
                .execute(&mut **tx)
                .await?;
            Ok(())
        })
    }));
    let mut rng = StdRng::seed_from_u64(7);
    let mut distinct: Vec<(String, Uuid)> = Vec::new();
    for _ in 0..MESSAGES / CHUNK {
        let mut chunk: Vec<(String, Uuid)> = Vec::with_capacity(CHUNK);
        for _ in 0..CHUNK {
            // Of the last while, most of them soon.
            let recent = distinct.len().min(2_000);
            if recent > 0 && rng.random_range(0..1_000) < of_a_thousand {
                let at = distinct.len() - 1 - rng.random_range(0..recent);
                chunk.push(distinct[at].clone());
            } else {
                let new = (format!("key {}", rng.random_range(0..500)), Uuid::now_v7());
                distinct.push(new.clone());
                chunk.push(new);
            }
        }
        let records = chunk.iter().map(|(key, id)| (&**key, "", *id));
        scene.publish(records).await;
    }
    let expected = i64::try_from(distinct.len()).unwrap();
    until(async || running.stats.effects() + running.stats.duplicates() >= MESSAGES as u64).await;
    // A second effect would come now.
    tokio::time::sleep(Duration::from_millis(300)).await;
    running.stop().await.unwrap();
    let effects = scene.count("SELECT count(*) FROM effect").await;
    let once = scene
        .count("SELECT count(DISTINCT payload) FROM effect")
        .await;
    assert_eq!((effects, once), (expected, expected));
    assert!(expected < MESSAGES as i64, "duplicates were injected");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a25_three_duplicates_of_a_thousand_have_no_second_effect() {
    duplicates_have_no_second_effect(3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a25_three_hundred_duplicates_of_a_thousand_have_no_second_effect() {
    duplicates_have_no_second_effect(300).await;
}
