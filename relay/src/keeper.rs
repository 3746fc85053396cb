//! The keeper: shows signs of life, writes the confirmed position and cleans up behind it, on a session of its own.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::error::Error;
use crate::position::Checkpoint;
use crate::session::Session;
use crate::step::Step;

/// Rows of one clean-up transaction: short, because a DELETE holds the same lock as a writer.
const CLEAN_UP_ROWS: usize = 1_000;

/// Pause of the clean-up when there was little to do.
const CLEAN_UP_PAUSE: Duration = Duration::from_secs(1);

/// Whether the publisher still gets on. A leader whose publisher hangs must not keep the lease for ever; one whose
/// broker is slow must not lose it.
#[derive(Clone)]
pub(crate) struct Pulse {
    busy_since: Arc<Mutex<Option<Instant>>>,
    last_step: Arc<dyn Fn() -> Instant + Send + Sync>,
    patience: Duration,
}

impl Pulse {
    /// `last_step` tells when the publisher last completed a step of a Kafka transaction.
    pub(crate) fn new(
        patience: Duration,
        last_step: impl Fn() -> Instant + Send + Sync + 'static,
    ) -> Self {
        Self {
            busy_since: Arc::default(),
            last_step: Arc::new(last_step),
            patience,
        }
    }

    /// The publisher begins (`true`) or ends a transaction.
    pub(crate) fn busy(&self, busy: bool) {
        *self
            .busy_since
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = busy.then(Instant::now);
    }

    fn alive(&self) -> bool {
        let busy_since = *self
            .busy_since
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // The last step of an idle publisher is old; what counts is since when nothing happened in this transaction.
        busy_since.is_none_or(|since| since.max((self.last_step)()).elapsed() < self.patience)
    }
}

/// What the keeper works on.
pub(crate) struct Keeper<S> {
    pub(crate) config: Config,
    /// Shared with the publisher, which parks and releases on it.
    pub(crate) session: Arc<tokio::sync::Mutex<S>>,
    pub(crate) epoch: i64,
    pub(crate) cluster_id: String,
    pub(crate) pulse: Pulse,
    /// The acknowledged position: known to be committed in Kafka. `None` until the claim.
    pub(crate) acknowledged: watch::Receiver<Option<Checkpoint>>,
    /// Ends the keeper: it writes what is left and gives the lease back.
    pub(crate) stop: CancellationToken,
}

impl<S: Session> Keeper<S> {
    /// Runs until it is told to stop, or until the lead is lost.
    pub(crate) async fn run(mut self) -> Result<(), Error> {
        let mut renew = tokio::time::interval(self.config.lease / 4);
        renew.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut confirm = tokio::time::interval(self.config.mark_interval);
        confirm.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut next_clean_up = Instant::now() + CLEAN_UP_PAUSE;
        let mut confirmed = 0;
        loop {
            tokio::select! {
                () = self.stop.cancelled() => break,
                _ = renew.tick() => if self.pulse.alive() {
                    self.session.lock().await.renew(self.epoch).await?.led()?;
                },
                _ = confirm.tick() => self.confirm(&mut confirmed).await?,
                () = tokio::time::sleep_until(next_clean_up) => {
                    let mut session = self.session.lock().await;
                    let (written, deleted) = session.clean_up(self.epoch, self.config.retention, CLEAN_UP_ROWS).await?;
                    drop(session);
                    written.led()?;
                    metrics::counter!("oncebox_relay_deleted_total").increment(deleted);
                    // A backlog of old rows is worked off in short steps that let writers and the lease through.
                    let full = deleted >= CLEAN_UP_ROWS as u64;
                    let pause = if full { Duration::from_millis(20) } else { CLEAN_UP_PAUSE };
                    next_clean_up = Instant::now() + pause;
                }
            }
        }
        self.confirm(&mut confirmed).await?;
        self.session.lock().await.release(self.epoch).await?.led()
    }

    /// Writes the mark: only what Kafka is known to have committed (G3).
    async fn confirm(&mut self, confirmed: &mut i64) -> Result<(), Error> {
        let acknowledged = self.acknowledged.borrow_and_update().clone();
        if let Some(checkpoint) = acknowledged.filter(|c| c.seq > *confirmed) {
            let mut session = self.session.lock().await;
            session
                .confirm(self.epoch, &checkpoint, &self.cluster_id)
                .await?
                .led()?;
            drop(session);
            *confirmed = checkpoint.seq;
            self.config.step(Step::Marked);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_publisher_that_was_idle_for_long_is_alive_when_it_begins_and_dead_when_it_hangs() {
        let Some(long_ago) = Instant::now().checked_sub(Duration::from_secs(3600)) else {
            return;
        };
        let pulse = Pulse::new(Duration::from_millis(50), move || long_ago);
        assert!(pulse.alive(), "idle");
        pulse.busy(true);
        assert!(pulse.alive(), "just begun");
        std::thread::sleep(Duration::from_millis(60));
        assert!(!pulse.alive(), "hangs");
        pulse.busy(false);
        assert!(pulse.alive());
        let moving = Pulse::new(Duration::from_millis(50), Instant::now);
        moving.busy(true);
        std::thread::sleep(Duration::from_millis(60));
        assert!(moving.alive(), "slow, but each step completes");
    }
}
