//! Where the tables are: schema and prefix, checked once.

use crate::Dialect;

/// Longest name that follows the prefix (`inbox_seen_at`), with room for later ones.
const LONGEST_SUFFIX: usize = 23;
/// Identifiers of PostgreSQL are cut at 63 bytes: two cut names could meet.
const LONGEST_IDENTIFIER: usize = 63;

/// Schema and table prefix of one set of Oncebox tables.
///
/// Defaults to the schema `public` and the prefix `oncebox_`. SQLite has no schemas: there only the prefix counts.
/// Several sets can live in one database, each with a prefix or schema of its own.
///
/// ```
/// use oncebox_migrations::{Dialect, Names};
///
/// let names = Names::new("shop", "oncebox_")?;
/// assert_eq!(names.outbox(Dialect::Postgres), r#""shop"."oncebox_outbox""#);
/// assert_eq!(names.outbox(Dialect::Sqlite), r#""oncebox_outbox""#);
/// # Ok::<(), oncebox_migrations::NamesError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Names {
    schema: String,
    prefix: String,
}

impl Default for Names {
    fn default() -> Self {
        Self {
            schema: "public".into(),
            prefix: "oncebox_".into(),
        }
    }
}

impl Names {
    /// Checks a schema and a prefix.
    ///
    /// Both match `^[a-z_][a-z0-9_]{0,62}$`, which is why the SQL of Oncebox may carry them as text. A prefix is at
    /// most 40 bytes long, so that no table or index name exceeds PostgreSQL's 63 bytes.
    ///
    /// # Errors
    ///
    /// [`NamesError`] names the part, its value and the rule it breaks. Schemas that start with `pg_` and prefixes that
    /// start with `sqlite_` belong to the databases.
    pub fn new(schema: impl Into<String>, prefix: impl Into<String>) -> Result<Self, NamesError> {
        let names = Self {
            schema: schema.into(),
            prefix: prefix.into(),
        };
        check("schema", &names.schema, LONGEST_IDENTIFIER, "pg_")?;
        check(
            "prefix",
            &names.prefix,
            LONGEST_IDENTIFIER - LONGEST_SUFFIX,
            "sqlite_",
        )?;
        Ok(names)
    }

    /// The schema (PostgreSQL only).
    #[must_use]
    pub fn schema(&self) -> &str {
        &self.schema
    }

    /// The prefix of every table.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The table of messages that wait for the relay, quoted and qualified.
    #[must_use]
    pub fn outbox(&self, dialect: Dialect) -> String {
        self.table(dialect, "outbox")
    }

    /// The relay's one-row table, quoted and qualified.
    #[must_use]
    pub fn mark(&self, dialect: Dialect) -> String {
        self.table(dialect, "mark")
    }

    /// The rows that the relay could not publish, quoted and qualified.
    #[must_use]
    pub fn parked(&self, dialect: Dialect) -> String {
        self.table(dialect, "parked")
    }

    /// The topics and keys that the relay does not publish to, quoted and qualified.
    #[must_use]
    pub fn paused(&self, dialect: Dialect) -> String {
        self.table(dialect, "paused")
    }

    /// The dedup marks, quoted and qualified.
    #[must_use]
    pub fn inbox(&self, dialect: Dialect) -> String {
        self.table(dialect, "inbox")
    }

    /// The consumers' positions, quoted and qualified.
    #[must_use]
    pub fn position(&self, dialect: Dialect) -> String {
        self.table(dialect, "position")
    }

    /// The dead letters, quoted and qualified.
    #[must_use]
    pub fn dead_letter(&self, dialect: Dialect) -> String {
        self.table(dialect, "dead_letter")
    }

    /// The keys whose messages are parked instead of handled, quoted and qualified.
    #[must_use]
    pub fn blocked_key(&self, dialect: Dialect) -> String {
        self.table(dialect, "blocked_key")
    }

    /// The messages that failed and will be tried again, quoted and qualified.
    #[must_use]
    pub fn attempt(&self, dialect: Dialect) -> String {
        self.table(dialect, "attempt")
    }

    /// The topics that a consumer does not work on, quoted and qualified.
    #[must_use]
    pub fn inbox_paused(&self, dialect: Dialect) -> String {
        self.table(dialect, "inbox_paused")
    }

    /// The consumers that stopped because many messages failed in a row, quoted and qualified.
    #[must_use]
    pub fn breaker(&self, dialect: Dialect) -> String {
        self.table(dialect, "breaker")
    }

    /// The record of what was consumed, quoted and qualified.
    #[must_use]
    pub fn record(&self, dialect: Dialect) -> String {
        self.table(dialect, "record")
    }

    /// The history of the migrations, quoted and qualified.
    #[must_use]
    pub fn history(&self, dialect: Dialect) -> String {
        self.table(dialect, "migrations")
    }

    fn table(&self, dialect: Dialect, name: &str) -> String {
        let Self { schema, prefix } = self;
        match dialect {
            Dialect::Postgres => format!(r#""{schema}"."{prefix}{name}""#),
            Dialect::Sqlite => format!(r#""{prefix}{name}""#),
        }
    }
}

fn check(
    part: &'static str,
    value: &str,
    longest: usize,
    reserved: &'static str,
) -> Result<(), NamesError> {
    let rule = if value.is_empty() {
        "it must not be empty".to_owned()
    } else if value.len() > longest {
        format!("it is {} bytes long, the limit is {longest}", value.len())
    } else if value.as_bytes()[0].is_ascii_digit()
        || !value
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
    {
        "only a-z, 0-9 and _ are allowed, and no digit at the beginning".to_owned()
    } else if value.starts_with(reserved) {
        format!("names that start with {reserved} belong to the database")
    } else {
        return Ok(());
    };
    Err(NamesError {
        part,
        value: value.to_owned(),
        rule,
    })
}

/// A schema or prefix that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{part} {value:?} cannot be used: {rule}")]
pub struct NamesError {
    part: &'static str,
    value: String,
    rule: String,
}

impl NamesError {
    /// What is wrong: `schema` or `prefix`.
    #[must_use]
    pub fn part(&self) -> &'static str {
        self.part
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_change_the_sql_are_refused() {
        for bad in [
            "", "1a", "a-b", "a\"b", "a b", "Upper", "a;b", "ä", "a.b", "a\0",
        ] {
            assert_eq!(
                Names::new(bad, "p_").unwrap_err().part(),
                "schema",
                "{bad:?}"
            );
            assert_eq!(
                Names::new("s", bad).unwrap_err().part(),
                "prefix",
                "{bad:?}"
            );
        }
        assert!(Names::new("pg_shop", "p_").is_err());
        assert!(Names::new("s", "sqlite_p").is_err());
        assert!(Names::new("_", "_").is_ok());
    }

    #[test]
    fn no_identifier_exceeds_63_bytes() {
        assert!(Names::new("s".repeat(63), "p".repeat(40)).is_ok());
        assert!(Names::new("s".repeat(64), "p").is_err());
        let error = Names::new("s", "p".repeat(41)).unwrap_err();
        assert!(
            error.to_string().contains("41 bytes long, the limit is 40"),
            "{error}"
        );
    }
}
