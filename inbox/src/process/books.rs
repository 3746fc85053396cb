//! What is written beside the effects: the record, and attempts that are over.

use std::time::Duration;

use sqlx::Transaction;

use super::{Processor, Settled, now_micros, storable};
use crate::InboxStore;
use crate::lane::Batch;
use crate::position::Key;
use crate::store::{Recorded, whole_micros};

/// What becomes of one message of a batch.
pub(crate) struct Fate {
    pub(crate) settled: Settled,
    /// Time of the handler.
    pub(crate) took: Duration,
}

impl Fate {
    pub(super) fn of(settled: Settled) -> Self {
        Self {
            settled,
            took: Duration::ZERO,
        }
    }
}

impl<D: InboxStore> Processor<D> {
    /// Records, and attempts that are over.
    pub(crate) async fn keep_books(
        &self,
        tx: &mut Transaction<'static, D>,
        key: &Key,
        batch: &Batch,
        fates: &[Fate],
    ) -> Result<(), sqlx::Error> {
        let statements = &self.statements;
        for (delivery, standing) in batch.deliveries.iter().zip(&batch.standings) {
            if standing.written {
                self.limited(D::forget(tx, statements, key, delivery.offset))
                    .await?;
            }
        }
        let Some(business_id) = &self.record else {
            return Ok(());
        };
        let mut records = Vec::with_capacity(fates.len());
        for ((delivery, standing), fate) in batch.deliveries.iter().zip(&batch.standings).zip(fates)
        {
            let (status, calls) = match fate.settled {
                Settled::Duplicate | Settled::Known | Settled::Delayed => continue,
                Settled::Effect => ("effect", 1),
                Settled::DeadLetter => ("dead", 0),
                Settled::Parked => ("parked", 0),
            };
            let failed = Some(&*standing.error).filter(|e| !e.is_empty());
            records.push(Recorded {
                offset: delivery.offset,
                message_id: delivery.message_id,
                business_id: business_id(delivery).map(|id| storable(&id)),
                status,
                attempts: i32::try_from(standing.attempts + calls).unwrap_or(i32::MAX),
                first_at: standing.first_failed_at.unwrap_or_else(now_micros),
                duration_us: whole_micros(fate.took),
                error: failed,
            });
        }
        if records.is_empty() {
            return Ok(());
        }
        self.limited(D::record(tx, statements, key, &records)).await
    }
}
