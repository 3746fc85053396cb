//! The state of one assigned partition and what it needs next. No I/O, no clock of its own: time and jitter come in.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::chain::Term;
use crate::delivery::Delivery;
use crate::error::Error;
use crate::lane::{Batch, Entry, Lane, Standing, Task, lane_of};
use crate::position::{Key, Known, Verdict};
use crate::retry::{RetryPolicy, outage};

/// A partition that has to wait for longer than this is paused. Shorter waits are not worth throwing away what librdkafka
/// has fetched ahead.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);
/// What the Kafka client may have fetched ahead of a partition: one that settles as many in a second holds nobody up for longer.
const AHEAD: f64 = 10_000.0;

/// How far this process may trust what it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The position row is not ours (yet, or any more): take it before anything else.
    Unowned,
    /// It was ours; a compare-and-set or a COMMIT left a doubt: read the row before anything else.
    Unsure,
    /// It is ours.
    Working,
}

/// What a partition needs next.
#[derive(Debug)]
pub(crate) enum Work {
    /// Take ownership of the row.
    Take,
    /// Read the row and judge it.
    Check(Known),
    /// Write the position that was reached without a transaction.
    Advance,
    /// A transaction of one lane.
    Lane(usize, Task),
    /// The consumer stops.
    Stop(Box<Error>),
}

/// What happened to a message that came from Kafka.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// It waits for its turn.
    Queued,
    /// The position says that it is settled.
    Settled,
    /// It will come again: the partition is not ours, or it is in the queue already.
    Ignored,
}

/// A failed attempt that an earlier process has written down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The message's id.
    pub message_id: Uuid,
    /// Calls of the handler that failed.
    pub attempts: u32,
    /// What it said last.
    pub error: String,
    /// Microseconds since the Unix epoch.
    pub first_failed_at: i64,
    /// Not before so long from now.
    pub wait: Duration,
}

/// What a partition is told by the builder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Lanes of a partition.
    pub(crate) lanes: usize,
    /// Most messages that share a transaction.
    pub(crate) batch: usize,
    /// Longest time without a look at the row.
    pub(crate) check: Duration,
    /// Order does not matter: a message that waits for its next attempt does not hold its lane.
    pub(crate) delayed_retries: bool,
}

/// One assigned partition.
#[derive(Debug)]
pub(crate) struct Partition {
    pub(crate) key: Key,
    /// Kafka was told not to deliver.
    pub(crate) paused: bool,
    /// An operator has paused the topic: no transaction of a message begins.
    pub(crate) held: bool,
    pub(crate) topic_id: String,
    limits: Limits,
    phase: Phase,
    term: Arc<Term>,
    lanes: Vec<Lane>,
    /// Messages in the lanes, those on their way through a transaction included.
    queued: usize,
    /// The row is being taken, read or written without a message.
    row_busy: bool,
    /// What earlier processes tried in vain, by offset.
    attempts: BTreeMap<i64, Attempt>,
    /// Outages, losses and doubts since the last success, for the back-off.
    setbacks: u32,
    /// Nothing to do before this.
    due: Instant,
    /// When the row was last written or read.
    verified: Instant,
    /// Kafka was told where to deliver from since the row became ours. What comes before that was asked for by nobody: taking
    /// it would pass everything between the position and it (G10).
    listening: bool,
    /// Since when the queue is full, and how many messages have been settled since.
    full_since: Option<(Instant, usize)>,
}

impl Partition {
    /// A partition that Kafka has just assigned.
    pub(crate) fn new(key: Key, limits: Limits, now: Instant) -> Self {
        let nobody = Known {
            owner: Uuid::nil(),
            next: 0,
            seq: 0,
        };
        Self {
            key,
            paused: false,
            held: false,
            topic_id: String::new(),
            limits,
            phase: Phase::Unowned,
            term: Arc::new(Term::new(nobody, 0)),
            lanes: (0..limits.lanes).map(|_| Lane::new(now)).collect(),
            queued: 0,
            row_busy: false,
            attempts: BTreeMap::new(),
            setbacks: 0,
            due: now,
            verified: now,
            listening: false,
            full_since: None,
        }
    }

    /// What to do now, if anything. What it returns is under way until its outcome is reported.
    pub(crate) fn work(&mut self, now: Instant) -> Option<Work> {
        if !self.is_ready(now) {
            return None;
        }
        if self.is_at_work() {
            for (i, lane) in self.lanes.iter_mut().enumerate() {
                match lane.next(now, self.limits.batch) {
                    Some(Ok(task)) => return Some(Work::Lane(i, task)),
                    Some(Err(error)) => return Some(Work::Stop(error)),
                    None => {}
                }
            }
        }
        self.row_busy = true;
        let chain = self.term.chain();
        Some(match self.phase {
            Phase::Unowned => Work::Take,
            Phase::Working if chain.settled_below() > chain.known.next => Work::Advance,
            Phase::Working | Phase::Unsure => Work::Check(chain.known),
        })
    }

    /// The messages of the batch that a lane takes as soon as the present one is settled.
    pub(crate) fn upcoming(&self, lane: usize) -> Option<Vec<Uuid>> {
        self.is_at_work()
            .then(|| self.lanes[lane].upcoming(self.limits.batch))?
    }

    /// Whether its messages are handled at present.
    pub(crate) fn is_at_work(&self) -> bool {
        self.phase == Phase::Working && !self.held
    }

    /// Whether [`Self::work`] has an answer.
    pub(crate) fn is_ready(&self, now: Instant) -> bool {
        self.wakes().is_some_and(|at| now >= at)
    }

    fn is_idle(&self) -> bool {
        self.lanes.iter().all(Lane::is_idle)
    }

    /// Whether it has to be taken and nothing failed since the last success: that goes before everything else, once.
    pub(crate) fn goes_first(&self) -> bool {
        self.phase == Phase::Unowned && !self.row_busy && self.setbacks == 0
    }

    /// When there is something to do; `None` while that waits for what is under way.
    pub(crate) fn wakes(&self) -> Option<Instant> {
        if self.row_busy {
            return None;
        }
        match self.phase {
            Phase::Working if self.held && self.lanes.iter().any(|lane| lane.busy) => None,
            Phase::Working if self.held || self.is_idle() => {
                Some(self.due.max(self.verified + self.limits.check))
            }
            Phase::Working => {
                let due = self.lanes.iter().filter_map(Lane::wakes).min();
                due.map(|at| at.max(self.due))
            }
            // Lanes that are still at work find the doubt and roll back.
            Phase::Unsure if self.lanes.iter().any(|lane| lane.busy) => None,
            Phase::Unowned | Phase::Unsure => Some(self.due),
        }
    }

    /// So many messages may wait: the batches that are under way, the next ones, and as many again.
    fn capacity(&self) -> usize {
        (self.limits.batch * self.limits.lanes * 4).max(100)
    }

    /// Whether no more messages should come for the moment.
    pub(crate) fn is_full(&self) -> bool {
        self.queued >= self.capacity()
    }

    /// Whether nothing of it waits although Kafka may deliver.
    pub(crate) fn is_starving(&self) -> bool {
        self.phase == Phase::Working && self.listening && !self.held && self.queued == 0
    }

    /// Whether Kafka should stop delivering: an operator said so, or it has to wait for longer than a moment, or it has been full
    /// for longer and others are `starving` behind what was fetched of it, or nothing comes of it at all (the consumer is not
    /// polled then, and the group would wait for it).
    ///
    /// One that is only busy is not paused: what librdkafka has fetched ahead would be thrown away each time.
    pub(crate) fn wants_pause(&mut self, starving: bool, now: Instant) -> bool {
        if self.is_full() {
            self.full_since.get_or_insert((now, 0));
        } else if self.queued <= self.capacity() / 2 {
            self.full_since = None;
        }
        let full = self.full_since.is_some_and(|(since, settled)| {
            let elapsed = now.saturating_duration_since(since);
            let slow = (settled as f64) < AHEAD * elapsed.as_secs_f64();
            let stuck = now >= self.verified + PATIENCE;
            self.paused || (elapsed >= PATIENCE && (starving && slow || stuck))
        });
        self.held || self.due > now + PATIENCE || full
    }

    /// Where Kafka should deliver from; `None` while the row is not ours.
    pub(crate) fn next(&self) -> Option<i64> {
        (self.phase != Phase::Unowned).then(|| self.term.chain().end())
    }

    /// What the lanes share.
    pub(crate) fn term(&self) -> &Arc<Term> {
        &self.term
    }

    /// Whether a result belongs to what this process believes now.
    pub(crate) fn is_of(&self, term: &Arc<Term>) -> bool {
        Arc::ptr_eq(&self.term, term)
    }

    /// A message came. `identify` gives it its identity.
    pub(crate) fn receive(
        &mut self,
        offset: i64,
        now: Instant,
        identify: impl FnOnce(&str) -> (Delivery, Standing),
    ) -> Received {
        if self.phase == Phase::Unowned || !self.listening {
            return Received::Ignored;
        }
        let mut chain = self.term.chain();
        if offset < chain.known.next {
            return Received::Settled;
        }
        if offset < chain.end() {
            return Received::Ignored;
        }
        chain.receive(offset);
        drop(chain);
        let (delivery, mut standing) = identify(&self.topic_id);
        let lane = &mut self.lanes[lane_of(&delivery, self.limits.lanes)];
        if let Some(earlier) = self.attempts.remove(&offset)
            && earlier.message_id == delivery.message_id
            && !standing.given_up
        {
            standing.attempts = earlier.attempts;
            standing.written = true;
            standing.error = earlier.error;
            standing.first_failed_at = Some(earlier.first_failed_at);
            standing.cut = true;
            if lane.is_empty() {
                lane.due = lane.due.max(now + earlier.wait);
            }
        }
        lane.push(Entry { delivery, standing });
        self.queued += 1;
        Received::Queued
    }

    /// Kafka has nothing more below this offset.
    pub(crate) fn reached(&mut self, end: i64) {
        if self.phase != Phase::Unowned && self.listening {
            self.term.chain().reached(end);
        }
    }

    /// Kafka is told to deliver from [`Self::next`].
    pub(crate) fn listens(&mut self) {
        self.listening = self.phase != Phase::Unowned;
        self.paused = false;
    }

    /// It could not be told.
    pub(crate) fn listens_no_more(&mut self) {
        self.listening = false;
    }

    /// Whether Kafka was told.
    pub(crate) fn is_listening(&self) -> bool {
        self.listening
    }

    /// The row is ours, and the partition ended at `reach` when that was so.
    pub(crate) fn owned(
        &mut self,
        known: Known,
        reach: i64,
        topic_id: String,
        attempts: BTreeMap<i64, Attempt>,
        now: Instant,
    ) {
        self.phase = Phase::Working;
        self.row_busy = false;
        self.listening = false;
        self.term = Arc::new(Term::new(known, reach));
        self.topic_id = topic_id;
        self.attempts = attempts;
        self.verified = now;
        self.due = now;
        self.clear(now);
    }

    fn clear(&mut self, now: Instant) {
        for lane in &mut self.lanes {
            *lane = Lane::new(now);
        }
        self.queued = 0;
        self.full_since = None;
    }

    /// The lane's transaction settled its messages; the chain knows already.
    pub(crate) fn settled(&mut self, lane: usize, count: usize, took: Duration, now: Instant) {
        self.lanes[lane].settled(count, took);
        self.queued -= count;
        if let Some((_, settled)) = &mut self.full_since {
            *settled += count;
        }
        self.setbacks = 0;
        self.verified = now;
    }

    /// The lane's attempts are written down.
    pub(crate) fn noted(&mut self, lane: usize, mut batch: Batch, now: Instant) {
        for standing in &mut batch.standings {
            standing.unwritten = false;
            standing.written = true;
        }
        self.lanes[lane].put_back(batch);
        self.setbacks = 0;
        self.verified = now;
    }

    /// The position that was reached without a transaction is written.
    pub(crate) fn advanced(&mut self, now: Instant) {
        self.row_busy = false;
        self.setbacks = 0;
        self.verified = now;
    }

    /// The handler failed and its writes are rolled back. Says what follows.
    pub(crate) fn failed(
        &mut self,
        lane: usize,
        batch: Batch,
        failure: Failure,
        policy: &RetryPolicy,
        jitter: f64,
        now: Instant,
    ) -> Failed {
        let count = batch.deliveries.len();
        let lane = &mut self.lanes[lane];
        lane.put_back(batch);
        if count > 1 {
            // Not an attempt: its neighbours may be the reason.
            lane.split(count, failure.at);
            return Failed::Isolated;
        }
        let Some(standing) = lane.first() else {
            return Failed::Isolated;
        };
        standing.error = failure.error;
        standing.cut = true;
        if failure.conflict && standing.conflicts < CONFLICTS {
            standing.conflicts += 1;
            lane.due = now + CONFLICT_PAUSE.mul_f64(jitter);
            return Failed::Again;
        }
        standing.attempts += 1;
        standing.first_failed_at.get_or_insert(failure.now_micros);
        let delay = if failure.fatal {
            None
        } else {
            policy.next(standing.attempts, jitter)
        };
        if let Some(delay) = delay
            && self.limits.delayed_retries
            && delay >= WORTH_WRITING
        {
            standing.given_up = true;
            standing.aside = Some(delay);
            return Failed::Again;
        }
        // An attempt that is repeated at once is not worth a transaction.
        standing.unwritten = delay.is_some_and(|d| d >= WORTH_WRITING) || standing.written;
        standing.given_up = delay.is_none();
        match delay {
            Some(delay) => {
                lane.due = now + delay;
                Failed::Again
            }
            None => Failed::GivenUp,
        }
    }

    /// A compare-and-set hit no row, or the answer to a COMMIT was lost.
    pub(crate) fn unsure(&mut self, lane: Option<(usize, Batch)>) {
        self.give_back(lane);
        if self.phase == Phase::Working {
            self.phase = Phase::Unsure;
        }
    }

    /// Whatever was tried did not work; try the same again, later.
    pub(crate) fn outage(&mut self, lane: Option<(usize, Batch)>, jitter: f64, now: Instant) {
        self.give_back(lane);
        self.later(jitter, now);
    }

    /// What was tried is not under way any more, and did nothing: a lane's transaction, or work on the row alone.
    fn give_back(&mut self, lane: Option<(usize, Batch)>) {
        match lane {
            Some((lane, batch)) => self.lanes[lane].put_back(batch),
            None => self.row_busy = false,
        }
    }

    fn later(&mut self, jitter: f64, now: Instant) {
        self.setbacks = self.setbacks.saturating_add(1);
        self.due = now + outage(self.setbacks, jitter);
    }

    /// The row cannot be ours any more: take it again, if Kafka still assigns the partition.
    ///
    /// With a back-off, so that two processes that both believe they are assigned do not take it from each other in a
    /// tight loop until the group has settled.
    pub(crate) fn lost(&mut self, jitter: f64, now: Instant) {
        let mut chain = self.term.chain();
        // What is still under way belongs to this term, and commits nothing more.
        chain.in_doubt = true;
        let known = chain.known;
        drop(chain);
        self.term = Arc::new(Term::new(known, known.next));
        self.phase = Phase::Unowned;
        self.row_busy = false;
        self.listening = false;
        self.attempts.clear();
        self.clear(now);
        self.later(jitter, now);
    }

    /// The row was read.
    pub(crate) fn judged(&mut self, verdict: Verdict, jitter: f64, now: Instant) {
        self.row_busy = false;
        match (verdict, self.phase) {
            (Verdict::Unchanged, Phase::Unsure) => {
                self.phase = Phase::Working;
                self.term.chain().in_doubt = false;
                self.verified = now;
                // Nothing moved although something was tried: not in a tight loop.
                self.later(jitter, now);
            }
            (Verdict::Unchanged, _) => self.verified = now,
            (Verdict::Adopt(known), Phase::Unsure | Phase::Working) => {
                self.phase = Phase::Working;
                self.term.chain().adopt(known);
                for lane in &mut self.lanes {
                    lane.drop_below(known.next);
                }
                self.queued = self.lanes.iter().map(Lane::len).sum();
                self.setbacks = 0;
                self.verified = now;
                self.due = now;
            }
            (Verdict::Adopt(_), Phase::Unowned) => {}
            (Verdict::Lost(_), _) => self.lost(jitter, now),
        }
    }
}

/// Attempts that wait for at least this long are written down, so that a restart or a rebalance goes on counting: half a second,
/// of which the jitter takes up to a quarter.
const WORTH_WRITING: Duration = Duration::from_millis(375);

/// So often a handler that lost a race is called again at once before that counts as an attempt.
const CONFLICTS: u32 = 10;
/// Longest pause before that, at random, so that two that met do not meet again.
const CONFLICT_PAUSE: Duration = Duration::from_millis(20);

/// How a handler failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    /// Which message of the batch; `None`: a handler of whole batches does not say.
    pub(crate) at: Option<usize>,
    pub(crate) error: String,
    pub(crate) fatal: bool,
    /// Another transaction was faster.
    pub(crate) conflict: bool,
    /// Microseconds since the Unix epoch.
    pub(crate) now_micros: i64,
}

/// What follows a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failed {
    /// Its batch is taken apart.
    Isolated,
    /// It is called again.
    Again,
    /// It is written off.
    GivenUp,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delivery::identify;
    use crate::foreign::ForeignId;

    const LIMITS: Limits = Limits {
        lanes: 1,
        batch: 10,
        check: Duration::from_secs(600),
        delayed_retries: false,
    };

    fn receive(partition: &mut Partition, offset: i64, poison: bool) -> Received {
        let message = oncebox_kafka::Message {
            topic: "orders".into(),
            partition: 0,
            offset,
            timestamp_ms: -1,
            key: None,
            payload: None,
            headers: oncebox_kafka::Headers::default(),
        };
        partition.receive(offset, Instant::now(), |topic| {
            let standing = Standing {
                given_up: poison,
                ..Standing::default()
            };
            (
                identify(message, topic, &ForeignId::PartitionOffset).0,
                standing,
            )
        })
    }

    fn known(next: i64) -> Known {
        Known {
            owner: uuid::Uuid::nil(),
            next,
            seq: 1,
        }
    }

    fn owned(next: i64) -> Partition {
        let now = Instant::now();
        let key = Key {
            consumer: "c".into(),
            topic: "orders".into(),
            partition: 0,
        };
        let mut partition = Partition::new(key, LIMITS, now);
        partition.owned(known(next), next, "t".to_owned(), BTreeMap::new(), now);
        partition.listens();
        partition
    }

    #[test]
    fn g10_what_was_fetched_before_a_loss_is_not_taken_after_it() {
        let mut partition = owned(50);
        let now = Instant::now();
        // The database lost commits: the row says 10, and Kafka goes on delivering from 57.
        partition.lost(0.0, now);
        partition.owned(known(10), 58, "t".to_owned(), BTreeMap::new(), now);
        assert_eq!(receive(&mut partition, 57, false), Received::Ignored);
        partition.reached(58);
        assert_eq!(
            partition.next(),
            Some(10),
            "Kafka is asked for what is missing"
        );
        partition.listens();
        assert_eq!(receive(&mut partition, 10, false), Received::Queued);
    }

    #[test]
    fn g5_what_was_given_up_before_a_loss_is_not_buried_in_another_messages_place() {
        let mut partition = owned(20);
        receive(&mut partition, 20, true);
        let now = Instant::now();
        let Some(Work::Lane(lane, Task::Bury(batch))) = partition.work(now) else {
            panic!("it is written off");
        };
        partition.unsure(Some((lane, batch)));
        // The database lost commits: the row says 10.
        partition.lost(0.0, now);
        let later = now + Duration::from_secs(60);
        partition.owned(known(10), 21, "t".to_owned(), BTreeMap::new(), later);
        partition.listens();
        receive(&mut partition, 10, false);
        let work = partition.work(later);
        assert!(
            matches!(&work, Some(Work::Lane(_, Task::Deliver(batch))) if batch.offsets() == [10]),
            "{work:?}"
        );
    }

    /// Whether it is paused at any time in three seconds, of which it is full, with a batch settled every so often.
    fn paused(starving: bool, every: Option<Duration>) -> bool {
        let mut partition = owned(0);
        let start = Instant::now();
        let (mut next, mut settled) = (0, start);
        let mut any = false;
        for step in 0..300 {
            let now = start + Duration::from_millis(10 * step);
            while !partition.is_full() {
                receive(&mut partition, next, false);
                next += 1;
            }
            any |= partition.wants_pause(starving, now);
            if every.is_some_and(|every| now >= settled + every)
                && let Some(Work::Lane(lane, Task::Deliver(batch))) = partition.work(now)
            {
                let offsets = batch.offsets();
                partition.term().chain().commit(&offsets, known(0));
                partition.settled(lane, offsets.len(), Duration::ZERO, now);
                settled = now;
            }
        }
        any
    }

    #[test]
    fn a_full_partition_is_paused_only_when_that_is_of_use() {
        let (often, seldom) = (Duration::from_millis(10), Duration::from_millis(200));
        assert!(!paused(false, Some(often)), "nobody is behind it");
        assert!(!paused(false, Some(seldom)), "nobody is behind it");
        assert!(paused(true, Some(seldom)), "others would wait for long");
        assert!(paused(false, None), "the group would wait for it");
    }

    #[test]
    fn g10_a_result_of_an_earlier_term_is_not_of_this_one() {
        let mut partition = owned(20);
        receive(&mut partition, 20, false);
        let term = Arc::clone(partition.term());
        let now = Instant::now();
        partition.lost(0.0, now);
        assert!(!partition.is_of(&term));
        assert!(term.begin_commit(&[20]).is_none(), "and commits nothing");
        assert_eq!(
            partition.next(),
            None,
            "it is taken again, which compares the position with Kafka"
        );
    }

    #[test]
    fn a_failing_message_of_a_batch_is_redone_alone_and_that_is_no_attempt() {
        let mut partition = owned(0);
        for offset in 0..7 {
            receive(&mut partition, offset, false);
        }
        let now = Instant::now();
        let mut sizes = Vec::new();
        // Message 4 fails whatever is done; batches grow 1, 2, 4 …
        let mut failures = 0;
        let end = loop {
            let (lane, batch) = match partition.work(now) {
                Some(Work::Lane(lane, Task::Deliver(batch))) => (lane, batch),
                other => break other,
            };
            let offsets = batch.offsets();
            sizes.push(offsets.clone());
            if offsets.contains(&4) {
                failures += 1;
                let failure = Failure {
                    at: offsets.iter().position(|o| *o == 4),
                    error: "no".into(),
                    fatal: false,
                    conflict: false,
                    now_micros: 1,
                };
                let never = RetryPolicy::never();
                let failed = partition.failed(lane, batch, failure, &never, 0.0, now);
                let alone = offsets.len() == 1;
                assert_eq!(failed == Failed::GivenUp, alone, "{offsets:?}");
            } else {
                partition.term().chain().commit(&offsets, known(0));
                partition.settled(lane, offsets.len(), Duration::ZERO, now);
            }
        };
        assert!(matches!(end, Some(Work::Lane(_, Task::Bury(_)))), "{end:?}");
        assert_eq!(failures, 2);
        assert_eq!(
            sizes,
            [vec![0], vec![1, 2], vec![3, 4, 5, 6], vec![3], vec![4]]
        );
    }
}
