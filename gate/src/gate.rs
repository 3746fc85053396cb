//! The hint that the processes of a consumer share: done-marks in Redis, written after the commit.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, FutureExt as _};
use redis::{Cmd, Script, cmd};
use uuid::Uuid;

use crate::breaker::{Breaker, BreakerState};
use crate::link::{Failure, Redis};
use crate::{Error, Hint, Scope};

/// Writes the marks. KEYS: the scope's generation, then one key per id. ARGV: the mark without generation, milliseconds.
static SETTLE: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local mark = ARGV[1]
local generation = redis.call('GET', KEYS[1])
if generation then
  mark = mark .. '#' .. generation
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
for at = 2, #KEYS do
  redis.call('SET', KEYS[at], mark, 'PX', ARGV[2])
end
return 1",
    )
});

/// How long marks live, and how much Redis may cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GateConfig {
    /// How long a mark lives: the window for which the inbox keeps its own marks, or less. No default.
    pub window: Duration,
    /// The longest time after which a message may come again: all retries with their back-off, and how long Kafka may deliver
    /// it again. The window is not shorter. No default.
    pub retry_horizon: Duration,
    /// Most time that one call may take, for any number of ids, the connection included. Defaults to 5 ms.
    pub timeout: Duration,
    /// After so many calls in a row without an answer the breaker opens: nobody asks Redis any more. Defaults to 5.
    pub failures: u32,
    /// How long the breaker stays open before one call tries again. Defaults to 5 s.
    pub cool_down: Duration,
}

impl GateConfig {
    /// This window and this retry horizon, and the defaults.
    #[must_use]
    pub fn new(window: Duration, retry_horizon: Duration) -> Self {
        Self {
            window,
            retry_horizon,
            timeout: Duration::from_millis(5),
            failures: 5,
            cool_down: Duration::from_secs(5),
        }
    }

    fn check(&self) -> Result<(), Error> {
        if self.window < self.retry_horizon {
            return Err(Error::WindowTooShort {
                window: self.window,
                horizon: self.retry_horizon,
            });
        }
        for (name, value) in [
            ("window", self.window),
            ("timeout", self.timeout),
            ("cool_down", self.cool_down),
        ] {
            if value < Duration::from_millis(1) {
                return Err(Error::invalid(name, value, "at least 1 ms"));
            }
        }
        if self.failures == 0 {
            return Err(Error::invalid("failures", self.failures, "at least 1"));
        }
        Ok(())
    }
}

/// A [`Hint`] in Redis, shared by all processes of a consumer.
///
/// The value of a mark is `D:<epoch>`, under a key of environment, database epoch, consumer and id; it expires after the window.
/// Whatever else is found there is a miss. One `MGET` asks for a whole batch, one script writes it.
///
/// Redis never makes anything fail and never costs more than [`GateConfig::timeout`] per call: after some calls without an
/// answer a circuit breaker opens, and the database works alone until a probe is answered.
///
/// Metrics: `oncebox_gate_known_total{hint, answer}`, `oncebox_gate_failures_total{operation}`, `oncebox_gate_breaker_open`
/// (1 unless closed).
///
/// ```no_run
/// # fn example() -> Result<(), oncebox_gate::Error> {
/// use std::time::Duration;
///
/// use oncebox_gate::{GateConfig, Redis, RedisConfig, RedisGate};
///
/// let redis = Redis::new(RedisConfig::new("redis://127.0.0.1:6379", "production"))?;
/// let (window, retry_horizon) = (Duration::from_secs(7 * 86_400), Duration::from_secs(86_400));
/// let gate = RedisGate::new(redis, GateConfig::new(window, retry_horizon))?;
/// # let _ = gate; Ok(()) }
/// ```
#[derive(Debug)]
pub struct RedisGate {
    redis: Redis,
    window: Duration,
    timeout: Duration,
    breaker: Breaker,
}

impl RedisGate {
    /// Checks the settings; asks Redis for nothing.
    ///
    /// # Errors
    ///
    /// [`Error::WindowTooShort`] when a mark would be gone before the last repetition of its message can arrive, or
    /// [`Error::Invalid`].
    pub fn new(redis: Redis, config: GateConfig) -> Result<Self, Error> {
        config.check()?;
        let GateConfig {
            window,
            retry_horizon: _,
            timeout,
            failures,
            cool_down,
        } = config;
        metrics::gauge!("oncebox_gate_breaker_open").set(0.0);
        Ok(Self {
            redis,
            window,
            timeout,
            breaker: Breaker::new(failures, cool_down),
        })
    }

    /// What the breaker does now.
    #[must_use]
    pub fn breaker(&self) -> BreakerState {
        self.breaker.now()
    }

    fn key(&self, scope: &Scope, id: &Uuid) -> String {
        let id = id.as_simple().to_string();
        self.redis
            .key("done", &[&scope.epoch, &scope.consumer, &id])
    }

    /// The key of the scope's generation: a random word that [`clear`](Hint::clear) writes. Marks of another one are misses,
    /// so that a scope is cleared by one write, however many marks it has. It outlives the marks from before it.
    fn generation(&self, scope: &Scope) -> String {
        let parts = [&*scope.epoch, &*scope.consumer];
        self.redis.key("generation", &parts)
    }

    async fn ask(&self, scope: &Scope, ids: &[Uuid]) -> Vec<bool> {
        let mut mget = cmd("MGET");
        mget.arg(self.generation(scope));
        for id in ids {
            mget.arg(self.key(scope, id));
        }
        let asked = self.redis.command(&mget, self.timeout);
        let values: Option<Vec<Option<Vec<u8>>>> = self.guarded("known", asked).await;
        match values.as_deref() {
            Some([generation, values @ ..]) if values.len() == ids.len() => {
                let mut mark = mark(scope).into_bytes();
                if let Some(generation) = generation {
                    mark.push(b'#');
                    mark.extend(generation);
                }
                // G5: only a mark of this epoch was written after a commit of this database
                let is_mark = |value: &Option<Vec<u8>>| value.as_ref() == Some(&mark);
                values.iter().map(is_mark).collect()
            }
            _ => vec![false; ids.len()],
        }
    }

    async fn write(&self, operation: &'static str, command: &Cmd) {
        let written = self.redis.command::<()>(command, self.timeout);
        self.guarded(operation, written).await;
    }

    /// The answer, or `None` when the breaker is open or Redis has failed.
    async fn guarded<T>(
        &self,
        operation: &'static str,
        request: impl Future<Output = Result<T, Failure>> + Send,
    ) -> Option<T> {
        let permit = self.breaker.admit(Instant::now())?;
        match request.await {
            Ok(answer) => {
                if permit.answered() {
                    tracing::info!("redis answers again, the gate is in use");
                    metrics::gauge!("oncebox_gate_breaker_open").set(0.0);
                }
                Some(answer)
            }
            Err(failure) => {
                metrics::counter!("oncebox_gate_failures_total", "operation" => operation)
                    .increment(1);
                if permit.failed(Instant::now()) {
                    tracing::warn!(%failure, "redis does not answer, the database works alone");
                    metrics::gauge!("oncebox_gate_breaker_open").set(1.0);
                }
                None
            }
        }
    }
}

impl Hint for RedisGate {
    fn known<'a>(&'a self, scope: &'a Scope, ids: &'a [Uuid]) -> BoxFuture<'a, Vec<bool>> {
        async move {
            if ids.is_empty() {
                return Vec::new();
            }
            let known = self.ask(scope, ids).await;
            crate::count("redis", &known);
            known
        }
        .boxed()
    }

    fn settled<'a>(&'a self, scope: &'a Scope, ids: &'a [Uuid]) -> BoxFuture<'a, ()> {
        async move {
            if ids.is_empty() {
                return;
            }
            let mut settle = SETTLE.key(self.generation(scope));
            for id in ids {
                settle.key(self.key(scope, id));
            }
            settle.arg(mark(scope)).arg(millis(self.window));
            let written = self.redis.script::<i64>(&settle, self.timeout);
            self.guarded("settled", written).await;
        }
        .boxed()
    }

    fn forget<'a>(&'a self, scope: &'a Scope, ids: &'a [Uuid]) -> BoxFuture<'a, ()> {
        async move {
            if ids.is_empty() {
                return;
            }
            let mut unlink = cmd("UNLINK");
            for id in ids {
                unlink.arg(self.key(scope, id));
            }
            self.write("forget", &unlink).await;
        }
        .boxed()
    }

    fn clear<'a>(&'a self, scope: &'a Scope) -> BoxFuture<'a, ()> {
        async move {
            let mut set = cmd("SET");
            set.arg(self.generation(scope))
                .arg(Uuid::new_v4().as_simple().to_string())
                .arg("PX")
                .arg(millis(self.window));
            self.write("clear", &set).await;
        }
        .boxed()
    }
}

/// The mark of a committed message, before the first `clear`.
fn mark(scope: &Scope) -> String {
    format!("D:{}", scope.epoch)
}

/// Milliseconds as Redis takes them.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
