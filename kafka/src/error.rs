//! What can go wrong outside a transaction, in words that name the remedy.

/// An error of a Kafka client.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A property is refused, by Oncebox or by librdkafka.
    #[error("kafka property `{property}` {reason}")]
    Config {
        /// The property's name, without the prefix `kafka.`.
        property: String,
        /// Why; never contains a secret.
        reason: String,
    },
    /// No broker answered in time.
    #[error(
        "cannot reach Kafka at {bootstrap}: {reason}; check that a broker listens there and that \
         `kafka.security.protocol` is what the listener expects"
    )]
    Unreachable {
        /// The configured bootstrap list.
        bootstrap: String,
        /// The last thing the client saw.
        reason: String,
    },
    /// The broker refused the credentials, or the TLS handshake failed.
    #[error(
        "Kafka at {bootstrap} refused the connection: {reason}; check `kafka.sasl.*`, `kafka.ssl.*` \
         and `kafka.security.protocol`"
    )]
    Authentication {
        /// The configured bootstrap list.
        bootstrap: String,
        /// What the broker or OpenSSL said.
        reason: String,
    },
    /// The principal lacks a right.
    #[error("{operation}: Kafka denies it ({code}): {reason}; {remedy}")]
    Authorization {
        /// What was tried.
        operation: String,
        /// Kafka's error name.
        code: String,
        /// What the broker said.
        reason: String,
        /// The right to grant.
        remedy: &'static str,
    },
    /// The topic, or the partition asked for, does not exist.
    #[error(
        "Kafka topic `{topic}`, or the partition asked for, does not exist; create it, for example: \
         kafka-topics.sh --create --topic {topic}"
    )]
    UnknownTopic {
        /// The topic's name.
        topic: String,
    },
    /// Another producer with the same `transactional.id` has been opened, or the broker has timed
    /// our transaction out: the two cannot be told apart.
    #[error(
        "{operation}: fenced: a newer producer has the same transactional.id, or the broker ended our \
         transaction by time-out ({reason})"
    )]
    Fenced {
        /// What was tried.
        operation: String,
        /// What librdkafka said.
        reason: String,
    },
    /// Anything else, with Kafka's name for it.
    #[error("{operation}: {code}: {reason}")]
    Kafka {
        /// What was tried.
        operation: String,
        /// Kafka's or librdkafka's error name, for example `REQUEST_TIMED_OUT` or `_TIMED_OUT`.
        code: String,
        /// What the broker or librdkafka said.
        reason: String,
        /// Whether trying again may help.
        retriable: bool,
        /// Whether the client is dead and has to be created anew.
        fatal: bool,
    },
    /// The client's thread has ended.
    #[error("{operation}: the Kafka client is closed")]
    Closed {
        /// What was tried.
        operation: String,
    },
}

impl Error {
    pub(crate) fn config(property: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Config {
            property: property.into(),
            reason: reason.into(),
        }
    }

    pub(crate) fn closed(operation: impl Into<String>) -> Self {
        Self::Closed {
            operation: operation.into(),
        }
    }

    /// Trying again may help without anybody changing anything.
    #[must_use]
    pub fn is_retriable(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Kafka { retriable, .. } => *retriable,
            _ => false,
        }
    }

    /// The client is of no more use: create a new one.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        match self {
            Self::Fenced { .. } | Self::Closed { .. } => true,
            Self::Kafka { fatal, .. } => *fatal,
            _ => false,
        }
    }

    /// The configuration is wrong.
    #[must_use]
    pub fn is_config(&self) -> bool {
        matches!(self, Self::Config { .. })
    }

    /// The broker refused the credentials or the TLS handshake.
    #[must_use]
    pub fn is_authentication(&self) -> bool {
        matches!(self, Self::Authentication { .. })
    }

    /// The principal lacks a right.
    #[must_use]
    pub fn is_authorization(&self) -> bool {
        matches!(self, Self::Authorization { .. })
    }

    /// The topic does not exist.
    #[must_use]
    pub fn is_unknown_topic(&self) -> bool {
        matches!(self, Self::UnknownTopic { .. })
    }

    /// A newer producer has the same `transactional.id`, or the broker ended our transaction by
    /// time-out.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        matches!(self, Self::Fenced { .. })
    }
}
