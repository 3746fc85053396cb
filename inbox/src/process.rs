//! The transactions of a partition: marks, handlers, position, COMMIT. And what a failure leaves behind: nothing, or a dead
//! letter.
//!
//! Nothing here retries or decides about the partition: the outcome goes back to the worker.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use oncebox_gate::{Hint, Scope};
use oncebox_migrations::headers;
use sqlx::{Pool, Transaction};
use time::OffsetDateTime;
use tracing::Instrument;
use uuid::Uuid;

use crate::InboxStore;
use crate::chain::Term;
use crate::classify::{Class, class};
use crate::dedup::Dedup;
use crate::delivery::Delivery;
use crate::error::Error;
use crate::handler::{Handler, HandlerError};
use crate::lane::Batch;
use crate::partition::{Attempt, Failure};
use crate::position::{Key, Row};
use crate::retry::OnFailure;
use crate::step::{Step, StepHook};
use crate::store::{DeadLetter, Recorded, Statements};

/// Longest error text of a dead letter, in bytes.
const ERROR_LIMIT: usize = 4_096;
/// Longest wait for the answer to a statement of ours, beyond the time a lock may be held by a stopped process. Longer than
/// sqlx's default wait for a free connection (30 s).
const STATEMENT_LIMIT: Duration = Duration::from_secs(40);

/// What the business calls a message.
pub(crate) type BusinessId = Arc<dyn Fn(&Delivery) -> Option<String> + Send + Sync>;

/// What the transactions of all partitions share.
pub(crate) struct Processor<D: InboxStore> {
    pub(crate) pool: Pool<D>,
    pub(crate) statements: Statements,
    pub(crate) handler: Handler<D>,
    pub(crate) dedup: Dedup,
    pub(crate) on_failure: OnFailure,
    /// Keys are blocked by this policy, or are still blocked by an earlier one.
    pub(crate) looks_for_blocked_keys: bool,
    pub(crate) hint: Option<Hinted>,
    /// Write a record of every message, with this id of the business.
    pub(crate) record: Option<BusinessId>,
    pub(crate) on_step: Option<StepHook>,
    /// After this much idle time inside a transaction the database may have ended the session (G6).
    pub(crate) idle_limit: Duration,
    /// Longest time for one call of the handler.
    pub(crate) handler_limit: Duration,
}

/// What may know a settled message faster than the database, and whose messages these are.
#[derive(Clone, Debug)]
pub(crate) struct Hinted {
    pub(crate) hint: Arc<dyn Hint>,
    pub(crate) scope: Scope,
}

/// How a transaction of a partition ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Committed, and the chain knows; what became of each message.
    Settled(Vec<Settled>),
    /// The handler failed; everything is rolled back.
    Failed(Failure),
    /// The compare-and-set hit no row, or the answer to COMMIT was lost: read the row before anything else.
    Unsure(&'static str),
    /// A statement of ours failed in a way that repeating can cure. Nothing was committed.
    Outage(sqlx::Error),
    /// Repeating does not help.
    Stop(Error),
}

/// What was committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    /// Mark, effect and position.
    Effect,
    /// The position only: the mark was there.
    Duplicate,
    /// Nothing: a hint knew it, and the database confirmed that without a transaction.
    Known,
    /// Mark, dead letter and position.
    DeadLetter,
    /// Mark, parked message and position.
    Parked,
}

/// What an own statement's error means: an outage or a stop.
fn own(doing: &'static str, error: sqlx::Error) -> Outcome {
    match class(&error) {
        Class::Outage => Outcome::Outage(error),
        Class::Data | Class::Handler | Class::Refusal => {
            Outcome::Stop(Error::database(doing, error))
        }
    }
}

/// [`own`] for a `map_err`. Boxed: the error side is the rare one.
fn cannot(doing: &'static str) -> impl FnOnce(sqlx::Error) -> Box<Outcome> {
    move |error| Box::new(own(doing, error))
}

/// The failure of a handler, as the partition needs it.
fn failure(at: Option<usize>, error: &HandlerError) -> Failure {
    Failure {
        at,
        error: storable(&error.chain()),
        fatal: error.is_fatal(),
        conflict: matches!(error, HandlerError::Conflict(_)),
        now_micros: now_micros(),
    }
}

pub(crate) fn now_micros() -> i64 {
    i64::try_from(OffsetDateTime::now_utc().unix_timestamp_nanos() / 1_000).unwrap_or_default()
}

/// What becomes of one message of a batch.
struct Fate {
    settled: Settled,
    took: Duration,
}

impl<D: InboxStore> Processor<D> {
    pub(crate) fn step(&self, step: Step) {
        if let Some(hook) = &self.on_step {
            hook(step);
        }
    }

    /// Handles the messages of a batch in one transaction (G5, G6).
    pub(crate) async fn deliver(&self, key: &Key, term: &Term, batch: &Batch) -> Outcome {
        match self.try_deliver(key, term, batch).await {
            Ok(outcome) => outcome,
            Err(outcome) => *outcome,
        }
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
                let letter = self.letter(delivery, 0, None, "waits behind a blocked key", true);
                self.write_letter(tx, key, letter).await?;
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

    /// Writes a message off: mark, dead letter and position in one transaction (G8). Or parks it and blocks its key.
    pub(crate) async fn bury(&self, key: &Key, term: &Term, batch: &Batch) -> Outcome {
        match self.try_bury(key, term, batch).await {
            Ok(outcome) => outcome,
            Err(outcome) => *outcome,
        }
    }

    async fn try_bury(
        &self,
        key: &Key,
        term: &Term,
        batch: &Batch,
    ) -> Result<Outcome, Box<Outcome>> {
        let (delivery, standing) = (&batch.deliveries[0], &batch.standings[0]);
        // The mark is the licence: without it somebody else has settled the message, and a dead letter could bring a
        // second effect by its replay.
        let (mut tx, fresh) = self.open(key, &batch.deliveries).await?;
        let mut settled = Settled::Duplicate;
        if fresh.is_none_or(|fresh| !fresh.is_empty()) {
            let blocks = delivery.key.as_deref();
            let blocks = blocks.filter(|_| self.on_failure == OnFailure::BlockKey);
            if let Some(name) = blocks {
                self.limited(D::block(
                    &mut tx,
                    &self.statements,
                    key,
                    name,
                    &standing.error,
                ))
                .await
                .map_err(cannot("block a key"))?;
                settled = Settled::Parked;
            } else {
                settled = Settled::DeadLetter;
            }
            let letter = self.letter(
                delivery,
                standing.attempts,
                standing.first_failed_at,
                &standing.error,
                blocks.is_some(),
            );
            if let Err(outcome) = self.write_letter(&mut tx, key, letter).await {
                self.undo(tx).await;
                return Err(outcome);
            }
        }
        if let Err(e) = self
            .keep_books(&mut tx, key, batch, &[Fate::of(settled)])
            .await
        {
            self.undo(tx).await;
            return Ok(own("write the record", e));
        }
        let marked = self.dedup.marks().then_some(delivery.message_id);
        let offset = [delivery.offset];
        let finished = self.finish(tx, key, term, &offset, marked, vec![settled]);
        Ok(match finished.await {
            Finished::Done(Outcome::Failed(refused)) => {
                *stop_at(key, delivery, &standing.error, refused.error)
            }
            Finished::Done(outcome) => outcome,
            Finished::NotAdvanced(e) => own("advance the position", e),
        })
    }

    /// Writes down the attempts of a message, so that a restart or a rebalance goes on counting.
    pub(crate) async fn note(
        &self,
        key: &Key,
        term: &Term,
        batch: &Batch,
        due: Instant,
    ) -> Outcome {
        let (delivery, standing) = (&batch.deliveries[0], &batch.standings[0]);
        let attempt = Attempt {
            message_id: delivery.message_id,
            attempts: standing.attempts,
            error: standing.error.clone(),
            first_failed_at: standing.first_failed_at.unwrap_or_else(now_micros),
            wait: due.saturating_duration_since(Instant::now()),
        };
        let mut tx = match self.limited(D::begin(&self.pool, &self.statements)).await {
            Ok(tx) => tx,
            Err(e) => return own("begin a transaction", e),
        };
        let write = D::note(&mut tx, &self.statements, key, delivery.offset, &attempt);
        if let Err(e) = self.limited(write).await {
            self.undo(tx).await;
            return own("write down an attempt", e);
        }
        self.finish_own(tx, key, term).await
    }

    /// Writes a position that was reached without a transaction.
    pub(crate) async fn advance(&self, key: &Key, term: &Term) -> Outcome {
        match self.limited(D::begin(&self.pool, &self.statements)).await {
            Ok(tx) => self.finish_own(tx, key, term).await,
            Err(e) => own("begin a transaction", e),
        }
    }

    async fn finish_own(&self, tx: Transaction<'static, D>, key: &Key, term: &Term) -> Outcome {
        match self.finish(tx, key, term, &[], None, Vec::new()).await {
            Finished::Done(outcome) => outcome,
            Finished::NotAdvanced(e) => own("advance the position", e),
        }
    }

    /// Begins a transaction and inserts the marks; those that were not there, or `None` when there are no marks.
    async fn open(
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

    /// Records, and attempts that are over.
    async fn keep_books(
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
                Settled::Duplicate | Settled::Known => continue,
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
                duration_us: i64::try_from(fate.took.as_micros()).unwrap_or(i64::MAX),
                error: failed,
            });
        }
        if records.is_empty() {
            return Ok(());
        }
        self.limited(D::record(tx, statements, key, &records)).await
    }

    /// Compare-and-set and COMMIT: the last two statements, so that nobody waits behind the row's lock for a handler (G6).
    /// One lane after the other.
    async fn finish(
        &self,
        mut tx: Transaction<'static, D>,
        key: &Key,
        term: &Term,
        offsets: &[i64],
        marked: Option<Uuid>,
        settled: Vec<Settled>,
    ) -> Finished {
        let handled = !settled.is_empty();
        if handled && let Err(e) = self.limited(D::intact(&mut tx)).await {
            self.undo(tx).await;
            return Finished::NotAdvanced(e);
        }
        let waiting = Instant::now();
        let turn = term.turn.lock().await;
        if waiting.elapsed() >= self.idle_limit / 2 {
            // Another lane waited long for an answer. The session may be ended at any moment, and that would look like a
            // failure of the handler.
            drop(turn);
            self.undo(tx).await;
            return Finished::Done(Outcome::Outage(timed_out(waiting.elapsed())));
        }
        let Some((from, to)) = term.begin_commit(offsets) else {
            drop(turn);
            self.undo(tx).await;
            return Finished::Done(Outcome::Unsure("another lane left a doubt"));
        };
        match self
            .limited(D::advance(
                &mut tx,
                &self.statements,
                key,
                &from,
                &to,
                marked,
            ))
            .await
        {
            Ok(true) => {}
            // G6: a zombie ends here. Its marks and effects go with the transaction.
            Ok(false) => {
                self.undo(tx).await;
                return Finished::Done(Outcome::Unsure(
                    "the position row is not what this process wrote",
                ));
            }
            Err(e) => {
                term.chain().in_doubt = false;
                drop(turn);
                self.undo(tx).await;
                return Finished::NotAdvanced(e);
            }
        }
        self.step(Step::BeforeCommit);
        match self.commit(tx).await {
            Ok(()) => {
                let mut chain = term.chain();
                chain.commit(offsets, to);
                chain.in_doubt = false;
                drop(chain);
                let gone = |s: &Settled| matches!(s, Settled::DeadLetter | Settled::Parked);
                self.step(if handled && settled.iter().all(gone) {
                    Step::DeadLettered
                } else {
                    Step::Committed
                });
                Finished::Done(Outcome::Settled(settled))
            }
            // A deferred constraint or trigger: the server has said that it did not commit.
            Err(e) if e.as_database_error().is_some() && class(&e) != Class::Outage => {
                term.chain().in_doubt = false;
                let at = (offsets.len() == 1).then_some(0);
                Finished::Done(Outcome::Failed(failure(at, &e.into())))
            }
            Err(e) => {
                tracing::warn!(error = %e, "no answer to a commit, the position row will tell");
                Finished::Done(Outcome::Unsure("the answer to a commit was lost"))
            }
        }
    }

    /// COMMIT. SQLite rolls back by itself when it cannot commit (a full disk), and sqlx would go on counting the transaction: a
    /// connection on which nothing can begin any more.
    pub(crate) async fn commit(&self, mut tx: Transaction<'static, D>) -> Result<(), sqlx::Error> {
        if !D::IN_PROCESS {
            return self.limited(tx.commit()).await;
        }
        // In a task of its own: dropped in between, the count would be wrong as well.
        let done = tokio::spawn(async move {
            let committed = D::plain(&mut tx, "COMMIT").await;
            roll_back::<D>(tx).await;
            committed
        });
        let done = async { done.await.map_err(|_| sqlx::Error::WorkerCrashed)? };
        self.limited(done).await
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

    /// Rolls back. An error means that the connection is gone, and with it the transaction.
    pub(crate) async fn undo(&self, tx: Transaction<'static, D>) {
        let done = tokio::spawn(roll_back::<D>(tx));
        let done = async { done.await.map_err(|_| sqlx::Error::WorkerCrashed) };
        if let Err(e) = self.limited(done).await {
            tracing::debug!(error = %e, "no answer to a rollback");
        }
    }

    /// Waits for the database no longer than it may take: a server that has vanished without a word never answers, and TCP
    /// would wait for it for ever.
    pub(crate) async fn limited<T>(
        &self,
        statement: impl Future<Output = Result<T, sqlx::Error>>,
    ) -> Result<T, sqlx::Error> {
        // A mark or a row may be held by a stopped process until the database ends its session.
        let limit = self.idle_limit + STATEMENT_LIMIT;
        match tokio::time::timeout(limit, statement).await {
            Ok(result) => result,
            Err(_) => Err(timed_out(limit)),
        }
    }

    fn letter<'a>(
        &self,
        delivery: &'a Delivery,
        attempts: u32,
        first_failed_at: Option<i64>,
        error: &'a str,
        parked: bool,
    ) -> (&'a Delivery, Letter<'a>) {
        (
            delivery,
            Letter {
                attempts,
                first_failed_at,
                error,
                parked,
            },
        )
    }

    /// Inserts a dead letter or a parked message.
    async fn write_letter(
        &self,
        tx: &mut Transaction<'static, D>,
        key: &Key,
        (delivery, letter): (&Delivery, Letter<'_>),
    ) -> Result<(), Box<Outcome>> {
        let stop = |problem| stop_at(key, delivery, letter.error, problem);
        let refused = |e: sqlx::Error| match class(&e) {
            Class::Outage => Box::new(Outcome::Outage(e)),
            Class::Data | Class::Handler | Class::Refusal => stop(e.to_string()),
        };
        let pairs = delivery.headers.iter();
        let headers = headers::encode(pairs.map(|(name, value)| (name.as_str(), value.as_deref())))
            .map_err(|e| stop(e.to_string()))?;
        let row = DeadLetter {
            message_id: delivery.message_id,
            offset: delivery.offset,
            key: delivery.key.as_deref(),
            payload: delivery.payload.as_deref(),
            headers: &headers,
            error: &storable(letter.error),
            attempts: i32::try_from(letter.attempts).unwrap_or(i32::MAX),
            parked: letter.parked,
            timestamp_ms: delivery.timestamp_ms,
            first_failed_at: letter.first_failed_at,
        };
        let statements = &self.statements;
        if self
            .limited(D::bury(tx, statements, key, &row))
            .await
            .map_err(refused)?
        {
            return Ok(());
        }
        // The same message was written off before its mark expired: it is on record, which is all we need. Another
        // message at the same place must not be overwritten and this one not be dropped.
        let there = self
            .limited(D::buried(tx, statements, key, delivery.offset))
            .await
            .map_err(refused)?;
        if there == Some(delivery.message_id) {
            return Ok(());
        }
        Err(stop(
            "the dead-letter table holds another message of this topic, partition and offset (the topic was re-created?); move that row elsewhere"
                .to_owned(),
        ))
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
            traceparent = delivery.traceparent,
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

    /// The statement after the handler failed. When that is the handler's doing it counts as its failure: as an outage
    /// it would be repeated for ever.
    fn after_handler(&self, at: Option<usize>, error: sqlx::Error, idle: Duration) -> Outcome {
        let its_fault = match class(&error) {
            Class::Handler => format!(
                "the handler returned Ok, but an earlier statement of it had failed, or it left the transaction idle for too long: {error}"
            ),
            _ if is_no_savepoint(&error) => {
                "the handler returned Ok, but its transaction is not open any more".to_owned()
            }
            Class::Outage if idle >= self.idle_limit => format!(
                "the handler left the transaction idle for up to {} s, the limit is {} s: {error}",
                idle.as_secs(),
                self.idle_limit.as_secs(),
            ),
            Class::Outage => return Outcome::Outage(error),
            Class::Data | Class::Refusal => {
                return Outcome::Stop(Error::database("advance the position", error));
            }
        };
        Outcome::Failed(failure(at, &HandlerError::retriable(its_fault)))
    }

    /// Writes down that the consumer stops because many messages failed in a row.
    pub(crate) async fn trip(
        &self,
        topic: &str,
        consumer: &str,
        failures: u32,
        error: &str,
    ) -> Result<(), sqlx::Error> {
        let failures = i32::try_from(failures).unwrap_or(i32::MAX);
        let write = async {
            let mut conn = self.pool.acquire().await?;
            D::trip(
                &mut conn,
                &self.statements,
                consumer,
                topic,
                failures,
                error,
            )
            .await
        };
        self.limited(write).await
    }

    /// Reads the position row as committed, in a session of its own.
    pub(crate) async fn read(&self, key: &Key) -> Result<Option<Row>, sqlx::Error> {
        let read = async {
            let mut conn = self.pool.acquire().await?;
            D::read(&mut conn, &self.statements, key).await
        };
        self.limited(read).await
    }

    /// Takes ownership of a partition, and reads what was tried in vain; `None` when it has no row yet.
    ///
    /// The token is written before Kafka is asked where the partition begins and ends, and before it is told to
    /// deliver. It may wait for the last transaction of the previous owner, and thereby sees its outcome: whatever
    /// that one tries later fails on the token (G6). A lost answer needs no care: the next attempt writes another token.
    pub(crate) async fn take(
        &self,
        key: &Key,
    ) -> Result<Option<(Row, BTreeMap<i64, Attempt>)>, sqlx::Error> {
        let take = async {
            let statements = &self.statements;
            let mut tx = D::begin_brief(&self.pool, statements).await?;
            let Some(row) = D::take(&mut tx, statements, key, Uuid::new_v4()).await? else {
                return Ok(None);
            };
            D::forget_below(&mut tx, statements, key, row.next).await?;
            let attempts = D::attempts(&mut tx, statements, key, row.next).await?;
            tx.commit().await?;
            Ok(Some((row, attempts)))
        };
        self.limited(take).await
    }

    /// Creates the row of a partition that has none. `None`: another process was faster, take it.
    pub(crate) async fn create(
        &self,
        key: &Key,
        topic_id: String,
        next: i64,
    ) -> Result<Option<Row>, sqlx::Error> {
        let row = Row {
            topic_id,
            next,
            seq: 0,
            owner: Uuid::new_v4(),
        };
        let create = async {
            let mut tx = D::begin_brief(&self.pool, &self.statements).await?;
            let created = D::create(&mut tx, &self.statements, key, &row).await?;
            tx.commit().await?;
            Ok(created)
        };
        Ok(self.limited(create).await?.then_some(row))
    }
}

impl Fate {
    fn of(settled: Settled) -> Self {
        Self {
            settled,
            took: Duration::ZERO,
        }
    }
}

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

/// How [`Processor::finish`] ended.
enum Finished {
    Done(Outcome),
    /// The transaction is rolled back, because this statement failed after the handler.
    NotAdvanced(sqlx::Error),
}

/// What a dead letter says besides the message.
#[derive(Clone, Copy)]
struct Letter<'a> {
    attempts: u32,
    first_failed_at: Option<i64>,
    error: &'a str,
    parked: bool,
}

/// The savepoint is gone, and with it the transaction (SQLSTATE 3B001, 25P01; SQLite: no such savepoint).
fn is_no_savepoint(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|e| {
        matches!(e.code().as_deref(), Some("3B001" | "25P01"))
            || e.message().starts_with("no such savepoint")
    })
}

/// A dead letter that cannot be written stops the partition: the message must not be passed (G8).
fn stop_at(key: &Key, delivery: &Delivery, failure: &str, problem: String) -> Box<Outcome> {
    Box::new(Outcome::Stop(Error::DeadLetter {
        topic: key.topic.to_string(),
        partition: key.partition,
        offset: delivery.offset,
        failure: failure.to_owned(),
        problem,
    }))
}

/// ROLLBACK, also when the transaction has ended by itself.
async fn roll_back<D: InboxStore>(mut tx: Transaction<'static, D>) {
    let _ = D::reopen(&mut tx).await;
    if let Err(e) = tx.rollback().await {
        tracing::debug!(error = %e, "no answer to a rollback");
    }
}

fn timed_out(limit: Duration) -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::new(
        std::io::ErrorKind::TimedOut,
        format!("no answer within {} s", limit.as_secs()),
    ))
}

/// PostgreSQL's text holds no NUL; and an error text is for people.
pub(crate) fn storable(text: &str) -> String {
    let mut text = text.replace('\0', "\u{fffd}");
    if text.len() > ERROR_LIMIT {
        let mut end = ERROR_LIMIT;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
    }
    text
}
