//! The connection to Redis: shared, made in the background, replaced when it no longer answers.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ErrorKind, FromRedisValue, RedisError, ScriptInvocation,
    ServerErrorKind,
};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::Error;

/// After so many requests in a row without an answer the connection is given up and made anew: the server may be gone without
/// a word, or have moved.
const UNANSWERED: u32 = 3;

/// Where Redis is, and how long to wait for it.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisConfig {
    /// For example `redis://:password@redis.internal:6379/0`. One server (or the address of the current primary), not a
    /// cluster. TLS (`rediss://`) is not compiled in.
    pub url: String,
    /// The first part of every key: two environments may share one Redis. 1 to 64 letters, digits, `-`, `_`, `.`.
    pub environment: String,
    /// Longest time for a new connection, in the background: no request waits longer than its own time-out. Defaults to 1 s.
    pub connect_timeout: Duration,
    /// Longest time for one request of a [`Lease`](crate::Lease) or a [`Reserve`](crate::Reserve); the gate has its own,
    /// shorter one. Defaults to 250 ms.
    pub request_timeout: Duration,
}

impl RedisConfig {
    /// This server, this environment, and the defaults.
    pub fn new(url: impl Into<String>, environment: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            environment: environment.into(),
            connect_timeout: Duration::from_secs(1),
            request_timeout: Duration::from_millis(250),
        }
    }
}

impl fmt::Debug for RedisConfig {
    /// Without the URL: it may hold a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConfig")
            .field("environment", &self.environment)
            .field("connect_timeout", &self.connect_timeout)
            .field("request_timeout", &self.request_timeout)
            .finish_non_exhaustive()
    }
}

/// A Redis server for gate, leases and reservations. Cheap to clone; all clones share one connection. What uses it runs in a
/// tokio runtime with I/O and time.
///
/// ```no_run
/// # fn example() -> Result<(), oncebox_gate::Error> {
/// use oncebox_gate::{Redis, RedisConfig};
///
/// let redis = Redis::new(RedisConfig::new("redis://127.0.0.1:6379", "production"))?;
/// # let _ = redis; Ok(()) }
/// ```
#[derive(Clone)]
pub struct Redis(Arc<Link>);

struct Link {
    client: Client,
    environment: String,
    connect_timeout: Duration,
    request_timeout: Duration,
    state: Mutex<State>,
}

enum State {
    Down,
    Connecting(watch::Receiver<Attempt>),
    Up(Up),
}

struct Up {
    connection: MultiplexedConnection,
    number: u64,
    unanswered: u32,
}

/// `None` while it lasts.
type Attempt = Option<Result<(), Failure>>;

/// Why a request has no answer.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum Failure {
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    #[error("{0}")]
    Redis(Arc<RedisError>),
    #[error("the connection was not made")]
    NotConnected,
}

impl From<RedisError> for Failure {
    fn from(error: RedisError) -> Self {
        Self::Redis(Arc::new(error))
    }
}

impl Redis {
    /// Checks the settings. Connects at the first request.
    ///
    /// # Errors
    ///
    /// [`Error::Url`] or [`Error::Invalid`]. Not when Redis is down: that is no reason not to start.
    pub fn new(config: RedisConfig) -> Result<Self, Error> {
        let RedisConfig {
            url,
            environment,
            connect_timeout,
            request_timeout,
        } = config;
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if environment.is_empty() || environment.len() > 64 || !environment.chars().all(plain) {
            let rule = "1 to 64 letters, digits, `-`, `_`, `.`";
            return Err(Error::invalid("environment", environment, rule));
        }
        for (name, value) in [
            ("connect_timeout", connect_timeout),
            ("request_timeout", request_timeout),
        ] {
            if value.is_zero() {
                return Err(Error::invalid(name, value, "longer than 0"));
            }
        }
        let client = Client::open(url).map_err(|error| Error::Url(error.to_string()))?;
        Ok(Self(Arc::new(Link {
            client,
            environment,
            connect_timeout,
            request_timeout,
            state: Mutex::new(State::Down),
        })))
    }

    /// `oncebox:<environment>:<kind>`, then the parts, each after a colon. No two lists of parts give one key.
    pub(crate) fn key(&self, kind: &str, parts: &[&str]) -> String {
        let mut key = format!("oncebox:{}:{kind}", self.0.environment);
        for part in parts {
            key.push(':');
            escape(part, &mut key);
        }
        key
    }

    pub(crate) fn request_timeout(&self) -> Duration {
        self.0.request_timeout
    }

    /// One command, answered within `limit`, the connection included.
    pub(crate) async fn command<T>(&self, command: &Cmd, limit: Duration) -> Result<T, Failure>
    where
        T: FromRedisValue + Send,
    {
        let ask = |mut connection: MultiplexedConnection| async move {
            command.query_async(&mut connection).await
        };
        self.within(limit, ask).await
    }

    /// One script, answered within `limit`, the connection included.
    pub(crate) async fn script<T>(
        &self,
        script: &ScriptInvocation<'_>,
        limit: Duration,
    ) -> Result<T, Failure>
    where
        T: FromRedisValue + Send,
    {
        let ask = |mut connection: MultiplexedConnection| async move {
            script.invoke_async(&mut connection).await
        };
        self.within(limit, ask).await
    }

    async fn within<T, Fut>(
        &self,
        limit: Duration,
        ask: impl FnOnce(MultiplexedConnection) -> Fut + Send,
    ) -> Result<T, Failure>
    where
        T: Send,
        Fut: Future<Output = Result<T, RedisError>> + Send,
    {
        let mut asked = None;
        let answer = timeout(limit, async {
            let (number, connection) = self.connection().await?;
            asked = Some(number);
            ask(connection).await.map_err(Failure::from)
        })
        .await
        .unwrap_or(Err(Failure::TimedOut(limit)));
        if let Some(number) = asked {
            self.0.note(number, answer.as_ref().err());
        }
        answer
    }

    async fn connection(&self) -> Result<(u64, MultiplexedConnection), Failure> {
        loop {
            let mut attempt = {
                let mut state = self.0.state();
                match &*state {
                    State::Up(up) => return Ok((up.number, up.connection.clone())),
                    State::Connecting(attempt) => attempt.clone(),
                    State::Down => {
                        let attempt = self.connect();
                        *state = State::Connecting(attempt.clone());
                        attempt
                    }
                }
            };
            match attempt.wait_for(Option::is_some).await.as_deref() {
                Ok(Some(Ok(()))) => {}
                Ok(Some(Err(failure))) => return Err(failure.clone()),
                // the task is gone, with its runtime
                Ok(None) | Err(_) => {
                    *self.0.state() = State::Down;
                    return Err(Failure::NotConnected);
                }
            }
        }
    }

    /// In a task of its own: a request whose time is over must not take the attempt with it, or a connection that takes longer
    /// than a request would never be made.
    fn connect(&self) -> watch::Receiver<Attempt> {
        let (done, attempt) = watch::channel(None);
        let link = Arc::clone(&self.0);
        tokio::spawn(async move {
            let limit = link.connect_timeout;
            let config = AsyncConnectionConfig::new()
                .set_connection_timeout(Some(limit))
                // requests bring their own limit
                .set_response_timeout(None);
            let connecting = link
                .client
                .get_multiplexed_async_connection_with_config(&config);
            let made = match timeout(limit, connecting).await {
                Ok(Ok(connection)) => Ok(connection),
                Ok(Err(error)) => Err(Failure::from(error)),
                Err(_) => Err(Failure::TimedOut(limit)),
            };
            let (state, outcome) = match made {
                Ok(connection) => (State::Up(Up::new(connection)), Ok(())),
                Err(failure) => (State::Down, Err(failure)),
            };
            *link.state() = state;
            let _ = done.send(Some(outcome));
        });
        attempt
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis")
            .field("environment", &self.0.environment)
            .finish_non_exhaustive()
    }
}

impl Up {
    fn new(connection: MultiplexedConnection) -> Self {
        static NUMBERS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        Self {
            connection,
            number: NUMBERS.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
            unanswered: 0,
        }
    }
}

impl Link {
    /// Gives the connection up when it is broken, or silent for too long.
    fn note(&self, number: u64, failure: Option<&Failure>) {
        let mut state = self.state();
        let State::Up(up) = &mut *state else { return };
        if up.number != number {
            return;
        }
        let give_up = match failure {
            None => {
                up.unanswered = 0;
                false
            }
            Some(Failure::Redis(error)) => {
                // a primary that was demoted: the address may lead to the new one by now
                error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
                    || error.is_unrecoverable_error()
            }
            Some(Failure::TimedOut(_) | Failure::NotConnected) => {
                up.unanswered += 1;
                up.unanswered >= UNANSWERED
            }
        };
        if give_up {
            *state = State::Down;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Letters, digits, `-`, `_`, `.`, `/` as they are; every other byte as `%` and two digits: neither the colon between the
/// parts nor the braces of a hash tag can come out of a name.
fn escape(part: &str, key: &mut String) {
    for byte in part.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_./".contains(&byte) {
            key.push(char::from(byte));
        } else {
            key.push('%');
            for half in [byte >> 4, byte & 15] {
                key.push(char::from(b"0123456789abcdef"[usize::from(half)]));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redis() -> Redis {
        Redis::new(RedisConfig::new("redis://:secret@127.0.0.1:1", "test")).unwrap()
    }

    #[test]
    fn no_two_lists_of_parts_give_one_key() {
        let redis = redis();
        assert_eq!(redis.key("done", &["7/1", "a"]), "oncebox:test:done:7/1:a");
        assert_ne!(
            redis.key("done", &["a:b", "c"]),
            redis.key("done", &["a", "b:c"])
        );
        assert_ne!(redis.key("done", &["%3a"]), redis.key("done", &[":"]));
        assert_eq!(redis.key("x", &["é{"]), "oncebox:test:x:%c3%a9%7b");
    }

    #[test]
    fn the_password_is_in_no_text() {
        let config = RedisConfig::new("redis://:secret@127.0.0.1:1", "test");
        let wrong = Redis::new(RedisConfig::new("redis://:secret@host:port:x", "test"));
        for text in [
            format!("{config:?}"),
            format!("{:?}", redis()),
            format!("{:?}", wrong.unwrap_err()),
        ] {
            assert!(!text.contains("secret"), "{text}");
        }
    }

    #[test]
    fn wrong_settings_are_refused_with_their_name() {
        for environment in ["", "a:b", "ü"] {
            let error = Redis::new(RedisConfig::new("redis://h", environment)).unwrap_err();
            assert!(error.to_string().contains("environment"), "{error}");
        }
    }
}
