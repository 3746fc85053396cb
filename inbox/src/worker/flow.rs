//! What Kafka is told: where to deliver from, when to pause, and how far we are.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::pump::Command;
use super::{Id, Worker};
use crate::InboxStore;

impl<D: InboxStore> Worker<D> {
    fn tell(&self, command: Command) {
        // Without a listener the events end too, and with them the worker.
        let _ = self.commands.send(command);
    }

    /// G7: only called with a position that the database has committed.
    pub(super) fn store(&self, id: &Id, next: i64) {
        self.tell(Command::Store((Arc::clone(&id.0), id.1), next));
    }

    /// Has Kafka deliver the partitions that have become ours.
    pub(super) fn start(&mut self) {
        let mut ours = Vec::new();
        for slot in self.slots.values_mut() {
            let partition = &mut slot.partition;
            if partition.is_listening() {
                continue;
            }
            if let Some(next) = partition.next() {
                partition.listens();
                slot.started = self.started + 1;
                ours.push((
                    partition.key.topic.to_string(),
                    partition.key.partition,
                    next,
                ));
            }
        }
        if !ours.is_empty() {
            self.started += 1;
            self.tell(Command::Start(self.started, ours));
        }
    }

    /// Pauses partitions that wait or are full for long, and wakes those that do not; holds everything back for a moment
    /// while one is full.
    pub(super) fn adjust_flow(&mut self, now: Instant) {
        let mut full = false;
        let (mut pause, mut resume) = (Vec::new(), Vec::new());
        let starving = self.slots.values().any(|s| s.partition.is_starving());
        for slot in self.slots.values_mut() {
            let partition = &mut slot.partition;
            let wanted = partition.wants_pause(starving, now);
            full |= partition.is_full() && !wanted;
            if partition.next().is_none() || partition.paused == wanted {
                continue;
            }
            partition.paused = wanted;
            let list = if wanted { &mut pause } else { &mut resume };
            list.push((partition.key.topic.to_string(), partition.key.partition));
        }
        self.full.store(full, Ordering::Relaxed);
        if !pause.is_empty() {
            self.tell(Command::Pause(pause));
        }
        if !resume.is_empty() {
            self.tell(Command::Resume(resume));
        }
    }
}
