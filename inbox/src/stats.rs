//! Counters: a cheap handle for programs, and the `metrics` facade for dashboards.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram};
use time::OffsetDateTime;

/// Live counters of one [`Inbox`](crate::Inbox). Clones share the numbers.
///
/// The same events go to the `metrics` facade with the labels `consumer` and `topic`:
///
/// | metric | kind | what |
/// |---|---|---|
/// | `oncebox_inbox_deliveries_total` | counter | messages received from Kafka |
/// | `oncebox_inbox_duplicates_total` | counter | deliveries that were already settled; label `reason`: `position` (below the position), `mark` (the dedup mark was there), `hint` (a hint knew it, and the database confirmed it) |
/// | `oncebox_inbox_effects_total` | counter | messages whose effect committed |
/// | `oncebox_inbox_retries_total` | counter | handler calls that failed and will be repeated |
/// | `oncebox_inbox_dead_letters_total` | counter | messages written to the dead-letter table |
/// | `oncebox_inbox_parked_total` | counter | messages parked because their key is blocked |
/// | `oncebox_inbox_letters` | gauge | letters that wait; label `kind`: `dead`, `parked` or `delayed`. Every process of the consumer counts all, each 15 s: take the maximum |
/// | `oncebox_inbox_oldest_letter_seconds` | gauge | how long ago the first of them was written; label `kind` |
/// | `oncebox_inbox_paused` | gauge | 1 while an operator has paused the topic ([`pause`](crate::pause)) |
/// | `oncebox_inbox_ownership_total` | counter | times a partition's position row was taken |
/// | `oncebox_inbox_batch_messages` | histogram | messages that shared a transaction |
/// | `oncebox_inbox_transaction_seconds` | histogram | from the beginning of a transaction to the answer to its COMMIT |
/// | `oncebox_inbox_lag_seconds` | gauge | age of the message that was settled last, by Kafka's timestamp, when it was settled |
#[derive(Clone, Debug, Default)]
pub struct Stats {
    counts: Arc<Counts>,
}

/// How a duplicate was known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Duplicate {
    Position,
    Mark,
    Hint,
}

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident $metric:literal),* $(,)?) => {
        #[derive(Debug, Default)]
        struct Counts {
            duplicates: [AtomicU64; 3],
            $($name: AtomicU64,)*
        }

        impl Stats {
            /// Deliveries that were already settled.
            #[must_use]
            pub fn duplicates(&self) -> u64 {
                let counts = self.counts.duplicates.iter();
                counts.map(|count| count.load(Ordering::Relaxed)).sum()
            }

            /// Those of them that lay below the position.
            #[must_use]
            pub fn duplicates_by_position(&self) -> u64 {
                self.known_by(Duplicate::Position)
            }

            /// Those of them whose dedup mark was there.
            #[must_use]
            pub fn duplicates_by_mark(&self) -> u64 {
                self.known_by(Duplicate::Mark)
            }

            /// Those of them that a hint knew, and the database confirmed.
            #[must_use]
            pub fn duplicates_by_hint(&self) -> u64 {
                self.known_by(Duplicate::Hint)
            }

            fn known_by(&self, reason: Duplicate) -> u64 {
                self.counts.duplicates[reason as usize].load(Ordering::Relaxed)
            }

            $($(#[$doc])*
            #[must_use]
            pub fn $name(&self) -> u64 {
                self.counts.$name.load(Ordering::Relaxed)
            })*
        }

        /// The counters of one topic: the shared handle and the facade's.
        #[derive(Clone)]
        pub(crate) struct TopicCounters {
            stats: Stats,
            duplicates: [Counter; 3],
            batch: Histogram,
            transaction: Histogram,
            lag: Gauge,
            $($name: Counter,)*
        }

        impl TopicCounters {
            pub(crate) fn new(stats: Stats, consumer: &str, topic: &str) -> Self {
                let labels = || [("consumer", consumer.to_owned()), ("topic", topic.to_owned())];
                let duplicates = ["position", "mark", "hint"].map(|reason| {
                    let mut labels = labels().to_vec();
                    labels.push(("reason", reason.to_owned()));
                    metrics::counter!("oncebox_inbox_duplicates_total", &labels)
                });
                Self {
                    stats,
                    duplicates,
                    batch: metrics::histogram!("oncebox_inbox_batch_messages", &labels()),
                    transaction: metrics::histogram!("oncebox_inbox_transaction_seconds", &labels()),
                    lag: metrics::gauge!("oncebox_inbox_lag_seconds", &labels()),
                    $($name: metrics::counter!($metric, &labels()),)*
                }
            }

            $(pub(crate) fn $name(&self, n: u64) {
                self.stats.counts.$name.fetch_add(n, Ordering::Relaxed);
                self.$name.increment(n);
            })*
        }
    };
}

counts! {
    /// Messages received from Kafka.
    deliveries "oncebox_inbox_deliveries_total",
    /// Messages whose effect committed.
    effects "oncebox_inbox_effects_total",
    /// Handler calls that failed and will be repeated.
    retries "oncebox_inbox_retries_total",
    /// Messages written to the dead-letter table.
    dead_letters "oncebox_inbox_dead_letters_total",
    /// Messages parked because their key is blocked.
    parked "oncebox_inbox_parked_total",
    /// Times a partition's position row was taken.
    ownership "oncebox_inbox_ownership_total",
}

impl TopicCounters {
    pub(crate) fn duplicates(&self, reason: Duplicate, n: u64) {
        self.stats.counts.duplicates[reason as usize].fetch_add(n, Ordering::Relaxed);
        self.duplicates[reason as usize].increment(n);
    }

    /// A transaction settled so many messages; the last of them has this timestamp.
    pub(crate) fn transaction(&self, messages: usize, took: Duration, timestamp_ms: Option<i64>) {
        self.batch.record(messages as f64);
        self.transaction.record(took.as_secs_f64());
        if let Some(at) = timestamp_ms {
            let now = OffsetDateTime::now_utc().unix_timestamp_nanos() / 1_000_000;
            let age = (now - i128::from(at)).max(0);
            self.lag.set(age as f64 / 1_000.0);
        }
    }
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
            counters.deliveries(2);
            counters.duplicates(Duplicate::Position, 1);
            counters.duplicates(Duplicate::Mark, 2);
            counters.duplicates(Duplicate::Hint, 1);
            counters.effects(1);
            counters.retries(1);
            counters.dead_letters(1);
            counters.parked(1);
            counters.ownership(1);
            counters.transaction(3, Duration::from_millis(5), Some(0));
        });
        let mut found = Vec::new();
        let mut others = Vec::new();
        for (key, _, _, value) in snapshotter.snapshot().into_vec() {
            let key = key.key();
            let mut name = key.name().to_owned();
            let mut labels: Vec<_> = key.labels().map(|l| (l.key(), l.value())).collect();
            if let Some(("reason", reason)) = labels.get(2).copied() {
                name = format!("{name} {reason}");
                labels.pop();
            }
            assert_eq!(labels, [("consumer", "inventory"), ("topic", "orders")]);
            match value {
                DebugValue::Counter(n) => found.push((name, n)),
                _ => others.push(name),
            }
        }
        others.sort();
        assert_eq!(
            others,
            [
                "oncebox_inbox_batch_messages",
                "oncebox_inbox_lag_seconds",
                "oncebox_inbox_transaction_seconds",
            ]
        );
        found.sort();
        let expected = [
            ("oncebox_inbox_dead_letters_total", stats.dead_letters()),
            ("oncebox_inbox_deliveries_total", stats.deliveries()),
            (
                "oncebox_inbox_duplicates_total hint",
                stats.duplicates_by_hint(),
            ),
            (
                "oncebox_inbox_duplicates_total mark",
                stats.duplicates_by_mark(),
            ),
            (
                "oncebox_inbox_duplicates_total position",
                stats.duplicates_by_position(),
            ),
            ("oncebox_inbox_effects_total", stats.effects()),
            ("oncebox_inbox_ownership_total", stats.ownership()),
            ("oncebox_inbox_parked_total", stats.parked()),
            ("oncebox_inbox_retries_total", stats.retries()),
        ]
        .map(|(name, n)| (name.to_owned(), n));
        assert_eq!(found, expected);
        assert_eq!((stats.deliveries(), stats.duplicates()), (2, 4));
        assert_eq!(
            (stats.duplicates_by_mark(), stats.duplicates_by_hint()),
            (2, 1)
        );
    }
}
