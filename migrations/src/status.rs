//! What was applied, and what that means for this build. Pure: no I/O.

use crate::catalog::{LATEST, MIGRATIONS, Migration};
use crate::{Dialect, Error};

/// What a run of the migrations did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Versions that this run applied, in order. Empty when everything was there already.
    pub applied: Vec<i64>,
    /// The version of the schema now.
    pub version: i64,
}

/// One row of the history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    /// Version of the migration.
    pub version: i64,
    /// Its name.
    pub name: String,
    /// SHA-256 of its template, lower-case hex.
    pub checksum: String,
    /// Version of `oncebox-migrations` that applied it.
    pub library: String,
}

/// What the history says.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// Version of the schema; 0 when Oncebox has no table there.
    pub version: i64,
    /// The newest version this build knows.
    pub latest: i64,
    /// The rows of the history by version.
    pub applied: Vec<Applied>,
    pub(crate) dialect: Dialect,
    pub(crate) table: String,
}

impl Status {
    pub(crate) fn new(dialect: Dialect, table: String, applied: Vec<Applied>) -> Self {
        Self {
            version: applied.last().map_or(0, |row| row.version),
            latest: LATEST,
            applied,
            dialect,
            table,
        }
    }

    /// Whether this build can work with the schema.
    ///
    /// # Errors
    ///
    /// [`Error::Behind`], [`Error::NewerSchema`], [`Error::Edited`] or [`Error::Hole`], each with its remedy.
    pub fn check(&self) -> Result<(), Error> {
        match self.next()? {
            None => Ok(()),
            Some(_) => Err(Error::Behind {
                version: self.version,
                latest: self.latest,
            }),
        }
    }

    /// The migration to apply next, once the history agrees with this build.
    pub(crate) fn next(&self) -> Result<Option<&'static Migration>, Error> {
        self.next_of(MIGRATIONS)
    }

    fn next_of<'m>(&self, known: &'m [Migration]) -> Result<Option<&'m Migration>, Error> {
        if let Some(newest) = self.applied.last()
            && newest.version > known.len() as i64
        {
            return Err(Error::NewerSchema {
                version: newest.version,
                latest: known.len() as i64,
                library: newest.library.clone(),
            });
        }
        for (migration, row) in known.iter().zip(&self.applied) {
            if migration.version != row.version {
                return Err(Error::Hole {
                    version: migration.version,
                    table: self.table.clone(),
                });
            }
            let expected = migration.checksum(self.dialect);
            if expected != row.checksum {
                return Err(Error::Edited {
                    version: row.version,
                    name: row.name.clone(),
                    library: row.library.clone(),
                    table: self.table.clone(),
                    recorded: row.checksum.clone(),
                    expected,
                });
            }
        }
        Ok(known.get(self.applied.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(rows: &[(i64, Option<&str>)]) -> Status {
        let applied = rows
            .iter()
            .map(|&(version, checksum)| Applied {
                version,
                name: format!("m{version}"),
                checksum: checksum.map_or_else(
                    || {
                        MIGRATIONS
                            .get(version as usize - 1)
                            .map_or(String::new(), |m| m.checksum(Dialect::Sqlite))
                    },
                    str::to_owned,
                ),
                library: "9.9.9".into(),
            })
            .collect();
        Status::new(Dialect::Sqlite, "\"t\"".into(), applied)
    }

    #[test]
    fn the_next_migration_follows_the_last_applied_one() {
        assert_eq!(status(&[]).next().unwrap().unwrap().version, 1);
        assert_eq!(status(&[(1, None)]).next().unwrap().unwrap().version, 2);
        let all: Vec<_> = (1..=crate::LATEST).map(|version| (version, None)).collect();
        assert!(status(&all).next().unwrap().is_none());
        assert!(status(&all).check().is_ok());
    }

    #[test]
    fn a_schema_that_is_behind_names_the_command() {
        let error = status(&[(1, None)]).check().unwrap_err();
        assert!(matches!(error, Error::Behind { version: 1, .. }));
        assert!(error.to_string().contains("oncebox migrate"), "{error}");
    }

    #[test]
    fn an_edited_migration_is_named_with_both_checksums() {
        let error = status(&[(1, Some("abc")), (2, None)]).check().unwrap_err();
        assert!(matches!(error, Error::Edited { version: 1, .. }));
        let text = error.to_string();
        assert!(
            text.contains("abc")
                && text.contains("m1")
                && text.contains(&MIGRATIONS[0].checksum(Dialect::Sqlite))
        );
    }

    #[test]
    fn a_newer_schema_is_said_before_anything_else() {
        let error = status(&[(1, Some("abc")), (2, None), (99, None)])
            .check()
            .unwrap_err();
        assert!(matches!(error, Error::NewerSchema { version: 99, .. }));
        assert!(error.to_string().contains("9.9.9"), "{error}");
    }

    #[test]
    fn a_hole_in_the_history_is_an_error() {
        let error = status(&[(2, None)]).check().unwrap_err();
        assert!(matches!(error, Error::Hole { version: 1, .. }), "{error}");
    }
}
