//! Partitions move between consumers: no effect twice, none missing, order per key kept (G4, G5, G6).

use std::time::Duration;

use crate::scene::{Running, Scene, effect, until};

const MESSAGES: i32 = 1_200;

fn slow(scene: &Scene, name: &'static str) -> Running {
    Running::new(scene.inbox().handle(move |tx, delivery| {
        Box::pin(async move {
            effect(tx, delivery).await?;
            sqlx::query("UPDATE effect SET by = $1 WHERE n = lastval()")
                .bind(name)
                .execute(&mut **tx)
                .await?;
            tokio::time::sleep(Duration::from_millis(3)).await;
            Ok(())
        })
    }))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_consumers_share_and_hand_over_partitions() {
    let Some(scene) = Scene::new(4).await else {
        return;
    };
    scene.publish_numbers(0..MESSAGES / 2).await;
    let one = slow(&scene, "one");
    scene.effects_reach(50).await;
    let two = slow(&scene, "two");
    // The first may have done all of these before the second has joined: the rest comes when both have partitions.
    until(async || two.stats.ownership() > 0).await;
    scene.publish_numbers(MESSAGES / 2..MESSAGES).await;
    until(async || two.stats.effects() >= 50).await;
    assert!(one.stats.effects() > 0);
    let taken = [&one, &two].map(|consumer| consumer.stats.ownership());
    assert_eq!(
        taken,
        [4, 2],
        "the partitions that stay are not taken again"
    );
    one.stop().await.unwrap();
    scene.effects_reach(i64::from(MESSAGES)).await;
    two.stop().await.unwrap();
    let mut numbers: Vec<i32> = scene
        .effects()
        .await
        .iter()
        .map(|p| p.parse().unwrap())
        .collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (0..MESSAGES).collect::<Vec<_>>(), "each once");
    let inversions = scene
        .count("SELECT count(*) FROM (SELECT place, lag(place) OVER (PARTITION BY partition ORDER BY n) AS before FROM effect) x WHERE place <= before")
        .await;
    assert_eq!(inversions, 0, "in the order of the partition");
    assert_eq!(
        scene.count("SELECT count(DISTINCT by) FROM effect").await,
        2
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_without_a_partition_waits_and_takes_over() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    scene.publish_numbers(0..20).await;
    let one = slow(&scene, "one");
    scene.effects_reach(20).await;
    let two = slow(&scene, "two");
    tokio::time::sleep(Duration::from_secs(1)).await;
    one.stop().await.unwrap();
    scene.publish_numbers(20..30).await;
    scene.effects_reach(30).await;
    two.stop().await.unwrap();
    assert_eq!(scene.effects().await.len(), 30);
}
