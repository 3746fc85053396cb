//! Why a message was not enqueued.

/// Why a message was not enqueued. In every case nothing of the call is in the transaction; on PostgreSQL the transaction
/// is still usable unless the error is [`Error::Database`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A part of the message is too large.
    #[error("{field}: {actual} {unit}, the limit is {limit}")]
    Limit {
        /// The part, for example `topic` or `header "tenant"`.
        field: String,
        /// What is counted, for example `bytes`.
        unit: &'static str,
        /// The most that is allowed.
        limit: usize,
        /// What the message has.
        actual: usize,
    },
    /// A part of the message breaks a rule.
    #[error("{field} {value:?} is not allowed: {rule}")]
    Invalid {
        /// The part, for example `topic` or `traceparent`.
        field: String,
        /// Its value, shortened.
        value: String,
        /// The rule.
        rule: &'static str,
    },
    /// A part that is needed is not there.
    #[error("the message has no {field}: {rule}")]
    Missing {
        /// The part, for example `key`.
        field: &'static str,
        /// Why it is needed, and what to call.
        rule: &'static str,
    },
    /// The payload could not be serialised.
    #[error("the payload could not be serialised as JSON: {0}")]
    Json(#[source] serde_json::Error),
    /// A message of [`enqueue_all`](crate::Outbox::enqueue_all) is not allowed; none was enqueued.
    #[error("message {index} of the batch: {source}")]
    InBatch {
        /// Position in the `Vec`, from 0.
        index: usize,
        /// What is wrong with it.
        source: Box<Error>,
    },
    /// The database refused, or was not there. Roll the transaction back.
    #[error("could not {doing}: {source}{}", hint(source))]
    Database {
        /// What was being done.
        doing: &'static str,
        /// What the database or the driver answered.
        source: sqlx::Error,
    },
}

impl Error {
    pub(crate) fn database(doing: &'static str) -> impl FnOnce(sqlx::Error) -> Self {
        move |source| Self::Database { doing, source }
    }

    /// The message itself is at fault: it will be refused again, whatever the database does.
    #[must_use]
    pub fn is_invalid_message(&self) -> bool {
        !matches!(self, Self::Database { .. })
    }

    /// Rolling back and repeating the whole business transaction can succeed: a deadlock, a serialisation failure, a lock
    /// time-out or a busy SQLite database.
    #[must_use]
    pub fn is_retriable(&self) -> bool {
        let Self::Database { source, .. } = self else {
            return false;
        };
        code(source).is_some_and(|code| match code.as_str() {
            "40001" | "40P01" | "55P03" => true,
            // SQLite's codes have at most four digits; the lowest byte of SQLITE_BUSY and its kin is 5.
            code => code.len() < 5 && code.parse::<u32>().is_ok_and(|code| code & 0xff == 5),
        })
    }
}

fn code(error: &sqlx::Error) -> Option<String> {
    Some(error.as_database_error()?.code()?.into_owned())
}

/// What a caller can do about the errors everybody meets once.
fn hint(error: &sqlx::Error) -> &'static str {
    const MIGRATE: &str = " (run `oncebox migrate`; is Config::names right?)";
    match code(error).as_deref() {
        Some("42P01") => MIGRATE,
        Some("1") if error.to_string().contains("no such table") => MIGRATE,
        Some("42501") => " (the role needs INSERT on the outbox: oncebox_migrations::grants)",
        Some("517") => {
            " (a deferred transaction read before it wrote, and somebody else wrote in between: \
             begin it with pool.begin_with(\"BEGIN IMMEDIATE\"))"
        }
        _ => "",
    }
}
