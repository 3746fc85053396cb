//! Faults inside the inventory service: a handler that fails half-way, and a hint that forgets too soon.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use oncebox_gate::{Cache, CacheConfig, Hint, Scope};
use oncebox_inbox::HandlerError;
use uuid::Uuid;

/// The handler fails at one order in this many.
const FAILS: i64 = 50;

/// How long the hint remembers: shorter than the time until the duplicates come.
pub(super) const MEMORY: Duration = Duration::from_secs(1);

/// What a process of the inventory service keeps in memory.
#[derive(Clone, Debug)]
pub(super) struct Process {
    pub(super) hint: Arc<ShortMemory>,
    pub(super) half_way: Arc<HalfWay>,
}

/// The orders whose handler failed, so that the next attempt passes.
#[derive(Debug, Default)]
pub(super) struct HalfWay(Mutex<HashSet<i64>>);

impl HalfWay {
    /// Fails between two effects of one message, at the first attempt of every chosen order.
    pub(super) fn fail_once(&self, order: i64) -> Result<(), HandlerError> {
        if order % FAILS == 0 && locked(&self.0).insert(order) {
            return Err(HandlerError::retriable(
                "injected between the stock and the points",
            ));
        }
        Ok(())
    }

    /// How often it failed.
    pub(super) fn failures(&self) -> usize {
        locked(&self.0).len()
    }
}

/// A process-local hint that forgets after [`MEMORY`], and counts what it was asked for after that.
#[derive(Debug)]
pub(super) struct ShortMemory {
    cache: Cache,
    settled: Mutex<HashSet<Uuid>>,
    forgotten: Mutex<HashSet<Uuid>>,
}

impl ShortMemory {
    pub(super) fn new() -> Self {
        Self {
            cache: Cache::new(CacheConfig {
                ttl: MEMORY,
                ..CacheConfig::default()
            }),
            settled: Mutex::default(),
            forgotten: Mutex::default(),
        }
    }

    /// Messages that were known once, and asked for again when they were forgotten.
    pub(super) fn forgotten(&self) -> usize {
        locked(&self.forgotten).len()
    }
}

impl Hint for ShortMemory {
    fn known<'a>(&'a self, scope: &'a Scope, ids: &'a [Uuid]) -> BoxFuture<'a, Vec<bool>> {
        Box::pin(async move {
            let known = self.cache.known(scope, ids).await;
            let settled = locked(&self.settled);
            let missed = ids.iter().zip(&known).filter(|(_, known)| !**known);
            let forgotten = missed.map(|(id, _)| *id).filter(|id| settled.contains(id));
            locked(&self.forgotten).extend(forgotten);
            known
        })
    }

    fn settled<'a>(&'a self, scope: &'a Scope, ids: &'a [Uuid]) -> BoxFuture<'a, ()> {
        locked(&self.settled).extend(ids);
        self.cache.settled(scope, ids)
    }

    fn forget<'a>(&'a self, scope: &'a Scope, ids: &'a [Uuid]) -> BoxFuture<'a, ()> {
        self.cache.forget(scope, ids)
    }

    fn clear<'a>(&'a self, scope: &'a Scope) -> BoxFuture<'a, ()> {
        self.cache.clear(scope)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handler_fails_once_for_each_of_the_chosen_orders() {
        let half_way = HalfWay::default();
        assert!(half_way.fail_once(1).is_ok());
        assert!(half_way.fail_once(FAILS).is_err());
        assert!(half_way.fail_once(FAILS).is_ok());
        assert_eq!(half_way.failures(), 1);
    }

    #[tokio::test]
    async fn what_the_hint_knew_and_knows_no_more_is_counted_once() {
        let (hint, scope) = (ShortMemory::new(), Scope::new("1", "inventory"));
        let ids = [Uuid::from_u128(1), Uuid::from_u128(2)];
        assert_eq!(hint.known(&scope, &ids).await, [false, false]);
        hint.settled(&scope, &ids[..1]).await;
        assert_eq!(hint.known(&scope, &ids).await, [true, false]);
        assert_eq!(hint.forgotten(), 0);
        hint.clear(&scope).await;
        for _ in 0..2 {
            assert_eq!(hint.known(&scope, &ids).await, [false, false]);
        }
        assert_eq!(hint.forgotten(), 1);
    }
}
