//! Messages that failed: attempts are written down; dead letters, parked and delayed messages are written.

use std::time::{Duration, Instant};

use oncebox_migrations::headers;
use sqlx::Transaction;

use super::finish::Finished;
use super::{Fate, Outcome, Processor, Settled, cannot, now_micros, own, storable};
use crate::InboxStore;
use crate::chain::Term;
use crate::classify::{Class, class};
use crate::dead_topic::Cause;
use crate::delivery::Delivery;
use crate::error::Error;
use crate::lane::Batch;
use crate::partition::Attempt;
use crate::position::Key;
use crate::retry::OnFailure;
use crate::store::{DeadLetter, whole_micros};

/// What a letter says besides the message.
#[derive(Clone, Copy)]
pub(super) struct Letter<'a> {
    pub(super) attempts: u32,
    pub(super) first_failed_at: Option<i64>,
    pub(super) error: &'a str,
    pub(super) parked: bool,
    /// It is tried again after so long.
    pub(super) delay: Option<Duration>,
}

impl<D: InboxStore> Processor<D> {
    /// Writes a message off: mark, dead letter and position in one transaction (G8). Or parks it and blocks its key, or puts it
    /// aside for its next attempt.
    pub(crate) async fn bury(&self, key: &Key, term: &Term, batch: &Batch) -> Outcome {
        let outcome = self.try_bury(key, term, batch).await;
        outcome.unwrap_or_else(|outcome| *outcome)
    }

    async fn try_bury(
        &self,
        key: &Key,
        term: &Term,
        batch: &Batch,
    ) -> Result<Outcome, Box<Outcome>> {
        let (delivery, standing) = (&batch.deliveries[0], &batch.standings[0]);
        // The mark is the licence: without it somebody else has settled the message, and a dead letter could bring a
        // second effect by its replay.
        let (mut tx, fresh) = self.open(key, &batch.ids()).await?;
        let licensed = fresh.is_none_or(|fresh| !fresh.is_empty());
        let settled = match self.write_off(&mut tx, key, batch, licensed).await {
            Ok(settled) => settled,
            Err(outcome) => {
                self.undo(tx).await;
                return Err(outcome);
            }
        };
        let marked = self.dedup.marks().then_some(delivery.message_id);
        let offset = [delivery.offset];
        let finished = self.finish(tx, key, term, &offset, marked, vec![settled]);
        Ok(match finished.await {
            Finished::Done(Outcome::Failed(refused)) => {
                *stop_at(key, delivery, &standing.error, refused.error)
            }
            Finished::Done(outcome) => outcome,
            Finished::NotAdvanced(e) => own("advance the position", e),
        })
    }

    /// The dead letter, or the parked message and its blocked key; and the books.
    async fn write_off(
        &self,
        tx: &mut Transaction<'static, D>,
        key: &Key,
        batch: &Batch,
        licensed: bool,
    ) -> Result<Settled, Box<Outcome>> {
        let (delivery, standing) = (&batch.deliveries[0], &batch.standings[0]);
        let blocks = delivery.key.as_deref();
        let blocks = blocks.filter(|_| self.on_failure == OnFailure::BlockKey);
        let settled = match blocks {
            _ if !licensed => Settled::Duplicate,
            _ if standing.aside.is_some() => Settled::Delayed,
            Some(_) => Settled::Parked,
            None => Settled::DeadLetter,
        };
        if licensed {
            if let Some(name) = blocks {
                self.limited(D::block(tx, &self.statements, key, name, &standing.error))
                    .await
                    .map_err(cannot("block a key"))?;
            }
            let letter = Letter {
                attempts: standing.attempts,
                first_failed_at: standing.first_failed_at,
                error: &standing.error,
                parked: blocks.is_some(),
                delay: standing.aside,
            };
            self.write_letter(tx, key, delivery, letter).await?;
        }
        self.keep_books(tx, key, batch, &[Fate::of(settled)])
            .await
            .map_err(cannot("write the record"))?;
        Ok(settled)
    }

    /// A delayed message failed for the last time: it is a dead letter now, as if it had failed in its lane. `false`: it is gone.
    /// Without its content (damaged headers) it is neither published nor recorded.
    pub(crate) async fn give_up(
        &self,
        key: &Key,
        id: i64,
        error: &str,
        batch: Option<&Batch>,
    ) -> Result<bool, Box<Outcome>> {
        let begun = self.limited(D::begin(&self.pool, &self.statements)).await;
        let mut tx = begun.map_err(cannot("begin a transaction"))?;
        match self.try_give_up(&mut tx, key, id, error, batch).await {
            Ok(true) => {}
            Ok(false) => {
                self.undo(tx).await;
                return Ok(false);
            }
            Err(outcome) => {
                self.undo(tx).await;
                return Err(outcome);
            }
        }
        self.commit(tx)
            .await
            .map_err(cannot("write a message off"))?;
        Ok(true)
    }

    async fn try_give_up(
        &self,
        tx: &mut Transaction<'static, D>,
        key: &Key,
        id: i64,
        error: &str,
        batch: Option<&Batch>,
    ) -> Result<bool, Box<Outcome>> {
        let gone = D::give_up(tx, &self.statements, id, error);
        if !self
            .limited(gone)
            .await
            .map_err(cannot("write a message off"))?
        {
            return Ok(false);
        }
        let Some(batch) = batch else { return Ok(true) };
        let standing = &batch.standings[0];
        let letter = Letter {
            attempts: standing.attempts,
            first_failed_at: standing.first_failed_at,
            error,
            parked: false,
            delay: None,
        };
        self.publish_letter(tx, key, &batch.deliveries[0], letter)
            .await?;
        self.keep_books(tx, key, batch, &[Fate::of(Settled::DeadLetter)])
            .await
            .map_err(cannot("write the record"))?;
        Ok(true)
    }

    /// Writes down the attempts of a message, so that a restart or a rebalance goes on counting.
    pub(crate) async fn note(
        &self,
        key: &Key,
        term: &Term,
        batch: &Batch,
        due: Instant,
    ) -> Outcome {
        let (delivery, standing) = (&batch.deliveries[0], &batch.standings[0]);
        let attempt = Attempt {
            message_id: delivery.message_id,
            attempts: standing.attempts,
            error: standing.error.clone(),
            first_failed_at: standing.first_failed_at.unwrap_or_else(now_micros),
            wait: due.saturating_duration_since(Instant::now()),
        };
        let mut tx = match self.limited(D::begin(&self.pool, &self.statements)).await {
            Ok(tx) => tx,
            Err(e) => return own("begin a transaction", e),
        };
        let write = D::note(&mut tx, &self.statements, key, delivery.offset, &attempt);
        if let Err(e) = self.limited(write).await {
            self.undo(tx).await;
            return own("write down an attempt", e);
        }
        self.finish_own(tx, key, term).await
    }

    /// Inserts a letter.
    pub(super) async fn write_letter(
        &self,
        tx: &mut Transaction<'static, D>,
        key: &Key,
        delivery: &Delivery,
        letter: Letter<'_>,
    ) -> Result<(), Box<Outcome>> {
        let stop = |problem| stop_at(key, delivery, letter.error, problem);
        let refused = |e| refused_at(key, delivery, letter.error, e);
        let headers = headers::encode(&delivery.headers).map_err(|e| stop(e.to_string()))?;
        let row = DeadLetter {
            message_id: delivery.message_id,
            offset: delivery.offset,
            key: delivery.key.as_deref(),
            payload: delivery.payload.as_deref(),
            headers: &headers,
            error: &storable(letter.error),
            attempts: i32::try_from(letter.attempts).unwrap_or(i32::MAX),
            parked: letter.parked,
            timestamp_ms: delivery.timestamp_ms,
            first_failed_at: letter.first_failed_at,
            delay_micros: letter.delay.map(whole_micros),
        };
        let statements = &self.statements;
        if self
            .limited(D::bury(tx, statements, key, &row))
            .await
            .map_err(refused)?
        {
            return self.publish_letter(tx, key, delivery, letter).await;
        }
        // The same message was written off before its mark expired: it is on record, which is all we need. Another
        // message at the same place must not be overwritten and this one not be dropped.
        let there = self
            .limited(D::buried(tx, statements, key, delivery.offset))
            .await
            .map_err(refused)?;
        if there == Some(delivery.message_id) {
            return Ok(());
        }
        Err(stop(
            "the dead-letter table holds another message of this topic, partition and offset (the topic was re-created?); move that row elsewhere"
                .to_owned(),
        ))
    }

    /// The dead letter as a message, where there is a topic for them. What is parked or delayed waits, and is not dead.
    async fn publish_letter(
        &self,
        tx: &mut Transaction<'static, D>,
        key: &Key,
        delivery: &Delivery,
        letter: Letter<'_>,
    ) -> Result<(), Box<Outcome>> {
        let waits = letter.parked || letter.delay.is_some();
        let Some(topic) = self.dead_topic.as_ref().filter(|_| !waits) else {
            return Ok(());
        };
        let cause = Cause {
            consumer: &key.consumer,
            attempts: letter.attempts,
            error: letter.error,
        };
        let publish = async {
            match topic.publish(tx, delivery, &cause).await {
                Err(oncebox_outbox::Error::Database { source, .. }) => Err(source),
                done => Ok(done),
            }
        };
        match self.limited(publish).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) => Err(stop_at(key, delivery, letter.error, e.to_string())),
            Err(e) => Err(refused_at(key, delivery, letter.error, e)),
        }
    }
}

/// A dead letter that cannot be written stops the partition: the message must not be passed (G8).
fn stop_at(key: &Key, delivery: &Delivery, failure: &str, problem: String) -> Box<Outcome> {
    Box::new(Outcome::Stop(Error::DeadLetter {
        topic: key.topic.to_string(),
        partition: key.partition,
        offset: delivery.offset,
        failure: failure.to_owned(),
        problem,
    }))
}

/// [`stop_at`], unless repeating can cure it.
fn refused_at(key: &Key, delivery: &Delivery, failure: &str, error: sqlx::Error) -> Box<Outcome> {
    match class(&error) {
        Class::Outage => Box::new(Outcome::Outage(error)),
        Class::Data | Class::Handler | Class::Refusal => {
            stop_at(key, delivery, failure, error.to_string())
        }
    }
}
