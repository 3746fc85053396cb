//! The reader: looks at the outbox round by round and cuts it into batches that each know the position after them.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::Instant;

use crate::config::Config;
use crate::error::{Error, Stop};
use crate::health::Health;
use crate::identity;
use crate::position::{Checkpoint, Holders, Position, Sample, Tracker};
use crate::session::{Limit, Look, Row, Session};
use crate::step::Step;

/// Batches that may exist at once: the one that commits and the one that is read meanwhile.
const BATCHES: u32 = 2;

/// Rows of a look when there is no backlog to learn from.
const FEW_ROWS: usize = 500;

/// How often the sequence is compared with the position when no gap asks for a look at the holders.
const PROBE_INTERVAL: Duration = Duration::from_millis(250);

/// How often the lag is counted while the publisher is stuck.
const LAG_INTERVAL: Duration = Duration::from_secs(1);

/// Rows to publish together, and the position after them: fixed here, whatever is read later (G2).
pub(crate) struct Batch {
    pub(crate) rows: Vec<Row>,
    pub(crate) position: Position,
    /// Messages behind this batch, at most.
    pub(crate) behind: u64,
    _permit: OwnedSemaphorePermit,
}

/// Reads until the batches are not wanted any more, or, given `until`, until everything up to that id was read.
pub(crate) struct Reader<S> {
    pub(crate) config: Config,
    pub(crate) session: S,
    pub(crate) tracker: Tracker,
    pub(crate) health: Health,
    /// The highest id that was visible at the start, for `--until-empty`.
    pub(crate) until: Option<i64>,
    /// Holders at the start, while any of them lives: a lost ROLLBACK PREPARED can revive a burnt id.
    pub(crate) start_holders: Holders,
    /// The acknowledged position.
    pub(crate) acknowledged: watch::Receiver<Option<Checkpoint>>,
}

/// What one round brought.
struct Turn {
    rows: Vec<Row>,
    /// There is more to read at once.
    more: bool,
    /// The gaps were looked at to their end, and nothing is held back.
    complete: bool,
    /// Rows wait because their gaps do not fit.
    held: bool,
    last_id: Option<i64>,
}

impl<S: Session> Reader<S> {
    pub(crate) async fn run(mut self, batches: mpsc::Sender<Batch>) -> Result<(), Error> {
        let permits = Arc::new(Semaphore::new(BATCHES as usize));
        let mut rows = FEW_ROWS.min(self.config.max_batch_rows);
        let mut pause = self.config.poll_min;
        let mut probed = Instant::now();
        let mut last_id = self.tracker.high();
        // With a backlog, the next batch is read while this one commits. Without one it is read after that: the rows that
        // arrive meanwhile would only wait for the batch that was read too early.
        let mut backlog = false;
        loop {
            let room = if backlog { 1 } else { BATCHES };
            let permit = self.wait_for_room(&permits, room).await?;
            let look_at_sequence = probed.elapsed() >= PROBE_INTERVAL;
            let turn = self.turn(rows, look_at_sequence).await?;
            backlog = turn.more;
            if let Some(id) = turn.last_id {
                probed = Instant::now();
                last_id = id;
            }
            let read_everything =
                turn.complete && self.until.is_some_and(|until| self.tracker.high() >= until);
            if turn.rows.is_empty() {
                drop(permit);
                if read_everything {
                    return Ok(());
                }
                let idle = permits.available_permits() == BATCHES as usize;
                if idle && !turn.held {
                    self.health.progress();
                }
                // Late rows and burnt gaps of somebody's transaction are waited for no longer than new rows.
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = batches.closed() => return Ok(()),
                }
                pause = (pause * 2).min(self.config.poll_max);
                continue;
            }
            self.config.step(Step::BatchRead);
            // Small when idle, so that a message is quick; growing with the backlog, because a transaction has a price.
            let bytes: usize = turn.rows.iter().map(Row::bytes).sum();
            rows = if turn.more {
                next_rows(rows, turn.rows.len(), bytes, &self.config)
            } else {
                rows
            };
            pause = self.config.poll_min;
            let behind = if turn.more {
                u64::try_from(last_id - self.tracker.high()).unwrap_or(0)
            } else {
                0
            };
            let batch = Batch {
                rows: turn.rows,
                position: self.tracker.position(),
                behind,
                _permit: permit,
            };
            if batches.send(batch).await.is_err() || read_everything {
                return Ok(());
            }
        }
    }

    /// Waits until there is room for this many batches, and takes that of one. While Kafka accepts nothing, the lag is
    /// still counted.
    async fn wait_for_room(
        &mut self,
        permits: &Arc<Semaphore>,
        room: u32,
    ) -> Result<OwnedSemaphorePermit, Error> {
        loop {
            let all = Arc::clone(permits).acquire_many_owned(room);
            if let Ok(Ok(mut all)) = tokio::time::timeout(LAG_INTERVAL, all).await
                && let Some(one) = all.split(1)
            {
                return Ok(one);
            }
            let last_id = self.session.probe().await?.last_id;
            self.check_sequence(last_id)?;
            let high = self
                .acknowledged
                .borrow()
                .as_ref()
                .map_or(0, |c| c.position.high);
            self.health.lag(u64::try_from(last_id - high).unwrap_or(0));
        }
    }

    async fn turn(&mut self, rows: usize, look_at_sequence: bool) -> Result<Turn, Error> {
        let gaps = self.tracker.gaps();
        let mut last_id = None;
        let mut before = None;
        // G2: the holders are looked at before the rows; only this set may burn a gap.
        if !gaps.is_empty() || look_at_sequence || !self.start_holders.is_empty() {
            let probe = self.session.probe().await?;
            self.check_sequence(probe.last_id)?;
            last_id = Some(probe.last_id);
            self.check_revived(&probe.holders).await?;
            before = Some(probe.holders);
        }
        let limit = Limit {
            rows,
            bytes: self.config.max_batch_bytes,
        };
        let mut look = self.session.look(&gaps, self.tracker.high(), limit).await?;
        let ids = |rows: &[Row]| rows.iter().map(|row| row.id).collect::<Vec<_>>();
        let (late, new) = (ids(&look.late), ids(&look.new));
        let sample = Sample {
            before: before.as_ref(),
            late: &late,
            late_cut: look.late_cut,
            new: &new,
        };
        let round = self
            .tracker
            .advance(sample)
            .map_err(|e| Stop::BadRow(e.to_string()))?;
        if round.needs_holders {
            // G2: and again after the rows; this set may still fill the new holes.
            let probe = self.session.probe().await?;
            self.tracker.record(&probe.holders);
            last_id = Some(probe.last_id);
        }
        let more = look.late_cut || look.new_cut || round.new < look.new.len() && !round.held;
        self.show(&gaps_held(round.held, &self.tracker));
        let complete = !look.late_cut && !look.new_cut && !round.held && round.late == late.len();
        let rows = take(&mut look, round.late, round.new, &mut self.tracker);
        Ok(Turn {
            rows,
            more,
            complete,
            held: round.held,
            last_id,
        })
    }

    fn check_sequence(&self, last_id: i64) -> Result<(), Error> {
        let high = self.tracker.high();
        if last_id < high {
            return Err(Stop::SequenceBehind {
                sequence: last_id,
                high,
            }
            .into());
        }
        Ok(())
    }

    /// Once the transactions that were open at the start have ended, the rows below the position must still be those
    /// that it settled.
    async fn check_revived(&mut self, now: &Holders) -> Result<(), Error> {
        if self.start_holders.is_empty() || !self.start_holders.is_disjoint(now) {
            return Ok(());
        }
        let Some(position) = self.acknowledged.borrow().clone() else {
            return Ok(());
        };
        let facts = self
            .session
            .facts(
                position.position.high,
                &position.position.gaps,
                &position.released,
            )
            .await?;
        // A release or the clean-up may have moved on between the two looks: then the next turn looks again.
        if identity::check_facts(&position, &facts)? {
            self.start_holders.clear();
        }
        Ok(())
    }

    fn show(&self, holding: &Option<String>) {
        let gaps = self.tracker.gaps().len();
        #[allow(clippy::cast_precision_loss, reason = "a gauge")]
        metrics::gauge!("oncebox_relay_gaps").set(gaps as f64);
        self.health.update(|s| {
            s.gaps = gaps;
            if s.holding != *holding {
                if let Some(reason) = holding {
                    tracing::warn!(reason, "position held");
                }
                s.holding.clone_from(holding);
            }
        });
    }
}

fn gaps_held(held: bool, tracker: &Tracker) -> Option<String> {
    held.then(|| {
        format!(
            "{} gaps of open transactions fill the checkpoint; rows above id {} wait until some of them end",
            tracker.gaps().len(),
            tracker.high()
        )
    })
}

/// The rows that the round takes: late ones first (G4).
fn take(look: &mut Look, late: usize, new: usize, tracker: &mut Tracker) -> Vec<Row> {
    look.late.truncate(late);
    look.new.truncate(new);
    if let Some(last) = look.new.last() {
        tracker.name_high(last.message_id);
    }
    let mut rows = std::mem::take(&mut look.late);
    rows.append(&mut look.new);
    rows
}

fn next_rows(rows: usize, read: usize, bytes: usize, config: &Config) -> usize {
    let fits = config.max_batch_bytes / (bytes / read.max(1)).max(1);
    (rows * 2).min(config.max_batch_rows).min(fits.max(1))
}

#[cfg(test)]
mod tests;
