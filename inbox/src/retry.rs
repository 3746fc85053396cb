//! When a message whose handler failed is tried again. Pure: the caller brings the jitter.

use std::time::Duration;

/// How often, and how soon, a handler that reported a retriable error is called again.
///
/// The delays double from `initial` up to `max`, with up to a quarter taken off at random so that consumers which
/// failed together do not come back together. After the last attempt the message goes to the dead-letter table.
/// While a message waits, its partition waits with it (order is kept) and the other partitions go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// How many times the handler is called in all. At least 1. Defaults to 10, which with the other defaults spends
    /// about half a minute on one message.
    pub attempts: u32,
    /// Delay before the second attempt. Defaults to 100 ms.
    pub initial: Duration,
    /// Longest delay between two attempts. Defaults to 10 s.
    pub max: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            attempts: 10,
            initial: Duration::from_millis(100),
            max: Duration::from_secs(10),
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

    /// The delay after `failed` attempts, or `None` when no attempt is left. `jitter` is in `0.0..1.0`.
    pub(crate) fn next(&self, failed: u32, jitter: f64) -> Option<Duration> {
        (failed < self.attempts).then(|| back_off(self.initial, self.max, failed, jitter))
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

    proptest! {
        #[test]
        fn delays_are_bounded_and_attempts_are_counted(attempts in 1u32..200, initial in 1u64..10_000, max in 1u64..100_000, failed in 1u32..400, jitter in 0.0f64..1.0) {
            let policy = RetryPolicy { attempts, initial: Duration::from_millis(initial), max: Duration::from_millis(max) };
            match policy.next(failed, jitter) {
                Some(delay) => {
                    prop_assert!(failed < attempts);
                    prop_assert!(delay <= policy.max);
                    prop_assert!(delay >= policy.initial.min(policy.max).mul_f64(0.749));
                }
                None => prop_assert!(failed >= attempts),
            }
            prop_assert!(outage(failed, jitter) <= Duration::from_secs(5));
        }
    }
}
