//! What the inbox needs from a database. One file per database, all of its SQL at the top of the file, one trait.
//!
//! Every function works on a connection that is inside a transaction of the caller, except [`Store::begin`] and
//! [`Store::check`]. None of them decides anything: see `position`, `start` and `process`.

#[cfg(test)]
mod conformance;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use oncebox_migrations::{Dialect, Names};
use sqlx::{AssertSqlSafe, Pool, Transaction};
use uuid::Uuid;

use crate::position::{Key, Known, Row};

/// The SQL of one database, built once: table names are checked identifiers, everything else is bound.
#[derive(Clone, Debug)]
pub struct Statements {
    begin: Arc<str>,
    begin_brief: Arc<str>,
    mark: Arc<str>,
    advance: Arc<str>,
    take: Arc<str>,
    create: Arc<str>,
    read: Arc<str>,
    put: Arc<str>,
    bury: Arc<str>,
    buried: Arc<str>,
}

impl Statements {
    /// Fills the table names into the templates.
    fn new(
        dialect: Dialect,
        names: &Names,
        begin: &str,
        begin_brief: &str,
        templates: &Templates,
    ) -> Self {
        let fill = |template: &str| -> Arc<str> {
            template
                .replace("{inbox}", &names.inbox(dialect))
                .replace("{position}", &names.position(dialect))
                .replace("{dead_letter}", &names.dead_letter(dialect))
                .into()
        };
        Self {
            begin: begin.into(),
            begin_brief: begin_brief.into(),
            mark: fill(templates.mark),
            advance: fill(templates.advance),
            take: fill(templates.take),
            create: fill(templates.create),
            read: fill(templates.read),
            put: fill(templates.put),
            bury: fill(templates.bury),
            buried: fill(templates.buried),
        }
    }
}

/// The texts of one database, with `{inbox}`, `{position}` and `{dead_letter}` for the tables.
struct Templates {
    mark: &'static str,
    advance: &'static str,
    take: &'static str,
    create: &'static str,
    read: &'static str,
    put: &'static str,
    bury: &'static str,
    buried: &'static str,
}

/// A query over text that was built by [`Statements::new`]: the only place where run-time SQL is declared safe.
fn sql<D: sqlx::Database>(
    text: &Arc<str>,
) -> sqlx::query::Query<'_, D, <D as sqlx::Database>::Arguments> {
    sqlx::query(AssertSqlSafe(Arc::clone(text)))
}

/// A row of the dead-letter table.
#[derive(Clone, Debug)]
pub struct DeadLetter<'a> {
    /// The message's id.
    pub message_id: Uuid,
    /// Offset of the record.
    pub offset: i64,
    /// Key.
    pub key: Option<&'a [u8]>,
    /// Payload.
    pub payload: Option<&'a [u8]>,
    /// Encoded header list.
    pub headers: &'a [u8],
    /// Why it failed, without NUL.
    pub error: &'a str,
    /// How often it was tried.
    pub attempts: i32,
}

/// The statements of the inbox in one database.
pub trait Store: sqlx::Database {
    /// The SQL of this database. A session that is idle inside a transaction for longer than `idle_limit` is ended by
    /// the database, where it can do that (G6).
    fn statements(names: &Names, idle_limit: Duration) -> Statements;

    /// Whether the schema is the one this build works with.
    fn check(
        conn: &mut Self::Connection,
        names: &Names,
    ) -> impl Future<Output = Result<(), oncebox_migrations::Error>> + Send;

    /// Begins a writing transaction.
    fn begin(
        pool: &Pool<Self>,
        statements: &Statements,
    ) -> impl Future<Output = Result<Transaction<'static, Self>, sqlx::Error>> + Send {
        let begin = AssertSqlSafe(Arc::clone(&statements.begin));
        async move { pool.begin_with(begin).await }
    }

    /// Begins a writing transaction that gives up with an error after a few seconds of waiting for a lock.
    fn begin_brief(
        pool: &Pool<Self>,
        statements: &Statements,
    ) -> impl Future<Output = Result<Transaction<'static, Self>, sqlx::Error>> + Send {
        let begin = AssertSqlSafe(Arc::clone(&statements.begin_brief));
        async move { pool.begin_with(begin).await }
    }

    /// Inserts the dedup mark. `false`: it was there, the message is a duplicate. Waits for another transaction that
    /// is inserting the same mark.
    fn mark(
        conn: &mut Self::Connection,
        statements: &Statements,
        consumer: &str,
        message_id: Uuid,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

    /// The compare-and-set of the position. `false`: the row is not what this process knows, or the mark of the message
    /// is not there: the transaction that inserted it was rolled back behind our back, and with it the effect (SQLite
    /// does that by itself when the disk is full, and a handler may have swallowed the error).
    fn advance(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        from: &Known,
        to: &Known,
        message_id: Uuid,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

    /// Makes sure that a transaction is open where one should be. A handler may have ended it by itself (a bare
    /// ROLLBACK): sqlx still counts it, its own ROLLBACK would then fail, and the pool would hand out a connection on
    /// which no transaction can be begun any more.
    fn reopen(conn: &mut Self::Connection) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Takes ownership of an existing row: writes the token, adds 1 to seq, returns the row. May wait for the last
    /// transaction of the previous owner.
    fn take(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        owner: Uuid,
    ) -> impl Future<Output = Result<Option<Row>, sqlx::Error>> + Send;

    /// Creates the row. `false`: somebody else did.
    fn create(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        row: &Row,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

    /// Reads the row as committed.
    fn read(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
    ) -> impl Future<Output = Result<Option<Row>, sqlx::Error>> + Send;

    /// Writes a position by an operator's decision, whether the row exists or not; seq only grows.
    fn put(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        row: &Row,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Inserts a dead letter. `false`: the place (consumer, topic, partition, offset) is taken by another one.
    fn bury(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        letter: &DeadLetter<'_>,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

    /// The message id of the dead letter at a place.
    fn buried(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        offset: i64,
    ) -> impl Future<Output = Result<Option<Uuid>, sqlx::Error>> + Send;
}

/// The functions of [`Store`] whose code is the same text for every database: only the SQL and the types differ, and sqlx has
/// no bounds that would let one generic function serve both.
macro_rules! implement_statements {
    ($db:ty) => {
        async fn mark(
            conn: &mut Self::Connection,
            statements: &Statements,
            consumer: &str,
            message_id: uuid::Uuid,
        ) -> Result<bool, sqlx::Error> {
            let row = $crate::store::sql::<$db>(&statements.mark)
                .bind(consumer)
                .bind(message_id)
                .fetch_optional(conn)
                .await?;
            Ok(row.is_some())
        }

        async fn reopen(conn: &mut Self::Connection) -> Result<(), sqlx::Error> {
            // Refused, or only warned about, where a transaction is open.
            sqlx::query("BEGIN").execute(conn).await.map(drop)
        }

        async fn advance(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            from: &$crate::position::Known,
            to: &$crate::position::Known,
            message_id: uuid::Uuid,
        ) -> Result<bool, sqlx::Error> {
            let done = $crate::store::sql::<$db>(&statements.advance)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(key.partition)
                .bind(from.owner)
                .bind(from.next)
                .bind(from.seq)
                .bind(to.next)
                .bind(to.seq)
                .bind(message_id)
                .execute(conn)
                .await?;
            Ok(done.rows_affected() == 1)
        }

        async fn take(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            owner: uuid::Uuid,
        ) -> Result<Option<$crate::position::Row>, sqlx::Error> {
            let row = $crate::store::sql::<$db>(&statements.take)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(key.partition)
                .bind(owner)
                .fetch_optional(conn)
                .await?;
            row.as_ref().map($crate::store::position_row).transpose()
        }

        async fn create(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            row: &$crate::position::Row,
        ) -> Result<bool, sqlx::Error> {
            let done = $crate::store::sql::<$db>(&statements.create)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(key.partition)
                .bind(&row.topic_id)
                .bind(row.next)
                .bind(row.seq)
                .bind(row.owner)
                .execute(conn)
                .await?;
            Ok(done.rows_affected() == 1)
        }

        async fn read(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
        ) -> Result<Option<$crate::position::Row>, sqlx::Error> {
            let row = $crate::store::sql::<$db>(&statements.read)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(key.partition)
                .fetch_optional(conn)
                .await?;
            row.as_ref().map($crate::store::position_row).transpose()
        }

        async fn put(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            row: &$crate::position::Row,
        ) -> Result<(), sqlx::Error> {
            $crate::store::sql::<$db>(&statements.put)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(key.partition)
                .bind(&row.topic_id)
                .bind(row.next)
                .bind(row.seq)
                .bind(row.owner)
                .execute(conn)
                .await?;
            Ok(())
        }

        async fn bury(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            letter: &$crate::store::DeadLetter<'_>,
        ) -> Result<bool, sqlx::Error> {
            let done = $crate::store::sql::<$db>(&statements.bury)
                .bind(&*key.consumer)
                .bind(letter.message_id)
                .bind(&*key.topic)
                .bind(key.partition)
                .bind(letter.offset)
                .bind(letter.key)
                .bind(letter.payload)
                .bind(letter.headers)
                .bind(letter.error)
                .bind(letter.attempts)
                .execute(conn)
                .await?;
            Ok(done.rows_affected() == 1)
        }

        async fn buried(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            offset: i64,
        ) -> Result<Option<uuid::Uuid>, sqlx::Error> {
            let row = $crate::store::sql::<$db>(&statements.buried)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(key.partition)
                .bind(offset)
                .fetch_optional(conn)
                .await?;
            row.map(|row| sqlx::Row::try_get(&row, 0)).transpose()
        }
    };
}
use implement_statements;

/// Reads `topic_id, next, seq, owner`.
fn position_row<'r, R>(row: &'r R) -> Result<Row, sqlx::Error>
where
    R: sqlx::Row,
    usize: sqlx::ColumnIndex<R>,
    String: sqlx::Decode<'r, R::Database> + sqlx::Type<R::Database>,
    i64: sqlx::Decode<'r, R::Database> + sqlx::Type<R::Database>,
    Uuid: sqlx::Decode<'r, R::Database> + sqlx::Type<R::Database>,
{
    Ok(Row {
        topic_id: row.try_get(0)?,
        next: row.try_get(1)?,
        seq: row.try_get(2)?,
        owner: row.try_get(3)?,
    })
}
