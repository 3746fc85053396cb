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

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use oncebox_migrations::{Dialect, Names};
use sqlx::{AssertSqlSafe, Pool, Transaction};
use uuid::Uuid;

use crate::partition::Attempt;
use crate::position::{Key, Known, Row};

/// The SQL of one database, built once: table names are checked identifiers, everything else is bound.
#[derive(Clone, Debug)]
pub struct Statements {
    begin: Arc<str>,
    begin_brief: Arc<str>,
    mark: Arc<str>,
    advance_marked: Arc<str>,
    advance: Arc<str>,
    take: Arc<str>,
    create: Arc<str>,
    read: Arc<str>,
    put: Arc<str>,
    bury: Arc<str>,
    buried: Arc<str>,
    block: Arc<str>,
    blocked: Arc<str>,
    any_blocked: Arc<str>,
    note: Arc<str>,
    forget: Arc<str>,
    forget_below: Arc<str>,
    attempts: Arc<str>,
    record: Arc<str>,
    known: Arc<str>,
    trip: Arc<str>,
    tripped: Arc<str>,
    accept: Arc<str>,
    due_letter: Arc<str>,
    count_replay: Arc<str>,
    take_letter: Arc<str>,
    first_parked: Arc<str>,
    release_next: Arc<str>,
    unblock: Arc<str>,
    pages: Arc<str>,
    refuse_letter: Arc<str>,
    refuse_key: Arc<str>,
    sweep: Arc<str>,
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
                .replace("{blocked_key}", &names.blocked_key(dialect))
                .replace("{attempt}", &names.attempt(dialect))
                .replace("{record}", &names.record(dialect))
                .replace("{breaker}", &names.breaker(dialect))
                .into()
        };
        Self {
            begin: begin.into(),
            begin_brief: begin_brief.into(),
            mark: fill(templates.mark),
            advance_marked: fill(templates.advance_marked),
            advance: fill(templates.advance),
            take: fill(templates.take),
            create: fill(templates.create),
            read: fill(templates.read),
            put: fill(templates.put),
            bury: fill(templates.bury),
            buried: fill(templates.buried),
            block: fill(templates.block),
            blocked: fill(templates.blocked),
            any_blocked: fill(templates.any_blocked),
            note: fill(templates.note),
            forget: fill(templates.forget),
            forget_below: fill(templates.forget_below),
            attempts: fill(templates.attempts),
            record: fill(templates.record),
            known: fill(templates.known),
            trip: fill(templates.trip),
            tripped: fill(templates.tripped),
            accept: fill(templates.accept),
            due_letter: fill(templates.due_letter),
            count_replay: fill(templates.count_replay),
            take_letter: fill(templates.take_letter),
            first_parked: fill(templates.first_parked),
            release_next: fill(templates.release_next),
            unblock: fill(templates.unblock),
            pages: fill(templates.pages),
            refuse_letter: fill(templates.refuse_letter),
            refuse_key: fill(templates.refuse_key),
            sweep: fill(templates.sweep),
        }
    }
}

/// The texts of one database, with `{inbox}`, `{position}` and so on for the tables.
struct Templates {
    mark: &'static str,
    advance_marked: &'static str,
    advance: &'static str,
    take: &'static str,
    create: &'static str,
    read: &'static str,
    put: &'static str,
    bury: &'static str,
    buried: &'static str,
    block: &'static str,
    blocked: &'static str,
    any_blocked: &'static str,
    note: &'static str,
    forget: &'static str,
    forget_below: &'static str,
    attempts: &'static str,
    record: &'static str,
    known: &'static str,
    trip: &'static str,
    tripped: &'static str,
    accept: &'static str,
    due_letter: &'static str,
    count_replay: &'static str,
    take_letter: &'static str,
    first_parked: &'static str,
    release_next: &'static str,
    unblock: &'static str,
    pages: &'static str,
    refuse_letter: &'static str,
    refuse_key: &'static str,
    sweep: &'static str,
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
    /// It waits, and blocks its key, instead of being given up.
    pub parked: bool,
    /// Kafka's timestamp of the record, milliseconds.
    pub timestamp_ms: Option<i64>,
    /// Microseconds since the Unix epoch.
    pub first_failed_at: Option<i64>,
}

/// A dead letter or a parked message, as it is read for a replay.
#[derive(Clone, Debug)]
pub struct Letter {
    /// Its row.
    pub id: i64,
    /// The message's id.
    pub message_id: Uuid,
    /// Topic.
    pub topic: String,
    /// Partition of the topic.
    pub partition: i32,
    /// Offset of the record.
    pub offset: i64,
    /// Key.
    pub key: Option<Vec<u8>>,
    /// Payload.
    pub payload: Option<Vec<u8>>,
    /// Encoded header list.
    pub headers: Vec<u8>,
    /// How often it was tried.
    pub attempts: i32,
    /// It waits for its key.
    pub parked: bool,
    /// Kafka's timestamp of the record, milliseconds.
    pub timestamp_ms: Option<i64>,
}

/// A row of the record of what was consumed.
#[derive(Clone, Debug)]
pub struct Recorded<'a> {
    /// Offset of the record.
    pub offset: i64,
    /// The message's id.
    pub message_id: Uuid,
    /// What the business calls it.
    pub business_id: Option<String>,
    /// `effect`, `dead` or `parked`.
    pub status: &'static str,
    /// Calls of the handler.
    pub attempts: i32,
    /// Of the first attempt, microseconds since the Unix epoch.
    pub first_at: i64,
    /// Of the handler's last call, microseconds.
    pub duration_us: i64,
    /// Why it failed.
    pub error: Option<&'a str>,
}

/// The statements of the inbox in one database.
pub trait Store: sqlx::Database {
    /// The database runs in this process: a statement costs no round trip, one transaction writes at a time, and the
    /// database may roll back by itself.
    const IN_PROCESS: bool;

    /// The SQL of this database. A session that is idle inside a transaction for longer than `idle_limit` is ended by
    /// the database, where it can do that (G6).
    fn statements(names: &Names, idle_limit: Duration) -> Statements;

    /// Whether the schema is the one this build works with.
    fn check(
        conn: &mut Self::Connection,
        names: &Names,
    ) -> impl Future<Output = Result<(), oncebox_migrations::Error>> + Send;

    /// Begins a writing transaction, with the savepoint that [`Store::intact`] looks for.
    fn begin(
        pool: &Pool<Self>,
        statements: &Statements,
    ) -> impl Future<Output = Result<Transaction<'static, Self>, sqlx::Error>> + Send {
        begin(pool, &statements.begin)
    }

    /// Begins a writing transaction that gives up with an error after a few seconds of waiting for a lock.
    fn begin_brief(
        pool: &Pool<Self>,
        statements: &Statements,
    ) -> impl Future<Output = Result<Transaction<'static, Self>, sqlx::Error>> + Send {
        begin(pool, &statements.begin_brief)
    }

    /// Inserts dedup marks, and returns those that were not there. Waits for other transactions that are inserting the same
    /// marks. The ids are sorted and each there once: unsorted batches deadlock.
    fn mark(
        conn: &mut Self::Connection,
        statements: &Statements,
        consumer: &str,
        ids: &[Uuid],
    ) -> impl Future<Output = Result<Vec<Uuid>, sqlx::Error>> + Send;

    /// The compare-and-set of the position. `false`: the row is not what this process knows, or the mark of the message
    /// is not there: the transaction that inserted it was rolled back behind our back, and with it the effect (SQLite
    /// does that by itself when the disk is full, and a handler may have swallowed the error).
    fn advance(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        from: &Known,
        to: &Known,
        marked: Option<Uuid>,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

    /// Another savepoint that [`Store::intact`] looks for.
    fn guard(conn: &mut Self::Connection) -> impl Future<Output = Result<(), sqlx::Error>> + Send {
        async move { Self::plain(conn, "SAVEPOINT oncebox").await }
    }

    /// Whether the transaction of [`Store::guard`] is still the one that is open: an error when it is not.
    fn intact(conn: &mut Self::Connection) -> impl Future<Output = Result<(), sqlx::Error>> + Send {
        async move { Self::plain(conn, "RELEASE SAVEPOINT oncebox").await }
    }

    /// What names this history of this database: another one after a failover or a restore, as far as the database can tell.
    fn epoch(
        conn: &mut Self::Connection,
    ) -> impl Future<Output = Result<String, sqlx::Error>> + Send;

    /// Runs a statement without parameters.
    fn plain(
        conn: &mut Self::Connection,
        statement: &'static str,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Which of these keys are blocked; locks their rows. The keys are sorted and each there once.
    fn blocked(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        keys: &[&[u8]],
    ) -> impl Future<Output = Result<Vec<Vec<u8>>, sqlx::Error>> + Send;

    /// Whether any key of a consumer is blocked.
    fn any_blocked(
        conn: &mut Self::Connection,
        statements: &Statements,
        consumer: &str,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

    /// Blocks a key.
    fn block(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        blocked: &[u8],
        reason: &str,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Writes down the attempts of a message, and how long it waits.
    fn note(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        offset: i64,
        attempt: &Attempt,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Deletes the attempts of messages below an offset: they are settled.
    fn forget_below(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        next: i64,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Deletes the attempts of a message.
    fn forget(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        offset: i64,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// The attempts of the messages from an offset on.
    fn attempts(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        from: i64,
    ) -> impl Future<Output = Result<BTreeMap<i64, Attempt>, sqlx::Error>> + Send;

    /// The next letter whose replay is ordered and due.
    fn due_letter(
        conn: &mut Self::Connection,
        statements: &Statements,
        consumer: &str,
    ) -> impl Future<Output = Result<Option<Letter>, sqlx::Error>> + Send;

    /// Counts a replay before it begins. `None`: there is no letter or no order any more.
    fn count_replay(
        conn: &mut Self::Connection,
        statements: &Statements,
        id: i64,
    ) -> impl Future<Output = Result<Option<i32>, sqlx::Error>> + Send;

    /// Deletes a letter whose replay is ordered: the licence to handle it. `false`: somebody else has it.
    fn take_letter(
        conn: &mut Self::Connection,
        statements: &Statements,
        id: i64,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

    /// The first parked message of a key.
    fn first_parked(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        name: &[u8],
    ) -> impl Future<Output = Result<Option<i64>, sqlx::Error>> + Send;

    /// Passes the order on to the next parked message of a key; the key is free when there is none.
    fn release_next(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        name: &[u8],
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Takes an order back, for a parked message that of its whole key, and writes down why.
    fn refuse_replay(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        letter: &Letter,
        error: &str,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Writes rows of the record.
    fn record(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        records: &[Recorded<'_>],
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Which of these messages have a mark, and where the position stands at the same moment.
    fn known(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        ids: &[Uuid],
    ) -> impl Future<Output = Result<Option<(Known, Vec<Uuid>)>, sqlx::Error>> + Send;

    /// Deletes marks that are older than the window, a chunk at a time: those of this consumer in this chunk of the table.
    /// Returns the next chunk, `None` behind the last one.
    fn sweep(
        conn: &mut Self::Connection,
        statements: &Statements,
        consumer: &str,
        window: Duration,
        chunk: i64,
    ) -> impl Future<Output = Result<(u64, Option<i64>), sqlx::Error>> + Send;

    /// Writes down that a consumer stopped because many messages failed in a row.
    fn trip(
        conn: &mut Self::Connection,
        statements: &Statements,
        consumer: &str,
        topic: &str,
        failures: i32,
        error: &str,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// The topics because of which a consumer stopped: how many messages failed, and why.
    fn all_tripped(
        conn: &mut Self::Connection,
        statements: &Statements,
        consumer: &str,
    ) -> impl Future<Output = Result<Vec<(String, i32, String)>, sqlx::Error>> + Send;

    /// Somebody accepts the failures of a consumer. Returns how many topics that were.
    fn accept(
        conn: &mut Self::Connection,
        statements: &Statements,
        consumer: &str,
    ) -> impl Future<Output = Result<u64, sqlx::Error>> + Send;

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
        async fn reopen(conn: &mut Self::Connection) -> Result<(), sqlx::Error> {
            // Refused, or only warned about, where a transaction is open.
            sqlx::query("BEGIN").execute(conn).await.map(drop)
        }

        async fn plain(
            conn: &mut Self::Connection,
            statement: &'static str,
        ) -> Result<(), sqlx::Error> {
            sqlx::query(statement).execute(conn).await.map(drop)
        }

        async fn advance(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            from: &$crate::position::Known,
            to: &$crate::position::Known,
            marked: Option<uuid::Uuid>,
        ) -> Result<bool, sqlx::Error> {
            let text = if marked.is_some() {
                &statements.advance_marked
            } else {
                &statements.advance
            };
            let mut query = $crate::store::sql::<$db>(text)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(key.partition)
                .bind(from.owner)
                .bind(from.next)
                .bind(from.seq)
                .bind(to.next)
                .bind(to.seq);
            if let Some(id) = marked {
                query = query.bind(id);
            }
            Ok(query.execute(conn).await?.rows_affected() == 1)
        }

        async fn any_blocked(
            conn: &mut Self::Connection,
            statements: &Statements,
            consumer: &str,
        ) -> Result<bool, sqlx::Error> {
            let row = $crate::store::sql::<$db>(&statements.any_blocked)
                .bind(consumer)
                .fetch_optional(conn)
                .await?;
            Ok(row.is_some())
        }

        async fn block(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            blocked: &[u8],
            reason: &str,
        ) -> Result<(), sqlx::Error> {
            $crate::store::sql::<$db>(&statements.block)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(blocked)
                .bind(reason)
                .execute(conn)
                .await
                .map(drop)
        }

        async fn note(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            offset: i64,
            attempt: &$crate::partition::Attempt,
        ) -> Result<(), sqlx::Error> {
            $crate::store::sql::<$db>(&statements.note)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(key.partition)
                .bind(offset)
                .bind(attempt.message_id)
                .bind(i32::try_from(attempt.attempts).unwrap_or(i32::MAX))
                .bind(&attempt.error)
                .bind(attempt.first_failed_at)
                .bind(i64::try_from(attempt.wait.as_micros()).unwrap_or(i64::MAX))
                .execute(conn)
                .await
                .map(drop)
        }

        async fn forget(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            offset: i64,
        ) -> Result<(), sqlx::Error> {
            $crate::store::sql::<$db>(&statements.forget)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(key.partition)
                .bind(offset)
                .execute(conn)
                .await
                .map(drop)
        }

        async fn due_letter(
            conn: &mut Self::Connection,
            statements: &Statements,
            consumer: &str,
        ) -> Result<Option<$crate::store::Letter>, sqlx::Error> {
            let row = $crate::store::sql::<$db>(&statements.due_letter)
                .bind(consumer)
                .fetch_optional(conn)
                .await?;
            let Some(row) = row else { return Ok(None) };
            use sqlx::Row as _;
            Ok(Some($crate::store::Letter {
                id: row.try_get(0)?,
                message_id: row.try_get(1)?,
                topic: row.try_get(2)?,
                partition: row.try_get(3)?,
                offset: row.try_get(4)?,
                key: row.try_get(5)?,
                payload: row.try_get(6)?,
                headers: row.try_get(7)?,
                attempts: row.try_get(8)?,
                parked: row.try_get(9)?,
                timestamp_ms: row.try_get(10)?,
            }))
        }

        async fn count_replay(
            conn: &mut Self::Connection,
            statements: &Statements,
            id: i64,
        ) -> Result<Option<i32>, sqlx::Error> {
            let row = $crate::store::sql::<$db>(&statements.count_replay)
                .bind(id)
                .fetch_optional(conn)
                .await?;
            row.map(|row| sqlx::Row::try_get(&row, 0)).transpose()
        }

        async fn take_letter(
            conn: &mut Self::Connection,
            statements: &Statements,
            id: i64,
        ) -> Result<bool, sqlx::Error> {
            let done = $crate::store::sql::<$db>(&statements.take_letter)
                .bind(id)
                .execute(conn)
                .await?;
            Ok(done.rows_affected() == 1)
        }

        async fn first_parked(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            name: &[u8],
        ) -> Result<Option<i64>, sqlx::Error> {
            let row = $crate::store::sql::<$db>(&statements.first_parked)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(name)
                .fetch_optional(conn)
                .await?;
            row.map(|row| sqlx::Row::try_get(&row, 0)).transpose()
        }

        async fn release_next(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            name: &[u8],
        ) -> Result<(), sqlx::Error> {
            let done = $crate::store::sql::<$db>(&statements.release_next)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(name)
                .execute(&mut *conn)
                .await?;
            if done.rows_affected() > 0 {
                return Ok(());
            }
            $crate::store::sql::<$db>(&statements.unblock)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(name)
                .execute(conn)
                .await
                .map(drop)
        }

        async fn refuse_replay(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            letter: &$crate::store::Letter,
            error: &str,
        ) -> Result<(), sqlx::Error> {
            let done = $crate::store::sql::<$db>(&statements.refuse_letter)
                .bind(letter.id)
                .bind(error)
                .execute(&mut *conn)
                .await?;
            if done.rows_affected() == 0 {
                return Ok(());
            }
            let Some(name) = letter.key.as_deref().filter(|_| letter.parked) else {
                return Ok(());
            };
            $crate::store::sql::<$db>(&statements.refuse_key)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(name)
                .execute(conn)
                .await
                .map(drop)
        }

        async fn forget_below(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            next: i64,
        ) -> Result<(), sqlx::Error> {
            $crate::store::sql::<$db>(&statements.forget_below)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(key.partition)
                .bind(next)
                .execute(conn)
                .await
                .map(drop)
        }

        async fn attempts(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            from: i64,
        ) -> Result<std::collections::BTreeMap<i64, $crate::partition::Attempt>, sqlx::Error> {
            let rows = $crate::store::sql::<$db>(&statements.attempts)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(key.partition)
                .bind(from)
                .fetch_all(conn)
                .await?;
            rows.iter().map($crate::store::attempt_row).collect()
        }

        async fn trip(
            conn: &mut Self::Connection,
            statements: &Statements,
            consumer: &str,
            topic: &str,
            failures: i32,
            error: &str,
        ) -> Result<(), sqlx::Error> {
            $crate::store::sql::<$db>(&statements.trip)
                .bind(consumer)
                .bind(topic)
                .bind(failures)
                .bind(error)
                .execute(conn)
                .await
                .map(drop)
        }

        async fn all_tripped(
            conn: &mut Self::Connection,
            statements: &Statements,
            consumer: &str,
        ) -> Result<Vec<(String, i32, String)>, sqlx::Error> {
            let rows = $crate::store::sql::<$db>(&statements.tripped)
                .bind(consumer)
                .fetch_all(conn)
                .await?;
            use sqlx::Row as _;
            rows.iter()
                .map(|row| Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?)))
                .collect()
        }

        async fn accept(
            conn: &mut Self::Connection,
            statements: &Statements,
            consumer: &str,
        ) -> Result<u64, sqlx::Error> {
            let done = $crate::store::sql::<$db>(&statements.accept)
                .bind(consumer)
                .execute(conn)
                .await?;
            Ok(done.rows_affected())
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
                .bind(letter.parked)
                .bind(letter.timestamp_ms)
                .bind(letter.first_failed_at)
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

/// Begins a transaction in a task of its own. Dropped between the BEGIN and its answer, sqlx would give a connection with an open
/// transaction back to the pool, where the service itself would go on in it.
fn begin<D: Store>(
    pool: &Pool<D>,
    begin: &Arc<str>,
) -> impl Future<Output = Result<Transaction<'static, D>, sqlx::Error>> + Send + use<D> {
    let (pool, begin) = (pool.clone(), AssertSqlSafe(Arc::clone(begin)));
    async move {
        let begun = tokio::spawn(async move { pool.begin_with(begin).await });
        begun.await.map_err(|_| sqlx::Error::WorkerCrashed)?
    }
}

/// Reads `record_offset, message_id, attempts, error, first_at, wait` (both in microseconds).
fn attempt_row<'r, R>(row: &'r R) -> Result<(i64, Attempt), sqlx::Error>
where
    R: sqlx::Row,
    usize: sqlx::ColumnIndex<R>,
    String: sqlx::Decode<'r, R::Database> + sqlx::Type<R::Database>,
    i32: sqlx::Decode<'r, R::Database> + sqlx::Type<R::Database>,
    i64: sqlx::Decode<'r, R::Database> + sqlx::Type<R::Database>,
    Uuid: sqlx::Decode<'r, R::Database> + sqlx::Type<R::Database>,
{
    let attempts: i32 = row.try_get(2)?;
    let wait: i64 = row.try_get(5)?;
    let attempt = Attempt {
        message_id: row.try_get(1)?,
        attempts: u32::try_from(attempts).unwrap_or_default(),
        error: row.try_get(3)?,
        first_failed_at: row.try_get(4)?,
        wait: Duration::from_micros(u64::try_from(wait).unwrap_or_default()),
    };
    Ok((row.try_get(0)?, attempt))
}

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
