//! Hints in front of the database: speed, never authority.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use oncebox_gate::{Cache, CacheConfig, Hint, Scope};
use uuid::Uuid;

use super::bench::{Bench, Options, until};

/// Says of every message that it is settled.
#[derive(Debug, Default)]
struct Liar {
    asked: AtomicU32,
}

impl Hint for Liar {
    fn known<'a>(&'a self, _: &'a Scope, ids: &'a [Uuid]) -> BoxFuture<'a, Vec<bool>> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        async { vec![true; ids.len()] }.boxed()
    }

    fn settled<'a>(&'a self, _: &'a Scope, _: &'a [Uuid]) -> BoxFuture<'a, ()> {
        async {}.boxed()
    }

    fn forget<'a>(&'a self, _: &'a Scope, _: &'a [Uuid]) -> BoxFuture<'a, ()> {
        async {}.boxed()
    }

    fn clear<'a>(&'a self, _: &'a Scope) -> BoxFuture<'a, ()> {
        async {}.boxed()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_a_hint_that_is_wrong_skips_nothing() {
    let bench = Bench::new(1).await;
    for n in 0..20 {
        bench.kafka.append(0, Uuid::now_v7(), &n.to_string());
    }
    let liar = Arc::new(Liar::default());
    let options = Options {
        hint: Some(Arc::clone(&liar) as Arc<dyn Hint>),
        ..Options::default()
    };
    let worker = bench.start(&[0], options);
    bench.settled(0, 20).await;
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await.len(), 20);
    assert_eq!(liar.asked.load(Ordering::SeqCst), 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_what_a_hint_knows_is_skipped_without_a_transaction_and_the_position_follows() {
    let bench = Bench::new(1).await;
    let ids: Vec<Uuid> = (0..10).map(|_| Uuid::now_v7()).collect();
    for id in &ids {
        bench.kafka.append(0, *id, "once");
    }
    let cache = Arc::new(Cache::new(CacheConfig::default()));
    let options = Options {
        hint: Some(cache),
        check_interval: Duration::from_millis(300),
        ..Options::default()
    };
    let worker = bench.start(&[0], options);
    bench.settled(0, 10).await;
    let before: i64 = bench.count("SELECT seq FROM oncebox_position").await;
    for id in &ids {
        bench.kafka.append(0, *id, "twice");
    }
    until(async || worker.stats.duplicates() == 10).await;
    bench.settled(0, 20).await;
    let after: i64 = bench.count("SELECT seq FROM oncebox_position").await;
    assert!(
        after - before < 10,
        "{before} {after}: not one transaction each"
    );
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await, ["once"; 10]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_a_hint_that_outlives_a_restored_database_skips_nothing() {
    let bench = Bench::new(1).await;
    let ids: Vec<Uuid> = (0..10).map(|_| Uuid::now_v7()).collect();
    for id in &ids {
        bench.kafka.append(0, *id, "effect");
    }
    let cache: Arc<dyn Hint> = Arc::new(Cache::new(CacheConfig::default()));
    let options = || Options {
        hint: Some(Arc::clone(&cache)),
        ..Options::default()
    };
    let worker = bench.start(&[0], options());
    bench.settled(0, 10).await;
    // An older backup: effects, marks and position of the last five messages are gone.
    let mut tx = bench.pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    for lost in [
        "DELETE FROM effect WHERE place >= 5",
        "DELETE FROM oncebox_inbox WHERE message_id IN (SELECT message_id FROM oncebox_inbox ORDER BY message_id LIMIT 5 OFFSET 5)",
        "UPDATE oncebox_position SET next = 5, seq = 5",
    ] {
        sqlx::query(lost).execute(&mut *tx).await.unwrap();
    }
    tx.commit().await.unwrap();
    bench.settled(0, 10).await;
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await.len(), 10);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_a_hint_skips_nothing_while_the_position_is_another() {
    // Another process has the partition: what is skipped here would never reach the position, and nobody would notice.
    let bench = Bench::new(1).await;
    let id = Uuid::now_v7();
    bench.kafka.append(0, id, "once");
    let worker = bench.start(
        &[0],
        Options {
            hint: Some(Arc::new(Liar::default())),
            check_interval: Duration::from_secs(60),
            ..Options::default()
        },
    );
    bench.settled(0, 1).await;
    sqlx::query("UPDATE oncebox_position SET owner = $1")
        .bind(Uuid::now_v7())
        .execute(&bench.pool)
        .await
        .unwrap();
    bench.kafka.append(0, id, "twice");
    // It takes the partition again instead of going on.
    until(async || worker.stats.ownership() == 2 && worker.stats.duplicates() == 1).await;
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await, ["once"]);
}
