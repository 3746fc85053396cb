//! PostgreSQL.

use oncebox_migrations::Dialect;
use sqlx::error::BoxDynError;
use sqlx::postgres::PgArguments;
use sqlx::{Arguments as _, Postgres, Row as _};

use super::ask::{Ask, Value, implement_ask};

impl Ask for Postgres {
    const DIALECT: Dialect = Dialect::Postgres;
    const BEGIN_READ: &'static str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
    // Who waits for a minute behind somebody's lock has to hear of it.
    const BEGIN_WRITE: &'static str =
        "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = 60000";
    const NOW: &'static str = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint";
    const TIME: &'static str = "(timestamptz 'epoch' + ? * interval '1 microsecond')";

    fn micros(column: &str) -> String {
        format!("(extract(epoch FROM {column}) * 1000000)::bigint")
    }

    fn array(values: &[Value]) -> Option<Value> {
        let uuids = values.iter().map(|value| match value {
            Value::Uuid(id) => Some(*id),
            _ => None,
        });
        if let Some(uuids) = uuids.collect::<Option<Vec<_>>>() {
            return Some(Value::Uuids(uuids));
        }
        let ints = values.iter().map(|value| match value {
            Value::Int(id) => Some(*id),
            _ => None,
        });
        ints.collect::<Option<Vec<_>>>().map(Value::Ints)
    }

    fn int(row: &Self::Row, at: usize) -> Result<Option<i64>, sqlx::Error> {
        row.try_get::<Option<i64>, _>(at)
            .or_else(|_| Ok(row.try_get::<Option<i32>, _>(at)?.map(i64::from)))
    }

    implement_ask!(PgArguments);
}

fn arguments(values: Vec<Value>) -> Result<PgArguments, BoxDynError> {
    let mut arguments = PgArguments::default();
    for value in values {
        match value {
            Value::Int(value) => arguments.add(value)?,
            Value::Text(value) => arguments.add(value)?,
            Value::Bytes(value) => arguments.add(value)?,
            Value::Uuid(value) => arguments.add(value)?,
            Value::Ints(values) => arguments.add(values)?,
            Value::Uuids(values) => arguments.add(values)?,
        }
    }
    Ok(arguments)
}
