//! What a handler is and what it can report.

use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use sqlx::Transaction;

use crate::classify::{Class, class};
use crate::delivery::Delivery;

/// Any error that can cross threads.
pub type BoxError = Box<dyn StdError + Send + Sync + 'static>;

/// What a handler returns: `Box::pin(async move { … })`.
pub type HandlerFuture<'a> = Pin<Box<dyn Future<Output = Result<(), HandlerError>> + Send + 'a>>;

type Each<D> = Arc<
    dyn for<'a> Fn(&'a mut Transaction<'static, D>, Delivery) -> HandlerFuture<'a> + Send + Sync,
>;
type Whole<D> = Arc<
    dyn for<'a> Fn(&'a mut Transaction<'static, D>, &'a [Delivery]) -> HandlerFuture<'a>
        + Send
        + Sync,
>;

/// The two kinds of handlers.
#[derive(Clone)]
pub(crate) enum Handler<D: sqlx::Database> {
    /// Called for each message.
    Each(Each<D>),
    /// Called once for all messages of a transaction.
    Batch(Whole<D>),
}

/// Why a handler did not do its work. Everything it wrote through the transaction is rolled back.
///
/// `?` on an [`sqlx::Error`] chooses by SQLSTATE: class 22 (data exception) and 23 (constraint), or a SQLite constraint,
/// are fatal, everything else is retriable. `?` on a [`serde_json::Error`] is fatal. For other errors say which one it is:
///
/// ```
/// # use oncebox_inbox::HandlerError;
/// # fn rate() -> Result<f64, std::num::ParseFloatError> { "1.5".parse() }
/// # fn handler() -> Result<(), HandlerError> {
/// let rate = rate().map_err(HandlerError::fatal)?;
/// # let _ = rate; Ok(()) }
/// # handler().unwrap();
/// ```
#[derive(Debug)]
pub enum HandlerError {
    /// It may work later: called again as the [`RetryPolicy`](crate::RetryPolicy) says, then a dead letter.
    Retriable(BoxError),
    /// Another transaction was faster (`guard::versioned`): the whole handler is called again at once, up to ten times without
    /// counting; after that it is retriable.
    Conflict(BoxError),
    /// It will never work with this message: a dead letter at once, and the partition goes on.
    Fatal(BoxError),
}

impl HandlerError {
    /// A retriable error.
    pub fn retriable(error: impl Into<BoxError>) -> Self {
        Self::Retriable(error.into())
    }

    /// A fatal error.
    pub fn fatal(error: impl Into<BoxError>) -> Self {
        Self::Fatal(error.into())
    }

    /// Whether the message is given up at once.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::Fatal(_))
    }

    fn inner(&self) -> &BoxError {
        let (Self::Retriable(error) | Self::Conflict(error) | Self::Fatal(error)) = self;
        error
    }

    /// The error with its sources in one line, as the dead letter records it.
    pub(crate) fn chain(&self) -> String {
        let error = self.inner();
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            // Many errors repeat their source in their own text.
            if !text.ends_with(&cause_text) {
                text.push_str(": ");
                text.push_str(&cause_text);
            }
            source = cause.source();
        }
        text
    }
}

impl fmt::Display for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Retriable(e) => write!(f, "retriable: {e}"),
            Self::Conflict(e) => write!(f, "conflict: {e}"),
            Self::Fatal(e) => write!(f, "fatal: {e}"),
        }
    }
}

impl StdError for HandlerError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.inner().source()
    }
}

impl From<sqlx::Error> for HandlerError {
    fn from(error: sqlx::Error) -> Self {
        match class(&error) {
            Class::Data => Self::fatal(error),
            Class::Handler | Class::Outage | Class::Refusal => Self::retriable(error),
        }
    }
}

/// A conflict is redone, an error of the database is sorted as always; a misspelt name and the like is fatal.
impl From<oncebox_guard::Error> for HandlerError {
    fn from(error: oncebox_guard::Error) -> Self {
        match error {
            oncebox_guard::Error::Database { source, .. } => source.into(),
            e if e.is_conflict() => Self::Conflict(e.into()),
            e if e.is_retriable() => Self::retriable(e),
            e => Self::fatal(e),
        }
    }
}

impl From<serde_json::Error> for HandlerError {
    fn from(error: serde_json::Error) -> Self {
        Self::fatal(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_that_does_not_parse_is_fatal() {
        let error = serde_json::from_str::<u32>("x").unwrap_err();
        assert!(HandlerError::from(error).is_fatal());
    }

    #[test]
    fn a_lost_connection_is_retriable() {
        let io = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        assert!(!HandlerError::from(sqlx::Error::Io(io)).is_fatal());
        assert!(!HandlerError::from(sqlx::Error::PoolTimedOut).is_fatal());
    }
}
