//! Batches that come next: their transactions are opened while those before them are under way (ADR 13).

use std::collections::btree_map::Entry;

use tokio_util::task::AbortOnDropHandle;
use uuid::Uuid;

use super::Worker;
use crate::InboxStore;
use crate::process::Preparing;

/// A transaction that is opened for these messages while the batch before them is under way.
pub(super) struct Ahead<D: InboxStore> {
    pub(super) ids: Vec<Uuid>,
    pub(super) prepared: Preparing<D>,
}

impl<D: InboxStore> Worker<D> {
    /// Connections that nobody uses or has in prospect.
    pub(super) fn free(&self) -> usize {
        let ahead: usize = self.slots.values().map(|slot| slot.ahead.len()).sum();
        let used = self.jobs.len() + ahead;
        self.settings.connections.saturating_sub(used)
    }

    /// Opens transactions for the batches that come next, as far as there are connections for them.
    pub(super) fn look_ahead(&mut self) {
        // Where one transaction writes at a time, a second one only waits.
        if D::IN_PROCESS {
            return;
        }
        for slot in self.slots.values_mut() {
            if !slot.partition.is_at_work() {
                slot.ahead.clear();
            }
        }
        let mut free = self.free();
        for (id, slot) in &mut self.slots {
            for lane in 0..self.settings.limits.lanes {
                if free == 0 {
                    return;
                }
                // Once for each batch.
                let Entry::Occupied(begun) = slot.begun.entry(lane) else {
                    continue;
                };
                let Some(ids) = slot.partition.upcoming(lane) else {
                    continue;
                };
                let begun = begun.remove();
                let job = slot.job(id, &self.processor);
                let prepare = job.prepare(ids.clone(), begun);
                let prepared = AbortOnDropHandle::new(tokio::spawn(prepare));
                slot.ahead.insert(lane, Ahead { ids, prepared });
                free -= 1;
            }
        }
    }
}
