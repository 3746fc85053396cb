//! The process-local hint: bounded in entries and in time.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _, ready};
use moka::policy::EvictionPolicy;
use uuid::Uuid;

use crate::{Hint, Scope};

/// How much the cache keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheConfig {
    /// Most ids, over all scopes; the least recently settled go first. About 200 bytes each. Defaults to 100 000.
    pub entries: u64,
    /// How long an id is kept. Not longer than the inbox keeps its marks: what the cache knows beyond that, the database does
    /// not confirm. Defaults to one hour.
    pub ttl: Duration,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            entries: 100_000,
            ttl: Duration::from_secs(3600),
        }
    }
}

/// Remembers what this process itself has committed. A redelivery after a rebalance or a lost offset is answered from memory;
/// a restart empties it.
///
/// ```
/// # futures_util::FutureExt::now_or_never(async {
/// use oncebox_gate::{Cache, CacheConfig, Hint, Scope};
/// use uuid::Uuid;
///
/// let cache = Cache::new(CacheConfig::default());
/// let scope = Scope::new("7301234567890123456/1", "inventory");
/// let id = Uuid::now_v7();
/// assert_eq!(cache.known(&scope, &[id]).await, [false]);
/// cache.settled(&scope, &[id]).await; // after the COMMIT
/// assert_eq!(cache.known(&scope, &[id]).await, [true]);
/// # }).unwrap();
/// ```
#[derive(Debug)]
pub struct Cache {
    ids: moka::sync::Cache<(u32, Uuid), ()>,
    scopes: RwLock<Scopes>,
}

/// A number for every scope: an entry holds 4 bytes instead of two strings, and a cleared scope takes a new number, which
/// none of its old entries has.
#[derive(Debug, Default)]
struct Scopes {
    numbers: HashMap<Scope, u32>,
    next: u32,
}

impl Scopes {
    fn renew(&mut self, scope: &Scope) -> u32 {
        self.next = self.next.wrapping_add(1);
        self.numbers.insert(scope.clone(), self.next);
        self.next
    }
}

impl Cache {
    /// An empty cache.
    #[must_use]
    pub fn new(config: CacheConfig) -> Self {
        let CacheConfig { entries, ttl } = config;
        let ids = moka::sync::Cache::builder()
            .max_capacity(entries)
            .time_to_live(ttl)
            // the default policy keeps what is asked for often; a message is asked for once, soon after it was settled
            .eviction_policy(EvictionPolicy::lru())
            .build();
        Self {
            ids,
            scopes: RwLock::default(),
        }
    }

    /// How many ids it holds, about: evictions are done in the background.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.ids.run_pending_tasks();
        self.ids.entry_count()
    }

    fn number(&self, scope: &Scope) -> Option<u32> {
        let scopes = self.scopes.read().unwrap_or_else(PoisonError::into_inner);
        scopes.numbers.get(scope).copied()
    }

    fn renew(&self, scope: &Scope) -> u32 {
        let mut scopes = self.scopes.write().unwrap_or_else(PoisonError::into_inner);
        scopes.renew(scope)
    }

    fn number_or_new(&self, scope: &Scope) -> u32 {
        if let Some(number) = self.number(scope) {
            return number;
        }
        let mut scopes = self.scopes.write().unwrap_or_else(PoisonError::into_inner);
        match scopes.numbers.get(scope) {
            Some(number) => *number,
            None => scopes.renew(scope),
        }
    }
}

impl Hint for Cache {
    fn known<'a>(&'a self, scope: &'a Scope, ids: &'a [Uuid]) -> BoxFuture<'a, Vec<bool>> {
        let known: Vec<bool> = match self.number(scope) {
            Some(number) => ids
                .iter()
                .map(|id| self.ids.contains_key(&(number, *id)))
                .collect(),
            None => vec![false; ids.len()],
        };
        crate::count("cache", &known);
        ready(known).boxed()
    }

    fn settled<'a>(&'a self, scope: &'a Scope, ids: &'a [Uuid]) -> BoxFuture<'a, ()> {
        async move {
            let number = self.number_or_new(scope);
            for id in ids {
                self.ids.insert((number, *id), ());
            }
        }
        .boxed()
    }

    fn forget<'a>(&'a self, scope: &'a Scope, ids: &'a [Uuid]) -> BoxFuture<'a, ()> {
        async move {
            if let Some(number) = self.number(scope) {
                for id in ids {
                    self.ids.invalidate(&(number, *id));
                }
            }
        }
        .boxed()
    }

    fn clear<'a>(&'a self, scope: &'a Scope) -> BoxFuture<'a, ()> {
        async move {
            self.renew(scope);
        }
        .boxed()
    }
}
