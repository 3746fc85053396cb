//! A lock in Redis with an end: taken, renewed while the work lasts, given back by its holder only.

use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use redis::{Script, cmd};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::Error;
use crate::gate::millis;
use crate::link::{Failure, Redis};

/// The shortest time to live: three renewals have to fit.
const SHORTEST: Duration = Duration::from_millis(100);

static RENEW: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0",
    )
});

static RELEASE: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0",
    )
});

/// What a release found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// The lock was still this holder's, and is free now.
    Free,
    /// The lock had expired; it is free or another's, and was left alone.
    NotHeld,
}

/// A lock in Redis that one process holds for a name, renewed by a task of its own at a third of its time to live, so that the
/// work may take longer than that.
///
/// **An optimisation, not a proof.** A lease spares work that two processes would do at the same time. It cannot keep a holder
/// that was stopped between its last look and its write from writing after all; no lock outside the database can. What must
/// not happen twice is fenced by the database: a mark, an expected version, the compare-and-set of the position row.
///
/// The holder is told in time: [`is_held`](Self::is_held), [`lost`](Self::lost) and [`signal`](Self::signal) go by the local
/// monotonic clock, and say that the lease is over no later than one time to live after the last renewal that Redis has
/// confirmed was *sent*; that is before Redis gives the name to anybody else. That holds also when Redis is unreachable, and
/// for a process that was stopped: the first look after it goes on says so. A clock that stands still while the whole machine
/// is suspended is not noticed. What is over stays over.
///
/// Dropping it stops the renewal and gives the signal; the lock then expires by itself. [`release`](Self::release) gives it
/// back at once.
///
/// ```no_run
/// # async fn example(redis: oncebox_gate::Redis) -> Result<(), oncebox_gate::Error> {
/// use std::time::Duration;
///
/// use oncebox_gate::Lease;
///
/// if let Some(lease) = Lease::take(&redis, "nightly-report", Duration::from_secs(10)).await? {
///     tokio::select! {
///         () = report() => {}
///         () = lease.lost() => {} // stop: somebody else may begin now
///     }
///     lease.release().await?;
/// }
/// # Ok(()) }
/// # async fn report() {}
/// ```
#[derive(Debug)]
pub struct Lease {
    lock: Lock,
    held: Arc<Held>,
    watchdog: JoinHandle<()>,
}

/// The lock as Redis knows it.
#[derive(Debug, Clone)]
struct Lock {
    redis: Redis,
    key: String,
    token: String,
    ttl: Duration,
}

/// Until when the holder may believe that it holds.
#[derive(Debug)]
struct Held {
    until: Mutex<Instant>,
    over: CancellationToken,
}

impl Lease {
    /// Takes the name for `ttl` (at least 100 ms; 10 s is a good value), if nobody holds it. `None` = somebody does.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`], or [`Error::Unavailable`] when Redis does not answer; the name may be taken for one `ttl` then.
    ///
    /// # Cancel safety
    ///
    /// When the future is dropped, the name may stay taken for one `ttl`.
    pub async fn take(redis: &Redis, name: &str, ttl: Duration) -> Result<Option<Self>, Error> {
        if ttl < SHORTEST {
            return Err(Error::invalid("ttl", ttl, "at least 100 ms"));
        }
        let lock = Lock {
            redis: redis.clone(),
            key: redis.key("lease", &[name]),
            token: Uuid::new_v4().as_simple().to_string(),
            ttl,
        };
        // the clock starts before the request: Redis starts its own later
        let asked = Instant::now();
        if !lock
            .take()
            .await
            .map_err(Error::unavailable("take the lease"))?
        {
            return Ok(None);
        }
        let held = Arc::new(Held {
            until: Mutex::new(asked + lock.believed()),
            over: CancellationToken::new(),
        });
        let watchdog = tokio::spawn(watch(lock.clone(), Arc::clone(&held), asked));
        Ok(Some(Self {
            lock,
            held,
            watchdog,
        }))
    }

    /// Whether the lease is still held, by the clock of this moment: look right before what only the holder should do.
    #[must_use]
    pub fn is_held(&self) -> bool {
        !self.held.is_over()
    }

    /// Waits until the lease is over.
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time.
    pub async fn lost(&self) {
        while !self.held.is_over() {
            tokio::select! {
                () = self.held.over.cancelled() => {}
                () = sleep_until(self.held.until()) => {}
            }
        }
    }

    /// Cancelled when the lease is over, given back or dropped: for tasks that outlive a borrow. It is given by the renewal
    /// task; after a stop of the whole process [`is_held`](Self::is_held) knows earlier.
    #[must_use]
    pub fn signal(&self) -> CancellationToken {
        self.held.over.clone()
    }

    /// Stops the renewal, then gives the lock back if it is still this holder's. Another's is never touched.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`]: the lock expires by itself.
    ///
    /// # Cancel safety
    ///
    /// When the future is dropped, the renewal has stopped or stops, and the lock expires by itself.
    pub async fn release(mut self) -> Result<Released, Error> {
        self.watchdog.abort();
        // nothing renews a lock that was given back
        let _ = (&mut self.watchdog).await;
        let released = self.lock.release().await;
        match released.map_err(Error::unavailable("give the lease back"))? {
            true => Ok(Released::Free),
            false => Ok(Released::NotHeld),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.watchdog.abort();
        self.held.over.cancel();
    }
}

impl Lock {
    async fn take(&self) -> Result<bool, Failure> {
        let mut set = cmd("SET");
        set.arg(&self.key)
            .arg(&self.token)
            .arg("NX")
            .arg("PX")
            .arg(millis(self.ttl));
        let limit = self.redis.request_timeout();
        let taken: Option<String> = self.redis.command(&set, limit).await?;
        Ok(taken.is_some())
    }

    async fn renew(&self) -> Result<bool, Failure> {
        let mut script = RENEW.key(&self.key);
        script.arg(&self.token).arg(millis(self.ttl));
        // two attempts fit before the end, whatever the first one waits for
        let limit = self.redis.request_timeout().min(self.ttl / 6);
        let renewed: i64 = self.redis.script(&script, limit).await?;
        Ok(renewed == 1)
    }

    async fn release(&self) -> Result<bool, Failure> {
        let mut script = RELEASE.key(&self.key);
        script.arg(&self.token);
        let limit = self.redis.request_timeout();
        let deleted: i64 = self.redis.script(&script, limit).await?;
        Ok(deleted == 1)
    }

    /// How long the holder believes in it: a little less than Redis does, for two clocks do not run alike.
    fn believed(&self) -> Duration {
        self.ttl - self.ttl / 100
    }
}

impl Held {
    fn until(&self) -> Instant {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.over.is_cancelled() || Instant::now() >= self.until()
    }

    /// A renewal was confirmed. Whether it came in time: what is over stays over, for others may have seen it so.
    fn extend(&self, until: Instant) -> bool {
        let mut held = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        if Instant::now() >= *held {
            return false;
        }
        *held = until;
        true
    }
}

/// Renews until the lease is over, or the task is aborted. However it ends, the signal is given.
async fn watch(lock: Lock, held: Arc<Held>, taken: Instant) {
    let _signal = held.over.clone().drop_guard();
    let mut next = taken + lock.ttl / 3;
    loop {
        tokio::select! {
            // first: after a stop of the process both times have passed
            biased;
            () = sleep_until(held.until()) => return lost(&lock, "not renewed in time"),
            () = sleep_until(next) => {}
        }
        let asked = Instant::now();
        let renewed = tokio::select! {
            biased;
            () = sleep_until(held.until()) => return lost(&lock, "not renewed in time"),
            renewed = lock.renew() => renewed,
        };
        match renewed {
            Ok(true) if held.extend(asked + lock.believed()) => next = asked + lock.ttl / 3,
            Ok(true) => return lost(&lock, "renewed too late"),
            Ok(false) => return lost(&lock, "the lock is gone"),
            Err(failure) => {
                tracing::debug!(%failure, key = lock.key, "lease not renewed, trying again");
                next = Instant::now() + lock.ttl / 12;
            }
        }
    }
}

fn lost(lock: &Lock, reason: &str) {
    tracing::warn!(key = lock.key, reason, "lease lost");
    metrics::counter!("oncebox_lease_lost_total").increment(1);
}
