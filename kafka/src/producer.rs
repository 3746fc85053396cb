//! The transactional producer.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::error::Error;
use crate::record::Transaction;
use crate::transact_error::TransactError;

/// A point in the life of a transaction, reported to [`ProducerOptions::on_step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The transaction is open.
    Begun,
    /// About half of the records are handed over.
    Producing,
    /// Every record is acknowledged.
    Acked,
    /// The checkpoint is part of the transaction.
    OffsetsSent,
    /// The commit request is written to the socket, its answer not yet read. Called on a thread of librdkafka.
    EndTxnSent,
    /// The commit is known.
    Committed,
}

/// How a [`TransactionalProducer`] works.
#[derive(Clone)]
pub struct ProducerOptions {
    /// Deadline of a transaction, and how long `read_committed` readers wait for a producer that died: 1 s or more.
    /// Defaults to 30 s.
    pub transaction_timeout: Duration,
    /// Called at each [`Step`]. Must return quickly. Defaults to nothing.
    pub on_step: Option<Arc<dyn Fn(Step) + Send + Sync>>,
    pub(crate) taint_rule: bool,
}

impl Default for ProducerOptions {
    fn default() -> Self {
        Self {
            transaction_timeout: Duration::from_secs(30),
            on_step: None,
            taint_rule: true,
        }
    }
}

impl ProducerOptions {
    /// Switches off the cure for late requests, to show the damage in tests. Never in production.
    #[doc(hidden)]
    #[must_use]
    pub fn without_taint_rule(mut self) -> Self {
        self.taint_rule = false;
        self
    }
}

impl fmt::Debug for ProducerOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProducerOptions")
            .field("transaction_timeout", &self.transaction_timeout)
            .finish_non_exhaustive()
    }
}

/// A transaction that was committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Why the producer must be re-created before its next transaction, if it must.
    pub tainted: Option<String>,
    /// How many records were published.
    pub records: usize,
}

/// The async handle of a transactional producer.
#[derive(Debug)]
pub struct TransactionalProducer {}

impl TransactionalProducer {
    /// Opens.
    pub async fn open(
        _config: &Config,
        _transactional_id: &str,
        _options: ProducerOptions,
    ) -> Result<Self, Error> {
        todo!()
    }
    /// Transacts.
    pub async fn transact(&self, _t: Transaction) -> Result<Committed, TransactError> {
        todo!()
    }
    /// Last step.
    pub fn last_step(&self) -> Instant {
        todo!()
    }
    /// Closes.
    pub async fn close(self) {
        todo!()
    }
}
