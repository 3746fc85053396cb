//! The end of every transaction: compare-and-set, COMMIT, or ROLLBACK.

use std::time::{Duration, Instant};

use sqlx::Transaction;
use uuid::Uuid;

use super::{Outcome, Processor, Settled, failure, own, timed_out};
use crate::InboxStore;
use crate::chain::Term;
use crate::classify::{Class, class};
use crate::error::Error;
use crate::handler::HandlerError;
use crate::position::Key;
use crate::step::Step;
use crate::store::ENDED;

/// How [`Processor::finish`] ended.
pub(super) enum Finished {
    Done(Outcome),
    /// The transaction is rolled back, because this statement failed after the handler.
    NotAdvanced(sqlx::Error),
}

impl<D: InboxStore> Processor<D> {
    /// Compare-and-set and COMMIT: the last two statements, so that nobody waits behind the row's lock for a handler (G6).
    /// One lane after the other.
    pub(super) async fn finish(
        &self,
        mut tx: Transaction<'static, D>,
        key: &Key,
        term: &Term,
        offsets: &[i64],
        marked: Option<Uuid>,
        settled: Vec<Settled>,
    ) -> Finished {
        let handled = !settled.is_empty();
        if handled
            && D::IN_PROCESS
            && let Err(e) = self.limited(D::intact(&mut tx)).await
        {
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
        let Some(step) = term.begin_commit(offsets) else {
            drop(turn);
            self.undo(tx).await;
            return Finished::Done(Outcome::Unsure("another lane left a doubt"));
        };
        match self
            .limited(D::advance(&mut tx, &self.statements, key, &step, marked))
            .await
        {
            Ok(true) => {}
            Ok(false) => {
                if handled
                    && !D::IN_PROCESS
                    && let Err(e) = self.limited(D::intact(&mut tx)).await
                {
                    term.chain().in_doubt = false;
                    drop(turn);
                    self.undo(tx).await;
                    return Finished::NotAdvanced(e);
                }
                // G6: a zombie ends here. Its marks and effects go with the transaction.
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
                chain.commit(offsets, step.to);
                chain.in_doubt = false;
                drop(chain);
                let gone = |s: &Settled| {
                    matches!(s, Settled::DeadLetter | Settled::Parked | Settled::Delayed)
                };
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

    /// Writes a position that was reached without a transaction.
    pub(crate) async fn advance(&self, key: &Key, term: &Term) -> Outcome {
        match self.limited(D::begin(&self.pool, &self.statements)).await {
            Ok(tx) => self.finish_own(tx, key, term).await,
            Err(e) => own("begin a transaction", e),
        }
    }

    pub(super) async fn finish_own(
        &self,
        tx: Transaction<'static, D>,
        key: &Key,
        term: &Term,
    ) -> Outcome {
        match self.finish(tx, key, term, &[], None, Vec::new()).await {
            Finished::Done(outcome) => outcome,
            Finished::NotAdvanced(e) => own("advance the position", e),
        }
    }

    /// The statement after the handler failed. When that is the handler's doing it counts as its failure: as an outage
    /// it would be repeated for ever.
    pub(super) fn after_handler(
        &self,
        at: Option<usize>,
        error: sqlx::Error,
        idle: Duration,
    ) -> Outcome {
        let its_fault = match class(&error) {
            Class::Handler => format!(
                "the handler returned Ok, but an earlier statement of it had failed, or it left the transaction idle for too long: {error}"
            ),
            _ if has_ended(&error) => {
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

    /// Rolls back. An error means that the connection is gone, and with it the transaction.
    pub(crate) async fn undo(&self, tx: Transaction<'static, D>) {
        let done = tokio::spawn(roll_back::<D>(tx));
        let done = async { done.await.map_err(|_| sqlx::Error::WorkerCrashed) };
        if let Err(e) = self.limited(done).await {
            tracing::debug!(error = %e, "no answer to a rollback");
        }
    }
}

/// ROLLBACK, also when the transaction has ended by itself: SQLite calls that an error, and sqlx would go on counting it.
async fn roll_back<D: InboxStore>(mut tx: Transaction<'static, D>) {
    if D::IN_PROCESS {
        let _ = D::reopen(&mut tx).await;
    }
    if let Err(e) = tx.rollback().await {
        tracing::debug!(error = %e, "no answer to a rollback");
    }
}

/// The transaction is not the one that was begun (no such savepoint on SQLite; see [`ENDED`]), or none is open (SQLSTATE 25P01).
fn has_ended(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Protocol(text) => text == ENDED,
        sqlx::Error::Database(e) => {
            e.code().as_deref() == Some("25P01") || e.message().starts_with("no such savepoint")
        }
        _ => false,
    }
}
