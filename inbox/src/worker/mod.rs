//! The consumer at work: takes what Kafka delivers, lets the partitions decide what they need, and has it done.
//!
//! One task decides; it never waits for the database or for Kafka. The Kafka consumer has a thread of its own ([`pump`]),
//! database work runs in tasks beside it ([`job`]). What to do is decided by [`Partition`], what the database says by `position`
//! and `start`.

mod ahead;
mod flow;
mod job;
mod pump;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc as blocking};
use std::time::{Duration, Instant};

use oncebox_kafka::{ConsumerEvent, Message};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use self::ahead::Ahead;
use self::job::{Ended, Job, Report};
use self::pump::{Bundle, Command, Happened, Pump};

use crate::InboxStore;
use crate::breaker::Breaker;
use crate::classify::{Class, class};
use crate::delivery::{Identified, identify};
use crate::error::Error;
use crate::feed::Feed;
use crate::foreign::ForeignId;
use crate::lane::{Batch, Standing, Task};
use crate::partition::{Failed, Limits, Partition, Received, Work};
use crate::pause;
use crate::position::{Key, Loss, Verdict, judge};
use crate::process::{Neighbours, Outcome, Processor, Settled};
use crate::replay::Desk;
use crate::retry::RetryPolicy;
use crate::stats::{Duplicate, Stats, TopicCounters};
use crate::step::Step;

/// Longest time without a look around.
const TICK: Duration = Duration::from_millis(100);
/// Bundles of events that may wait between the thread and the task.
const BUNDLES: usize = 2;

/// What the worker was told by the builder.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) consumer: Arc<str>,
    pub(crate) retry: RetryPolicy,
    pub(crate) foreign_id: ForeignId,
    pub(crate) limits: Limits,
    /// Transactions at the same time.
    pub(crate) connections: usize,
    /// So many failures in a row are an outage.
    pub(crate) breaker: Option<u32>,
    pub(crate) shutdown_grace: Duration,
    /// How long marks are kept; `None`: for ever, or there are none.
    pub(crate) window: Option<Duration>,
}

type Id = (Arc<str>, i32);

/// A partition, and what is under way for it.
struct Slot<D: InboxStore> {
    partition: Partition,
    /// Number of the [`Command::Start`] that concerned it last.
    started: u64,
    under_way: Vec<AbortHandle>,
    /// By lane: told when the transaction that is under way is open.
    begun: BTreeMap<usize, oneshot::Receiver<()>>,
    /// By lane: the transaction of the next batch.
    ahead: BTreeMap<usize, Ahead<D>>,
}

/// See the module.
pub(crate) struct Worker<D: InboxStore> {
    processor: Arc<Processor<D>>,
    settings: Settings,
    shutdown: CancellationToken,
    stats: Stats,
    counters: BTreeMap<Arc<str>, TopicCounters>,
    slots: BTreeMap<Id, Slot<D>>,
    jobs: JoinSet<Report>,
    commands: blocking::Sender<Command>,
    events: mpsc::Receiver<Bundle>,
    full: Arc<AtomicBool>,
    /// Number of the last [`Command::Start`].
    started: u64,
    /// The partition that was served last, so that the others come first.
    last: Option<Id>,
    breaker: Breaker,
    /// What operators have paused.
    held: watch::Receiver<pause::Topics>,
}

/// Consumes until the shutdown is requested or something stops the consumer; then commits offsets and leaves the group.
pub(crate) async fn work<D: InboxStore, F: Feed + Send + 'static>(
    feed: F,
    processor: Processor<D>,
    settings: Settings,
    shutdown: CancellationToken,
    stats: Stats,
) -> Result<(), Error> {
    let (commands, told) = blocking::channel();
    let (events, happened) = mpsc::channel(BUNDLES);
    let full = Arc::new(AtomicBool::new(false));
    let pump = Pump {
        feed,
        commands: told,
        events,
        full: Arc::clone(&full),
        on_step: processor.on_step.clone(),
    };
    let (gone, left) = tokio::sync::oneshot::channel();
    std::thread::Builder::new()
        .name(format!("inbox {}", settings.consumer))
        .spawn(move || {
            pump.run();
            let _ = gone.send(());
        })
        .map_err(|_| Error::Thread)?;
    let processor = Arc::new(processor);
    let (seen, held) = watch::channel(None);
    let chores = chores(&processor, &settings, &stats, seen, &shutdown);
    let worker = Worker {
        breaker: Breaker::new(settings.breaker),
        processor,
        settings,
        shutdown,
        stats,
        counters: BTreeMap::new(),
        slots: BTreeMap::new(),
        jobs: JoinSet::new(),
        commands,
        events: happened,
        full,
        started: 0,
        last: None,
        held,
    };
    let result = worker.run().await;
    // A replay that is dropped is rolled back: its letter and its order stay.
    drop(chores);
    // The worker's channels are closed: the thread commits the offsets and leaves the group.
    let left = left.await;
    result.and(left.map_err(|_| Error::Thread))
}

/// What is done beside the partitions: a look at what is paused, replays and delayed attempts, a count of the
/// letters, and the clean-up of the marks.
fn chores<D: InboxStore>(
    processor: &Arc<Processor<D>>,
    settings: &Settings,
    stats: &Stats,
    paused: watch::Sender<pause::Topics>,
    shutdown: &CancellationToken,
) -> JoinSet<()> {
    let mut chores = JoinSet::new();
    let consumer = &settings.consumer;
    let watch = Arc::clone(processor).watch_pauses(Arc::clone(consumer), paused, shutdown.clone());
    chores.spawn(watch);
    let desk = Desk {
        processor: Arc::clone(processor),
        consumer: Arc::clone(consumer),
        policy: settings.retry,
        stats: stats.clone(),
    };
    chores.spawn(desk.work(shutdown.clone()));
    let count = Arc::clone(processor).count_letters(Arc::clone(consumer), shutdown.clone());
    chores.spawn(count);
    if let Some(window) = settings.window {
        let processor = Arc::clone(processor);
        chores.spawn(processor.sweep_marks(Arc::clone(consumer), window, shutdown.clone()));
    }
    chores
}

impl<D: InboxStore> Worker<D> {
    async fn run(mut self) -> Result<(), Error> {
        while !self.shutdown.is_cancelled() {
            self.turn().await?;
        }
        // What is under way may end; nothing new begins.
        let deadline = tokio::time::Instant::now() + self.settings.shutdown_grace;
        while !self.jobs.is_empty() {
            tokio::select! {
                Some(ended) = self.jobs.join_next() => self.on_ended(ended).await?,
                bundle = self.events.recv() => self.on_bundle(bundle)?,
                () = tokio::time::sleep_until(deadline) => break,
            }
        }
        // Dropping a transaction rolls it back; a COMMIT that is on its way is judged by its compare-and-set.
        self.jobs.shutdown().await;
        Ok(())
    }

    /// Waits for something to happen, takes in all that did, and has done what is needed then.
    async fn turn(&mut self) -> Result<(), Error> {
        let wait = self.until_something_is_due(Instant::now());
        tokio::select! {
            // Not biased: transactions that end one after the other must not keep a rebalance waiting.
            () = self.shutdown.cancelled() => return Ok(()),
            Some(ended) = self.jobs.join_next() => self.on_ended(ended).await?,
            bundle = self.events.recv() => self.on_bundle(bundle)?,
            () = tokio::time::sleep(wait) => {}
        }
        while let Some(ended) = self.jobs.try_join_next() {
            self.on_ended(ended).await?;
        }
        self.hold();
        self.dispatch(Instant::now()).await?;
        self.look_ahead();
        self.start();
        self.adjust_flow(Instant::now());
        Ok(())
    }

    /// Holds back the topics that are paused, and all of them while nothing is known about that.
    fn hold(&mut self) {
        let paused = self.held.borrow();
        for ((topic, _), slot) in &mut self.slots {
            slot.partition.held = paused.as_ref().is_none_or(|topics| topics.contains(topic));
        }
    }

    fn until_something_is_due(&self, now: Instant) -> Duration {
        if self.jobs.len() >= self.settings.connections {
            return TICK;
        }
        let due = self
            .slots
            .values()
            .filter_map(|s| s.partition.wakes())
            .min();
        due.map_or(TICK, |at| at.saturating_duration_since(now).min(TICK))
    }

    /// Begins what is needed, partition by partition in turn, as far as there are connections for it.
    async fn dispatch(&mut self, now: Instant) -> Result<(), Error> {
        while self.jobs.len() < self.settings.connections {
            let Some(id) = self.choose(now) else { break };
            let Some(work) = self.slots.get_mut(&id).and_then(|s| s.partition.work(now)) else {
                break;
            };
            let work = self.count_failure(&id, work).await?;
            self.begin(&id, work)?;
            self.last = Some(id);
        }
        Ok(())
    }

    /// The next partition with something to do, in turn. Ownership goes first: Kafka delivers nothing before. But only where
    /// it did not fail yet: a partition without a leader takes seconds to say so, and must not starve the others (G9).
    fn choose(&self, now: Instant) -> Option<Id> {
        let first = self.slots.iter().find(|(_, s)| s.partition.goes_first());
        if let Some((id, _)) = first {
            return Some(id.clone());
        }
        let ready = |(_, s): &(&Id, &Slot<D>)| s.partition.is_ready(now);
        let after = self
            .slots
            .iter()
            .filter(|(id, _)| Some(*id) > self.last.as_ref());
        let before = self
            .slots
            .iter()
            .filter(|(id, _)| Some(*id) <= self.last.as_ref());
        let mut chosen = after.chain(before).filter(ready);
        chosen.next().map(|(id, _)| id.clone())
    }

    /// Every message that is about to be written off counts, also one without an attempt: a topic full of them is the wrong
    /// topic. Too many in a row stop the consumer instead.
    async fn count_failure(&mut self, id: &Id, mut work: Work) -> Result<Work, Error> {
        if let Work::Lane(_, Task::Bury(batch)) = &mut work
            && let Some(standing) = batch.standings.first_mut()
            && !std::mem::replace(&mut standing.counted, true)
            && let Some(failures) = self.breaker.failed(&id.0)
        {
            let error = standing.error.clone();
            return Err(self.trip(id, failures, error).await);
        }
        Ok(work)
    }

    /// Has a piece of work done in a task of its own.
    fn begin(&mut self, id: &Id, work: Work) -> Result<(), Error> {
        let Some(slot) = self.slots.get_mut(id) else {
            return Ok(());
        };
        let job = slot.job(id, &self.processor);
        let (opened, begun) = oneshot::channel();
        let mut neighbours = Neighbours {
            prepared: None,
            opened,
        };
        if let Work::Lane(lane, task) = &work {
            // What is opened for other messages goes: it may hold the mark of one of these.
            let ahead = slot.ahead.remove(lane);
            let fits =
                |ahead: &Ahead<D>| matches!(task, Task::Deliver(batch) if batch.ids() == ahead.ids);
            neighbours.prepared = ahead.filter(fits).map(|ahead| ahead.prepared);
            slot.begun.insert(*lane, begun);
        }
        if self.free() == 0 {
            // What is due goes before what comes next.
            let mut ahead = self.slots.values_mut().map(|slot| &mut slot.ahead);
            ahead.find_map(BTreeMap::pop_first);
        }
        let handle = match work {
            Work::Take => self.jobs.spawn(job.take(self.commands.clone())),
            Work::Check(known) => self.jobs.spawn(job.check(known)),
            Work::Advance => self.jobs.spawn(job.advance()),
            Work::Stop(error) => return Err(*error),
            Work::Lane(lane, task) => self.jobs.spawn(job.lane(lane, task, neighbours)),
        };
        if let Some(slot) = self.slots.get_mut(id) {
            slot.under_way.retain(|handle| !handle.is_finished());
            slot.under_way.push(handle);
        }
        Ok(())
    }

    async fn on_ended(
        &mut self,
        ended: Result<Report, tokio::task::JoinError>,
    ) -> Result<(), Error> {
        let report = match ended {
            Ok(report) => report,
            Err(e) if e.is_cancelled() => return Ok(()),
            Err(_) => return Err(Error::Thread),
        };
        let slot = self.slots.get(&report.id);
        let current = slot.is_some_and(|slot| slot.partition.is_of(&report.term));
        match report.result {
            // G10: a late result does not revive a partition that was given up.
            _ if !current => Ok(()),
            Ended::Taken(taken) => self.on_taken(&report.id, taken),
            Ended::Read(known, row) => {
                let now = Instant::now();
                let row = match row {
                    Ok(row) => row,
                    Err(e) => return self.wait_out(&report.id, None, "read a position", e),
                };
                let verdict = judge(&known, row.as_ref());
                tracing::debug!(topic = %report.id.0, partition = report.id.1, ?verdict, "position read");
                let Some(slot) = self.slots.get_mut(&report.id) else {
                    return Ok(());
                };
                slot.partition.judged(verdict, jitter(), now);
                match verdict {
                    Verdict::Adopt(known) => self.store(&report.id, known.next),
                    Verdict::Lost(loss) => {
                        tracing::warn!(topic = %report.id.0, partition = report.id.1, ?loss, next = known.next, "position lost, starting again from the database");
                        if loss != Loss::OtherOwner {
                            self.processor.forget_hints().await;
                        }
                    }
                    Verdict::Unchanged => {}
                }
                Ok(())
            }
            Ended::Done {
                lane,
                outcome,
                took,
            } => self.conclude(&report.id, lane, outcome, took),
        }
    }

    fn on_bundle(&mut self, bundle: Option<Bundle>) -> Result<(), Error> {
        let (started, bundle) = bundle.ok_or(Error::Thread)?;
        bundle
            .into_iter()
            .try_for_each(|happened| self.on_event(started, happened))
    }

    fn on_event(&mut self, started: u64, happened: Happened) -> Result<(), Error> {
        match happened {
            Happened::NotStarted(number, e) => {
                let slots = self.slots.values_mut().filter(|s| s.started == number);
                slots.for_each(|slot| slot.partition.listens_no_more());
                Self::tolerate("start to fetch partitions", e)
            }
            Happened::Kafka(ConsumerEvent::Message(message)) => {
                self.on_message(started, message);
                Ok(())
            }
            Happened::Kafka(ConsumerEvent::End {
                topic,
                partition,
                offset,
            }) => {
                let slot = self.slots.get_mut(&(topic, partition));
                if let Some(slot) = slot.filter(|slot| slot.hears(started)) {
                    slot.partition.reached(offset);
                }
                Ok(())
            }
            Happened::Kafka(ConsumerEvent::Assigned(assigned)) => {
                for (topic, partition) in assigned {
                    let topic: Arc<str> = topic.into();
                    let key = Key {
                        consumer: Arc::clone(&self.settings.consumer),
                        topic: Arc::clone(&topic),
                        partition,
                    };
                    tracing::info!(%topic, partition, "partition assigned");
                    let (limits, now) = (self.settings.limits, Instant::now());
                    let slot = Slot {
                        partition: Partition::new(key, limits, now),
                        started: 0,
                        under_way: Vec::new(),
                        begun: BTreeMap::new(),
                        ahead: BTreeMap::new(),
                    };
                    if let Some(old) = self.slots.insert((topic, partition), slot) {
                        old.give_up();
                    }
                }
                Ok(())
            }
            Happened::Kafka(ConsumerEvent::Revoked(revoked)) => {
                for (topic, partition) in revoked {
                    tracing::info!(%topic, partition, "partition revoked");
                    if let Some(slot) = self.slots.remove(&(topic.into(), partition)) {
                        slot.give_up();
                    }
                }
                Ok(())
            }
            Happened::Kafka(ConsumerEvent::OutOfRange {
                topic,
                partition,
                offset,
                reason,
            }) => {
                // Taking the partition again compares the position with what Kafka has now, and names the missing range.
                tracing::warn!(%topic, partition, offset, %reason, "position out of range");
                if let Some(slot) = self.slots.get_mut(&(topic.into(), partition)) {
                    slot.partition.lost(jitter(), Instant::now());
                }
                Ok(())
            }
            Happened::Kafka(ConsumerEvent::Error(e)) => Self::tolerate("consume", e),
        }
    }

    fn on_message(&mut self, started: u64, message: Message) {
        let id = (Arc::clone(&message.topic), message.partition);
        let slot = self.slots.get_mut(&id);
        let Some(slot) = slot.filter(|slot| slot.hears(started)) else {
            return;
        };
        let policy = &self.settings.foreign_id;
        let (offset, now) = (message.offset, Instant::now());
        let received = slot.partition.receive(offset, now, |topic_id| {
            let mut standing = Standing::default();
            let (delivery, error) = identify(message, topic_id, policy);
            match error {
                Identified::Known => {}
                Identified::Unusable(reason) => {
                    standing.given_up = true;
                    standing.error = reason;
                }
                Identified::Stop(error) => standing.stop = Some(error),
            }
            (delivery, standing)
        });
        match received {
            Received::Queued => {
                self.counters(&id.0).deliveries(1);
                self.processor.step(Step::Received);
            }
            Received::Settled => {
                let counters = self.counters(&id.0);
                counters.deliveries(1);
                counters.duplicates(Duplicate::Position, 1);
            }
            Received::Ignored => {}
        }
    }

    fn on_taken(&mut self, id: &Id, taken: job::Taken) -> Result<(), Error> {
        let (row, attempts, high) = match taken {
            job::Taken::Row {
                row,
                attempts,
                high,
            } => (row, attempts, high),
            job::Taken::Later => {
                self.later(id, None);
                return Ok(());
            }
            job::Taken::Outage(doing, e) => return self.wait_out(id, None, doing, e),
            job::Taken::Kafka(e) => {
                self.later(id, None);
                return Self::tolerate("look at a partition", e);
            }
            job::Taken::Stop(error) => return Err(*error),
        };
        tracing::info!(topic = %id.0, partition = id.1, next = row.next, "partition taken");
        self.counters(&id.0).ownership(1);
        if let Some(slot) = self.slots.get_mut(id) {
            let (known, now) = (row.known(), Instant::now());
            slot.partition
                .owned(known, high, row.topic_id, attempts, now);
            self.processor.step(Step::Owned);
        }
        Ok(())
    }

    /// What a transaction's outcome means for its partition.
    fn conclude(
        &mut self,
        id: &Id,
        lane: Option<(usize, Batch)>,
        outcome: Outcome,
        took: Duration,
    ) -> Result<(), Error> {
        let now = Instant::now();
        let Some(slot) = self.slots.get_mut(id) else {
            return Ok(());
        };
        if let Some((lane, _)) = &lane
            && !matches!(outcome, Outcome::Settled(_))
        {
            // The same messages come again, and perhaps alone.
            slot.ahead.remove(lane);
        }
        let partition = &mut slot.partition;
        match (outcome, lane) {
            (Outcome::Settled(settled), Some((lane, batch))) if settled.is_empty() => {
                partition.noted(lane, batch, now);
                Ok(())
            }
            (Outcome::Settled(settled), Some((lane, batch))) => {
                partition.settled(lane, settled.len(), took, now);
                let next = partition.term().chain().known.next;
                let last = batch.deliveries.last().and_then(|d| d.timestamp_ms);
                self.count(id, &settled, took, last);
                self.store(id, next);
                Ok(())
            }
            (Outcome::Settled(_), None) => {
                partition.advanced(now);
                let next = partition.term().chain().known.next;
                self.store(id, next);
                Ok(())
            }
            (Outcome::Failed(failure), Some((lane, batch))) => {
                let text = failure.error.clone();
                let policy = &self.settings.retry;
                let failed = partition.failed(lane, batch, failure, policy, jitter(), now);
                match failed {
                    Failed::Isolated => {
                        tracing::debug!(topic = %id.0, partition = id.1, error = %text, "a message of a batch failed, it is taken apart");
                    }
                    Failed::Again => {
                        tracing::debug!(topic = %id.0, partition = id.1, error = %text, "handler failed, will be called again");
                        self.counters(&id.0).retries(1);
                    }
                    Failed::GivenUp => {
                        tracing::warn!(topic = %id.0, partition = id.1, error = %text, "handler failed, message is written off");
                    }
                }
                Ok(())
            }
            (Outcome::Unsure(why), lane) => {
                tracing::debug!(topic = %id.0, partition = id.1, why, "reading the position");
                partition.unsure(lane);
                Ok(())
            }
            (Outcome::Outage(e), lane) => self.wait_out(id, lane, "write to the database", e),
            (Outcome::Failed(failure), None) => {
                tracing::warn!(topic = %id.0, partition = id.1, error = %failure.error, "position not written");
                partition.outage(None, jitter(), now);
                Ok(())
            }
            (Outcome::Stop(error), _) => Err(error),
        }
    }

    fn count(&mut self, id: &Id, settled: &[Settled], took: Duration, last_ms: Option<i64>) {
        let of = |kind: Settled| settled.iter().filter(|s| **s == kind).count() as u64;
        let effects = of(Settled::Effect);
        if effects > 0 {
            self.breaker.succeeded(&id.0);
        }
        let counters = self.counters(&id.0);
        counters.effects(effects);
        counters.duplicates(Duplicate::Mark, of(Settled::Duplicate));
        counters.duplicates(Duplicate::Hint, of(Settled::Known));
        counters.dead_letters(of(Settled::DeadLetter));
        counters.parked(of(Settled::Parked));
        counters.transaction(settled.len(), took, last_ms);
    }

    /// Many messages failed in a row: writes down that the consumer stopped, so that a restart does not go on.
    async fn trip(&mut self, id: &Id, failures: u32, error: String) -> Error {
        let stop = Error::Breaker {
            consumer: self.settings.consumer.to_string(),
            topic: id.0.to_string(),
            failures,
            failure: error.clone(),
        };
        if let Err(e) = self
            .processor
            .trip(&id.0, &self.settings.consumer, failures, &error)
            .await
        {
            tracing::warn!(error = %e, "the stop is not written down, the next start tries again");
        }
        stop
    }

    /// A statement of ours failed: wait and repeat without limit when the database is away, stop otherwise.
    fn wait_out(
        &mut self,
        id: &Id,
        lane: Option<(usize, Batch)>,
        doing: &'static str,
        error: sqlx::Error,
    ) -> Result<(), Error> {
        if class(&error) != Class::Outage {
            return Err(Error::database(doing, error));
        }
        tracing::warn!(topic = %id.0, partition = id.1, %error, "cannot {doing}, will be tried again");
        self.later(id, lane);
        Ok(())
    }

    fn later(&mut self, id: &Id, lane: Option<(usize, Batch)>) {
        if let Some(slot) = self.slots.get_mut(id) {
            slot.partition.outage(lane, jitter(), Instant::now());
        }
    }

    /// Kafka's errors pass, except those that only somebody else can cure.
    fn tolerate(doing: &'static str, error: oncebox_kafka::Error) -> Result<(), Error> {
        if error.is_fatal()
            || error.is_config()
            || error.is_authentication()
            || error.is_authorization()
        {
            return Err(Error::kafka(doing, error));
        }
        tracing::warn!(%error, "cannot {doing}, will be tried again");
        Ok(())
    }

    fn counters(&mut self, topic: &Arc<str>) -> &TopicCounters {
        self.counters.entry(Arc::clone(topic)).or_insert_with(|| {
            TopicCounters::new(self.stats.clone(), &self.settings.consumer, topic)
        })
    }
}

impl<D: InboxStore> Slot<D> {
    /// A piece of work for this partition.
    fn job(&self, id: &Id, processor: &Arc<Processor<D>>) -> Job<D> {
        Job {
            id: id.clone(),
            key: self.partition.key.clone(),
            term: Arc::clone(self.partition.term()),
            processor: Arc::clone(processor),
        }
    }

    /// Whether it asked for what is delivered after this [`Command::Start`]. What was fetched before comes again if it is wanted.
    fn hears(&self, started: u64) -> bool {
        self.started <= started
    }

    /// The partition is somebody else's: what is under way is dropped and rolled back.
    fn give_up(self) {
        self.partition.term().chain().in_doubt = true;
        for handle in self.under_way {
            handle.abort();
        }
    }
}

fn jitter() -> f64 {
    rand::random::<f64>()
}
