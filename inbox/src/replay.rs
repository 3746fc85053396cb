//! Carries out what operators have ordered: dead letters are handled once more, blocked keys are released (`oncebox dead
//! replay`). The handler is the service's, so that its consumer does it.
//!
//! The letter is the licence: it is deleted and its handler runs in one transaction, while its mark stays. Whoever finds no
//! letter does nothing. Before that the letter counts the replay, in a transaction of its own, so that one that kills the
//! process does not do so for ever.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncebox_kafka::Message;
use oncebox_migrations::headers;
use tokio_util::sync::CancellationToken;

use crate::InboxStore;
use crate::delivery::identify;
use crate::foreign::ForeignId;
use crate::handler::HandlerError;
use crate::lane::{Batch, Entry, Standing};
use crate::position::Key;
use crate::process::{Fate, Processor, Settled};
use crate::store::Letter;

/// How often orders are looked for.
const INTERVAL: Duration = Duration::from_secs(1);
/// A letter that was replayed in vain so often is left alone.
const LOOP_GUARD: i32 = 10;

/// How a replay ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Replayed {
    /// It had its effect.
    Effect,
    /// Somebody else was faster, or took the order back.
    Gone,
    /// The handler failed: the letter stays and the order is taken back.
    Failed(String),
}

impl<D: InboxStore> Processor<D> {
    /// Carries out orders until the shutdown.
    pub(crate) async fn replay_orders(
        self: Arc<Self>,
        consumer: Arc<str>,
        stop: CancellationToken,
    ) {
        loop {
            match self.replay_next(&consumer).await {
                Ok(true) => continue,
                Ok(false) => {}
                Err(e) => tracing::warn!(error = %e, "cannot replay, will be tried again"),
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
    }

    /// Carries out the next order that is due, if there is one.
    pub(crate) async fn replay_next(&self, consumer: &Arc<str>) -> Result<bool, sqlx::Error> {
        let statements = &self.statements;
        let due = async {
            let mut conn = self.pool.acquire().await?;
            D::due_letter(&mut conn, statements, consumer).await
        };
        let Some(letter) = self.limited(due).await? else {
            return Ok(false);
        };
        let key = Key {
            consumer: Arc::clone(consumer),
            topic: letter.topic.as_str().into(),
            partition: letter.partition,
        };
        let id = letter.id;
        let count = async {
            let mut conn = self.pool.acquire().await?;
            D::count_replay(&mut conn, statements, id).await
        };
        let counted = self.limited(count).await?;
        let outcome = if counted.is_some_and(|replays| replays > LOOP_GUARD) {
            Replayed::Failed(format!("replayed {LOOP_GUARD} times in vain, left alone"))
        } else if counted.is_some() {
            self.replay(&key, &letter).await?
        } else {
            Replayed::Gone
        };
        match outcome {
            Replayed::Effect => {
                tracing::info!(topic = %key.topic, partition = key.partition, offset = letter.offset, "replayed");
            }
            Replayed::Gone => {}
            Replayed::Failed(error) => {
                tracing::warn!(topic = %key.topic, partition = key.partition, offset = letter.offset, %error, "replay failed");
                let refuse = async {
                    let mut conn = self.pool.acquire().await?;
                    D::refuse_replay(&mut conn, statements, &key, &letter, &error).await
                };
                self.limited(refuse).await?;
            }
        }
        Ok(true)
    }

    pub(crate) async fn replay(&self, key: &Key, letter: &Letter) -> Result<Replayed, sqlx::Error> {
        let statements = &self.statements;
        let mut tx = self.limited(D::begin(&self.pool, statements)).await?;
        if let (true, Some(name)) = (letter.parked, &letter.key) {
            // The key first, as the consumer does: whoever parks waits for us, and the other way round.
            self.limited(D::blocked(&mut tx, statements, key, &[name]))
                .await?;
            let first = D::first_parked(&mut tx, statements, key, name);
            if self.limited(first).await? != Some(letter.id) {
                return self.gone(tx).await;
            }
        }
        if !self
            .limited(D::take_letter(&mut tx, statements, letter.id))
            .await?
        {
            return self.gone(tx).await;
        }
        let batch = match batch(key, letter) {
            Ok(batch) => batch,
            Err(e) => {
                self.undo(tx).await;
                return Ok(Replayed::Failed(e.chain()));
            }
        };
        let begun = Instant::now();
        if let Err(e) = self.handle(&mut tx, &batch.deliveries).await {
            self.undo(tx).await;
            return Ok(Replayed::Failed(e.chain()));
        }
        let fate = Fate {
            settled: Settled::Effect,
            took: begun.elapsed(),
        };
        let after = async {
            self.limited(D::intact(&mut tx)).await?;
            self.keep_books(&mut tx, key, &batch, &[fate]).await?;
            if let (true, Some(name)) = (letter.parked, &letter.key) {
                self.limited(D::release_next(&mut tx, statements, key, name))
                    .await?;
            }
            Ok::<_, sqlx::Error>(())
        };
        if let Err(e) = after.await {
            self.undo(tx).await;
            return Ok(Replayed::Failed(format!(
                "the handler returned Ok, but the statement after it failed: {e}"
            )));
        }
        match self.commit(tx).await {
            Ok(()) => Ok(Replayed::Effect),
            Err(e) if e.as_database_error().is_some() => {
                Ok(Replayed::Failed(HandlerError::from(e).chain()))
            }
            // Unknown: the letter is there, or it is not.
            Err(e) => Err(e),
        }
    }

    async fn gone(&self, tx: sqlx::Transaction<'static, D>) -> Result<Replayed, sqlx::Error> {
        self.undo(tx).await;
        Ok(Replayed::Gone)
    }
}

/// The message as it was delivered when it failed, alone in its batch.
fn batch(key: &Key, letter: &Letter) -> Result<Batch, HandlerError> {
    let mut list = Vec::new();
    for header in headers::decode(&letter.headers) {
        let (name, value) = header.map_err(HandlerError::fatal)?;
        let value = value.map(bytes::Bytes::copy_from_slice);
        list.push((name.to_owned(), value));
    }
    let message = Message {
        topic: Arc::clone(&key.topic),
        partition: letter.partition,
        offset: letter.offset,
        timestamp_ms: letter.timestamp_ms.unwrap_or(-1),
        key: letter.key.clone().map(Into::into),
        payload: letter.payload.clone().map(Into::into),
        headers: list,
    };
    let (mut delivery, _) = identify(message, "", &ForeignId::PartitionOffset);
    delivery.message_id = letter.message_id;
    let standing = Standing {
        attempts: u32::try_from(letter.attempts).unwrap_or(0),
        ..Standing::default()
    };
    let mut batch = Batch::default();
    batch.push(Entry { delivery, standing });
    Ok(batch)
}
