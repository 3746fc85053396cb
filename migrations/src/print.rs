//! The SQL as text, for people and tools that run it themselves.

use std::fmt::Write as _;

use crate::catalog::{MIGRATIONS, history_sql, render};
use crate::{Dialect, Names};

/// The SQL that brings a schema from version `from` (exclusive, 0 = nothing there) to version `to` (inclusive).
///
/// For an application that runs all DDL with its own tool. Run the text in **one transaction** (it contains no `BEGIN`, so
/// that a migration tool can wrap it). It records the versions in Oncebox's own history, so that
/// [`status`](crate::status) and a later run of the runner know them.
///
/// ```
/// use oncebox_migrations::{Dialect, LATEST, Names, sql};
///
/// let text = sql(Dialect::Postgres, &Names::default(), 0, LATEST);
/// assert!(text.contains(r#"CREATE TABLE "public"."oncebox_outbox""#));
/// ```
#[must_use]
pub fn sql(dialect: Dialect, names: &Names, from: i64, to: i64) -> String {
    let mut text = format!(
        "-- Oncebox schema, version {from} to {}. Run it in one transaction.\n",
        to.min(crate::LATEST)
    );
    if from <= 0 {
        let _ = write!(text, "\n{}", history_sql(dialect, names));
    }
    for migration in MIGRATIONS {
        if migration.version > from && migration.version <= to {
            let _ = write!(
                text,
                "\n-- Version {}: {}\n{}",
                migration.version,
                migration.name,
                migration.sql(dialect, names)
            );
        }
    }
    text
}

/// The least rights that the three roles need on PostgreSQL, as SQL for the owner of the tables.
///
/// * `producer`: a service that enqueues. `INSERT` on the outbox and nothing else.
/// * `relay`: `SELECT`, `DELETE` on the outbox, `SELECT` on its sequence, `SELECT`, `UPDATE` on the mark.
/// * `consumer`: the inbox, its positions and dead letters. A handler that enqueues is a producer too.
///
/// Role names are quoted; they may be the same. The roles must exist. Rights on the application's own tables are the
/// application's business.
///
/// ```
/// let sql = oncebox_migrations::grants(&Default::default(), "shop", "oncebox_relay", "inventory");
/// assert!(sql.contains(r#"GRANT INSERT ON "public"."oncebox_outbox" TO "shop";"#));
/// ```
#[must_use]
pub fn grants(names: &Names, producer: &str, relay: &str, consumer: &str) -> String {
    let quoted = |role: &str| format!("\"{}\"", role.replace('"', "\"\""));
    render(
        include_str!("../sql/postgres/grants.sql"),
        names,
        &[
            ("{producer}", quoted(producer)),
            ("{relay}", quoted(relay)),
            ("{consumer}", quoted(consumer)),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_history_can_be_printed() {
        let names = Names::default();
        let second = sql(Dialect::Postgres, &names, 1, 2);
        assert!(
            second.contains("oncebox_inbox")
                && !second.contains("CREATE TABLE \"public\".\"oncebox_outbox\"")
        );
        assert!(!second.contains("CREATE SCHEMA"));
        assert!(sql(Dialect::Postgres, &names, 2, 2).lines().count() == 1);
        assert_eq!(
            sql(Dialect::Sqlite, &names, 0, 99),
            sql(Dialect::Sqlite, &names, 0, crate::LATEST).as_str()
        );
    }

    #[test]
    fn role_names_are_quoted() {
        let sql = grants(&Names::default(), "a\"; DROP TABLE x; --", "Relay", "c");
        assert!(sql.contains(r#"TO "a""; DROP TABLE x; --";"#), "{sql}");
        assert!(sql.contains(r#"TO "Relay";"#));
    }
}
