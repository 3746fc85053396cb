//! The publisher: sends batch after batch, each with the position that belongs to it, parks what Kafka refuses, and
//! releases it again. It runs on the leader's task, one thing after the other.

mod tending;
mod trouble;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, watch};
use tokio::time::Instant;

use crate::config::Config;
use crate::error::Error;
use crate::health::Health;
use crate::keeper::Pulse;
use crate::log::{How, NotPublished, Producer};
use crate::parking::Plan;
use crate::position::{Checkpoint, Gaps};
use crate::reader::Batch;
use crate::session::{Cause, Parking, ParkingSession, Row};
use crate::step::Step;

pub(crate) use tending::Desk;
use trouble::Lesson;
pub(crate) use trouble::Memory;

/// Rows of one transaction that parks, and of one that releases.
const PARKING_ROWS: usize = 500;

/// How long the second try of a batch may take, of which one topic alone got no acknowledgement.
const SECOND_TRY: Duration = Duration::from_secs(10);

/// Publishes as the leader of one term.
pub(crate) struct Publisher<S, P> {
    pub(crate) config: Config,
    pub(crate) health: Health,
    pub(crate) producer: Arc<P>,
    /// The keeper's session: what is written is written as the leader of `epoch`.
    pub(crate) session: Arc<Mutex<S>>,
    pub(crate) epoch: i64,
    pub(crate) cluster_id: String,
    pub(crate) source_epoch: i64,
    pub(crate) pulse: Pulse,
    pub(crate) acknowledged: watch::Sender<Option<Checkpoint>>,
    /// The acknowledged position.
    pub(crate) last: Checkpoint,
    pub(crate) last_at: Instant,
    pub(crate) memory: Arc<std::sync::Mutex<Memory>>,
    pub(crate) desk: Desk,
}

impl<S: ParkingSession, P: Producer> Publisher<S, P> {
    /// Publishes a batch, or what of it can be published; the rest is parked first (G8).
    pub(crate) async fn publish(&mut self, batch: Batch) -> Result<(), Error> {
        let rows = &batch.rows;
        let count = rows.len() as u64;
        let oldest = rows.iter().map(|row| row.created_at_micros).min();
        self.health.lag(count + batch.behind);
        self.health.oldest(oldest);
        let mut plan = self.plan(rows).await?;
        let mut how = How::default();
        let published = loop {
            self.park(&mut plan).await?;
            let wanted = plan.publishable();
            let next = Checkpoint {
                seq: self.last.seq + 1,
                position: batch.position.clone(),
                parked: self.last.parked.with(plan.parked(rows)),
                released: Gaps::default(),
                ..self.last.clone()
            };
            let sent: Vec<&Row> = wanted.iter().map(|index| &rows[*index]).collect();
            how.records_per_batch = self.records_per_batch(&sent);
            match self.send(&sent, &next, how).await {
                Ok(tainted) => {
                    self.acknowledge(next);
                    taint(tainted)?;
                    break sent.len() as u64;
                }
                Err(failed) => match self.learn(failed, &sent).await? {
                    Lesson::Refused(culprits, reason) => {
                        for index in culprits {
                            plan.refuse(rows, wanted[index], &reason);
                        }
                    }
                    Lesson::Paused(topic, reason) => plan.pause(rows, &topic, &reason),
                    Lesson::Silent(paused, reason) => {
                        how.timeout = paused.is_empty().then_some(SECOND_TRY);
                        for topic in paused {
                            plan.pause(rows, &topic, &reason);
                        }
                    }
                },
            }
        };
        self.quiet();
        self.health.update(|s| {
            s.published += published;
            s.last_error = None;
        });
        metrics::counter!("oncebox_relay_published_total").increment(published);
        self.health.lag(batch.behind);
        self.health.oldest(None);
        Ok(())
    }

    /// Commits the position again: Kafka forgets the offsets of a group that is idle for too long.
    pub(crate) async fn heartbeat(&mut self) -> Result<(), Error> {
        if self.last_at.elapsed() < self.config.heartbeat {
            return Ok(());
        }
        let next = Checkpoint {
            seq: self.last.seq + 1,
            released: Gaps::default(),
            ..self.last.clone()
        };
        let tainted = self.send(&[], &next, How::default()).await?;
        self.acknowledge(next);
        taint(tainted)
    }

    async fn plan(&mut self, rows: &[Row]) -> Result<Plan, Error> {
        if self.desk.looked_at.is_none() {
            self.look().await?;
        }
        if self.desk.is_empty() {
            return Ok(Plan::publish_all(rows));
        }
        let among = self.session.lock().await.parked_among(rows).await?;
        // Parked before, settled with this batch: only then may they be released.
        self.desk.due |= !among.ids.is_empty();
        Ok(Plan::new(rows, &among, &self.desk.overview.paused)?)
    }

    /// Writes what the plan parks: before any checkpoint passes it, so that nothing passes a row that is not recorded (G8).
    async fn park(&mut self, plan: &mut Plan) -> Result<(), Error> {
        let unwritten = plan.unwritten();
        if unwritten.is_empty() {
            return Ok(());
        }
        for chunk in unwritten.chunks(PARKING_ROWS) {
            self.session
                .lock()
                .await
                .park(self.epoch, chunk)
                .await?
                .led()?;
            self.config.step(Step::Parked);
        }
        plan.written();
        report(&unwritten);
        // The counts are for people and may wait; that something is parked may not.
        if self.desk.is_empty() {
            self.look().await?;
        }
        Ok(())
    }

    async fn send(
        &mut self,
        rows: &[&Row],
        next: &Checkpoint,
        how: How,
    ) -> Result<Option<String>, NotPublished> {
        self.pulse.busy(true);
        let committed = self
            .producer
            .publish(self.source_epoch, rows, next, how)
            .await;
        self.pulse.busy(false);
        committed
    }

    /// G3: only after the commit is known is the position acknowledged; the keeper writes it into the mark.
    fn acknowledge(&mut self, next: Checkpoint) {
        self.health
            .update(|s| (s.seq, s.high) = (next.seq, next.position.high));
        self.acknowledged.send_replace(Some(next.clone()));
        self.last = next;
        self.last_at = Instant::now();
        self.health.progress();
        metrics::counter!("oncebox_relay_transactions_total").increment(1);
    }
}

fn taint(tainted: Option<String>) -> Result<(), Error> {
    tainted.map_or(Ok(()), |reason| Err(Error::Tainted(reason)))
}

/// Says what was parked: each refused row, and how many wait behind something.
fn report(parked: &[Parking]) {
    for row in parked.iter().filter(|row| row.cause == Cause::Refused) {
        tracing::error!(
            id = row.id,
            reason = row.reason,
            "message parked: Kafka refuses it; `oncebox relay park show {}`, then requeue or skip",
            row.id
        );
    }
    for cause in [Cause::Refused, Cause::Key, Cause::Topic] {
        let count = parked.iter().filter(|row| row.cause == cause).count() as u64;
        metrics::counter!("oncebox_relay_parked_total", "cause" => cause.as_str()).increment(count);
        if count > 0 && cause != Cause::Refused {
            tracing::warn!(
                count,
                cause = cause.as_str(),
                "messages parked behind others"
            );
        }
    }
}
