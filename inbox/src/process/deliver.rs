//! The transaction of a batch: hint, marks, handlers.

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::time::Instant;

use futures_util::FutureExt;
use futures_util::future::OptionFuture;
use sqlx::Transaction;
use tokio::sync::oneshot;
use tokio_util::task::AbortOnDropHandle;
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

/// What goes before the handler of a batch.
pub(crate) enum Prepared<D: InboxStore> {
    /// All of it is settled: a hint knew it, and the database confirmed that.
    Known,
    /// The transaction is open.
    Opened(Opened<D>),
}

/// A transaction before the handler.
pub(crate) struct Opened<D: InboxStore> {
    tx: Transaction<'static, D>,
    /// The marks that were not there before; `None` when there are no marks.
    fresh: Option<BTreeSet<Uuid>>,
    since: Instant,
}

/// That, while the batch before is under way. Dropped, it is rolled back.
pub(crate) type Preparing<D> = AbortOnDropHandle<Result<Prepared<D>, Box<Outcome>>>;

/// How a batch stands between its neighbours.
pub(crate) struct Neighbours<D: InboxStore> {
    /// What was done for it during the batch before.
    pub(crate) prepared: Option<Preparing<D>>,
    /// Told as soon as its marks are inserted. Those of the next batch come only then: side by side, each of the two statements may wait for
    /// a mark of the other's, and the next batch does not end before this one.
    pub(crate) opened: oneshot::Sender<()>,
}

impl<D: InboxStore> Processor<D> {
    /// Handles the messages of a batch in one transaction (G5, G6), one that is prepared for exactly these if there is one.
    pub(crate) async fn deliver(
        &self,
        key: &Key,
        term: &Term,
        batch: &Batch,
        neighbours: Neighbours<D>,
    ) -> Outcome {
        let outcome = self.try_deliver(key, term, batch, neighbours).await;
        outcome.unwrap_or_else(|outcome| *outcome)
    }

    /// What can be done for these messages before the batch in front of them is settled: nothing of it is seen by anybody before
    /// their own COMMIT, and a mark that the batch in front has inserted is waited for. Their handlers are not: they would
    /// not see its effects.
    pub(crate) async fn prepare(
        &self,
        key: &Key,
        term: &Term,
        ids: &[Uuid],
    ) -> Result<Prepared<D>, Box<Outcome>> {
        // Sorted: unsorted batches deadlock.
        let ids: BTreeSet<Uuid> = ids.iter().copied().collect();
        let ids: Vec<Uuid> = ids.into_iter().collect();
        if let Some(hinted) = &self.hint
            && self.all_known(hinted, key, term, &ids).await
        {
            return Ok(Prepared::Known);
        }
        let (tx, fresh) = self.open(key, &ids).await?;
        Ok(Prepared::Opened(Opened {
            tx,
            fresh,
            since: Instant::now(),
        }))
    }

    async fn prepared(
        &self,
        key: &Key,
        term: &Term,
        batch: &Batch,
        prepared: Option<Preparing<D>>,
    ) -> Result<Prepared<D>, Box<Outcome>> {
        if let Some(Ok(prepared)) = OptionFuture::from(prepared).await {
            match prepared? {
                // The database may end the session at any moment, and that would look like a failure of the handler.
                Prepared::Opened(old) if old.since.elapsed() >= self.idle_limit / 2 => {
                    self.undo(old.tx).await;
                }
                prepared => return Ok(prepared),
            }
        }
        self.prepare(key, term, &batch.ids()).await
    }

    async fn try_deliver(
        &self,
        key: &Key,
        term: &Term,
        batch: &Batch,
        neighbours: Neighbours<D>,
    ) -> Result<Outcome, Box<Outcome>> {
        let deliveries = &batch.deliveries;
        let prepared = neighbours.prepared;
        let prepared = self.prepared(key, term, batch, prepared).await?;
        let _ = neighbours.opened.send(());
        let (mut tx, fresh) = match prepared {
            Prepared::Opened(opened) => (opened.tx, opened.fresh),
            Prepared::Known => {
                term.chain().skip(&batch.offsets());
                return Ok(Outcome::Settled(vec![Settled::Known; deliveries.len()]));
            }
        };
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
            hint.settled(scope, &batch.ids()).await;
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
        ids: &[Uuid],
    ) -> bool {
        if !hint.known(scope, ids).await.into_iter().all(|known| known) {
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
        let read = D::known(&mut conn, &self.statements, key, ids);
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

    /// Begins a transaction and inserts the marks, which come sorted; those that were not there, or `None` when there are no marks.
    pub(super) async fn open(
        &self,
        key: &Key,
        ids: &[Uuid],
    ) -> Result<(Transaction<'static, D>, Option<BTreeSet<Uuid>>), Box<Outcome>> {
        let mut tx = self
            .limited(D::begin(&self.pool, &self.statements))
            .await
            .map_err(cannot("begin a transaction"))?;
        if !self.dedup.marks() {
            return Ok((tx, None));
        }
        match self
            .limited(D::mark(&mut tx, &self.statements, &key.consumer, ids))
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
