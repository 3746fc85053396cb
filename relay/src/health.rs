//! What a relay says about itself while it runs: readiness is progress.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What a relay is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// Connecting, or recovering.
    #[default]
    Starting,
    /// Watching another leader.
    Standby,
    /// Publishing.
    Leader,
    /// Ended.
    Stopped,
}

impl Role {
    /// Lower-case name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Standby => "standby",
            Self::Leader => "leader",
            Self::Stopped => "stopped",
        }
    }
}

/// The state at one moment.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Leader, standby, …
    pub role: Role,
    /// How long ago the relay last made progress: a look at an idle outbox, an acknowledged batch, or, on standby, a
    /// look at the mark. `None` before the first.
    pub last_progress: Option<Duration>,
    /// Messages that wait, at most: ids behind the position that may still be rolled back count too. 0 when idle.
    pub lag_messages: u64,
    /// Age in seconds of the oldest message that waits; 0 when idle.
    pub lag_seconds: f64,
    /// Messages published by this process.
    pub published: u64,
    /// Id intervals that may still be filled by open transactions.
    pub gaps: usize,
    /// Messages that are parked: refused by Kafka, or waiting behind one that is, or for a paused topic.
    pub parked: u64,
    /// Paused topics, and topics of which keys are paused.
    pub paused: Vec<String>,
    /// Why the position is held back, when it is.
    pub holding: Option<String>,
    /// The last error that made the relay start over, if nothing was published since.
    pub last_error: Option<String>,
    /// The acknowledged position's number.
    pub seq: i64,
    /// The acknowledged position's highest id.
    pub high: i64,
}

#[derive(Debug, Default)]
struct Inner {
    shown: Snapshot,
    progress: Option<Instant>,
    oldest_micros: Option<i64>,
}

/// A handle on a running relay's state. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Health(Arc<Mutex<Inner>>);

impl Health {
    /// A handle for a relay that has not started.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The state now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut shown = inner.shown.clone();
        shown.last_progress = inner.progress.map(|at| at.elapsed());
        shown.lag_seconds = inner.oldest_micros.map_or(0.0, |micros| {
            #[allow(clippy::cast_precision_loss, reason = "seconds for people")]
            let seconds = (now_micros() - micros) as f64 / 1e6;
            seconds.max(0.0)
        });
        metrics::gauge!("oncebox_relay_lag_seconds").set(shown.lag_seconds);
        shown
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut Snapshot)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner).shown);
    }

    pub(crate) fn progress(&self) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .progress = Some(Instant::now());
    }

    pub(crate) fn role(&self, role: Role) {
        self.update(|s| s.role = role);
        metrics::gauge!("oncebox_relay_leader").set(if role == Role::Leader { 1.0 } else { 0.0 });
    }

    /// Messages that wait, at most.
    pub(crate) fn lag(&self, messages: u64) {
        self.update(|s| s.lag_messages = messages);
        #[allow(clippy::cast_precision_loss, reason = "a gauge")]
        metrics::gauge!("oncebox_relay_lag_messages").set(messages as f64);
    }

    /// The oldest message that is not yet acknowledged; `None` = nothing waits.
    pub(crate) fn oldest(&self, created_at_micros: Option<i64>) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .oldest_micros = created_at_micros;
    }
}

fn now_micros() -> i64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| i64::try_from(d.as_micros()).unwrap_or(i64::MAX))
}
