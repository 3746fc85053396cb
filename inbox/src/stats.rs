//! Counters: a cheap handle for programs, and the `metrics` facade for dashboards.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use metrics::Counter;

/// Live counters of one [`Inbox`](crate::Inbox). Clones share the numbers.
///
/// The same events go to the `metrics` facade with the labels `consumer` and `topic`:
///
/// | metric | counts |
/// |---|---|
/// | `oncebox_inbox_deliveries_total` | messages received from Kafka |
/// | `oncebox_inbox_duplicates_total` | deliveries that were already settled: found by the mark or below the position |
/// | `oncebox_inbox_effects_total` | handler transactions that committed |
/// | `oncebox_inbox_retries_total` | handler calls that failed and will be repeated |
/// | `oncebox_inbox_dead_letters_total` | messages written to the dead-letter table |
/// | `oncebox_inbox_ownership_total` | times a partition's position row was taken |
#[derive(Clone, Debug, Default)]
pub struct Stats {
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    deliveries: AtomicU64,
    duplicates: AtomicU64,
    effects: AtomicU64,
    retries: AtomicU64,
    dead_letters: AtomicU64,
    ownership: AtomicU64,
}

impl Stats {
    /// Messages received from Kafka.
    #[must_use]
    pub fn deliveries(&self) -> u64 {
        self.counts.deliveries.load(Ordering::Relaxed)
    }

    /// Deliveries that were already settled.
    #[must_use]
    pub fn duplicates(&self) -> u64 {
        self.counts.duplicates.load(Ordering::Relaxed)
    }

    /// Handler transactions that committed.
    #[must_use]
    pub fn effects(&self) -> u64 {
        self.counts.effects.load(Ordering::Relaxed)
    }

    /// Handler calls that failed and will be repeated.
    #[must_use]
    pub fn retries(&self) -> u64 {
        self.counts.retries.load(Ordering::Relaxed)
    }

    /// Messages written to the dead-letter table.
    #[must_use]
    pub fn dead_letters(&self) -> u64 {
        self.counts.dead_letters.load(Ordering::Relaxed)
    }

    /// Times a partition's position row was taken.
    #[must_use]
    pub fn ownership(&self) -> u64 {
        self.counts.ownership.load(Ordering::Relaxed)
    }
}

/// The counters of one topic: the shared handle and the facade's.
#[derive(Clone)]
pub(crate) struct TopicCounters {
    stats: Stats,
    deliveries: Counter,
    duplicates: Counter,
    effects: Counter,
    retries: Counter,
    dead_letters: Counter,
    ownership: Counter,
}

macro_rules! counted {
    ($($name:ident),*) => {$(
        pub(crate) fn $name(&self) {
            self.stats.counts.$name.fetch_add(1, Ordering::Relaxed);
            self.$name.increment(1);
        }
    )*};
}

impl TopicCounters {
    pub(crate) fn new(stats: Stats, consumer: &str, topic: &str) -> Self {
        let counter = |name: &'static str| metrics::counter!(name, "consumer" => consumer.to_owned(), "topic" => topic.to_owned());
        Self {
            stats,
            deliveries: counter("oncebox_inbox_deliveries_total"),
            duplicates: counter("oncebox_inbox_duplicates_total"),
            effects: counter("oncebox_inbox_effects_total"),
            retries: counter("oncebox_inbox_retries_total"),
            dead_letters: counter("oncebox_inbox_dead_letters_total"),
            ownership: counter("oncebox_inbox_ownership_total"),
        }
    }

    counted!(
        deliveries,
        duplicates,
        effects,
        retries,
        dead_letters,
        ownership
    );
}

#[cfg(test)]
mod tests {
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};

    use super::*;

    #[test]
    fn every_event_is_counted_in_the_handle_and_in_the_facade() {
        let recorder = DebuggingRecorder::new();
        let snapshotter = recorder.snapshotter();
        let stats = Stats::default();
        metrics::with_local_recorder(&recorder, || {
            let counters = TopicCounters::new(stats.clone(), "inventory", "orders");
            counters.deliveries();
            counters.deliveries();
            counters.duplicates();
            counters.effects();
            counters.retries();
            counters.dead_letters();
            counters.ownership();
        });
        let mut found: Vec<(String, u64)> = snapshotter
            .snapshot()
            .into_vec()
            .into_iter()
            .map(|(key, _, _, value)| {
                let key = key.key();
                let labels: Vec<_> = key.labels().map(|l| (l.key(), l.value())).collect();
                assert_eq!(labels, [("consumer", "inventory"), ("topic", "orders")]);
                let DebugValue::Counter(n) = value else {
                    panic!("{value:?}")
                };
                (key.name().to_owned(), n)
            })
            .collect();
        found.sort();
        let expected = [
            ("oncebox_inbox_dead_letters_total", stats.dead_letters()),
            ("oncebox_inbox_deliveries_total", stats.deliveries()),
            ("oncebox_inbox_duplicates_total", stats.duplicates()),
            ("oncebox_inbox_effects_total", stats.effects()),
            ("oncebox_inbox_ownership_total", stats.ownership()),
            ("oncebox_inbox_retries_total", stats.retries()),
        ]
        .map(|(name, n)| (name.to_owned(), n));
        assert_eq!(found, expected);
        assert_eq!((stats.deliveries(), stats.effects()), (2, 1));
    }
}
