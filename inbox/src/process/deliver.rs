//! The transaction of a batch: hint, marks, handlers.

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::time::Instant;

use futures_util::FutureExt;
use sqlx::Transaction;
use tracing::Instrument;
use uuid::Uuid;

use super::finish::Finished;
use super::write_off::Letter;
use super::{Fate, Hinted, Outcome, Processor, Settled, cannot, failure, own};
use crate::InboxStore;
use crate::chain::Term;
use crate::delivery::Delivery;
use crate::handler::{Handler, HandlerError};
use crate::lane::Batch;
use crate::position::Key;
use crate::step::Step;

/// What went wrong between the marks and the position.
enum Broken {
    /// The handler of this message.
    Handler(Option<usize>, HandlerError),
    /// A statement after it, which may be its fault.
    After(Option<usize>, sqlx::Error),
    /// A statement of ours.
    Ours(Box<Outcome>),
}

impl From<Box<Outcome>> for Broken {
    fn from(outcome: Box<Outcome>) -> Self {
        Self::Ours(outcome)
    }
}

impl<D: InboxStore> Processor<D> {
    /// Handles the messages of a batch in one transaction (G5, G6).
    pub(crate) async fn deliver(&self, key: &Key, term: &Term, batch: &Batch) -> Outcome {
        let outcome = self.try_deliver(key, term, batch).await;
        outcome.unwrap_or_else(|outcome| *outcome)
    }

    async fn try_deliver(
        &self,
        key: &Key,
        term: &Term,
        batch: &Batch,
    ) -> Result<Outcome, Box<Outcome>> {
        let deliveries = &batch.deliveries;
        if let Some(hinted) = &self.hint
            && self.all_known(hinted, key, term, deliveries).await
        {
            term.chain().skip(&batch.offsets());
            return Ok(Outcome::Settled(vec![Settled::Known; deliveries.len()]));
        }
        let (mut tx, fresh) = self.open(key, deliveries).await?;
        let begun = Instant::now();
        // The position moves only with a mark of this transaction; a batch of duplicates alone has nothing to lose.
        let marked = fresh.as_ref().and_then(|fresh| fresh.first().copied());
        let fates = match self.work_through(&mut tx, key, batch, fresh).await {
            Ok(fates) => fates,
            Err(Broken::Handler(at, error)) => {
                return Ok(self.handler_failed(tx, at, &error).await);
            }
            Err(Broken::After(at, error)) => {
                self.undo(tx).await;
                return Ok(self.after_handler(at, error, begun.elapsed()));
            }
            Err(Broken::Ours(outcome)) => {
                self.undo(tx).await;
                return Err(outcome);
            }
        };
        let idle = begun.elapsed();
        let settled = fates.iter().map(|fate| fate.settled).collect();
        let offsets = batch.offsets();
        let finished = self.finish(tx, key, term, &offsets, marked, settled);
        let outcome = match finished.await {
            Finished::Done(outcome) => outcome,
            Finished::NotAdvanced(e) => self.after_handler(None, e, idle),
        };
        if let (Outcome::Settled(_), Some(Hinted { hint, scope })) = (&outcome, &self.hint) {
            let ids: Vec<Uuid> = deliveries.iter().map(|d| d.message_id).collect();
            hint.settled(scope, &ids).await;
        }
        Ok(outcome)
    }

    /// The handlers of a batch, and what is written beside them.
    async fn work_through(
        &self,
        tx: &mut Transaction<'static, D>,
        key: &Key,
        batch: &Batch,
        mut fresh: Option<BTreeSet<Uuid>>,
    ) -> Result<Vec<Fate>, Broken> {
        let deliveries = &batch.deliveries;
        let blocked = self.blocked(tx, key, deliveries).await?;
        if fresh.as_ref().is_none_or(|fresh| !fresh.is_empty()) {
            self.step(Step::Marked);
        }
        let first: Vec<bool> = deliveries
            .iter()
            .map(|d| {
                fresh
                    .as_mut()
                    .is_none_or(|fresh| fresh.remove(&d.message_id))
            })
            .collect();
        let is_blocked = |d: &Delivery| d.key.as_deref().is_some_and(|k| blocked.contains(k));
        let mut fates = Vec::with_capacity(deliveries.len());
        for (i, delivery) in deliveries.iter().enumerate() {
            if !first[i] {
                self.step(Step::Duplicate);
                fates.push(Fate::of(Settled::Duplicate));
            } else if is_blocked(delivery) {
                let letter = Letter {
                    attempts: 0,
                    first_failed_at: None,
                    error: "waits behind a blocked key",
                    parked: true,
                    delay: None,
                };
                self.write_letter(tx, key, delivery, letter).await?;
                fates.push(Fate::of(Settled::Parked));
            } else if let Handler::Each(_) = &self.handler {
                let begun = Instant::now();
                self.handle(tx, std::slice::from_ref(delivery))
                    .await
                    .map_err(|e| Broken::Handler(Some(i), e))?;
                if D::IN_PROCESS {
                    self.still_open(tx)
                        .await
                        .map_err(|e| Broken::After(Some(i), e))?;
                }
                self.step(Step::Handled);
                fates.push(Fate {
                    settled: Settled::Effect,
                    took: begun.elapsed(),
                });
            } else {
                fates.push(Fate::of(Settled::Effect));
            }
        }
        if let Handler::Batch(_) = &self.handler {
            self.handle_all(tx, deliveries, &mut fates)
                .await
                .map_err(|e| Broken::Handler(None, e))?;
        }
        self.keep_books(tx, key, batch, &fates)
            .await
            .map_err(|e| Broken::After(None, e))?;
        Ok(fates)
    }

    /// Whether every message is settled without a doubt. A hint alone skips nothing: one statement has to find the marks and
    /// the position row as this process wrote it last. Whatever else comes out goes through the transaction.
    async fn all_known(
        &self,
        Hinted { hint, scope }: &Hinted,
        key: &Key,
        term: &Term,
        deliveries: &[Delivery],
    ) -> bool {
        let ids: BTreeSet<Uuid> = deliveries.iter().map(|d| d.message_id).collect();
        let ids: Vec<Uuid> = ids.into_iter().collect();
        if !hint.known(scope, &ids).await.into_iter().all(|known| known) {
            return false;
        }
        let Ok(mut conn) = self.limited(self.pool.acquire()).await else {
            return false;
        };
        // No other lane moves the row meanwhile.
        let turn = term.turn.lock().await;
        let expected = {
            let chain = term.chain();
            (!chain.in_doubt).then_some(chain.known)
        };
        let read = D::known(&mut conn, &self.statements, key, &ids);
        let Ok(Some((row, marked))) = self.limited(read).await else {
            return false;
        };
        drop(turn);
        if marked.len() < ids.len() {
            let unknown = ids.iter().filter(|id| !marked.contains(id));
            let unknown: Vec<Uuid> = unknown.copied().collect();
            hint.forget(scope, &unknown).await;
        }
        Some(row) == expected && marked.len() == ids.len()
    }

    /// The database lost commits: what the hints know may be void.
    pub(crate) async fn forget_hints(&self) {
        if let Some(Hinted { hint, scope }) = &self.hint {
            hint.clear(scope).await;
        }
    }

    /// Begins a transaction and inserts the marks; those that were not there, or `None` when there are no marks.
    pub(super) async fn open(
        &self,
        key: &Key,
        deliveries: &[Delivery],
    ) -> Result<(Transaction<'static, D>, Option<BTreeSet<Uuid>>), Box<Outcome>> {
        let mut tx = self
            .limited(D::begin(&self.pool, &self.statements))
            .await
            .map_err(cannot("begin a transaction"))?;
        if !self.dedup.marks() {
            return Ok((tx, None));
        }
        // Sorted: unsorted batches deadlock.
        let ids: BTreeSet<Uuid> = deliveries.iter().map(|d| d.message_id).collect();
        let ids: Vec<Uuid> = ids.into_iter().collect();
        match self
            .limited(D::mark(&mut tx, &self.statements, &key.consumer, &ids))
            .await
        {
            Ok(fresh) => Ok((tx, Some(fresh.into_iter().collect()))),
            Err(e) => {
                self.undo(tx).await;
                Err(Box::new(own("insert the dedup marks", e)))
            }
        }
    }

    /// Between two handlers, where that costs nothing: the database may have rolled back by itself.
    async fn still_open(&self, tx: &mut Transaction<'static, D>) -> Result<(), sqlx::Error> {
        self.limited(D::intact(tx)).await?;
        self.limited(D::guard(tx)).await
    }

    /// Which keys of the batch are blocked; their rows are locked until the end of the transaction.
    async fn blocked(
        &self,
        tx: &mut Transaction<'static, D>,
        key: &Key,
        deliveries: &[Delivery],
    ) -> Result<BTreeSet<Vec<u8>>, Box<Outcome>> {
        if !self.looks_for_blocked_keys {
            return Ok(BTreeSet::new());
        }
        let keys: BTreeSet<&[u8]> = deliveries.iter().filter_map(|d| d.key.as_deref()).collect();
        let keys: Vec<&[u8]> = keys.into_iter().collect();
        let blocked = self
            .limited(D::blocked(tx, &self.statements, key, &keys))
            .await
            .map_err(cannot("look for blocked keys"))?;
        Ok(blocked.into_iter().collect())
    }

    /// The handler of whole batches, with those that are not settled yet.
    async fn handle_all(
        &self,
        tx: &mut Transaction<'static, D>,
        deliveries: &[Delivery],
        fates: &mut [Fate],
    ) -> Result<(), HandlerError> {
        let open = fates
            .iter()
            .filter(|fate| fate.settled == Settled::Effect)
            .count();
        if open == 0 {
            return Ok(());
        }
        let begun = Instant::now();
        if open == deliveries.len() {
            self.handle(tx, deliveries).await?;
        } else {
            let effects = deliveries.iter().zip(&*fates);
            let effects = effects.filter(|(_, fate)| fate.settled == Settled::Effect);
            let open: Vec<Delivery> = effects.map(|(delivery, _)| delivery.clone()).collect();
            self.handle(tx, &open).await?;
        }
        let share = begun.elapsed() / u32::try_from(open).unwrap_or(u32::MAX).max(1);
        for fate in fates {
            fate.took = share;
        }
        self.step(Step::Handled);
        Ok(())
    }

    /// Calls the handler; a panic is a fatal error of this message, not the end of the consumer (G8).
    pub(crate) async fn handle(
        &self,
        tx: &mut Transaction<'static, D>,
        deliveries: &[Delivery],
    ) -> Result<(), HandlerError> {
        let delivery = &deliveries[0];
        let span = tracing::debug_span!(
            "delivery",
            topic = %delivery.topic,
            partition = delivery.partition,
            offset = delivery.offset,
            messages = deliveries.len(),
            message_id = %delivery.message_id,
            traceparent = delivery.traceparent(),
        );
        // The call is inside the future, so that a panic before the first await is caught too.
        let call = async move {
            match &self.handler {
                Handler::Each(handler) => handler(tx, delivery.clone()).await,
                Handler::Batch(handler) => handler(tx, deliveries).await,
            }
        };
        let limit = self.handler_limit;
        let guarded = AssertUnwindSafe(call).catch_unwind().instrument(span);
        let Ok(result) = tokio::time::timeout(limit, guarded).await else {
            return Err(HandlerError::retriable(format!(
                "the handler did not finish within {} s",
                limit.as_secs()
            )));
        };
        result.unwrap_or_else(|panic| {
            let text = panic
                .downcast_ref::<&str>()
                .map(|s| (*s).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "no message".to_owned());
            Err(HandlerError::fatal(format!("the handler panicked: {text}")))
        })
    }

    /// G5: the handler's writes go before anybody thinks about a retry or a dead letter.
    async fn handler_failed(
        &self,
        tx: Transaction<'static, D>,
        at: Option<usize>,
        error: &HandlerError,
    ) -> Outcome {
        self.undo(tx).await;
        self.step(Step::Failed);
        Outcome::Failed(failure(at, error))
    }
}
