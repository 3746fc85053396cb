//! Why something in front of the database could not be set up, or not be done.

use std::time::Duration;

/// Why a setting was refused, or a lease or a reservation not decided. A [`Hint`](crate::Hint) never fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The URL of Redis cannot be used. The text does not repeat it: it may hold a password.
    #[error("the URL of Redis cannot be used: {0}")]
    Url(String),
    /// A setting or an argument breaks a rule.
    #[error("{name} {value} is not allowed: {rule}")]
    Invalid {
        /// The setting or argument, for example `environment`.
        name: &'static str,
        /// Its value.
        value: String,
        /// The rule.
        rule: &'static str,
    },
    /// The marks would be gone before the last repetition of a message can arrive.
    #[error(
        "the marks live {window:?}, but a message may come again after {horizon:?}: \
         raise the window to at least the retry horizon, or shorten the retries"
    )]
    WindowTooShort {
        /// How long a mark lives.
        window: Duration,
        /// The longest time after which a message may come again.
        horizon: Duration,
    },
    /// Redis did not answer in time, cannot be reached, or answered with an error. What was asked for may have happened.
    #[error("could not {doing}: {source}")]
    Unavailable {
        /// What was being done.
        doing: &'static str,
        /// What the connection or Redis said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl Error {
    /// Redis is at fault, not the caller: go on without it, or ask again.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }

    pub(crate) fn unavailable(doing: &'static str) -> impl FnOnce(crate::link::Failure) -> Self {
        move |failure| Self::Unavailable {
            doing,
            source: Box::new(failure),
        }
    }

    pub(crate) fn invalid(
        name: &'static str,
        value: impl std::fmt::Debug,
        rule: &'static str,
    ) -> Self {
        Self::Invalid {
            name,
            value: format!("{value:?}"),
            rule,
        }
    }
}
