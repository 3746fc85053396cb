//! The process-local cache knows what was settled here, and is bounded.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _, ready};
use oncebox_gate::{Cache, CacheConfig, Chain, Hint, Scope};
use uuid::Uuid;

fn ids(n: usize) -> Vec<Uuid> {
    (0..n).map(|_| Uuid::now_v7()).collect()
}

fn scope() -> Scope {
    Scope::new("7/1", "inventory")
}

#[tokio::test]
async fn a13_only_settled_ids_are_known() {
    let cache = Cache::new(CacheConfig::default());
    let ids = ids(3);
    assert_eq!(cache.known(&scope(), &ids).await, [false; 3]);
    // asking does not make an id known
    assert_eq!(cache.known(&scope(), &ids).await, [false; 3]);
    cache.settled(&scope(), &ids[1..2]).await;
    assert_eq!(cache.known(&scope(), &ids).await, [false, true, false]);
    cache.forget(&scope(), &ids[1..2]).await;
    assert_eq!(cache.known(&scope(), &ids).await, [false; 3]);
}

#[tokio::test]
async fn a13_the_same_id_of_another_consumer_or_epoch_is_another_message() {
    let cache = Cache::new(CacheConfig::default());
    let ids = ids(1);
    cache.settled(&scope(), &ids).await;
    for other in [
        Scope::new("7/1", "billing"),
        Scope::new("7/2", "inventory"),
        Scope::new("7/1i", "nventory"),
    ] {
        assert_eq!(cache.known(&other, &ids).await, [false], "{other:?}");
    }
}

#[tokio::test]
async fn a13_a_cleared_scope_knows_nothing_and_the_others_are_left() {
    let cache = Cache::new(CacheConfig::default());
    let (ids, other) = (ids(10), Scope::new("7/1", "billing"));
    cache.settled(&scope(), &ids).await;
    cache.settled(&other, &ids).await;
    cache.clear(&scope()).await;
    assert_eq!(
        cache.known(&scope(), &ids).await,
        [false; 10],
        "known after the database lost commits"
    );
    assert_eq!(cache.known(&other, &ids).await, [true; 10]);
    cache.settled(&scope(), &ids[..1]).await;
    assert!(cache.known(&scope(), &ids).await[0]);
}

#[tokio::test]
async fn a13_the_cache_is_bounded_in_entries_and_keeps_the_newest() {
    let cache = Cache::new(CacheConfig {
        entries: 100,
        ..CacheConfig::default()
    });
    let ids = ids(5_000);
    for id in &ids {
        cache.settled(&scope(), &[*id]).await;
    }
    assert!(cache.entries() <= 100, "{} entries", cache.entries());
    assert!(cache.known(&scope(), &ids[4_990..]).await.contains(&true));
    assert!(!cache.known(&scope(), &ids[..1_000]).await.contains(&true));
}

#[tokio::test]
async fn a13_an_id_is_forgotten_after_its_time() {
    let cache = Cache::new(CacheConfig {
        ttl: Duration::from_millis(100),
        ..CacheConfig::default()
    });
    let ids = ids(1);
    cache.settled(&scope(), &ids).await;
    tokio::time::sleep(Duration::from_millis(150)).await;
    assert_eq!(cache.known(&scope(), &ids).await, [false]);
}

/// Knows everything but the nil id, and notes what it was asked for.
#[derive(Debug, Default)]
struct Noting(Mutex<Vec<Uuid>>);

impl Hint for Noting {
    fn known<'a>(&'a self, _: &'a Scope, ids: &'a [Uuid]) -> BoxFuture<'a, Vec<bool>> {
        self.0.lock().unwrap().extend(ids);
        ready(ids.iter().map(|id| !id.is_nil()).collect()).boxed()
    }

    fn settled<'a>(&'a self, _: &'a Scope, _: &'a [Uuid]) -> BoxFuture<'a, ()> {
        ready(()).boxed()
    }

    fn forget<'a>(&'a self, _: &'a Scope, _: &'a [Uuid]) -> BoxFuture<'a, ()> {
        ready(()).boxed()
    }

    fn clear<'a>(&'a self, _: &'a Scope) -> BoxFuture<'a, ()> {
        ready(()).boxed()
    }
}

#[tokio::test]
async fn a13_a_chain_asks_the_next_hint_only_for_what_is_still_open() {
    let (near, far) = (
        Arc::new(Cache::new(CacheConfig::default())),
        Arc::new(Noting::default()),
    );
    let chain = Chain::new(vec![near.clone(), far.clone()]);
    let [a, b] = [Uuid::now_v7(), Uuid::now_v7()];
    chain.settled(&scope(), &[a]).await;
    assert_eq!(
        chain.known(&scope(), &[Uuid::nil(), a, b]).await,
        [false, true, true]
    );
    assert_eq!(*far.0.lock().unwrap(), [Uuid::nil(), b]);
    chain.clear(&scope()).await;
    assert_eq!(near.known(&scope(), &[a]).await, [false]);
}
