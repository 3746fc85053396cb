//! When a message whose handler failed is tried again. Pure: the caller brings the jitter.

use std::time::Duration;

/// How often, and how soon, a handler that reported a retriable error is called again.
///
/// The delays double from `initial` up to `max`, with up to a quarter taken off at random so that consumers which
/// failed together do not come back together; or they come in two grades, see [`RetryPolicy::graded`]. After the last attempt
/// follows what [`OnFailure`] says. While a message waits, its lane waits with it (the order of a key is kept) and the others
/// go on. Attempts that are followed by a delay of half a second or more are written down in the database, so that a restart
/// or a rebalance goes on counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// How many times the handler is called in all. At least 1. Defaults to 10, which with the other defaults spends
    /// about half a minute on one message.
    pub attempts: u32,
    /// Delay before the second attempt. Defaults to 100 ms.
    pub initial: Duration,
    /// Longest delay between two attempts. Defaults to 10 s.
    pub max: Duration,
    /// So many attempts follow each other with the delay `initial`, all later ones with the delay `max`. Defaults to 0: the
    /// delay doubles.
    pub fast: u32,
}

/// What becomes of a message that has failed for the last time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFailure {
    /// It goes to the dead-letter table, and its key goes on without it. The default.
    #[default]
    DeadLetter,
    /// It goes to the dead-letter table as a parked message, and every later message of its key goes there too, unhandled,
    /// until an operator releases the key (`oncebox dead replay`): the order of the key is kept and the partition never
    /// stalls. A message without a key becomes a dead letter.
    BlockKey,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            attempts: 10,
            initial: Duration::from_millis(100),
            max: Duration::from_secs(10),
            fast: 0,
        }
    }
}

impl RetryPolicy {
    /// Calls the handler once; a retriable error is a dead letter at once.
    #[must_use]
    pub fn never() -> Self {
        Self {
            attempts: 1,
            ..Self::default()
        }
    }

    /// Three attempts 100 ms apart, then one every 10 s, 16 in all: a glitch costs nothing, an outage of a downstream system
    /// of two minutes costs no message.
    #[must_use]
    pub fn graded() -> Self {
        Self {
            attempts: 16,
            fast: 3,
            ..Self::default()
        }
    }

    /// The longest time from the first attempt to the last, without the handler's own time.
    #[must_use]
    pub fn horizon(&self) -> Duration {
        // From some attempt on all delays are the longest one.
        let doubling = self.attempts.min(self.fast.max(32));
        let first: Duration = (1..doubling).filter_map(|n| self.next(n, 0.0)).sum();
        let rest = self.attempts.saturating_sub(doubling.max(1));
        first.saturating_add(self.max.saturating_mul(rest))
    }

    /// The delay after `failed` attempts, or `None` when no attempt is left. `jitter` is in `0.0..1.0`.
    pub(crate) fn next(&self, failed: u32, jitter: f64) -> Option<Duration> {
        let delay = match self.fast {
            0 => back_off(self.initial, self.max, failed, jitter),
            fast if failed < fast => back_off(self.initial, self.initial, 1, jitter),
            _ => back_off(self.max, self.max, 1, jitter),
        };
        (failed < self.attempts).then_some(delay)
    }
}

/// Back-off of our own statements and requests (database or broker unreachable): without limit, because nothing is
/// lost by waiting and everything by giving up.
pub(crate) fn outage(failed: u32, jitter: f64) -> Duration {
    back_off(
        Duration::from_millis(100),
        Duration::from_secs(5),
        failed,
        jitter,
    )
}

fn back_off(initial: Duration, max: Duration, failed: u32, jitter: f64) -> Duration {
    let doublings = failed.saturating_sub(1).min(31);
    let full = initial.saturating_mul(1 << doublings).min(max);
    full.mul_f64(1.0 - 0.25 * jitter.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_default_spends_about_half_a_minute() {
        let policy = RetryPolicy::default();
        let total: Duration = (1..policy.attempts)
            .map(|n| policy.next(n, 0.0).unwrap())
            .sum();
        assert_eq!(total, Duration::from_millis(32_700));
        assert_eq!(policy.next(policy.attempts, 0.0), None);
    }

    #[test]
    fn the_graded_policy_is_three_fast_and_then_every_ten_seconds() {
        let policy = RetryPolicy::graded();
        let delays: Vec<_> = (1..=16).map(|n| policy.next(n, 0.0)).collect();
        let (fast, slow) = (Duration::from_millis(100), Duration::from_secs(10));
        assert_eq!(delays[..2], [Some(fast); 2]);
        assert_eq!(delays[2..15], [Some(slow); 13]);
        assert_eq!(delays[15], None);
        assert_eq!(policy.horizon(), fast * 2 + slow * 13);
        let default = RetryPolicy::default();
        assert_eq!(default.horizon(), Duration::from_millis(32_700));
        let long = RetryPolicy {
            attempts: 1_000,
            ..default
        };
        assert_eq!(long.horizon(), Duration::from_millis(32_700) + 990 * slow);
    }

    proptest! {
        #[test]
        fn delays_are_bounded_and_attempts_are_counted(attempts in 1u32..200, initial in 1u64..10_000, max in 1u64..100_000, failed in 1u32..400, fast in 0u32..5, jitter in 0.0f64..1.0) {
            let policy = RetryPolicy { attempts, initial: Duration::from_millis(initial), max: Duration::from_millis(max), fast };
            match policy.next(failed, jitter) {
                Some(delay) => {
                    prop_assert!(failed < attempts);
                    prop_assert!(delay <= policy.max.max(policy.initial));
                    prop_assert!(delay >= policy.initial.min(policy.max).mul_f64(0.749));
                }
                None => prop_assert!(failed >= attempts),
            }
            prop_assert!(outage(failed, jitter) <= Duration::from_secs(5));
        }
    }
}
