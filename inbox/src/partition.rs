//! The state of one assigned partition and what it needs next. No I/O, no clock of its own: time and jitter come in.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use oncebox_kafka::Message;

use crate::position::{Key, Known, Verdict};
use crate::retry::{RetryPolicy, outage};

/// More waiting messages than this pause the partition.
const QUEUE_LIMIT: usize = 100;
/// A partition that has to wait for longer than this is paused. Shorter waits are not worth throwing away what librdkafka
/// has fetched ahead.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// How far this process may trust what it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The position row is not ours (yet, or any more): take it before anything else.
    Unowned,
    /// It was ours; a compare-and-set or a COMMIT left a doubt: read the row before anything else.
    Unsure(Known),
    /// It is ours.
    Working(Known),
}

/// The message at the head of the queue has failed before.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Failing {
    offset: i64,
    attempts: u32,
    /// Set when no attempt is left: the text of the dead letter.
    given_up: Option<String>,
}

/// What a partition needs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Take ownership of the row.
    Take,
    /// Read the row and judge it.
    Check(Known),
    /// Handle the message at the head of the queue.
    Deliver(Known),
    /// Write the message at the head of the queue off.
    Bury(Known),
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

/// One assigned partition.
#[derive(Debug)]
pub(crate) struct Partition {
    pub(crate) key: Key,
    /// Number of the assignment that brought it: results of an older one are not for it.
    pub(crate) generation: u64,
    pub(crate) paused: bool,
    pub(crate) topic_id: String,
    phase: Phase,
    queue: VecDeque<Message>,
    failing: Option<Failing>,
    /// Outages, losses and doubts since the last success, for the back-off.
    setbacks: u32,
    /// Nothing to do before this.
    due: Instant,
    /// When the row was last written or read.
    verified: Instant,
}

impl Partition {
    /// A partition that Kafka has just assigned.
    pub(crate) fn new(key: Key, generation: u64, now: Instant) -> Self {
        Self {
            key,
            generation,
            paused: false,
            topic_id: String::new(),
            phase: Phase::Unowned,
            queue: VecDeque::new(),
            failing: None,
            setbacks: 0,
            due: now,
            verified: now,
        }
    }

    /// What to do now, if anything. `check` is the longest time without a look at the row.
    pub(crate) fn work(&self, now: Instant, check: Duration) -> Option<Work> {
        if now < self.due {
            return None;
        }
        match self.phase {
            Phase::Unowned => Some(Work::Take),
            Phase::Unsure(known) => Some(Work::Check(known)),
            Phase::Working(known) => match (self.queue.front(), &self.failing) {
                (Some(head), Some(failing))
                    if failing.offset == head.offset && failing.given_up.is_some() =>
                {
                    Some(Work::Bury(known))
                }
                (Some(_), _) => Some(Work::Deliver(known)),
                (None, _) => (now >= self.verified + check).then_some(Work::Check(known)),
            },
        }
    }

    /// Whether nothing failed since the last success: its ownership goes before everything else, once.
    pub(crate) fn is_fresh(&self) -> bool {
        self.setbacks == 0
    }

    /// When [`Partition::work`] may have an answer without a message coming.
    pub(crate) fn wakes(&self, check: Duration) -> Instant {
        match self.phase {
            Phase::Working(_) if self.queue.is_empty() => self.due.max(self.verified + check),
            _ => self.due,
        }
    }

    /// Whether Kafka should stop delivering.
    pub(crate) fn wants_pause(&self, now: Instant) -> bool {
        self.queue.len() >= QUEUE_LIMIT || self.due > now + PATIENCE
    }

    /// Where Kafka should deliver from; `None` while the row is not ours.
    pub(crate) fn next(&self) -> Option<i64> {
        match self.phase {
            Phase::Unowned => None,
            Phase::Unsure(known) | Phase::Working(known) => Some(known.next),
        }
    }

    /// Kafka was told to deliver from `next`: everything it had delivered before will come again.
    pub(crate) fn reassigned(&mut self) {
        self.queue.clear();
        self.paused = false;
    }

    /// A message came.
    pub(crate) fn receive(&mut self, message: Message) -> Received {
        let Some(next) = self.next() else {
            return Received::Ignored;
        };
        if message.offset < next {
            return Received::Settled;
        }
        if self
            .queue
            .back()
            .is_some_and(|m| message.offset <= m.offset)
        {
            return Received::Ignored;
        }
        self.queue.push_back(message);
        Received::Queued
    }

    /// The message whose turn it is, and which call of the handler this would be.
    pub(crate) fn head(&self) -> Option<(&Message, u32)> {
        let message = self.queue.front()?;
        let failed = match &self.failing {
            Some(f) if f.offset == message.offset => f.attempts,
            _ => 0,
        };
        Some((message, failed + 1))
    }

    /// Why the head of the queue is written off, and after how many attempts.
    pub(crate) fn obituary(&self) -> Option<(&Message, u32, &str)> {
        let message = self.queue.front()?;
        // G5: what was given up is one message, not whatever comes first after the position went back.
        let failing = self
            .failing
            .as_ref()
            .filter(|f| f.offset == message.offset)?;
        Some((message, failing.attempts, failing.given_up.as_deref()?))
    }

    /// The row is ours.
    pub(crate) fn owned(&mut self, known: Known, topic_id: String, now: Instant) {
        self.phase = Phase::Working(known);
        self.topic_id = topic_id;
        self.verified = now;
        self.due = now;
    }

    /// A transaction was committed; `known` is the position now. Says nothing about a partition that was given up
    /// meanwhile: that one is taken again.
    pub(crate) fn settled(&mut self, known: Known, now: Instant) {
        if matches!(self.phase, Phase::Unowned) {
            return;
        }
        self.setbacks = 0;
        self.adopt(known, now);
    }

    /// The handler failed and its writes are rolled back. Returns whether it will be called again.
    pub(crate) fn failed(
        &mut self,
        error: String,
        fatal: bool,
        policy: &RetryPolicy,
        jitter: f64,
        now: Instant,
    ) -> bool {
        let Some((message, attempts)) = self.head() else {
            return false;
        };
        let offset = message.offset;
        let delay = if fatal {
            None
        } else {
            policy.next(attempts, jitter)
        };
        let again = delay.is_some();
        self.due = now + delay.unwrap_or_default();
        self.failing = Some(Failing {
            offset,
            attempts,
            given_up: (!again).then_some(error),
        });
        again
    }

    /// The head of the queue must not be handled at all.
    pub(crate) fn unusable(&mut self, reason: String) {
        if let Some(message) = self.queue.front() {
            self.failing = Some(Failing {
                offset: message.offset,
                attempts: 0,
                given_up: Some(reason),
            });
        }
    }

    /// A compare-and-set hit no row, or the answer to a COMMIT was lost.
    pub(crate) fn unsure(&mut self) {
        if let Phase::Working(known) = self.phase {
            self.phase = Phase::Unsure(known);
        }
    }

    /// Whatever was tried did not work; try the same again, later.
    pub(crate) fn outage(&mut self, jitter: f64, now: Instant) {
        self.setbacks = self.setbacks.saturating_add(1);
        self.due = now + outage(self.setbacks, jitter);
    }

    /// The row cannot be ours any more: take it again, if Kafka still assigns the partition.
    ///
    /// With a back-off, so that two processes that both believe they are assigned do not take it from each other in a
    /// tight loop until the group has settled.
    pub(crate) fn lost(&mut self, jitter: f64, now: Instant) {
        self.phase = Phase::Unowned;
        self.queue.clear();
        self.failing = None;
        self.outage(jitter, now);
    }

    /// The row was read.
    pub(crate) fn judged(&mut self, verdict: Verdict, jitter: f64, now: Instant) {
        match (verdict, self.phase) {
            (Verdict::Unchanged, Phase::Unsure(known)) => {
                self.phase = Phase::Working(known);
                self.verified = now;
                // Nothing moved although something was tried: not in a tight loop.
                self.outage(jitter, now);
            }
            (Verdict::Unchanged, _) => self.verified = now,
            (Verdict::Adopt(known), _) => self.settled(known, now),
            (Verdict::Lost(_), _) => self.lost(jitter, now),
        }
    }

    fn adopt(&mut self, known: Known, now: Instant) {
        self.phase = Phase::Working(known);
        self.verified = now;
        self.due = now;
        while self.queue.front().is_some_and(|m| m.offset < known.next) {
            self.queue.pop_front();
        }
        if self.failing.as_ref().is_some_and(|f| f.offset < known.next) {
            self.failing = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(offset: i64) -> Message {
        Message {
            topic: "orders".into(),
            partition: 0,
            offset,
            timestamp_ms: -1,
            key: None,
            payload: None,
            headers: vec![],
        }
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
        let mut partition = Partition::new(key, 1, now);
        partition.owned(known(next), "t".to_owned(), now);
        partition
    }

    #[test]
    fn g5_what_was_given_up_before_a_loss_is_not_buried_in_another_messages_place() {
        let mut partition = owned(20);
        partition.receive(message(20));
        partition.unusable("poison".to_owned());
        let (now, check) = (Instant::now(), Duration::from_secs(60));
        assert!(matches!(partition.work(now, check), Some(Work::Bury(_))));
        // The database lost commits: the row says 10.
        partition.lost(0.0, now);
        let later = now + Duration::from_secs(60);
        partition.owned(known(10), "t".to_owned(), later);
        partition.receive(message(10));
        assert!(matches!(
            partition.work(later, check * 9),
            Some(Work::Deliver(_))
        ));
        assert!(partition.obituary().is_none());
    }

    #[test]
    fn g10_a_late_result_does_not_revive_a_partition_that_was_given_up() {
        let mut partition = owned(20);
        partition.receive(message(20));
        let now = Instant::now();
        partition.lost(0.0, now);
        partition.settled(known(21), now);
        assert_eq!(
            partition.next(),
            None,
            "it is taken again, which compares the position with Kafka"
        );
    }
}
