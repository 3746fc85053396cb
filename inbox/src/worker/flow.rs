//! What Kafka is told: where to deliver from, when to pause, and how far we are.

use std::time::{Duration, Instant};

use super::{Id, Worker};
use crate::InboxStore;
use crate::error::Error;
use crate::feed::Feed;
use crate::partition::Partition;
use crate::position::Known;
use crate::step::Step;

/// How often stored offsets go to Kafka.
const COMMIT_INTERVAL: Duration = Duration::from_secs(1);

impl<D: InboxStore, F: Feed> Worker<D, F> {
    /// G7: only called with a position that the database has committed.
    pub(super) fn store(&mut self, id: &Id, known: Known) {
        match self.feed.store(&id.0, id.1, known.next) {
            Ok(()) => {
                self.stored = true;
                self.processor.step(Step::OffsetStored);
            }
            // Informational: the database knows where we are.
            Err(e) => {
                tracing::debug!(topic = %id.0, partition = id.1, error = %e, "offset not stored")
            }
        }
    }

    pub(super) fn commit_offsets(&mut self, now: Instant) {
        if !self.stored || now < self.offsets_committed + COMMIT_INTERVAL {
            return;
        }
        self.offsets_committed = now;
        match self.feed.commit() {
            Ok(()) => self.stored = false,
            Err(e) => tracing::debug!(error = %e, "offsets not committed, will be tried again"),
        }
    }

    /// Tells Kafka to deliver every partition that is ours from its position.
    pub(super) fn assign(&mut self) -> Result<(), Error> {
        self.reassign = false;
        let ours: Vec<_> = self
            .partitions
            .values()
            .filter_map(|p| Some((p.key.topic.to_string(), p.key.partition, p.next()?)))
            .collect();
        if let Err(e) = self.feed.assign(&ours) {
            self.reassign = true;
            return Self::tolerate("assign partitions", e);
        }
        let names: Vec<_> = ours.into_iter().map(|(topic, p, _)| (topic, p)).collect();
        // A pause outlives an assignment in librdkafka.
        if let Err(e) = self.feed.resume(&names) {
            tracing::debug!(error = %e, "not resumed");
        }
        for partition in self.partitions.values_mut() {
            partition.reassigned();
        }
        Ok(())
    }

    /// Pauses partitions that wait, and wakes those that do not.
    pub(super) fn adjust_flow(&mut self, now: Instant) {
        self.set_paused(|p| p.wants_pause(now));
    }

    pub(super) fn set_paused(&mut self, wanted: impl Fn(&Partition) -> bool) {
        for pause in [true, false] {
            let changed: Vec<_> = self
                .partitions
                .values_mut()
                .filter(|p| p.next().is_some() && p.paused != pause && wanted(p) == pause)
                .map(|p| {
                    p.paused = pause;
                    (p.key.topic.to_string(), p.key.partition)
                })
                .collect();
            if changed.is_empty() {
                continue;
            }
            let result = if pause {
                self.feed.pause(&changed)
            } else {
                self.feed.resume(&changed)
            };
            if let Err(e) = result {
                tracing::debug!(pause, error = %e, "flow not changed");
            }
        }
    }
}
