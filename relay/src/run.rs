//! The relay from start to end: lead, recover, stand by.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, Database};
use crate::error::Error;
use crate::health::{Health, Role};
use crate::leader::{self, Lease, Task, Term};
use crate::log::{KafkaLog, Log, Producer as _};
use crate::publisher::{Desk, Memory, Publisher};
use crate::session::{Deadline, ParkingSession, PostgresSession, SqliteSession};

/// How long a relay runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Until shutdown.
    Forever,
    /// Until everything is published that was visible when it took the lead. Ids that are still uncommitted then are
    /// not waited for.
    UntilEmpty,
}

/// How a relay ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Shutdown was requested, or everything was published.
    Stopped,
    /// [`Mode::UntilEmpty`] and another relay leads.
    NotLeader,
}

/// Longest pause between two attempts.
const MAX_BACK_OFF: Duration = Duration::from_secs(5);

/// Runs a relay: waits for the lead, publishes, recovers from whatever passes by itself.
///
/// What fails before the relay first stood by or led ends it at once, so that a wrong URL is seen; later it is
/// retried with back-off for as long as it takes.
///
/// # Errors
/// [`Error`] with the remedy, when somebody has to do something. Nothing that was acknowledged is lost then, and
/// nothing is published that was not enqueued.
///
/// # Cancel safety
/// Dropping the future is a crash: safe, but the lease has to run out. Cancel `shutdown` to stop gracefully: the
/// transaction in flight ends, the mark is written, the lease is given back.
pub async fn run(
    config: Config,
    mode: Mode,
    health: Health,
    shutdown: CancellationToken,
) -> Result<Exit, Error> {
    config.validate()?;
    let log = KafkaLog::new(&config);
    let result = match &config.database {
        Database::Postgres(_) => {
            Relay::<Deadline<PostgresSession>, _>::new(config, mode, log, health.clone(), shutdown)
                .run()
                .await
        }
        Database::Sqlite(_) => {
            Relay::<Deadline<SqliteSession>, _>::new(config, mode, log, health.clone(), shutdown)
                .run()
                .await
        }
    };
    health.role(Role::Stopped);
    if let Err(error) = &result {
        health.update(|s| s.last_error = Some(error.to_string()));
    }
    result
}

pub(crate) struct Relay<S, L> {
    config: Config,
    mode: Mode,
    health: Health,
    shutdown: CancellationToken,
    log: L,
    /// Names this relay in the lease.
    owner: String,
    /// Stood by or led once: from then on, what passes by itself is waited for.
    settled: bool,
    /// What its publishers remember from term to term.
    memory: Arc<Mutex<Memory>>,
    /// Grows with every failure in a row.
    back_off: Duration,
    /// Two relays that fence each other in step would do so for ever.
    jitter: StdRng,
    session: std::marker::PhantomData<fn() -> S>,
}

impl<S: ParkingSession, L: Log> Relay<S, L> {
    pub(crate) fn new(
        config: Config,
        mode: Mode,
        log: L,
        health: Health,
        shutdown: CancellationToken,
    ) -> Self {
        let back_off = Duration::from_millis(50);
        Self {
            config,
            mode,
            health,
            shutdown,
            log,
            owner: leader::owner(),
            settled: false,
            memory: Arc::default(),
            back_off,
            jitter: StdRng::from_rng(&mut rand::rng()),
            session: std::marker::PhantomData,
        }
    }

    pub(crate) async fn run(mut self) -> Result<Exit, Error> {
        loop {
            let error = match self.attempt().await {
                Ok(exit) => return Ok(exit),
                Err(error) => error,
            };
            if !error.is_retriable() || !self.settled {
                return Err(error);
            }
            metrics::counter!("oncebox_relay_rebuilds_total", "cause" => error.cause())
                .increment(1);
            tracing::warn!(%error, "starting over");
            self.health
                .update(|s| s.last_error = Some(error.to_string()));
            let jitter = self.jitter.random_range(0.5..1.5);
            tokio::select! {
                () = tokio::time::sleep(self.back_off.mul_f64(jitter)) => {}
                () = self.shutdown.cancelled() => return Ok(Exit::Stopped),
            }
            self.back_off = (self.back_off * 2).min(MAX_BACK_OFF);
        }
    }

    /// One term, from the first look to whatever ends it.
    async fn attempt(&mut self) -> Result<Exit, Error> {
        self.health.role(Role::Starting);
        let (mut keeper, reader) = leader::connect::<S>(&self.config).await?;
        let cluster_id = self.log.cluster_id().await?;
        let wait = self.mode == Mode::Forever;
        let (config, health) = (&self.config, &self.health);
        let lease = leader::wait_for_lease(
            config,
            &mut keeper,
            &self.log,
            (&cluster_id, &self.owner),
            wait,
            health,
            &self.shutdown,
        );
        let epoch = match lease.await {
            Ok(Lease::Taken(epoch)) => epoch,
            Ok(Lease::Held) => return Ok(Exit::NotLeader),
            Ok(Lease::Shutdown) => return Ok(Exit::Stopped),
            Err(error) => {
                // A standby has shown that its configuration is sound.
                self.settled |= health.snapshot().role == Role::Standby;
                return Err(error);
            }
        };
        let term = leader::begin_term(config, keeper, reader, &self.log, cluster_id, epoch, health)
            .await?;
        self.settled = true;
        self.health.role(Role::Leader);
        self.lead(term).await
    }

    async fn lead(&mut self, mut term: Term<S, L::Producer>) -> Result<Exit, Error> {
        if self.mode == Mode::UntilEmpty {
            term.reader.until = Some(term.reader.session.last_visible().await?);
        }
        let (batches_tx, mut batches) = mpsc::channel(1);
        let mut reader = Task::spawn(term.reader.run(batches_tx));
        let mut publisher = Publisher {
            config: self.config.clone(),
            health: self.health.clone(),
            producer: term.producer,
            session: term.session,
            epoch: term.epoch,
            cluster_id: term.cluster_id,
            source_epoch: term.source_epoch,
            pulse: term.pulse,
            acknowledged: term.acknowledged,
            last: term.claim,
            last_at: Instant::now(),
            memory: Arc::clone(&self.memory),
            desk: Desk::new(),
        };
        let mut heartbeat =
            tokio::time::interval(self.config.heartbeat.min(Duration::from_secs(60)));
        loop {
            tokio::select! {
                biased;
                () = self.shutdown.cancelled() => break,
                ended = term.keeper.join() => {
                    ended?;
                    return Err(Error::Deposed(term.epoch));
                }
                batch = batches.recv() => {
                    let Some(batch) = batch else {
                        reader.join().await?;
                        while publisher.may_release() {
                            publisher.tend().await?;
                        }
                        break;
                    };
                    publisher.publish(batch).await?;
                    self.back_off = Duration::from_millis(50);
                    // A chunk of parked rows between two batches, so that neither waits for the other.
                    if publisher.is_due() {
                        publisher.tend().await?;
                    }
                }
                _ = heartbeat.tick() => publisher.heartbeat().await?,
                () = tokio::time::sleep(publisher.next_look()) => publisher.tend().await?,
            }
        }
        drop(batches);
        drop(reader);
        term.stop_keeper.cancel();
        term.keeper.join().await?;
        if let Some(producer) = Arc::into_inner(publisher.producer) {
            producer.close().await;
        }
        Ok(Exit::Stopped)
    }
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
