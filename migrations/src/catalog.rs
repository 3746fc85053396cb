//! The migrations this build carries, and how their templates become SQL.

use sha2::{Digest, Sha256};

use crate::{Dialect, Names};

/// The version of this library, recorded with every migration it applies.
pub(crate) const LIBRARY: &str = env!("CARGO_PKG_VERSION");

/// One migration: a template per database. A published one is never edited; a change is a new version.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Migration {
    pub(crate) version: i64,
    pub(crate) name: &'static str,
    postgres: &'static str,
    sqlite: &'static str,
}

macro_rules! migrations {
    ($($version:literal $file:literal $name:literal),* $(,)?) => {
        &[$(Migration {
            version: $version,
            name: $name,
            postgres: include_str!(concat!("../sql/postgres/", $file)),
            sqlite: include_str!(concat!("../sql/sqlite/", $file)),
        }),*]
    };
}

/// All migrations, version 1 first, without a hole.
pub(crate) const MIGRATIONS: &[Migration] = migrations![
    1 "0001_outbox.sql" "outbox",
    2 "0002_inbox.sql" "inbox",
    3 "0003_parking.sql" "parking",
    4 "0004_failures.sql" "failures",
];

/// The newest version of the schema that this build knows.
pub const LATEST: i64 = MIGRATIONS.len() as i64;

impl Migration {
    fn template(&self, dialect: Dialect) -> &'static str {
        match dialect {
            Dialect::Postgres => self.postgres,
            Dialect::Sqlite => self.sqlite,
        }
    }

    /// SHA-256 of the template, lower-case hex. Over the template and not the rendered SQL: schema and prefix are no
    /// part of what was decided when the migration was written. Line ends count as LF, whatever the checkout made of them.
    pub(crate) fn checksum(&self, dialect: Dialect) -> String {
        let text = self.template(dialect).replace("\r\n", "\n");
        let mut hex = String::with_capacity(64);
        for byte in Sha256::digest(text) {
            hex.push(char::from_digit(u32::from(byte >> 4), 16).unwrap_or('0'));
            hex.push(char::from_digit(u32::from(byte & 15), 16).unwrap_or('0'));
        }
        hex
    }

    /// The migration and its row in the history: the two belong into one transaction.
    pub(crate) fn sql(&self, dialect: Dialect, names: &Names) -> String {
        format!(
            "{}\nINSERT INTO {} (version, name, checksum, library) VALUES ({}, '{}', '{}', '{LIBRARY}');\n",
            render(self.template(dialect), names, &[]).trim_end(),
            names.history(dialect),
            self.version,
            self.name,
            self.checksum(dialect),
        )
    }
}

/// The SQL that creates the history table (and the schema, where there is such a thing) when it is missing.
pub(crate) fn history_sql(dialect: Dialect, names: &Names) -> String {
    let template = match dialect {
        Dialect::Postgres => include_str!("../sql/postgres/history.sql"),
        Dialect::Sqlite => include_str!("../sql/sqlite/history.sql"),
    };
    render(template, names, &[])
}

/// Replaces `{schema}`, `{prefix}` and the given placeholders in one pass: a replacement is never looked at again.
pub(crate) fn render(template: &str, names: &Names, more: &[(&str, String)]) -> String {
    let mut sql = String::with_capacity(template.len() + 256);
    let mut rest = template;
    while let Some(start) = rest.find('{') {
        let (text, tail) = rest.split_at(start);
        sql.push_str(text);
        let known = [("{schema}", names.schema()), ("{prefix}", names.prefix())]
            .into_iter()
            .chain(more.iter().map(|(name, value)| (*name, value.as_str())))
            .find(|(name, _)| tail.starts_with(name));
        match known {
            Some((name, value)) => {
                sql.push_str(value);
                rest = &tail[name.len()..];
            }
            None => {
                sql.push('{');
                rest = &tail[1..];
            }
        }
    }
    sql.push_str(rest);
    sql
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_numbered_from_one_without_a_hole() {
        for (index, migration) in MIGRATIONS.iter().enumerate() {
            assert_eq!(migration.version, index as i64 + 1);
        }
    }

    #[test]
    fn every_numbered_file_is_carried() {
        for dir in ["postgres", "sqlite"] {
            let dir = format!("{}/sql/{dir}", env!("CARGO_MANIFEST_DIR"));
            let numbered = std::fs::read_dir(dir)
                .unwrap()
                .filter(|entry| {
                    let name = entry.as_ref().unwrap().file_name();
                    name.to_string_lossy()
                        .starts_with(|c: char| c.is_ascii_digit())
                })
                .count();
            assert_eq!(numbered, MIGRATIONS.len());
        }
    }

    #[test]
    fn no_placeholder_survives() {
        let names = Names::new("shop", "ob_").unwrap();
        for dialect in [Dialect::Postgres, Dialect::Sqlite] {
            let sql = crate::sql(dialect, &names, 0, LATEST);
            assert!(!sql.contains('{') && !sql.contains("oncebox_"), "{sql}");
        }
    }

    #[test]
    fn a_replacement_is_never_looked_at_again() {
        let roles = [("{relay}", "{schema}".to_owned())];
        assert_eq!(
            render("{relay} {prefix} {other}", &Names::default(), &roles),
            "{schema} oncebox_ {other}"
        );
    }

    #[test]
    fn a_checksum_is_the_hex_of_the_templates_sha256() {
        let checksum = MIGRATIONS[0].checksum(Dialect::Postgres);
        assert_eq!(checksum.len(), 64);
        assert!(
            checksum
                .bytes()
                .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        );
        assert_ne!(checksum, MIGRATIONS[0].checksum(Dialect::Sqlite));
    }
}
