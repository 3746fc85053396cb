//! SQLite.

use oncebox_migrations::Dialect;
use sqlx::error::BoxDynError;
use sqlx::sqlite::SqliteArguments;
use sqlx::{Arguments as _, Row as _, Sqlite};

use super::ask::{Ask, Value, implement_ask};

impl Ask for Sqlite {
    const DIALECT: Dialect = Dialect::Sqlite;
    const BEGIN_READ: &'static str = "BEGIN";
    // A deferred transaction that reads before it writes fails with SQLITE_BUSY at once.
    const BEGIN_WRITE: &'static str = "BEGIN IMMEDIATE";
    const NOW: &'static str =
        "(CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000)";
    const TIME: &'static str = "?";

    fn micros(column: &str) -> String {
        column.to_owned()
    }

    fn array(_values: &[Value]) -> Option<Value> {
        None
    }

    fn int(row: &Self::Row, at: usize) -> Result<Option<i64>, sqlx::Error> {
        row.try_get(at)
    }

    implement_ask!(SqliteArguments);
}

fn arguments(values: Vec<Value>) -> Result<SqliteArguments, BoxDynError> {
    let mut arguments = SqliteArguments::default();
    for value in values {
        match value {
            Value::Int(value) => arguments.add(value)?,
            Value::Text(value) => arguments.add(value)?,
            Value::Bytes(value) => arguments.add(value)?,
            Value::Uuid(value) => arguments.add(value)?,
            Value::Ints(_) | Value::Uuids(_) => return Err("SQLite has no arrays".into()),
        }
    }
    Ok(arguments)
}
