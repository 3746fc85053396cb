//! Messages that are handled outside their lane: what operators have ordered (`oncebox dead replay`: dead letters once more,
//! blocked keys released), and delayed attempts that have become due. The handler is the service's, so that its consumer does it.
//!
//! The letter is the licence: it is deleted and its handler runs in one transaction, while its mark stays. Whoever finds no
//! letter does nothing. Before that the letter counts the attempt, in a transaction of its own, so that one that kills the
//! process does not do so for ever.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncebox_kafka::{Headers, Message};
use oncebox_migrations::headers;
use tokio_util::sync::CancellationToken;

use crate::InboxStore;
use crate::delivery::identify;
use crate::foreign::ForeignId;
use crate::handler::HandlerError;
use crate::lane::{Batch, Entry, Standing};
use crate::position::Key;
use crate::process::{Fate, Outcome, Processor, Settled, storable};
use crate::retry::RetryPolicy;
use crate::stats::{Stats, TopicCounters};
use crate::store::Letter;

/// How often letters that are due are looked for.
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
    /// The handler failed: the letter stays.
    Failed {
        error: String,
        /// Repeating does not help.
        fatal: bool,
    },
}

impl Replayed {
    fn failed(error: &HandlerError) -> Self {
        Self::Failed {
            error: storable(&error.chain()),
            fatal: error.is_fatal(),
        }
    }
}

/// Where letters that are due are handled, one after the other.
pub(crate) struct Desk<D: InboxStore> {
    pub(crate) processor: Arc<Processor<D>>,
    pub(crate) consumer: Arc<str>,
    pub(crate) policy: RetryPolicy,
    pub(crate) stats: Stats,
}

impl<D: InboxStore> Desk<D> {
    /// Works until the shutdown.
    pub(crate) async fn work(self, stop: CancellationToken) {
        loop {
            match self.next().await {
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

    /// Handles the next letter that is due, if there is one.
    async fn next(&self) -> Result<bool, sqlx::Error> {
        let processor = &self.processor;
        let statements = &processor.statements;
        let due = async {
            let mut conn = processor.pool.acquire().await?;
            D::due_letter(&mut conn, statements, &self.consumer).await
        };
        let Some(letter) = processor.limited(due).await? else {
            return Ok(false);
        };
        let key = Key {
            consumer: Arc::clone(&self.consumer),
            topic: letter.topic.as_str().into(),
            partition: letter.partition,
        };
        let count = async {
            let mut conn = processor.pool.acquire().await?;
            D::count_replay(&mut conn, statements, &letter).await
        };
        let guard = LOOP_GUARD.saturating_add(if letter.delayed {
            i32::try_from(self.policy.attempts).unwrap_or(i32::MAX)
        } else {
            0
        });
        if !processor.limited(count).await? {
            // Somebody else is at it.
            return Ok(false);
        }
        let outcome = if letter.replays >= guard {
            Replayed::Failed {
                error: format!("replayed {guard} times in vain, left alone"),
                fatal: true,
            }
        } else {
            processor.replay(&key, &letter).await?
        };
        match outcome {
            Replayed::Effect => {
                tracing::info!(topic = %key.topic, partition = key.partition, offset = letter.offset, "replayed");
                self.counters(&key).effects(1);
            }
            Replayed::Gone => {}
            Replayed::Failed { error, fatal } => {
                tracing::warn!(topic = %key.topic, partition = key.partition, offset = letter.offset, %error, "replay failed");
                self.failed(&key, &letter, &error, fatal).await?;
            }
        }
        Ok(true)
    }

    /// What becomes of a letter that failed once more.
    async fn failed(
        &self,
        key: &Key,
        letter: &Letter,
        error: &str,
        fatal: bool,
    ) -> Result<(), sqlx::Error> {
        let processor = &self.processor;
        if !letter.delayed {
            let refuse = async {
                let mut conn = processor.pool.acquire().await?;
                D::refuse_replay(&mut conn, &processor.statements, key, letter, error).await
            };
            return processor.limited(refuse).await;
        }
        let attempts = u32::try_from(letter.attempts).unwrap_or(0) + 1;
        let delay = self.policy.next(attempts, rand::random());
        if let Some(delay) = delay.filter(|_| !fatal) {
            return self.delay(key, letter, error, delay).await;
        }
        let batch = batch(key, letter).map(|mut batch| {
            batch.standings[0].attempts = attempts;
            batch.standings[0].error = error.to_owned();
            batch
        });
        match processor
            .give_up(key, letter.id, error, batch.ok().as_ref())
            .await
        {
            Ok(true) => {
                self.counters(key).dead_letters(1);
                Ok(())
            }
            Ok(false) => Ok(()),
            Err(outcome) => match *outcome {
                Outcome::Outage(e) => Err(e),
                // It cannot be published or recorded, and stays what it is (G8).
                outcome => {
                    tracing::warn!(topic = %key.topic, partition = key.partition, offset = letter.offset, ?outcome, "cannot be written off, will be tried again");
                    let longest = self.policy.max.max(INTERVAL);
                    self.delay(key, letter, error, longest).await
                }
            },
        }
    }

    async fn delay(
        &self,
        key: &Key,
        letter: &Letter,
        error: &str,
        delay: Duration,
    ) -> Result<(), sqlx::Error> {
        let processor = &self.processor;
        let again = async {
            let mut conn = processor.pool.acquire().await?;
            D::delay_again(&mut conn, &processor.statements, letter.id, delay, error).await
        };
        if processor.limited(again).await? {
            self.counters(key).retries(1);
        }
        Ok(())
    }

    fn counters(&self, key: &Key) -> TopicCounters {
        TopicCounters::new(self.stats.clone(), &key.consumer, &key.topic)
    }
}

impl<D: InboxStore> Processor<D> {
    /// One attempt at a letter, in a transaction that deletes it.
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
                return Ok(Replayed::failed(&e));
            }
        };
        let begun = Instant::now();
        if let Err(e) = self.handle(&mut tx, &batch.deliveries).await {
            self.undo(tx).await;
            return Ok(Replayed::failed(&e));
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
            return Ok(Replayed::Failed {
                error: format!("the handler returned Ok, but the statement after it failed: {e}"),
                fatal: false,
            });
        }
        match self.commit(tx).await {
            Ok(()) => Ok(Replayed::Effect),
            Err(e) if e.as_database_error().is_some() => {
                Ok(Replayed::failed(&HandlerError::from(e)))
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
    let headers: Result<Headers, _> = headers::decode(&letter.headers).collect();
    let message = Message {
        topic: Arc::clone(&key.topic),
        partition: letter.partition,
        offset: letter.offset,
        timestamp_ms: letter.timestamp_ms.unwrap_or(-1),
        key: letter.key.clone().map(Into::into),
        payload: letter.payload.clone().map(Into::into),
        headers: headers.map_err(HandlerError::fatal)?,
    };
    let (mut delivery, _) = identify(message, "", &ForeignId::PartitionOffset);
    delivery.message_id = letter.message_id;
    let standing = Standing {
        attempts: u32::try_from(letter.attempts).unwrap_or(0),
        error: letter.error.clone(),
        first_failed_at: letter.first_failed_at,
        ..Standing::default()
    };
    let mut batch = Batch::default();
    batch.push(Entry { delivery, standing });
    Ok(batch)
}
