//! Why a guard could not do its work.

use std::error::Error as StdError;

/// Why a guard could not do its work. What it *found* is never an error, but an outcome, with one exception:
/// [`Error::Conflict`], because the only thing to do about it is to roll back.
///
/// Roll the transaction back, unless it is a conflict about a version that came with the message (see [`versioned`](crate::versioned)):
/// a conflict has written nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name of a table or column breaks a rule. Nothing was sent to the database.
    #[error("the {part} {name:?} is not allowed: {rule}")]
    Name {
        /// `schema`, `table` or `column`.
        part: &'static str,
        /// The name.
        name: &'static str,
        /// The rule.
        rule: &'static str,
    },
    /// A column of the key is NULL, which equals nothing, itself included. Nothing was sent to the database.
    #[error("{column:?}, a column of the key of {table:?}, is NULL: it identifies no row")]
    NullKey {
        /// The table.
        table: &'static str,
        /// The column.
        column: &'static str,
    },
    /// A negative amount. Nothing was sent to the database.
    #[error("an amount must not be negative: {amount}")]
    NegativeAmount {
        /// The amount.
        amount: i64,
    },
    /// The amount of the row would exceed an `i64`.
    #[error("{column:?} of {table:?} has no room for {amount} more")]
    Overflow {
        /// The table.
        table: &'static str,
        /// The column of the amount.
        column: &'static str,
        /// What was to be added.
        amount: i64,
    },
    /// The state machine does not declare the state. Nothing was sent to the database.
    #[error("the state machine of {table:?} has no state {state:?}")]
    UnknownState {
        /// The table.
        table: &'static str,
        /// The state.
        state: String,
    },
    /// Several rows have the key: it is not unique.
    #[error("several rows of {table:?} have the key: it must be unique")]
    ManyRows {
        /// The table.
        table: &'static str,
    },
    /// The row has another version: what this transaction has computed is based on an old one. Roll back and do it all again
    /// ([`redo`](crate::redo)).
    #[error("the transaction is based on an old version")]
    Conflict(#[source] Conflict),
    /// The row fulfils every condition, and the UPDATE still left it alone: a trigger or a row-level policy stands in the way.
    #[error("a row of {table:?} cannot be changed: a trigger or a policy keeps it as it is")]
    Suppressed {
        /// The table.
        table: &'static str,
    },
    /// The database refused, or was not there.
    #[error("could not {doing} {table:?}: {source}{}", hint(source))]
    Database {
        /// What was being done, up to the table's name.
        doing: &'static str,
        /// The table.
        table: &'static str,
        /// What the database or the driver answered.
        source: sqlx::Error,
    },
}

/// A version that is not the row's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the row of {table:?} has version {found}, expected was {expected}")]
#[non_exhaustive]
pub struct Conflict {
    /// The table.
    pub table: &'static str,
    /// The version that the row should have.
    pub expected: i64,
    /// The version it has.
    pub found: i64,
}

impl Conflict {
    /// The conflict that an error is, or has among its sources.
    #[must_use]
    pub fn find<'e>(error: &'e (dyn StdError + 'static)) -> Option<&'e Self> {
        let mut next = Some(error);
        while let Some(error) = next {
            match error.downcast_ref() {
                Some(conflict) => return Some(conflict),
                None => next = error.source(),
            }
        }
        None
    }
}

impl Error {
    pub(crate) fn database(
        doing: &'static str,
        table: &'static str,
    ) -> impl FnOnce(sqlx::Error) -> Self {
        move |source| Self::Database {
            doing,
            table,
            source,
        }
    }

    /// Another transaction changed the row first: the whole transaction is to be done again, from what it reads on.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Conflict(_))
    }

    /// Rolling back and repeating the whole transaction can succeed: a conflict, a deadlock, a serialisation failure, a lock
    /// time-out or a busy SQLite database.
    #[must_use]
    pub fn is_retriable(&self) -> bool {
        match self {
            Self::Conflict(_) => true,
            Self::Database { source, .. } => code(source).is_some_and(|code| match code.as_str() {
                "40001" | "40P01" | "55P03" => true,
                // SQLite's codes have at most four digits; the lowest byte of SQLITE_BUSY and its kin is 5.
                code => code.len() < 5 && code.parse::<u32>().is_ok_and(|code| code & 0xff == 5),
            }),
            _ => false,
        }
    }
}

/// So that [`redo`](crate::redo) can look into it, as into a boxed error.
impl AsRef<dyn StdError + Send + Sync + 'static> for Error {
    fn as_ref(&self) -> &(dyn StdError + Send + Sync + 'static) {
        self
    }
}

fn code(error: &sqlx::Error) -> Option<String> {
    Some(error.as_database_error()?.code()?.into_owned())
}

/// What a caller can do about the errors everybody meets once.
fn hint(error: &sqlx::Error) -> &'static str {
    const UNIQUE: &str =
        " (the key needs a primary key or a UNIQUE constraint on exactly these columns)";
    match code(error).as_deref() {
        Some("42P10") => UNIQUE,
        Some("1") if error.to_string().contains("ON CONFLICT") => UNIQUE,
        Some("517") => {
            " (a deferred transaction read before it wrote, and somebody else wrote in between: \
             begin it with pool.begin_with(\"BEGIN IMMEDIATE\"))"
        }
        _ => "",
    }
}
