//! Many messages that fail in a row are an outage and not poison.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Counts failures in a row, by topic.
#[derive(Debug)]
pub(crate) struct Breaker {
    limit: Option<u32>,
    failures: BTreeMap<Arc<str>, u32>,
}

impl Breaker {
    /// Without a limit it never trips.
    pub(crate) fn new(limit: Option<u32>) -> Self {
        Self {
            limit,
            failures: BTreeMap::new(),
        }
    }

    /// A message was given up. Says how many that were in a row when it is time to stop instead of writing it off.
    pub(crate) fn failed(&mut self, topic: &Arc<str>) -> Option<u32> {
        let failures = self.failures.entry(Arc::clone(topic)).or_default();
        *failures += 1;
        self.limit
            .filter(|limit| *failures >= *limit)
            .map(|_| *failures)
    }

    /// A message had its effect.
    pub(crate) fn succeeded(&mut self, topic: &Arc<str>) {
        self.failures.remove(topic);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failures_in_a_row_count() {
        let topic: Arc<str> = "orders".into();
        let mut breaker = Breaker::new(Some(3));
        assert_eq!(breaker.failed(&topic), None);
        assert_eq!(breaker.failed(&topic), None);
        breaker.succeeded(&topic);
        assert_eq!(breaker.failed(&topic), None);
        assert_eq!(breaker.failed(&topic), None);
        assert_eq!(breaker.failed(&topic), Some(3));
        let mut never = Breaker::new(None);
        assert!((0..100).all(|_| never.failed(&topic).is_none()));
    }
}
