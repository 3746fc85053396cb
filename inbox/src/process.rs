//! One message, one transaction: mark, handler, position, COMMIT. And what a failure leaves behind: nothing, or a dead
//! letter.
//!
//! Nothing here retries or decides about the partition: the outcome goes back to the worker.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use oncebox_migrations::headers;
use sqlx::{Pool, Transaction};
use tracing::Instrument;
use uuid::Uuid;

use crate::InboxStore;
use crate::classify::{Class, class};
use crate::delivery::Delivery;
use crate::error::Error;
use crate::handler::{Handler, HandlerError};
use crate::position::{Key, Known, Row};
use crate::step::{Step, StepHook};
use crate::store::{DeadLetter, Statements};

/// Longest error text of a dead letter, in bytes.
const ERROR_LIMIT: usize = 4_096;
/// Longest wait for the answer to a statement of ours, beyond the time a lock may be held by a stopped process. Longer than
/// sqlx's default wait for a free connection (30 s).
const STATEMENT_LIMIT: Duration = Duration::from_secs(40);

/// What the transactions of all partitions share.
pub(crate) struct Processor<D: InboxStore> {
    pub(crate) pool: Pool<D>,
    pub(crate) statements: Statements,
    pub(crate) handler: Handler<D>,
    pub(crate) on_step: Option<StepHook>,
    /// After this much idle time inside a transaction the database may have ended the session (G6).
    pub(crate) idle_limit: Duration,
    /// Longest time for one call of the handler.
    pub(crate) handler_limit: Duration,
}

/// How a transaction of a partition ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Committed, with the position that stands now.
    Settled(Known, Settled),
    /// The handler failed; everything is rolled back.
    Failed(HandlerError),
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
    /// Mark, dead letter and position.
    DeadLetter,
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

impl<D: InboxStore> Processor<D> {
    pub(crate) fn step(&self, step: Step) {
        if let Some(hook) = &self.on_step {
            hook(step);
        }
    }

    /// Handles one message (G5, G6).
    pub(crate) async fn deliver(&self, key: &Key, known: Known, delivery: Delivery) -> Outcome {
        let id = delivery.message_id;
        let (mut tx, fresh) = match self.open(key, id).await {
            Ok(open) => open,
            Err(outcome) => return *outcome,
        };
        let to = known.after(delivery.offset);
        let begun = Instant::now();
        if fresh {
            self.step(Step::Marked);
            if let Err(failure) = self.handle(&mut tx, delivery).await {
                // G5: the handler's writes go before anybody thinks about a retry or a dead letter.
                self.undo(tx).await;
                self.step(Step::Failed);
                return Outcome::Failed(failure);
            }
            self.step(Step::Handled);
        } else {
            self.step(Step::Duplicate);
        }
        match self.advance(&mut tx, key, &known, &to, id).await {
            Ok(true) => {}
            // G6: a zombie ends here. Its mark and effect go with the transaction.
            Ok(false) => return self.refuse(tx).await,
            Err(e) => return self.after_handler(e, begun.elapsed()),
        }
        let settled = if fresh {
            Settled::Effect
        } else {
            Settled::Duplicate
        };
        self.commit(tx, to, settled).await
    }

    /// Writes a message off: mark, dead letter and position in one transaction (G8).
    pub(crate) async fn bury(
        &self,
        key: &Key,
        known: Known,
        delivery: &Delivery,
        failure: &str,
    ) -> Outcome {
        let id = delivery.message_id;
        // The mark is the licence: without it somebody else has settled the message, and a dead letter could bring a
        // second effect by its replay.
        let (mut tx, fresh) = match self.open(key, id).await {
            Ok(open) => open,
            Err(outcome) => return *outcome,
        };
        if fresh && let Err(outcome) = self.letter(&mut tx, key, delivery, failure).await {
            self.undo(tx).await;
            return *outcome;
        }
        let to = known.after(delivery.offset);
        match self.advance(&mut tx, key, &known, &to, id).await {
            Ok(true) => {}
            Ok(false) => return self.refuse(tx).await,
            Err(e) => return own("advance the position", e),
        }
        let settled = if fresh {
            Settled::DeadLetter
        } else {
            Settled::Duplicate
        };
        match self.commit(tx, to, settled).await {
            Outcome::Failed(refused) => *stop_at(key, delivery, failure, refused.chain()),
            outcome => outcome,
        }
    }

    /// Begins the transaction of a message and inserts its mark; `false` = it was there.
    async fn open(
        &self,
        key: &Key,
        id: Uuid,
    ) -> Result<(Transaction<'static, D>, bool), Box<Outcome>> {
        let failed = |doing| move |e| Box::new(own(doing, e));
        let mut tx = self
            .limited(D::begin(&self.pool, &self.statements))
            .await
            .map_err(failed("begin a transaction"))?;
        let fresh = self
            .limited(D::mark(&mut tx, &self.statements, &key.consumer, id))
            .await
            .map_err(failed("insert the dedup mark"))?;
        Ok((tx, fresh))
    }

    /// The compare-and-set, the last statement before COMMIT: nobody waits behind its row lock for a handler (G6).
    async fn advance(
        &self,
        tx: &mut Transaction<'static, D>,
        key: &Key,
        from: &Known,
        to: &Known,
        id: Uuid,
    ) -> Result<bool, sqlx::Error> {
        self.limited(D::advance(tx, &self.statements, key, from, to, id))
            .await
    }

    /// The compare-and-set hit no row.
    async fn refuse(&self, tx: Transaction<'static, D>) -> Outcome {
        self.undo(tx).await;
        Outcome::Unsure("the position row is not what this process wrote")
    }

    /// Rolls back. An error means that the connection is gone, and with it the transaction.
    async fn undo(&self, mut tx: Transaction<'static, D>) {
        let _ = self.limited(D::reopen(&mut tx)).await;
        if let Err(e) = self.limited(tx.rollback()).await {
            tracing::debug!(error = %e, "no answer to a rollback");
        }
    }

    /// Waits for the database no longer than it may take: a server that has vanished without a word never answers, and TCP
    /// would wait for it for ever.
    async fn limited<T>(
        &self,
        statement: impl Future<Output = Result<T, sqlx::Error>>,
    ) -> Result<T, sqlx::Error> {
        // A mark or a row may be held by a stopped process until the database ends its session.
        let limit = self.idle_limit + STATEMENT_LIMIT;
        match tokio::time::timeout(limit, statement).await {
            Ok(result) => result,
            Err(_) => Err(sqlx::Error::Io(std::io::Error::new(
                std::io::ErrorKind::TimedOut,
                format!("no answer within {} s", limit.as_secs()),
            ))),
        }
    }

    /// Inserts the dead letter itself. Boxed: the error side is the rare one.
    async fn letter(
        &self,
        tx: &mut Transaction<'static, D>,
        key: &Key,
        delivery: &Delivery,
        failure: &str,
    ) -> Result<(), Box<Outcome>> {
        let stop = |problem| stop_at(key, delivery, failure, problem);
        let refused = |e: sqlx::Error| match class(&e) {
            Class::Outage => Box::new(Outcome::Outage(e)),
            Class::Data | Class::Handler | Class::Refusal => stop(e.to_string()),
        };
        let pairs = delivery.headers.iter();
        let headers = headers::encode(pairs.map(|(name, value)| (name.as_str(), value.as_deref())))
            .map_err(|e| stop(e.to_string()))?;
        let letter = DeadLetter {
            message_id: delivery.message_id,
            offset: delivery.offset,
            key: delivery.key.as_deref(),
            payload: delivery.payload.as_deref(),
            headers: &headers,
            error: &storable(failure),
            attempts: i32::try_from(delivery.attempt).unwrap_or(i32::MAX),
        };
        let statements = &self.statements;
        if self
            .limited(D::bury(tx, statements, key, &letter))
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

    async fn commit(&self, tx: Transaction<'static, D>, to: Known, settled: Settled) -> Outcome {
        self.step(Step::BeforeCommit);
        match self.limited(tx.commit()).await {
            Ok(()) => {
                self.step(match settled {
                    Settled::DeadLetter => Step::DeadLettered,
                    Settled::Effect | Settled::Duplicate => Step::Committed,
                });
                Outcome::Settled(to, settled)
            }
            // A deferred constraint or trigger: the server has said that it did not commit.
            Err(e) if e.as_database_error().is_some() && class(&e) != Class::Outage => {
                Outcome::Failed(e.into())
            }
            Err(e) => {
                tracing::warn!(error = %e, "no answer to a commit, the position row will tell");
                Outcome::Unsure("the answer to a commit was lost")
            }
        }
    }

    /// Calls the handler; a panic is a fatal error of this message, not the end of the consumer (G8).
    async fn handle(
        &self,
        tx: &mut Transaction<'static, D>,
        delivery: Delivery,
    ) -> Result<(), HandlerError> {
        let span = tracing::debug_span!(
            "delivery",
            topic = %delivery.topic,
            partition = delivery.partition,
            offset = delivery.offset,
            message_id = %delivery.message_id,
            traceparent = delivery.traceparent,
        );
        let handler = Arc::clone(&self.handler);
        // The call is inside the future, so that a panic before the first await is caught too.
        let call = async move { handler(tx, delivery).await };
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
    fn after_handler(&self, error: sqlx::Error, idle: Duration) -> Outcome {
        match class(&error) {
            Class::Handler => Outcome::Failed(HandlerError::retriable(format!(
                "the handler returned Ok, but an earlier statement of it had failed, or it left the transaction idle for too long: {error}"
            ))),
            Class::Outage if idle >= self.idle_limit => {
                Outcome::Failed(HandlerError::retriable(format!(
                    "the handler left the transaction idle for up to {} s, the limit is {} s: {error}",
                    idle.as_secs(),
                    self.idle_limit.as_secs(),
                )))
            }
            Class::Outage => Outcome::Outage(error),
            Class::Data | Class::Refusal => {
                Outcome::Stop(Error::database("advance the position", error))
            }
        }
    }

    /// Reads the position row as committed, in a session of its own.
    pub(crate) async fn read(&self, key: &Key) -> Result<Option<Row>, sqlx::Error> {
        let read = async {
            let mut conn = self.pool.acquire().await?;
            D::read(&mut conn, &self.statements, key).await
        };
        self.limited(read).await
    }

    /// Takes ownership of a partition; `None` when it has no row yet.
    ///
    /// The token is written before Kafka is asked where the partition begins and ends, and before it is told to
    /// deliver. It may wait for the last transaction of the previous owner, and thereby sees its outcome: whatever
    /// that one tries later fails on the token (G6). A lost answer needs no care: the next attempt writes another token.
    pub(crate) async fn take(&self, key: &Key) -> Result<Option<Row>, sqlx::Error> {
        let take = async {
            let mut tx = D::begin_brief(&self.pool, &self.statements).await?;
            let row = D::take(&mut tx, &self.statements, key, Uuid::new_v4()).await?;
            tx.commit().await?;
            Ok(row)
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

/// PostgreSQL's text holds no NUL; and an error text is for people.
fn storable(text: &str) -> String {
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
