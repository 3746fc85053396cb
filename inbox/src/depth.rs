//! How many letters wait, and for how long, as gauges: a letter that nobody sees is a lost message.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::InboxStore;
use crate::process::Processor;

/// How often a consumer counts its letters.
const INTERVAL: Duration = Duration::from_secs(15);

/// Letters of one topic and kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Depth {
    /// The topic.
    pub topic: String,
    /// `dead`, `parked` or `delayed`.
    pub kind: String,
    /// How many there are.
    pub letters: i64,
    /// How long ago the first of them was written, by the database's clock; microseconds.
    pub oldest: i64,
}

impl<D: InboxStore> Processor<D> {
    /// Counts the letters until the shutdown. While the database is away, what was counted last stands.
    pub(crate) async fn count_letters(
        self: Arc<Self>,
        consumer: Arc<str>,
        stop: CancellationToken,
    ) {
        let mut shown = BTreeSet::new();
        loop {
            let count = async {
                let mut conn = self.pool.acquire().await?;
                D::depths(&mut conn, &self.statements, &consumer).await
            };
            match self.limited(count).await {
                Ok(depths) => show(&consumer, depths, &mut shown),
                Err(e) => {
                    tracing::debug!(error = %e, "cannot count the letters, will be tried again")
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
    }
}

/// Sets the gauges; what is not there any more is 0.
fn show(consumer: &str, depths: Vec<Depth>, shown: &mut BTreeSet<(String, String)>) {
    let gone = shown.iter().cloned().map(|of| (of, (0, 0)));
    let mut all: BTreeMap<_, _> = gone.collect();
    all.extend(
        depths
            .into_iter()
            .map(|d| ((d.topic, d.kind), (d.letters, d.oldest))),
    );
    for ((topic, kind), (letters, oldest)) in all {
        let labels = [
            ("consumer", consumer.to_owned()),
            ("topic", topic.clone()),
            ("kind", kind.clone()),
        ];
        metrics::gauge!("oncebox_inbox_letters", &labels).set(letters as f64);
        metrics::gauge!("oncebox_inbox_oldest_letter_seconds", &labels).set(oldest as f64 / 1e6);
        shown.insert((topic, kind));
    }
}

#[cfg(test)]
mod tests {
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};

    use super::*;

    #[test]
    fn letters_are_counted_and_those_that_are_gone_are_none() {
        let recorder = DebuggingRecorder::new();
        let snapshotter = recorder.snapshotter();
        let depth = |kind: &str, letters| Depth {
            topic: "orders".to_owned(),
            kind: kind.to_owned(),
            letters,
            oldest: 1_500_000,
        };
        let mut shown = BTreeSet::new();
        let mut look = |depths: Vec<Depth>| {
            metrics::with_local_recorder(&recorder, || show("inventory", depths, &mut shown));
            let values = snapshotter.snapshot().into_vec().into_iter();
            let mut values: Vec<_> = values
                .map(|(key, _, _, value)| {
                    let labels: Vec<_> = key.key().labels().map(|l| l.value()).collect();
                    let DebugValue::Gauge(value) = value else {
                        panic!("a gauge")
                    };
                    let name = key.key().name();
                    (format!("{name} {}", labels.join(" ")), value.into_inner())
                })
                .collect();
            values.sort_by(|a, b| a.0.cmp(&b.0));
            values
        };
        let named = |name: &str, kind: &str, value: f64| {
            (
                format!("oncebox_inbox_{name} inventory orders {kind}"),
                value,
            )
        };
        assert_eq!(
            look(vec![depth("dead", 3), depth("delayed", 1)]),
            [
                named("letters", "dead", 3.0),
                named("letters", "delayed", 1.0),
                named("oldest_letter_seconds", "dead", 1.5),
                named("oldest_letter_seconds", "delayed", 1.5),
            ]
        );
        assert_eq!(
            look(vec![depth("dead", 1)]),
            [
                named("letters", "dead", 1.0),
                named("letters", "delayed", 0.0),
                named("oldest_letter_seconds", "dead", 1.5),
                named("oldest_letter_seconds", "delayed", 0.0),
            ]
        );
    }
}
