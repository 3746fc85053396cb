//! A newer format of the position, when every relay of an outbox knows it.
//!
//! A build writes the format that the mark asks for, and refuses one that it does not know before it writes anything. So an
//! older and a newer build may take turns during a rolling deploy, and go on doing so until the format is raised.

use std::fmt;

use crate::config::{Config, Database};
use crate::error::Error;
use crate::position::newest_format;
use crate::session::{Deadline, PostgresSession, Session, SqliteSession};

/// What an upgrade would do, or did.
#[derive(Debug, Clone)]
pub struct Plan {
    from: u32,
    to: u32,
    applied: bool,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, applied } = self;
        if from == to {
            return write!(
                f,
                "the position has format {from}, the newest of this build; nothing to do"
            );
        }
        writeln!(f, "the position's format goes from {from} to {to}")?;
        if *applied {
            write!(
                f,
                "written; a relay takes it up at its next start, and a build that does not know it refuses to start"
            )
        } else {
            write!(
                f,
                "nothing was changed; when no relay of an older build is left, add --apply to do it"
            )
        }
    }
}

/// Raises the format of the position to the newest of this build. Without `apply` it only looks. The relay may run: it
/// writes the new format from its next start on.
///
/// # Errors
/// [`Error`] when the database is not there, or its format is newer than this build.
///
/// # Cancel safety
/// Safe anywhere: it is one statement.
pub async fn upgrade(config: Config, apply: bool) -> Result<Plan, Error> {
    match &config.database {
        Database::Postgres(_) => upgrade_with::<Deadline<PostgresSession>>(&config, apply).await,
        Database::Sqlite(_) => upgrade_with::<Deadline<SqliteSession>>(&config, apply).await,
    }
}

pub(crate) async fn upgrade_with<S: Session>(config: &Config, apply: bool) -> Result<Plan, Error> {
    let mut session = S::connect(config).await?;
    let from = session.mark().await?.format;
    let to = newest_format();
    let applied = apply && from < to;
    if applied {
        session.raise_format(to).await?;
    }
    Ok(Plan { from, to, applied })
}
