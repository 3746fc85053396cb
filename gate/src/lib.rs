//! What sits in front of the database: it may be lost, emptied or unreachable at any time, and that costs speed, never
//! correctness.
//!
//! * [`Hint`]: which messages are known to be committed. [`Cache`] remembers what this process committed, [`RedisGate`] what
//!   any process of the consumer did; [`Chain`] asks one after the other. The inbox verifies what a hint says by one indexed
//!   read.
//! * [`Lease`]: a lock in Redis that is renewed while the work lasts, and tells its holder in time when it is over. It spares
//!   double work; fencing is the database's.
//! * [`Reserve`]: stock taken in advance in Redis, so that a rush does not reach the database. The database's own
//!   `stock >= n` decides.
//!
//! ```no_run
//! # async fn example() -> Result<(), oncebox_gate::Error> {
//! # #[cfg(feature = "redis")] {
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use oncebox_gate::{Cache, CacheConfig, Chain, GateConfig, Hint, Redis, RedisConfig, RedisGate, Scope};
//!
//! let redis = Redis::new(RedisConfig::new("redis://127.0.0.1:6379", "production"))?;
//! let (window, retry_horizon) = (Duration::from_secs(7 * 86_400), Duration::from_secs(86_400));
//! let gate = RedisGate::new(redis, GateConfig::new(window, retry_horizon))?;
//! let hint = Chain::new(vec![Arc::new(Cache::new(CacheConfig::default())), Arc::new(gate)]);
//!
//! let scope = Scope::new("7301234567890123456/1", "inventory");
//! let ids = [uuid::Uuid::now_v7()];
//! if !hint.known(&scope, &ids).await[0] {
//!     // BEGIN; mark; handler; position; COMMIT
//!     hint.settled(&scope, &ids).await;
//! }
//! # } Ok(()) }
//! ```
//!
//! # Features
//!
//! * `cache` (default): [`Cache`].
//! * `redis`: [`Redis`], [`RedisGate`], [`Lease`], [`Reserve`]. Compiles no C; without TLS.
//!
#![cfg_attr(
    not(feature = "cache"),
    doc = "[`Cache`]: https://docs.rs/oncebox-gate"
)]
#![cfg_attr(
    not(feature = "redis"),
    doc = "[`Redis`]: https://docs.rs/oncebox-gate"
)]
#![cfg_attr(
    not(feature = "redis"),
    doc = "[`RedisGate`]: https://docs.rs/oncebox-gate"
)]
#![cfg_attr(
    not(feature = "redis"),
    doc = "[`Lease`]: https://docs.rs/oncebox-gate"
)]
#![cfg_attr(
    not(feature = "redis"),
    doc = "[`Reserve`]: https://docs.rs/oncebox-gate"
)]

#[cfg(feature = "redis")]
mod breaker;
#[cfg(feature = "cache")]
mod cache;
#[cfg(feature = "redis")]
mod error;
#[cfg(feature = "redis")]
mod gate;
mod hint;
#[cfg(feature = "redis")]
mod lease;
#[cfg(feature = "redis")]
mod link;
#[cfg(feature = "redis")]
mod reserve;

#[cfg(feature = "redis")]
pub use breaker::BreakerState;
#[cfg(feature = "cache")]
pub use cache::{Cache, CacheConfig};
#[cfg(feature = "redis")]
pub use error::Error;
#[cfg(feature = "redis")]
pub use gate::{GateConfig, RedisGate};
pub use hint::{Chain, Hint, Scope};
#[cfg(feature = "redis")]
pub use lease::{Lease, Released};
#[cfg(feature = "redis")]
pub use link::{Redis, RedisConfig};
#[cfg(feature = "redis")]
pub use reserve::{Confirmation, End, Reconciled, Release, Reservation, Reserve, ReserveConfig};

/// `oncebox_gate_known_total`: hits and misses of a hint.
#[cfg(any(feature = "cache", feature = "redis"))]
fn count(hint: &'static str, known: &[bool]) {
    let hits = known.iter().filter(|known| **known).count();
    for (answer, count) in [("hit", hits), ("miss", known.len() - hits)] {
        metrics::counter!("oncebox_gate_known_total", "hint" => hint, "answer" => answer)
            .increment(count as u64);
    }
}
