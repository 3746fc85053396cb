//! What the doctor learns from a database, whichever it is, and the words for what a database says.

use std::collections::BTreeSet;
use std::time::Duration;

use oncebox_migrations::Names;

use super::position::Mark;
use super::report::Checks;
use super::{postgres, sqlite};
use crate::args::Role;
use crate::config::{Backend, DatabaseUrl};

/// How long connecting, and every question, may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(4);
/// Between two looks at the lease; a leader renews it several times within the default of 3 s.
pub(super) const BETWEEN_LOOKS: Duration = Duration::from_millis(1500);
/// How many of the oldest waiting and of the newest rows are looked at for topic names.
pub(super) const ROWS_FOR_TOPICS: i64 = 10_000;

/// What later checks need to know.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) checks: Checks,
    pub(super) mark: Option<(Mark, Mark)>,
    pub(super) topics: BTreeSet<String>,
}

/// Examines the database. Never takes longer than a few times [`PATIENCE`].
pub(super) async fn examine(url: &DatabaseUrl, names: &Names, roles: &[Role]) -> Findings {
    match url.backend() {
        Backend::Postgres => postgres::examine(url, names, roles).await,
        Backend::Sqlite => sqlite::examine(url, names).await,
    }
}

/// Adds the line for an error of connecting to `place`: whose fault it is, and what to do.
pub(super) fn explain_connect(checks: &mut Checks, place: &str, error: &sqlx::Error) {
    add(
        checks,
        "database",
        format!("{place}: {}", words(error)),
        error,
    );
}

/// Adds the line for an error of asking.
pub(super) fn explain(checks: &mut Checks, name: &str, error: &sqlx::Error) {
    add(checks, name, words(error), error);
}

fn add(checks: &mut Checks, name: &str, text: String, error: &sqlx::Error) {
    let code = error
        .as_database_error()
        .and_then(|e| e.code())
        .unwrap_or_default()
        .into_owned();
    let (name, remedy) = match code.as_str() {
        "28P01" | "28000" => (
            "credentials",
            "correct user and password of --database-url (ONCEBOX_DATABASE_URL), or pg_hba.conf",
        ),
        "3D000" => (
            name,
            "create the database, or correct its name in --database-url",
        ),
        "53300" => (
            name,
            "the server has no free connection: raise max_connections, or end idle sessions",
        ),
        "57P03" => (name, "the server is starting or stopping: try again"),
        "42501" => (
            "rights",
            "grant the rights that `oncebox migrate --grants` prints",
        ),
        "14" => (
            name,
            "no such file: create it with `oncebox migrate`, or correct the path",
        ),
        "26" => (name, "the file is not a SQLite database: correct the path"),
        "5" | "6" => (
            name,
            "another process holds the write lock: end it, or try again",
        ),
        "8" => (
            "rights",
            "the file cannot be written: give this user write access to it and its directory",
        ),
        _ => match error {
            sqlx::Error::Io(_) => (
                name,
                "start the database there, or correct host and port of --database-url",
            ),
            sqlx::Error::Tls(_) => (
                name,
                "correct sslmode and certificates; TLS needs a build with the feature `tls`",
            ),
            _ => (name, "correct --database-url, or look at the server's log"),
        },
    };
    checks.fail(name, text, remedy);
}

/// What the database said, without what sqlx puts around it.
fn words(error: &sqlx::Error) -> String {
    match error.as_database_error() {
        Some(database) => database.message().to_owned(),
        None => error.to_string(),
    }
}

/// Adds the line for a question that got no answer in time.
pub(super) fn late(checks: &mut Checks, name: &str) {
    checks.fail(
        name,
        format!("no answer within {} s", PATIENCE.as_secs()),
        "check the network, firewalls and the server's load; a blocked table shows in pg_stat_activity",
    );
}

/// Adds the line about the schema's version; whether it can be used.
pub(super) fn schema(
    checks: &mut Checks,
    status: Result<oncebox_migrations::Status, oncebox_migrations::Error>,
) -> bool {
    let usable = match &status {
        Ok(found) => found.check(),
        Err(_) => Ok(()),
    };
    match (status, usable) {
        (Ok(status), Ok(())) => {
            checks.ok(
                "schema",
                format!("version {}, the newest this build knows", status.version),
            );
            true
        }
        (Ok(_), Err(oncebox_migrations::Error::Behind { version, latest })) => {
            let found = match version {
                0 => "Oncebox's tables are not there".to_owned(),
                _ => format!("version {version}, this build needs {latest}"),
            };
            checks.fail(
                "schema",
                found,
                "run `oncebox migrate`, or apply the SQL of `oncebox migrate --print`",
            );
            false
        }
        (Err(error), _) | (Ok(_), Err(error)) => {
            let text = crate::exit::with_sources(&error);
            let remedy = match error {
                oncebox_migrations::Error::NewerSchema { .. } => "upgrade this program",
                _ => "correct what it names",
            };
            checks.fail("schema", text, remedy);
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_server_is_told_from_a_bad_url() {
        let mut checks = Checks::default();
        let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        explain(&mut checks, "database", &sqlx::Error::Io(refused));
        assert!(
            checks.text().contains("start the database there"),
            "{}",
            checks.text()
        );
    }

    #[test]
    fn a_missing_schema_names_the_command() {
        let mut checks = Checks::default();
        let error = oncebox_migrations::Error::Behind {
            version: 0,
            latest: 2,
        };
        assert!(!schema(&mut checks, Err(error)));
        assert!(
            checks.text().contains("oncebox migrate"),
            "{}",
            checks.text()
        );
    }
}
