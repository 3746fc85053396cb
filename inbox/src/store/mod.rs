//! What the inbox needs from a database. One file per database, all of its SQL at the top of the file, one trait.
//!
//! Every function works on a connection that is inside a transaction of the caller, except [`Store::begin`] and
//! [`Store::check`]. None of them decides anything: see `position`, `start` and `process`.

#[cfg(test)]
mod conformance;
#[cfg(feature = "postgres")]
mod postgres;
mod rows;
mod shared;
#[cfg(feature = "sqlite")]
mod sqlite;
mod statements;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use oncebox_migrations::Names;
use sqlx::pool::PoolConnection;
use sqlx::{AssertSqlSafe, Pool, Transaction};
use uuid::Uuid;

use crate::InboxStore;
use crate::chain::Move;
use crate::depth::Depth;
use crate::error::Error;
use crate::inbox::check_consumer;
use crate::partition::Attempt;
use crate::position::{Key, Known, Row};

pub(crate) use rows::{DeadLetter, Letter, Recorded, whole_micros};
pub(crate) use statements::Statements;
pub(crate) use statements::tables;

/// What [`Store::intact`] says where the database has no error for it.
pub(crate) const ENDED: &str = "the transaction is another one";

/// The statements of the inbox in one database.
pub trait Store: sqlx::Database {
    /// The database runs in this process: a statement costs no round trip, one transaction writes at a time, and the
    /// database may roll back by itself. Elsewhere the compare-and-set itself finds out that a handler ended the transaction.
    const IN_PROCESS: bool;

    /// The SQL of this database. A session that is idle inside a transaction for longer than `idle_limit` is ended by
    /// the database, where it can do that (G6).
    fn statements(names: &Names, idle_limit: Duration) -> Statements;

    /// Whether the schema is the one this build works with.
    fn check(
        conn: &mut Self::Connection,
        names: &Names,
    ) -> impl Future<Output = Result<(), oncebox_migrations::Error>> + Send;

    /// Begins a writing transaction that [`Store::intact`] knows again.
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

    /// The compare-and-set of the position. `false`: the row is not what this process knows, or the transaction is another one
    /// ([`Store::intact`] tells, where this looks for that: see [`Store::IN_PROCESS`]), or the mark of the message
    /// is not there: the transaction that inserted it was rolled back behind our back, and with it the effect (SQLite
    /// does that by itself when the disk is full, and a handler may have swallowed the error).
    fn advance(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        step: &Move,
        marked: Option<Uuid>,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

    /// Lets [`Store::intact`] know this transaction again, once more.
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

    /// The next letter whose replay is ordered and due, or which is delayed and due while its topic is not paused.
    fn due_letter(
        conn: &mut Self::Connection,
        statements: &Statements,
        consumer: &str,
    ) -> impl Future<Output = Result<Option<Letter>, sqlx::Error>> + Send;

    /// How many letters a consumer has, by topic and kind.
    fn depths(
        conn: &mut Self::Connection,
        statements: &Statements,
        consumer: &str,
    ) -> impl Future<Output = Result<Vec<Depth>, sqlx::Error>> + Send;

    /// Counts a replay before it begins. `false`: there is no letter or no order any more, or somebody else has counted since it was
    /// read.
    fn count_replay(
        conn: &mut Self::Connection,
        statements: &Statements,
        letter: &Letter,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

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

    /// Says when a delayed letter is tried again after it failed once more. `false`: it is not there any more, or not delayed.
    fn delay_again(
        conn: &mut Self::Connection,
        statements: &Statements,
        id: i64,
        delay: Duration,
        error: &str,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

    /// Makes a delayed letter that failed for the last time a dead one. `false`: as [`Store::delay_again`].
    fn give_up(
        conn: &mut Self::Connection,
        statements: &Statements,
        id: i64,
        error: &str,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

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

    /// Deletes marks that are older than the window, a chunk at a time: those of this consumer in this chunk of the table. Not those of
    /// letters, and not those that a position with a hole below them may need.
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

    /// Writes that a topic is paused, or another reason.
    fn pause(
        conn: &mut Self::Connection,
        statements: &Statements,
        consumer: &str,
        topic: &str,
        reason: &str,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Lets a topic go on. Whether it was paused.
    fn unpause(
        conn: &mut Self::Connection,
        statements: &Statements,
        consumer: &str,
        topic: &str,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

    /// The topics that are paused for a consumer, why, and since when (microseconds since the Unix epoch).
    fn paused(
        conn: &mut Self::Connection,
        statements: &Statements,
        consumer: &str,
    ) -> impl Future<Output = Result<Vec<(String, String, i64)>, sqlx::Error>> + Send;

    /// Makes sure that a transaction is open where one should be. A handler may have ended it by itself (a bare
    /// ROLLBACK): sqlx still counts it, its own ROLLBACK would then fail on SQLite, and the pool would hand out a connection on
    /// which no transaction can be begun any more. A server only remarks that none is open.
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

/// A connection to a database whose tables are those of this build.
pub(crate) async fn connect<D: InboxStore>(
    pool: &Pool<D>,
    names: &Names,
) -> Result<PoolConnection<D>, Error> {
    let mut conn = pool
        .acquire()
        .await
        .map_err(|e| Error::database("connect to the database", e))?;
    D::check(&mut conn, names).await?;
    Ok(conn)
}

/// [`connect`] on behalf of a consumer, with its statements.
pub(crate) async fn connect_as<D: InboxStore>(
    pool: &Pool<D>,
    names: &Names,
    consumer: &str,
) -> Result<(PoolConnection<D>, Statements), Error> {
    check_consumer(consumer)?;
    let conn = connect(pool, names).await?;
    Ok((conn, D::statements(names, Duration::from_secs(60))))
}

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
