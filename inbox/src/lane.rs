//! One lane of a partition: its messages in order, at most one transaction at a time.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::delivery::Delivery;
use crate::error::Error;

/// A transaction that takes longer than this makes the next batch smaller: it holds its row locks all the time, and a
/// partition that is given to somebody else loses all of it.
const BATCH_TIME: Duration = Duration::from_millis(250);

/// How it stands with a message that waits for its turn.
#[derive(Debug, Default)]
pub(crate) struct Standing {
    /// Calls of the handler that failed, alone in their transaction.
    pub(crate) attempts: u32,
    /// Races that the handler lost; not counted as attempts.
    pub(crate) conflicts: u32,
    /// The attempts are not in the database yet.
    pub(crate) unwritten: bool,
    /// The database has a row of attempts, which goes with the message.
    pub(crate) written: bool,
    /// What the handler said last.
    pub(crate) error: String,
    /// When it failed for the first time, microseconds since the Unix epoch.
    pub(crate) first_failed_at: Option<i64>,
    /// The breaker knows of it.
    pub(crate) counted: bool,
    /// It leaves the lane: written off, or aside.
    pub(crate) given_up: bool,
    /// It has attempts left, and order does not matter: it waits for so long outside the lane.
    pub(crate) aside: Option<Duration>,
    /// Stops the consumer when it is its turn.
    pub(crate) stop: Option<Box<Error>>,
    /// A batch ends before it: part of what isolates a failure.
    pub(crate) cut: bool,
}

/// A message that waits for its turn.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) delivery: Delivery,
    pub(crate) standing: Standing,
}

/// Messages that are on their way through a transaction. The two lists belong together.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) deliveries: Vec<Delivery>,
    pub(crate) standings: Vec<Standing>,
}

impl Batch {
    fn with_capacity(messages: usize) -> Self {
        Self {
            deliveries: Vec::with_capacity(messages),
            standings: Vec::with_capacity(messages),
        }
    }

    pub(crate) fn offsets(&self) -> Vec<i64> {
        self.deliveries.iter().map(|d| d.offset).collect()
    }

    pub(crate) fn ids(&self) -> Vec<Uuid> {
        self.deliveries.iter().map(|d| d.message_id).collect()
    }

    pub(crate) fn push(&mut self, mut entry: Entry) {
        entry.delivery.attempt = entry.standing.attempts + 1;
        self.deliveries.push(entry.delivery);
        self.standings.push(entry.standing);
    }
}

/// What the lane's first messages need.
#[derive(Debug)]
pub(crate) enum Task {
    /// The handler.
    Deliver(Batch),
    /// To be written off, or aside; one message.
    Bury(Batch),
    /// Its attempts are written down, and that it is not tried again before this; one message.
    Note(Batch, Instant),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Lane {
    waiting: VecDeque<Entry>,
    pub(crate) busy: bool,
    /// Nothing to do before this.
    pub(crate) due: Instant,
    /// How many messages the next batch may have.
    size: usize,
    /// The last transaction was.
    slow: bool,
    /// In the past.
    since: Instant,
}

impl Lane {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            waiting: VecDeque::new(),
            busy: false,
            due: now,
            size: 1,
            slow: false,
            since: now,
        }
    }

    pub(crate) fn push(&mut self, entry: Entry) {
        self.waiting.push_back(entry);
    }

    pub(crate) fn is_idle(&self) -> bool {
        !self.busy && self.waiting.is_empty()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// When there is something to do; `None` while it is busy or empty.
    pub(crate) fn wakes(&self) -> Option<Instant> {
        let first = self.waiting.front().filter(|_| !self.busy)?;
        Some(if first.standing.unwritten {
            self.since
        } else {
            self.due
        })
    }

    /// Whether there is something to do now.
    pub(crate) fn is_ready(&self, now: Instant) -> bool {
        self.wakes().is_some_and(|at| now >= at)
    }

    /// The next task; the lane is busy until its outcome is known.
    ///
    /// # Errors
    ///
    /// What stops the consumer now that it is this message's turn.
    pub(crate) fn next(&mut self, now: Instant, most: usize) -> Option<Result<Task, Box<Error>>> {
        if !self.is_ready(now) {
            return None;
        }
        let first = self.waiting.pop_front()?;
        let mut batch = Batch::with_capacity(self.size.min(most).min(1 + self.waiting.len()));
        if let Some(error) = first.standing.stop {
            return Some(Err(error));
        }
        self.busy = true;
        let (unwritten, given_up) = (first.standing.unwritten, first.standing.given_up);
        batch.push(first);
        if given_up {
            return Some(Ok(Task::Bury(batch)));
        }
        if unwritten {
            return Some(Ok(Task::Note(batch, self.due)));
        }
        while batch.deliveries.len() < self.size.min(most)
            && let Some(next) = self.waiting.front()
            && !(next.standing.cut || next.standing.given_up || next.standing.stop.is_some())
            && let Some(next) = self.waiting.pop_front()
        {
            batch.push(next);
        }
        Some(Ok(Task::Deliver(batch)))
    }

    /// The messages of the next batch while this one is under way, if it is sure to be a full one.
    pub(crate) fn upcoming(&self, most: usize) -> Option<Vec<Uuid>> {
        let entries = self.waiting.iter().take(most);
        let plain = |standing: &Standing| {
            !(standing.cut || standing.given_up || standing.unwritten || standing.stop.is_some())
        };
        let is_sure = self.busy
            && !self.slow
            && self.size >= most
            && self.waiting.len() >= most
            && entries.clone().all(|entry| plain(&entry.standing));
        is_sure.then(|| entries.map(|entry| entry.delivery.message_id).collect())
    }

    /// The batch was settled after this time.
    pub(crate) fn settled(&mut self, count: usize, took: Duration) {
        self.busy = false;
        self.slow = took > BATCH_TIME;
        if self.slow {
            self.size = (count / 2).max(1);
        } else if count >= self.size {
            self.size = self.size.saturating_mul(2);
        }
    }

    /// Nothing of the batch was settled: all of it waits again.
    pub(crate) fn put_back(&mut self, batch: Batch) {
        self.busy = false;
        let entries = batch.deliveries.into_iter().zip(batch.standings);
        for (delivery, standing) in entries.rev() {
            self.waiting.push_front(Entry { delivery, standing });
        }
    }

    /// The first messages, which were put back just now.
    pub(crate) fn first(&mut self) -> Option<&mut Standing> {
        self.waiting.front_mut().map(|entry| &mut entry.standing)
    }

    /// Isolates a failure in the first `count` messages: the failing one alone if it is known, halves if not.
    pub(crate) fn split(&mut self, count: usize, failed: Option<usize>) {
        let mut cut = |at: usize| {
            if let Some(entry) = self.waiting.get_mut(at) {
                entry.standing.cut = true;
            }
        };
        match failed {
            Some(at) => {
                cut(at);
                cut(at + 1);
            }
            None => cut(count / 2),
        }
        cut(count);
    }

    /// What is below is settled.
    pub(crate) fn drop_below(&mut self, next: i64) {
        self.waiting.retain(|entry| entry.delivery.offset >= next);
    }
}

/// The lane of a key: the same one for every message of the key. A message without a key has no order to keep.
pub(crate) fn lane_of(delivery: &Delivery, lanes: usize) -> usize {
    if lanes == 1 {
        return 0;
    }
    let mut hasher = DefaultHasher::new();
    match &delivery.key {
        Some(key) => key.hash(&mut hasher),
        None => delivery.offset.hash(&mut hasher),
    }
    usize::try_from(hasher.finish() % lanes as u64).unwrap_or(0)
}
