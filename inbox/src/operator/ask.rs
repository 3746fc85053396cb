//! Statements put together from parts, and the trait that a database answers them by.

use std::future::Future;

use oncebox_migrations::{Dialect, Names};
use time::OffsetDateTime;
use uuid::Uuid;

use super::micros;

/// A value to bind.
#[derive(Clone, Debug)]
pub enum Value {
    /// A number; times are microseconds since the Unix epoch.
    Int(i64),
    /// A text.
    Text(String),
    /// Bytes.
    Bytes(Vec<u8>),
    /// A message id.
    Uuid(Uuid),
    /// Numbers, as one array (PostgreSQL).
    Ints(Vec<i64>),
    /// Message ids, as one array (PostgreSQL).
    Uuids(Vec<Uuid>),
}

impl From<OffsetDateTime> for Value {
    fn from(at: OffsetDateTime) -> Self {
        Self::Int(micros(at))
    }
}

/// A statement under construction: text, and what is bound to its `$1`, `$2`, …
#[derive(Clone, Debug, Default)]
pub struct Sql {
    text: String,
    values: Vec<Value>,
}

impl Sql {
    /// Begins with a text.
    pub fn new(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            values: Vec::new(),
        }
    }

    /// Appends text.
    pub fn push(&mut self, text: &str) -> &mut Self {
        self.text.push_str(text);
        self
    }

    /// Binds a value and returns its name (`$3`), to be used as often as needed.
    pub fn bind(&mut self, value: Value) -> String {
        self.values.push(value);
        format!("${}", self.values.len())
    }

    /// Appends a text with `?` where the value belongs.
    pub fn push_with(&mut self, text: &str, value: Value) -> &mut Self {
        let name = self.bind(value);
        self.push(&text.replace('?', &name))
    }

    /// Appends the text when there is a value.
    pub fn push_if(&mut self, text: &str, value: Option<Value>) -> &mut Self {
        match value {
            Some(value) => self.push_with(text, value),
            None => self,
        }
    }

    /// Appends `<column> is one of these`.
    pub fn push_in<D: Ask>(&mut self, column: &str, values: Vec<Value>) -> &mut Self {
        match D::array(&values) {
            Some(array) => {
                let name = self.bind(array);
                self.push(&format!("{column} = ANY({name})"));
            }
            None => {
                let names: Vec<String> = values.into_iter().map(|v| self.bind(v)).collect();
                self.push(&format!("{column} IN ({})", names.join(", ")));
            }
        }
        self
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn into_parts(self) -> (String, Vec<Value>) {
        (self.text, self.values)
    }
}

/// `text` with the names of the tables in place of `{outbox}`, `{dead_letter}` and so on.
pub(crate) fn tables<D: Ask>(text: &str, names: &Names) -> String {
    crate::store::tables(D::DIALECT, names, text)
}

/// Asking a database. Every function works on a connection of the caller.
pub trait Ask: sqlx::Database {
    /// Whose SQL.
    const DIALECT: Dialect;
    /// Begins a transaction that only reads, all of it from one snapshot.
    const BEGIN_READ: &'static str;
    /// Begins a transaction that writes; on PostgreSQL READ COMMITTED whatever the database's default is, because a statement
    /// that waited for another operator has to see what that one did.
    const BEGIN_WRITE: &'static str;
    /// The database's clock, in microseconds since the Unix epoch.
    const NOW: &'static str;
    /// A bound time (`?`, microseconds) as the type of the columns.
    const TIME: &'static str;

    /// A column with a time, as microseconds.
    fn micros(column: &str) -> String;

    /// Values of one kind as one value, where the database has arrays.
    fn array(values: &[Value]) -> Option<Value>;

    /// The rows of a query.
    fn rows(
        conn: &mut Self::Connection,
        sql: Sql,
    ) -> impl Future<Output = Result<Vec<Self::Row>, sqlx::Error>> + Send;

    /// Runs a statement and returns how many rows it changed.
    fn change(
        conn: &mut Self::Connection,
        sql: Sql,
    ) -> impl Future<Output = Result<u64, sqlx::Error>> + Send;

    /// A number, of whatever width.
    fn int(row: &Self::Row, at: usize) -> Result<Option<i64>, sqlx::Error>;
    /// A text.
    fn text(row: &Self::Row, at: usize) -> Result<Option<String>, sqlx::Error>;
    /// Bytes.
    fn bytes(row: &Self::Row, at: usize) -> Result<Option<Vec<u8>>, sqlx::Error>;
    /// A message id.
    fn uuid(row: &Self::Row, at: usize) -> Result<Option<Uuid>, sqlx::Error>;
    /// Yes or no.
    fn flag(row: &Self::Row, at: usize) -> Result<Option<bool>, sqlx::Error>;
}

/// The functions of [`Ask`] whose code is the same text for every database.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
macro_rules! implement_ask {
    ($arguments:ty) => {
        async fn rows(
            conn: &mut Self::Connection,
            sql: $crate::operator::Sql,
        ) -> Result<Vec<Self::Row>, sqlx::Error> {
            let (text, values) = sql.into_parts();
            let arguments = arguments(values).map_err(sqlx::Error::Encode)?;
            sqlx::query_with(sqlx::AssertSqlSafe(text), arguments)
                .fetch_all(conn)
                .await
        }

        async fn change(
            conn: &mut Self::Connection,
            sql: $crate::operator::Sql,
        ) -> Result<u64, sqlx::Error> {
            let (text, values) = sql.into_parts();
            let arguments = arguments(values).map_err(sqlx::Error::Encode)?;
            let done = sqlx::query_with(sqlx::AssertSqlSafe(text), arguments)
                .execute(conn)
                .await?;
            Ok(done.rows_affected())
        }

        fn text(row: &Self::Row, at: usize) -> Result<Option<String>, sqlx::Error> {
            sqlx::Row::try_get(row, at)
        }

        fn bytes(row: &Self::Row, at: usize) -> Result<Option<Vec<u8>>, sqlx::Error> {
            sqlx::Row::try_get(row, at)
        }

        fn uuid(row: &Self::Row, at: usize) -> Result<Option<uuid::Uuid>, sqlx::Error> {
            sqlx::Row::try_get(row, at)
        }

        fn flag(row: &Self::Row, at: usize) -> Result<Option<bool>, sqlx::Error> {
            sqlx::Row::try_get(row, at)
        }
    };
}
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(super) use implement_ask;
