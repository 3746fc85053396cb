//! What can go wrong inside a transaction, and what is known about its outcome.

use std::time::Duration;

use crate::error::Error;

/// What is known about a transaction that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was not committed and will not be.
    DidNotHappen,
    /// A commit was sent and its answer is not known. The checkpoint decides after a rebuild.
    Unknown,
}

/// A record that Kafka, or this client on Kafka's behalf, refuses for good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Index of the record in [`crate::Transaction::records`]. If several records came back with
    /// the refusal (a broker refuses a whole batch), the most likely one: the largest for a size,
    /// else the first.
    pub index: usize,
    /// All records that came back with this refusal, ascending. One = the refusal is certain to be
    /// this record's.
    pub suspects: Vec<usize>,
    /// Topic of the record.
    pub topic: String,
    /// Kafka's error name, for example `MSG_SIZE_TOO_LARGE`, or `LOCAL` for a record that cannot be
    /// encoded.
    pub code: String,
    /// What the broker or the client said.
    pub reason: String,
}

/// Why a transaction failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// A definite refusal of one record: its size or its content. Trying again cannot help.
    #[error("record {} for topic `{}` is refused: {}: {}", .0.index, .0.topic, .0.code, .0.reason)]
    Refused(Refused),
    /// The topic is missing, forbidden or broken; other topics are not affected.
    #[error("topic `{topic}`: {code}: {reason}")]
    Topic {
        /// The topic's name; with several suspects the first.
        topic: String,
        /// The topics that it may be: librdkafka does not always say which one the broker refused. One = it is certain.
        suspects: Vec<String>,
        /// Kafka's error name.
        code: String,
        /// What the broker said, and the remedy.
        reason: String,
    },
    /// Records were not acknowledged: time-outs, lost connections, too few replicas. Never a reason
    /// to park a record.
    #[error("{failed} of {sent} records were not acknowledged; the first: {code}: {reason}")]
    NotAcknowledged {
        /// How many records were handed over.
        sent: usize,
        /// How many came back with an error.
        failed: usize,
        /// Kafka's error name of the first.
        code: String,
        /// What the broker or the client said of the first.
        reason: String,
        /// The topics of which not one record was acknowledged, while every record of every other topic was; empty if
        /// no topic was acknowledged in full.
        silent_topics: Vec<String>,
    },
    /// A transactional call failed.
    #[error(transparent)]
    Call(Error),
    /// The producer must be re-created first: an earlier transaction left a request behind that may
    /// still arrive.
    #[error("the producer must be re-created before the next transaction: {reason}")]
    NeedsRebuild {
        /// What was left behind.
        reason: String,
    },
}

/// A transaction that was not committed, or whose commit is not known.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}", .0.cause)]
pub struct TransactError(pub(crate) Box<Failure>);

/// What there is to say about a failed transaction.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) cause: Cause,
    pub(crate) outcome: Outcome,
    pub(crate) needs_rebuild: bool,
    pub(crate) retriable: bool,
}

impl Failure {
    /// The transaction was not begun, because an earlier one left something behind.
    pub(crate) fn refused(reason: &str) -> Self {
        Self {
            cause: Cause::NeedsRebuild {
                reason: reason.to_owned(),
            },
            outcome: Outcome::DidNotHappen,
            needs_rebuild: true,
            retriable: true,
        }
    }

    /// The producer's thread does not come back from a call.
    pub(crate) fn hangs(waited: Duration) -> Self {
        Self {
            cause: Cause::Call(Error::Kafka {
                operation: "transact".into(),
                code: "_TIMED_OUT".into(),
                reason: format!("the client has not come back for {waited:?}; it is given up"),
                retriable: true,
                fatal: true,
            }),
            outcome: Outcome::Unknown,
            needs_rebuild: true,
            retriable: true,
        }
    }

    /// The producer's thread is gone.
    pub(crate) fn closed(outcome: Outcome) -> Self {
        Self {
            cause: Cause::Call(Error::closed("transact")),
            outcome,
            needs_rebuild: true,
            retriable: true,
        }
    }
}

impl From<Failure> for TransactError {
    fn from(failure: Failure) -> Self {
        Self(Box::new(failure))
    }
}

impl TransactError {
    /// Why it failed.
    #[must_use]
    pub fn cause(&self) -> &Cause {
        &self.0.cause
    }

    /// What is known about the transaction.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        self.0.outcome
    }

    /// The producer is of no more use: close it, open a new one with the same `transactional.id`
    /// and read the checkpoint. `false` = the transaction was aborted cleanly and the producer can
    /// go on.
    #[must_use]
    pub fn needs_rebuild(&self) -> bool {
        self.0.needs_rebuild
    }

    /// Trying the same transaction again may help, after a rebuild if [`Self::needs_rebuild`].
    #[must_use]
    pub fn is_retriable(&self) -> bool {
        self.0.retriable
    }

    /// A newer producer has the same `transactional.id`, or the broker ended our transaction by
    /// time-out: the two cannot be told apart. Look at the lease.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        matches!(&self.0.cause, Cause::Call(error) if error.is_fenced())
    }

    /// The refused record, if the cause is a definite refusal (size, invalid record).
    #[must_use]
    pub fn refused(&self) -> Option<&Refused> {
        match &self.0.cause {
            Cause::Refused(refused) => Some(refused),
            _ => None,
        }
    }

    /// Whether the cause is a definite refusal of one record, see [`Self::refused`].
    #[must_use]
    pub fn is_refused(&self) -> bool {
        self.refused().is_some()
    }

    /// The topic that is missing or forbidden, if that is the cause.
    #[must_use]
    pub fn topic(&self) -> Option<&str> {
        match &self.0.cause {
            Cause::Topic { topic, .. } => Some(topic),
            _ => None,
        }
    }

    /// The topics that may be the cause, if a topic is: one = it is certain.
    #[must_use]
    pub fn suspected_topics(&self) -> &[String] {
        match &self.0.cause {
            Cause::Topic { suspects, .. } => suspects,
            _ => &[],
        }
    }

    /// The topics that alone got no acknowledgement, see [`Cause::NotAcknowledged`].
    #[must_use]
    pub fn silent_topics(&self) -> &[String] {
        match &self.0.cause {
            Cause::NotAcknowledged { silent_topics, .. } => silent_topics,
            _ => &[],
        }
    }
}
