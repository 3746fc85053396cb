//! What stops a consumer.
//!
//! | predicate | meaning |
//! |---|---|
//! | [`Error::is_config`] | the program or its configuration is wrong: nothing was read or written |
//! | [`Error::is_stop`] | going on would break a guarantee: somebody has to decide, the text names the command |

use crate::start::Refusal;

/// What stops a consumer. Outages of the database or of Kafka never do: they are waited out.
///
/// Nothing is lost by any of these: what was not settled in the database is delivered again after the next start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is missing or wrong.
    #[error("inbox setting `{setting}`: {problem}")]
    Config {
        /// The builder's method, or the Kafka property.
        setting: &'static str,
        /// What is wrong and what is allowed.
        problem: String,
    },
    /// A topic does not exist.
    #[error(
        "topic `{topic}` does not exist: create it (kafka-topics.sh --create --topic {topic}), or correct the name given to `.topic(…)`"
    )]
    UnknownTopic {
        /// The topic.
        topic: String,
    },
    /// The tables are missing, or of another version than this build.
    #[error(transparent)]
    Schema(#[from] oncebox_migrations::Error),
    /// The database refused something that repeating does not change.
    #[error("cannot {doing}: {source}{remedy}")]
    Database {
        /// What was tried.
        doing: &'static str,
        /// What the database said.
        source: sqlx::Error,
        /// What to do about it; empty when unknown.
        remedy: &'static str,
    },
    /// Kafka refused something that repeating does not change.
    #[error("cannot {doing}: {source}")]
    Kafka {
        /// What was tried.
        doing: &'static str,
        /// What Kafka said.
        source: oncebox_kafka::Error,
    },
    /// A partition's position needs a decision (G10).
    #[error(
        "{topic}[{partition}] of consumer `{consumer}` stopped: {refusal}. Look, then choose: oncebox inbox resume --consumer {consumer} --topic {topic} --partition {partition} --from earliest|latest|committed|<offset>|<time>"
    )]
    Position {
        /// The consumer.
        consumer: String,
        /// The topic.
        topic: String,
        /// The partition.
        partition: i32,
        /// Why.
        refusal: Refusal,
    },
    /// A message carries an envelope version this build does not know.
    #[error(
        "{topic}[{partition}] offset {offset}: {problem}; a newer Oncebox wrote it: upgrade this service, nothing was skipped"
    )]
    UnknownEnvelope {
        /// The topic.
        topic: String,
        /// The partition.
        partition: i32,
        /// The message's offset.
        offset: i64,
        /// What the decoder said.
        problem: String,
    },
    /// A dead letter could not be written, so the message must not be passed (G8).
    #[error(
        "{topic}[{partition}] offset {offset} failed ({failure}) and its dead letter cannot be written: {problem}. The partition stops here, nothing was skipped"
    )]
    DeadLetter {
        /// The topic.
        topic: String,
        /// The partition.
        partition: i32,
        /// The message's offset.
        offset: i64,
        /// Why the message failed.
        failure: String,
        /// Why the dead letter cannot be written.
        problem: String,
    },
    /// Many messages failed in a row: that is an outage, or the wrong topic, and not poison (G8).
    #[error(
        "{failures} messages of {topic} failed in a row for consumer `{consumer}`, the last one with: {failure}. That looks like an outage and not like poison: nothing more is written off. Repair it, then: oncebox inbox resume --consumer {consumer} --accept-failures --apply"
    )]
    Breaker {
        /// The consumer.
        consumer: String,
        /// The topic.
        topic: String,
        /// How many failed in a row.
        failures: u32,
        /// Why the last one failed.
        failure: String,
    },
    /// The consumer's thread ended without a result: a bug, please report it.
    #[error("the consumer thread ended unexpectedly")]
    Thread,
}

impl Error {
    /// The program or its configuration is wrong; nothing was read or written.
    #[must_use]
    pub fn is_config(&self) -> bool {
        match self {
            Self::Config { .. } | Self::UnknownTopic { .. } | Self::Schema(_) => true,
            Self::Kafka { source, .. } => source.is_config(),
            _ => false,
        }
    }

    /// Going on would break a guarantee: do not restart blindly, decide first.
    #[must_use]
    pub fn is_stop(&self) -> bool {
        matches!(
            self,
            Self::Position { .. }
                | Self::UnknownEnvelope { .. }
                | Self::DeadLetter { .. }
                | Self::Breaker { .. }
        )
    }

    pub(crate) fn config(setting: &'static str, problem: impl Into<String>) -> Self {
        Self::Config {
            setting,
            problem: problem.into(),
        }
    }

    pub(crate) fn database(doing: &'static str, source: sqlx::Error) -> Self {
        let remedy = if crate::classify::is_missing_table(&source) {
            "; run `oncebox migrate`"
        } else {
            ""
        };
        Self::Database {
            doing,
            source,
            remedy,
        }
    }

    pub(crate) fn kafka(doing: &'static str, source: oncebox_kafka::Error) -> Self {
        Self::Kafka { doing, source }
    }
}
