//! Between the batches: looks for what operators want, tries paused topics again, and releases parked rows.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroUsize;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::trouble::{Lesson, PROBE};
use super::{PARKING_ROWS, Publisher, taint};
use crate::error::Error;
use crate::log::{How, NotPublished, Producer};
use crate::position::{Checkpoint, Gaps, Position, Tally};
use crate::session::{Limit, Overview, ParkedRow, ParkingSession, Paused, Request, Row};
use crate::step::Step;

/// How often the operators' requests and pauses are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// How long one try of a topic that was paused for its silence may take: the others wait meanwhile (G9).
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// What the publisher knows about parked rows and paused topics.
#[derive(Debug, Default)]
pub(crate) struct Desk {
    pub(super) overview: Overview,
    /// Something may be releasable.
    pub(super) due: bool,
    pub(super) looked_at: Option<Instant>,
    /// Topics that take each record but no large batch: records per batch.
    pub(super) small_batches: HashMap<Arc<str>, NonZeroUsize>,
}

impl Desk {
    /// Parked rows may be releasable when a term begins.
    pub(crate) fn new() -> Self {
        Self {
            due: true,
            ..Self::default()
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.overview.parked.is_empty() && self.overview.paused.is_empty()
    }
}

impl<S: ParkingSession, P: Producer> Publisher<S, P> {
    /// Whether [`Publisher::tend`] has something to do.
    pub(crate) fn is_due(&self) -> bool {
        let looked = self.desk.looked_at;
        self.desk.due || looked.is_none_or(|at| at.elapsed() >= LOOK)
    }

    /// How long [`Publisher::tend`] need not be called when no batch comes.
    pub(crate) fn next_look(&self) -> Duration {
        let looked = self.desk.looked_at.filter(|_| !self.desk.due);
        looked.map_or(Duration::ZERO, |at| LOOK.saturating_sub(at.elapsed()))
    }

    /// Whether parked rows may still be releasable.
    pub(crate) fn may_release(&self) -> bool {
        self.desk.due
    }

    /// Looks for what operators want, tries paused topics again, and releases a chunk of parked rows.
    pub(crate) async fn tend(&mut self) -> Result<(), Error> {
        if self.desk.looked_at.is_none_or(|at| at.elapsed() >= LOOK) {
            self.look().await?;
        }
        let due = self.memory().due();
        for topic in due {
            self.probe(&topic).await?;
        }
        if self.desk.due {
            self.release().await?;
        }
        Ok(())
    }

    /// Reads what is parked and paused.
    pub(super) async fn look(&mut self) -> Result<(), Error> {
        let overview = self.session.lock().await.overview().await?;
        let desk = &mut self.desk;
        desk.looked_at = Some(Instant::now());
        let over = |before: &Paused| {
            let mut now = overview.paused.iter();
            !now.any(|p| (&p.topic, &p.key) == (&before.topic, &before.key))
        };
        desk.due |= overview.requests || desk.overview.paused.iter().any(over);
        let by_relay = overview.paused.iter().filter(|p| p.by_relay);
        let by_relay: HashSet<&str> = by_relay.map(|p| &*p.topic).collect();
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.probes.retain(|topic, _| by_relay.contains(&**topic));
        for topic in by_relay {
            let probe = memory.probes.entry(topic.to_owned());
            probe.or_insert_with(|| (Instant::now(), PROBE.0));
        }
        drop(memory);
        desk.overview = overview;
        self.show();
        Ok(())
    }

    fn show(&self) {
        let overview = &self.desk.overview;
        let parked = overview
            .parked
            .iter()
            .map(|(_, n)| u64::try_from(*n).unwrap_or(0))
            .sum();
        #[allow(clippy::cast_precision_loss, reason = "gauges")]
        {
            metrics::gauge!("oncebox_relay_parked_messages").set(parked as f64);
            metrics::gauge!("oncebox_relay_paused_topics").set(overview.paused.len() as f64);
        }
        self.health.update(|s| {
            s.parked = parked;
            s.paused = overview.paused.iter().map(|p| p.topic.clone()).collect();
        });
    }

    /// Tries a paused topic with its first parked row, in a transaction that is aborted; takes it again if Kafka does.
    async fn probe(&mut self, topic: &str) -> Result<(), Error> {
        let first = Limit { rows: 1, bytes: 0 };
        let high = self.last.position.high;
        let rows = self
            .session
            .lock()
            .await
            .releasable(high, first, Some(topic))
            .await?;
        // When no row of it waits, the next one is the test.
        if let Some(parked) = rows.first() {
            match self.rehearse(&[&parked.row], Some(PROBE_TIMEOUT)).await? {
                Ok(()) | Err(NotPublished::Refused(_)) => {}
                Err(NotPublished::Topic(refused)) => {
                    return self.pause(topic, &refused.reason).await;
                }
                Err(NotPublished::Silent(silent)) => {
                    return self.pause(topic, &silent.reason).await;
                }
                Err(NotPublished::Other(error)) => {
                    self.pause(topic, &error.to_string()).await?;
                    return if error.may_go_on() {
                        Ok(())
                    } else {
                        Err(error)
                    };
                }
            }
        }
        tracing::info!(topic, "topic resumed");
        self.session
            .lock()
            .await
            .resume_topic(self.epoch, topic)
            .await?
            .led()?;
        self.memory().probes.remove(topic);
        self.look().await
    }

    /// Releases parked rows that nothing holds any more, in id order and only those that the acknowledged position has
    /// settled.
    async fn release(&mut self) -> Result<(), Error> {
        loop {
            let chunk = self.releasable().await?;
            if chunk.is_empty() {
                self.desk.due = false;
                return Ok(());
            }
            let ids = Gaps::of(chunk.iter().map(|parked| parked.row.id));
            let skipped = |parked: &&ParkedRow| parked.request == Some(Request::Skip);
            let rows: Vec<&Row> = chunk
                .iter()
                .filter(|p| !skipped(p))
                .map(|p| &p.row)
                .collect();
            let mut gone = Tally::default();
            chunk
                .iter()
                .for_each(|parked| gone.add_message(parked.row.message_id));
            let next = Checkpoint {
                seq: self.last.seq + 1,
                parked: self.last.parked.without(gone),
                released: ids,
                ..self.last.clone()
            };
            let how = How {
                records_per_batch: self.records_per_batch(&rows),
                timeout: None,
            };
            match self.send(&rows, &next, how).await {
                Ok(tainted) => {
                    self.config.step(Step::Released);
                    let mut session = self.session.lock().await;
                    session
                        .finish_release(self.epoch, &next, &self.cluster_id)
                        .await?
                        .led()?;
                    drop(session);
                    self.acknowledge(next);
                    self.config.step(Step::Unparked);
                    let (published, skipped) = (rows.len(), chunk.len() - rows.len());
                    tracing::info!(published, skipped, "parked messages released");
                    metrics::counter!("oncebox_relay_released_total").increment(published as u64);
                    metrics::counter!("oncebox_relay_skipped_total").increment(skipped as u64);
                    self.health.update(|s| s.published += published as u64);
                    return taint(tainted);
                }
                Err(failed) => {
                    if let Lesson::Refused(culprits, reason) = self.learn(failed, &rows).await? {
                        for index in culprits {
                            let id = rows[index].id;
                            tracing::error!(id, reason, "parked message is refused again");
                            let mut session = self.session.lock().await;
                            session.refuse(self.epoch, id, &reason).await?.led()?;
                        }
                    }
                }
            }
        }
    }

    /// The next chunk: settled rows only, and as many as the checkpoint can name.
    async fn releasable(&mut self) -> Result<Vec<ParkedRow>, Error> {
        let limit = Limit {
            rows: PARKING_ROWS,
            bytes: self.config.max_batch_bytes,
        };
        let position = &self.last.position;
        let mut session = self.session.lock().await;
        let mut chunk = session.releasable(position.high, limit, None).await?;
        drop(session);
        // G8: what the position has not settled is still on its way through the normal path; nothing overtakes it.
        let unsettled = |parked: &ParkedRow| position.gaps.contains(parked.row.id);
        if let Some(first) = chunk.iter().position(unsettled) {
            chunk.truncate(first);
        }
        let bytes = |count: usize| {
            let ids = chunk[..count].iter().map(|parked| parked.row.id);
            let named = Checkpoint {
                released: Gaps::of(ids),
                position: Position::default(),
                ..self.last.clone()
            };
            named.encode().len()
        };
        // The gaps have the other half, or a base record.
        let room = self.config.checkpoint_bytes / 2;
        let mut count = chunk.len();
        while count > 1 && bytes(count) > room {
            count /= 2;
        }
        chunk.truncate(count);
        Ok(chunk)
    }
}
