//! The thread that owns the Kafka consumer, whose every call blocks: polls, passes events on, does what it is told.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use oncebox_kafka::{ConsumerEvent, Error};
use tokio::sync::{mpsc, oneshot};

use crate::feed::Feed;
use crate::start::Facts;
use crate::step::{Step, StepHook};

/// How long a poll waits, and with it how late a command is noticed when no message comes.
const POLL: Duration = Duration::from_millis(10);
/// How long it waits while enough messages wait. Shorter than a transaction: a lane that has nothing to do any more because the
/// thread sleeps is slower than a thread that looks once too often.
const FULL: Duration = Duration::from_millis(1);
/// Most events in a bundle. Each bundle wakes the task, and commands wait for the end of one.
const BUNDLE: usize = 128;
/// How often stored offsets go to Kafka.
const COMMIT_INTERVAL: Duration = Duration::from_secs(1);

type Id = (Arc<str>, i32);

/// What the thread is told.
pub(crate) enum Command {
    /// Deliver these partitions from these offsets. Events carry this number from then on.
    Start(u64, Vec<(String, i32, i64)>),
    Pause(Vec<(String, i32)>),
    Resume(Vec<(String, i32)>),
    /// The database has committed everything of the partition below this offset (G7).
    Store(Id, i64),
    /// What Kafka knows about a partition.
    Facts(Id, oneshot::Sender<Result<Option<Facts>, Error>>),
}

/// What the thread reports: the number of the last [`Command::Start`] that it has carried out before, and what happened, in its order.
pub(crate) type Bundle = (u64, Vec<Happened>);

pub(crate) enum Happened {
    Kafka(ConsumerEvent),
    /// The [`Command::Start`] with this number failed.
    NotStarted(u64, Error),
}

/// See the module.
pub(crate) struct Pump<F: Feed> {
    pub(crate) feed: F,
    pub(crate) commands: Receiver<Command>,
    pub(crate) events: mpsc::Sender<Bundle>,
    /// Set while enough messages wait: what librdkafka has fetched ahead stays where it is.
    pub(crate) full: Arc<AtomicBool>,
    pub(crate) on_step: Option<StepHook>,
}

impl<F: Feed> Pump<F> {
    /// Works until nobody gives commands or listens any more; then commits offsets and leaves the group.
    pub(crate) fn run(mut self) {
        let mut started = 0;
        let mut stored: BTreeMap<Id, i64> = BTreeMap::new();
        let mut dirty = false;
        let mut committed = Instant::now();
        loop {
            let full = self.full.load(Ordering::Relaxed);
            let command = if full {
                match self.commands.recv_timeout(FULL) {
                    Ok(command) => Some(command),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => break,
                }
            } else {
                match self.commands.try_recv() {
                    Ok(command) => Some(command),
                    Err(TryRecvError::Empty) => None,
                    Err(TryRecvError::Disconnected) => break,
                }
            };
            // A question about a partition takes seconds when it has no leader: then it is time to poll again (G9).
            let asked = matches!(command, Some(Command::Facts(..)));
            if let Some(command) = command {
                if let Some(failed) = self.obey(command, &mut started, &mut stored)
                    && self.events.blocking_send((started, vec![failed])).is_err()
                {
                    break;
                }
                if !asked {
                    continue;
                }
            }
            dirty |= self.store(&mut stored);
            if dirty && committed.elapsed() >= COMMIT_INTERVAL {
                committed = Instant::now();
                match self.feed.commit() {
                    Ok(()) => dirty = false,
                    Err(e) => {
                        tracing::debug!(error = %e, "offsets not committed, will be tried again")
                    }
                }
            }
            if full {
                continue;
            }
            let bundle = self.poll();
            if !bundle.is_empty() && self.events.blocking_send((started, bundle)).is_err() {
                break;
            }
        }
        // What was committed last, before the worker let go.
        while let Ok(command) = self.commands.try_recv() {
            if let Command::Store(id, next) = command {
                stored.insert(id, next);
            }
        }
        self.store(&mut stored);
        self.feed.close();
    }

    /// Waits for an event, and takes what has been fetched with it.
    fn poll(&mut self) -> Vec<Happened> {
        let mut bundle = Vec::new();
        let mut wait = POLL;
        while bundle.len() < BUNDLE
            && let Some(event) = self.feed.poll(wait)
        {
            if bundle.is_empty() {
                bundle.reserve_exact(BUNDLE);
            }
            bundle.push(Happened::Kafka(event));
            wait = Duration::ZERO;
        }
        bundle
    }

    fn obey(
        &mut self,
        command: Command,
        started: &mut u64,
        stored: &mut BTreeMap<Id, i64>,
    ) -> Option<Happened> {
        match command {
            Command::Start(number, partitions) => {
                if let Err(e) = self.feed.start(&partitions) {
                    return Some(Happened::NotStarted(number, e));
                }
                *started = number;
                let names: Vec<_> = partitions.into_iter().map(|(t, p, _)| (t, p)).collect();
                // A pause outlives that in librdkafka.
                if let Err(e) = self.feed.resume(&names) {
                    tracing::debug!(error = %e, "not resumed");
                }
            }
            Command::Pause(partitions) => {
                if let Err(e) = self.feed.pause(&partitions) {
                    tracing::debug!(error = %e, "not paused");
                }
            }
            Command::Resume(partitions) => {
                if let Err(e) = self.feed.resume(&partitions) {
                    tracing::debug!(error = %e, "not resumed");
                }
            }
            Command::Facts((topic, partition), answer) => {
                let _ = answer.send(self.feed.facts(&topic, partition));
            }
            // Many a second: the last one counts.
            Command::Store(id, next) => {
                stored.insert(id, next);
            }
        }
        None
    }

    /// Hands the offsets to the client. Whether there were any.
    fn store(&mut self, stored: &mut BTreeMap<Id, i64>) -> bool {
        let any = !stored.is_empty();
        for ((topic, partition), next) in std::mem::take(stored) {
            match self.feed.store(&topic, partition, next) {
                Ok(()) => {
                    if let Some(hook) = &self.on_step {
                        hook(Step::OffsetStored);
                    }
                }
                // Informational: the database knows where we are.
                Err(e) => tracing::debug!(%topic, partition, error = %e, "offset not stored"),
            }
        }
        any
    }
}
