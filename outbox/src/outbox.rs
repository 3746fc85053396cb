//! Enqueue: the message becomes a row of the caller's transaction.

use oncebox_migrations::Names;
use sqlx::Transaction;

use crate::check::{self, Row};
use crate::dialect::{Dialect, Statements};
use crate::{Error, Message, MessageId, limits};

/// Where the outbox is, and how large a message may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Schema and prefix of the tables. Defaults to `public` and `oncebox_`.
    pub names: Names,
    /// Most bytes of a record as it goes over the wire: key, payload and headers, those that the relay adds included
    /// (an upper bound, uncompressed). Not more than the topic's `max.message.bytes` and the relay's `message.max.bytes`.
    /// Defaults to 1 000 000.
    pub max_record_bytes: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            names: Names::default(),
            max_record_bytes: limits::DEFAULT_RECORD_BYTES,
        }
    }
}

/// Writes messages in the caller's transaction. Cheap to clone, needs no connection of its own, and serves every database
/// whose feature is on.
///
/// A message is published if and only if its transaction commits (G1, G2). There is nothing else to call: the relay finds
/// the row.
///
/// Only a [`Transaction`] is accepted. With a pool or a connection, message and business change would be two
/// transactions, so that does not compile:
///
/// ```compile_fail,E0308
/// # async fn example(outbox: &oncebox_outbox::Outbox, pool: &sqlx::PgPool) -> Result<(), oncebox_outbox::Error> {
/// # use oncebox_outbox::Message;
/// outbox.enqueue(pool, Message::new("orders").payload("paid")).await?;
/// # Ok(()) }
/// ```
///
/// ```compile_fail,E0308
/// # async fn example(outbox: &oncebox_outbox::Outbox, conn: &mut sqlx::PgConnection) -> Result<(), oncebox_outbox::Error> {
/// # use oncebox_outbox::Message;
/// outbox.enqueue(conn, Message::new("orders").payload("paid")).await?;
/// # Ok(()) }
/// ```
///
/// The same with a transaction does:
///
/// ```
/// # async fn example(outbox: &oncebox_outbox::Outbox, tx: &mut sqlx::Transaction<'_, sqlx::Postgres>) -> Result<(), oncebox_outbox::Error> {
/// # use oncebox_outbox::Message;
/// outbox.enqueue(tx, Message::new("orders").payload("paid")).await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Outbox {
    max_record_bytes: usize,
    statements: Statements,
}

impl Outbox {
    /// An outbox. Touches no database.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let Config {
            names,
            max_record_bytes,
        } = config;
        Self {
            max_record_bytes,
            statements: Statements::new(&names),
        }
    }

    /// Adds a message to the transaction. One round trip; the role needs `INSERT` on the outbox only.
    ///
    /// Messages of one key keep their order if every transaction that writes the key takes the same lock *before* it
    /// enqueues and keeps it until it ends (G4). A business row that each of them updates first is such a lock; without one,
    /// use [`enqueue_ordered`](Self::enqueue_ordered).
    ///
    /// # Errors
    ///
    /// [`Error`]: a limit or rule that the message breaks (nothing was sent to the database), or the database's answer
    /// (roll back; [`Error::is_retriable`] says whether the transaction is worth repeating).
    ///
    /// # Cancel safety
    ///
    /// When the future is dropped, the message may or may not be in the transaction: roll it back.
    pub async fn enqueue<D: Dialect>(
        &self,
        tx: &mut Transaction<'_, D>,
        message: Message,
    ) -> Result<MessageId, Error> {
        let row = check::row(message, self.max_record_bytes)?;
        self.insert(tx, row).await
    }

    /// Adds all messages to the transaction, in their order, or none. One round trip for any number of them.
    ///
    /// # Errors
    ///
    /// [`Error::InBatch`] with the index of the first message that breaks a limit or rule (nothing was sent to the
    /// database), or the database's answer.
    ///
    /// # Cancel safety
    ///
    /// As [`enqueue`](Self::enqueue).
    pub async fn enqueue_all<D: Dialect>(
        &self,
        tx: &mut Transaction<'_, D>,
        messages: Vec<Message>,
    ) -> Result<Vec<MessageId>, Error> {
        let rows = messages
            .into_iter()
            .enumerate()
            .map(|(index, message)| {
                check::row(message, self.max_record_bytes).map_err(|source| Error::InBatch {
                    index,
                    source: Box::new(source),
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let ids = rows.iter().map(|row| row.id).collect();
        if !rows.is_empty() {
            D::insert_all(&mut *tx, &self.statements, rows)
                .await
                .map_err(Error::database("enqueue the messages"))?;
        }
        Ok(ids)
    }

    /// Adds a message whose key no business row protects: takes the lock of (topic, key) first, and keeps it until the
    /// transaction ends, so that the messages of the key appear in the order of their transactions (G4). One more round
    /// trip than [`enqueue`](Self::enqueue). *Every* writer of the key must use it.
    ///
    /// * PostgreSQL: `pg_advisory_xact_lock`, in a statement before the `INSERT`, on the first 8 bytes (big-endian) of
    ///   `SHA-256("oncebox.key" 0x00 topic 0x00 key)`. A transaction that enqueues several keys should do so in sorted order:
    ///   otherwise two of them can deadlock, and one fails with a retriable error.
    /// * SQLite: nothing more than the `INSERT`, which takes the database's write lock before it draws its id, also in a
    ///   deferred transaction. Prefer `pool.begin_with("BEGIN IMMEDIATE")`: a deferred transaction that has read, and was
    ///   overtaken by another writer, fails with a retriable error.
    ///
    /// # Errors
    ///
    /// As [`enqueue`](Self::enqueue), and [`Error::Missing`] when the message has no key.
    ///
    /// # Cancel safety
    ///
    /// As [`enqueue`](Self::enqueue).
    pub async fn enqueue_ordered<D: Dialect>(
        &self,
        tx: &mut Transaction<'_, D>,
        message: Message,
    ) -> Result<MessageId, Error> {
        let row = check::row(message, self.max_record_bytes)?;
        let Some(key) = &row.key else {
            return Err(Error::Missing {
                field: "key",
                rule: "order is kept per key; call .key(…), or use enqueue",
            });
        };
        // G4: before the INSERT, because the INSERT draws the id.
        D::lock(&mut *tx, &self.statements, &row.topic, key)
            .await
            .map_err(Error::database("take the lock of the key"))?;
        self.insert(tx, row).await
    }

    async fn insert<D: Dialect>(
        &self,
        tx: &mut Transaction<'_, D>,
        row: Row,
    ) -> Result<MessageId, Error> {
        let id = row.id;
        D::insert(&mut *tx, &self.statements, row)
            .await
            .map_err(Error::database("enqueue the message"))?;
        Ok(id)
    }
}
