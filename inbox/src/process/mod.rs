//! The transactions of a partition: marks, handlers, position, COMMIT. And what a failure leaves behind: nothing, or a dead
//! letter.
//!
//! Nothing here retries or decides about the partition: the outcome goes back to the worker.

mod books;
mod deliver;
mod finish;
mod position;
mod write_off;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use oncebox_gate::{Hint, Scope};
use sqlx::Pool;
use time::OffsetDateTime;

use crate::InboxStore;
use crate::classify::{Class, class};
use crate::dead_topic::DeadTopic;
use crate::dedup::Dedup;
use crate::delivery::Delivery;
use crate::error::Error;
use crate::handler::{Handler, HandlerError};
use crate::operator::micros;
use crate::partition::Failure;
use crate::retry::OnFailure;
use crate::step::{Step, StepHook};
use crate::store::Statements;

pub(crate) use books::Fate;
pub(crate) use deliver::{Neighbours, Prepared, Preparing};

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
    /// Where dead letters are published, too.
    pub(crate) dead_topic: Option<DeadTopic>,
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
    /// Mark, delayed message and position.
    Delayed,
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

fn now_micros() -> i64 {
    micros(OffsetDateTime::now_utc())
}

impl<D: InboxStore> Processor<D> {
    pub(crate) fn step(&self, step: Step) {
        if let Some(hook) = &self.on_step {
            hook(step);
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
