//! The consumer's thread: polls Kafka, does one piece of work at a time, and keeps polling while that takes long.
//!
//! The thread owns the Kafka consumer (every call of it blocks). Database work runs on the tokio runtime; the thread waits
//! for its result. What to do is decided by [`Partition`], what the database says by `position` and `start`.

mod flow;
mod job;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncebox_kafka::{ConsumerEvent, Message};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use self::job::Ran;

use crate::InboxStore;
use crate::classify::{Class, class};
use crate::delivery::{Identified, identify};
use crate::error::Error;
use crate::feed::Feed;
use crate::foreign::ForeignId;
use crate::partition::{Partition, Received, Work};
use crate::position::{Key, Known, Verdict, judge};
use crate::process::{Outcome, Processor, Settled};
use crate::retry::RetryPolicy;
use crate::start::{Start, decide};
use crate::stats::{Stats, TopicCounters};
use crate::step::Step;

/// Longest wait for Kafka when there is nothing to do; also how late a shutdown is noticed.
const TICK: Duration = Duration::from_millis(100);

/// What the worker was told by the builder.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) consumer: Arc<str>,
    pub(crate) retry: RetryPolicy,
    pub(crate) foreign_id: ForeignId,
    pub(crate) check_interval: Duration,
    pub(crate) shutdown_grace: Duration,
}

type Id = (Arc<str>, i32);

/// The consumer's thread.
pub(crate) struct Worker<D: InboxStore, F: Feed> {
    feed: F,
    processor: Arc<Processor<D>>,
    settings: Settings,
    runtime: Handle,
    shutdown: CancellationToken,
    stats: Stats,
    counters: BTreeMap<Arc<str>, TopicCounters>,
    partitions: BTreeMap<Id, Partition>,
    generation: u64,
    /// The partition that was served last, so that the others come first.
    last: Option<Id>,
    /// A partition has become ours since Kafka was last told where to deliver from.
    reassign: bool,
    /// Something was stored since the last commit to Kafka.
    stored: bool,
    offsets_committed: Instant,
}

impl<D: InboxStore, F: Feed> Worker<D, F> {
    pub(crate) fn new(
        feed: F,
        processor: Processor<D>,
        settings: Settings,
        runtime: Handle,
        shutdown: CancellationToken,
        stats: Stats,
    ) -> Self {
        Self {
            feed,
            processor: Arc::new(processor),
            settings,
            runtime,
            shutdown,
            stats,
            counters: BTreeMap::new(),
            partitions: BTreeMap::new(),
            generation: 0,
            last: None,
            reassign: false,
            stored: false,
            offsets_committed: Instant::now(),
        }
    }

    /// Works until the shutdown is requested or something stops the consumer; then commits offsets and leaves the group.
    pub(crate) fn run(mut self) -> Result<(), Error> {
        let mut result = Ok(());
        while result.is_ok() && !self.shutdown.is_cancelled() {
            result = self.turn();
        }
        self.feed.close();
        result
    }

    /// One turn: at most one event from Kafka, at most one piece of work.
    fn turn(&mut self) -> Result<(), Error> {
        let now = Instant::now();
        let timeout = match self.choose(now) {
            Some(_) => Duration::ZERO,
            None => self.until_something_is_due(now),
        };
        if let Some(event) = self.feed.poll(timeout) {
            self.on_event(event)?;
        }
        if let Some((id, work)) = self.choose(Instant::now()) {
            self.last = Some(id.clone());
            match work {
                Work::Take => self.take(&id)?,
                Work::Check(known) => self.check(&id, known)?,
                Work::Deliver(known) => self.deliver(&id, known)?,
                Work::Bury(known) => self.bury(&id, known)?,
            }
        }
        let next = self.choose(Instant::now());
        let takes_are_due = next.is_some_and(|(id, work)| self.goes_first(&id, &work));
        if self.reassign && !takes_are_due {
            self.assign()?;
        }
        self.adjust_flow(Instant::now());
        self.commit_offsets(Instant::now());
        Ok(())
    }

    /// Ownership first: Kafka delivers nothing before. But only where it did not fail yet: a partition without a leader
    /// takes seconds to say so, and must not starve the others (G9).
    fn goes_first(&self, id: &Id, work: &Work) -> bool {
        *work == Work::Take && self.partitions.get(id).is_some_and(Partition::is_fresh)
    }

    /// The next partition with something to do, in turn.
    fn choose(&self, now: Instant) -> Option<(Id, Work)> {
        let check = self.settings.check_interval;
        let ready = |(id, p): (&Id, &Partition)| p.work(now, check).map(|work| (id.clone(), work));
        let after = self
            .partitions
            .iter()
            .filter(|(id, _)| Some(*id) > self.last.as_ref());
        let before = self
            .partitions
            .iter()
            .filter(|(id, _)| Some(*id) <= self.last.as_ref());
        let mut ready: Vec<_> = after.chain(before).filter_map(ready).collect();
        let take = ready
            .iter()
            .position(|(id, work)| self.goes_first(id, work));
        (!ready.is_empty()).then(|| ready.swap_remove(take.unwrap_or(0)))
    }

    fn until_something_is_due(&self, now: Instant) -> Duration {
        let check = self.settings.check_interval;
        let due = self.partitions.values().map(|p| p.wakes(check)).min();
        due.map_or(TICK, |at| at.saturating_duration_since(now).min(TICK))
    }

    fn on_event(&mut self, event: ConsumerEvent) -> Result<(), Error> {
        match event {
            ConsumerEvent::Message(message) => {
                self.on_message(message);
                Ok(())
            }
            ConsumerEvent::Assigned(assigned) => {
                self.generation += 1;
                for (topic, partition) in assigned {
                    let topic: Arc<str> = topic.into();
                    let key = Key {
                        consumer: Arc::clone(&self.settings.consumer),
                        topic: Arc::clone(&topic),
                        partition,
                    };
                    tracing::info!(%topic, partition, "partition assigned");
                    let new = Partition::new(key, self.generation, Instant::now());
                    self.partitions.insert((topic, partition), new);
                }
                // The next rebalance of the group waits for this answer, and taking ownership may wait for the database.
                self.assign()
            }
            ConsumerEvent::Revoked(revoked) => {
                for (topic, partition) in revoked {
                    tracing::info!(%topic, partition, "partition revoked");
                    self.partitions.remove(&(topic.into(), partition));
                }
                Ok(())
            }
            ConsumerEvent::OutOfRange {
                topic,
                partition,
                offset,
                reason,
            } => {
                // Taking the partition again compares the position with what Kafka has now, and names the missing range.
                tracing::warn!(%topic, partition, offset, %reason, "position out of range");
                let now = Instant::now();
                if let Some(p) = self.partitions.get_mut(&(topic.into(), partition)) {
                    p.lost(jitter(), now);
                }
                Ok(())
            }
            ConsumerEvent::Error(e) => Self::tolerate("consume", e),
        }
    }

    fn on_message(&mut self, message: Message) {
        let id = (Arc::clone(&message.topic), message.partition);
        let Some(partition) = self.partitions.get_mut(&id) else {
            return;
        };
        match partition.receive(message) {
            Received::Queued => {
                self.counters(&id.0).deliveries();
                self.processor.step(Step::Received);
            }
            Received::Settled => {
                let counters = self.counters(&id.0);
                counters.deliveries();
                counters.duplicates();
            }
            Received::Ignored => {}
        }
    }

    /// Takes the row of a partition, and decides where it starts.
    fn take(&mut self, id: &Id) -> Result<(), Error> {
        let Some(partition) = self.partitions.get(id) else {
            return Ok(());
        };
        let key = partition.key.clone();
        let processor = Arc::clone(&self.processor);
        let job_key = key.clone();
        let row = match self.work(id, async move { processor.take(&job_key).await })? {
            Ran::Done(Ok(row)) => row,
            Ran::Done(Err(e)) => return self.wait_out(id, "take ownership of a partition", e),
            Ran::Abandoned => return Ok(()),
        };
        // After the token is written: nobody but us can move the position now, so what Kafka says is compared with a
        // position that stands.
        let facts = match self.feed.facts(&id.0, id.1) {
            Ok(Some(facts)) => facts,
            Ok(None) => {
                return Err(Error::UnknownTopic {
                    topic: id.0.to_string(),
                });
            }
            Err(e) => {
                self.later(id);
                return Self::tolerate("look at a partition", e);
            }
        };
        let start = decide(row.as_ref(), &facts).map_err(|refusal| Error::Position {
            consumer: key.consumer.to_string(),
            topic: key.topic.to_string(),
            partition: key.partition,
            refusal,
        })?;
        let row = match (start, row) {
            (Start::AtRow, Some(row)) => Some(row),
            (Start::First(next), _) => {
                let processor = Arc::clone(&self.processor);
                let topic_id = facts.topic_id.clone();
                let job = async move { processor.create(&key, topic_id, next).await };
                match self.work(id, job)? {
                    Ran::Done(Ok(row)) => row,
                    Ran::Done(Err(e)) => return self.wait_out(id, "create a position", e),
                    Ran::Abandoned => return Ok(()),
                }
            }
            (Start::AtRow, None) => None,
        };
        let Some(row) = row else {
            self.later(id);
            return Ok(());
        };
        tracing::info!(topic = %id.0, partition = id.1, next = row.next, "partition taken");
        self.counters(&id.0).ownership();
        if let Some(partition) = self.partitions.get_mut(id) {
            partition.owned(row.known(), row.topic_id, Instant::now());
            self.reassign = true;
            self.processor.step(Step::Owned);
        }
        Ok(())
    }

    /// Reads the row and believes it (G6; lost answers; a database that lost commits).
    fn check(&mut self, id: &Id, known: Known) -> Result<(), Error> {
        let Some(partition) = self.partitions.get(id) else {
            return Ok(());
        };
        let (key, processor) = (partition.key.clone(), Arc::clone(&self.processor));
        let row = match self.work(id, async move { processor.read(&key).await })? {
            Ran::Done(Ok(row)) => row,
            Ran::Done(Err(e)) => return self.wait_out(id, "read a position", e),
            Ran::Abandoned => return Ok(()),
        };
        let verdict = judge(&known, row.as_ref());
        tracing::debug!(topic = %id.0, partition = id.1, ?verdict, "position read");
        let Some(partition) = self.partitions.get_mut(id) else {
            return Ok(());
        };
        partition.judged(verdict, jitter(), Instant::now());
        match verdict {
            Verdict::Adopt(known) => self.store(id, known),
            Verdict::Lost(loss) => {
                tracing::warn!(topic = %id.0, partition = id.1, ?loss, next = known.next, "position lost, starting again from the database");
            }
            Verdict::Unchanged => {}
        }
        Ok(())
    }

    fn deliver(&mut self, id: &Id, known: Known) -> Result<(), Error> {
        let Some(partition) = self.partitions.get_mut(id) else {
            return Ok(());
        };
        let Some((message, attempt)) = partition.head() else {
            return Ok(());
        };
        let mut delivery = match identify(message, &partition.topic_id, &self.settings.foreign_id)?
        {
            Identified::Known(delivery) => delivery,
            Identified::Unusable(_, reason) => {
                partition.unusable(reason);
                return Ok(());
            }
        };
        delivery.attempt = attempt;
        let (key, processor) = (partition.key.clone(), Arc::clone(&self.processor));
        let job = async move { processor.deliver(&key, known, delivery).await };
        match self.work(id, job)? {
            Ran::Done(outcome) => self.conclude(id, outcome),
            Ran::Abandoned => Ok(()),
        }
    }

    fn bury(&mut self, id: &Id, known: Known) -> Result<(), Error> {
        let Some(partition) = self.partitions.get(id) else {
            return Ok(());
        };
        let Some((message, attempts, failure)) = partition.obituary() else {
            return Ok(());
        };
        let (Identified::Known(mut delivery) | Identified::Unusable(mut delivery, _)) =
            identify(message, &partition.topic_id, &self.settings.foreign_id)?;
        delivery.attempt = attempts;
        let failure = failure.to_owned();
        let (key, processor) = (partition.key.clone(), Arc::clone(&self.processor));
        let job = async move { processor.bury(&key, known, &delivery, &failure).await };
        match self.work(id, job)? {
            Ran::Done(outcome) => self.conclude(id, outcome),
            Ran::Abandoned => Ok(()),
        }
    }

    /// What a transaction's outcome means for its partition.
    fn conclude(&mut self, id: &Id, outcome: Outcome) -> Result<(), Error> {
        let now = Instant::now();
        let Some(partition) = self.partitions.get_mut(id) else {
            return Ok(());
        };
        match outcome {
            Outcome::Settled(known, settled) => {
                partition.settled(known, now);
                let counters = self.counters(&id.0);
                match settled {
                    Settled::Effect => counters.effects(),
                    Settled::Duplicate => counters.duplicates(),
                    Settled::DeadLetter => counters.dead_letters(),
                }
                self.store(id, known);
                Ok(())
            }
            Outcome::Failed(error) => {
                let policy = self.settings.retry;
                let text = error.chain();
                let again =
                    partition.failed(text.clone(), error.is_fatal(), &policy, jitter(), now);
                if again {
                    tracing::debug!(topic = %id.0, partition = id.1, error = %text, "handler failed, will be called again");
                    self.counters(&id.0).retries();
                } else {
                    tracing::warn!(topic = %id.0, partition = id.1, error = %text, "handler failed, message goes to the dead letters");
                }
                Ok(())
            }
            Outcome::Unsure(why) => {
                tracing::debug!(topic = %id.0, partition = id.1, why, "reading the position");
                partition.unsure();
                Ok(())
            }
            Outcome::Outage(e) => self.wait_out(id, "write to the database", e),
            Outcome::Stop(error) => Err(error),
        }
    }

    /// A statement of ours failed: wait and repeat without limit when the database is away, stop otherwise.
    fn wait_out(&mut self, id: &Id, doing: &'static str, error: sqlx::Error) -> Result<(), Error> {
        if class(&error) != Class::Outage {
            return Err(Error::database(doing, error));
        }
        tracing::warn!(topic = %id.0, partition = id.1, %error, "cannot {doing}, will be tried again");
        self.later(id);
        Ok(())
    }

    fn later(&mut self, id: &Id) {
        if let Some(partition) = self.partitions.get_mut(id) {
            partition.outage(jitter(), Instant::now());
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

fn jitter() -> f64 {
    rand::random::<f64>()
}
