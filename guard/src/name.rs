//! Names of tables and columns: checked, then quoted. Values never get into the text of a statement.

use crate::{Dialect, Error};

/// PostgreSQL cuts longer names: two cut names could meet.
const LONGEST: usize = 63;

/// The rule that a name breaks.
pub(crate) const fn broken_rule(name: &str) -> Option<&'static str> {
    let bytes = name.as_bytes();
    if bytes.is_empty() {
        return Some("it must not be empty");
    }
    if bytes.len() > LONGEST {
        return Some("it is longer than 63 bytes");
    }
    if bytes[0].is_ascii_digit() {
        return Some("it must not begin with a digit");
    }
    let mut i = 0;
    while i < bytes.len() {
        if !bytes[i].is_ascii_alphanumeric() && bytes[i] != b'_' {
            return Some("only a-z, A-Z, 0-9 and _ are allowed");
        }
        i += 1;
    }
    None
}

/// The quoted name of a column.
pub(crate) fn column<D: Dialect>(name: &'static str) -> Result<String, Error> {
    quoted::<D>("column", name)
}

/// The quoted name of a table, which may have its schema in front: `shop.orders`.
pub(crate) fn table<D: Dialect>(name: &'static str) -> Result<String, Error> {
    match name.split_once('.') {
        None => quoted::<D>("table", name),
        Some((schema, table)) => Ok(format!(
            "{}.{}",
            quoted::<D>("schema", schema)?,
            quoted::<D>("table", table)?
        )),
    }
}

fn quoted<D: Dialect>(part: &'static str, name: &'static str) -> Result<String, Error> {
    match broken_rule(name) {
        Some(rule) => Err(Error::Name { part, name, rule }),
        None => Ok(format!("{0}{name}{0}", D::QUOTE)),
    }
}

#[cfg(all(test, feature = "postgres", feature = "sqlite"))]
mod tests {
    use sqlx::{Postgres, Sqlite};

    use super::*;

    #[test]
    fn names_are_quoted_as_the_database_does() {
        assert_eq!(
            table::<Postgres>("shop.Order").unwrap(),
            r#""shop"."Order""#
        );
        assert_eq!(table::<Sqlite>("stock").unwrap(), "`stock`");
        assert_eq!(column::<Postgres>("_a1").unwrap(), r#""_a1""#);
    }

    #[test]
    fn an_error_says_which_name_breaks_which_rule() {
        for (name, text) in [
            ("", r#"the table "" is not allowed: it must not be empty"#),
            (
                "1st",
                r#"the table "1st" is not allowed: it must not begin with a digit"#,
            ),
            ("st\"ock", r#"the table "st\"ock" is not allowed: only a-z"#),
            ("shop.stock.x", r#"the table "stock.x" is not allowed"#),
            (".stock", r#"the schema "" is not allowed"#),
            ("stück", "only a-z"),
        ] {
            let error = table::<Postgres>(name).unwrap_err().to_string();
            assert!(error.contains(text), "{error} does not say {text}");
        }
        let long = "t".repeat(64).leak();
        assert!(column::<Sqlite>(&long[1..]).is_ok());
        let error = column::<Sqlite>(long).unwrap_err().to_string();
        assert!(error.contains("the column"), "{error}");
    }
}
