//! The circuit breaker: after some failures in a row nobody asks any more, until one probe has been answered.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What the breaker in front of Redis does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BreakerState {
    /// Requests pass.
    Closed,
    /// Nothing passes: the database decides alone.
    Open,
    /// One request is on its way to find out whether Redis is back; nothing else passes.
    HalfOpen,
}

#[derive(Debug)]
pub(crate) struct Breaker {
    limit: u32,
    cool_down: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Closed { failures: u32 },
    Open { until: Instant },
    HalfOpen,
}

impl Breaker {
    /// Opens after `limit` failures in a row, for `cool_down`.
    pub(crate) fn new(limit: u32, cool_down: Duration) -> Self {
        Self {
            limit,
            cool_down,
            state: Mutex::new(State::Closed { failures: 0 }),
        }
    }

    /// Whether a request may pass now. `None` = the breaker is open.
    pub(crate) fn admit(&self, now: Instant) -> Option<Permit<'_>> {
        let mut state = self.state();
        let probe = match *state {
            State::Closed { .. } => false,
            State::Open { until } if now >= until => true,
            State::Open { .. } | State::HalfOpen => return None,
        };
        if probe {
            *state = State::HalfOpen;
        }
        Some(Permit {
            breaker: self,
            probe,
            reported: false,
        })
    }

    pub(crate) fn now(&self) -> BreakerState {
        match *self.state() {
            State::Closed { .. } => BreakerState::Closed,
            State::Open { .. } => BreakerState::Open,
            State::HalfOpen => BreakerState::HalfOpen,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that passes; it says how it went.
#[derive(Debug)]
pub(crate) struct Permit<'a> {
    breaker: &'a Breaker,
    probe: bool,
    reported: bool,
}

impl Permit<'_> {
    /// Redis answered. Whether that closed the breaker.
    pub(crate) fn answered(mut self) -> bool {
        self.reported = true;
        let mut state = self.breaker.state();
        match *state {
            State::Closed { .. } => *state = State::Closed { failures: 0 },
            State::HalfOpen if self.probe => {
                *state = State::Closed { failures: 0 };
                return true;
            }
            // an answer to what was asked before it opened: the probe decides
            State::Open { .. } | State::HalfOpen => {}
        }
        false
    }

    /// Redis did not answer. Whether that opened the breaker.
    pub(crate) fn failed(mut self, now: Instant) -> bool {
        self.reported = true;
        let mut state = self.breaker.state();
        let open = State::Open {
            until: now + self.breaker.cool_down,
        };
        match *state {
            State::Closed { failures } if failures + 1 < self.breaker.limit => {
                *state = State::Closed {
                    failures: failures + 1,
                };
                false
            }
            State::Closed { .. } => {
                *state = open;
                true
            }
            State::HalfOpen if self.probe => {
                *state = open;
                false
            }
            State::Open { .. } | State::HalfOpen => false,
        }
    }
}

impl Drop for Permit<'_> {
    /// A probe whose future was dropped has found out nothing: the next request is the probe.
    fn drop(&mut self) {
        if self.probe && !self.reported {
            *self.breaker.state() = State::Open {
                until: Instant::now(),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COOL_DOWN: Duration = Duration::from_secs(5);

    fn open(now: Instant) -> Breaker {
        let breaker = Breaker::new(2, COOL_DOWN);
        assert!(!breaker.admit(now).unwrap().failed(now));
        assert!(breaker.admit(now).unwrap().failed(now));
        breaker
    }

    #[test]
    fn failures_in_a_row_open_it_and_an_answer_in_between_does_not() {
        let now = Instant::now();
        let breaker = Breaker::new(2, COOL_DOWN);
        for _ in 0..5 {
            breaker.admit(now).unwrap().failed(now);
            breaker.admit(now).unwrap().answered();
        }
        assert_eq!(breaker.now(), BreakerState::Closed);
        let breaker = open(now);
        assert_eq!(breaker.now(), BreakerState::Open);
        assert!(breaker.admit(now).is_none());
    }

    #[test]
    fn one_probe_after_the_cool_down_decides() {
        let now = Instant::now();
        let breaker = open(now);
        let later = now + COOL_DOWN;
        let probe = breaker.admit(later).unwrap();
        assert_eq!(breaker.now(), BreakerState::HalfOpen);
        assert!(breaker.admit(later).is_none(), "one probe at a time");
        probe.failed(later);
        assert!(breaker.admit(later).is_none(), "open again");
        let probe = breaker.admit(later + COOL_DOWN).unwrap();
        assert!(probe.answered());
        assert_eq!(breaker.now(), BreakerState::Closed);
    }

    #[test]
    fn a_dropped_probe_leaves_the_next_request_to_probe() {
        let now = Instant::now();
        let breaker = open(now);
        drop(breaker.admit(now + COOL_DOWN).unwrap());
        assert!(breaker.admit(now + COOL_DOWN).is_some());
    }

    #[test]
    fn an_answer_from_before_it_opened_does_not_close_it() {
        let now = Instant::now();
        let breaker = Breaker::new(1, COOL_DOWN);
        let (early, late) = (breaker.admit(now).unwrap(), breaker.admit(now).unwrap());
        early.failed(now);
        assert!(!late.answered());
        assert_eq!(breaker.now(), BreakerState::Open);
    }
}
