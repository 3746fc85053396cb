//! Whole consumers against each other under a seed: rebalances that are noticed late, zombies, COMMITs whose answer is lost and
//! that land late, databases that are restored to an older state, outages, lanes that overtake each other, batches that are
//! taken apart, producers that write twice, and messages that no handler can take. The decisions are the real ones
//! (`partition`, `lane`, `chain`, `position`, `start`, `retry`); the database and Kafka are models small enough to be read.
//!
//! Invariants: no message has two effects; everything below the committed position is settled; the effects of a key are in the
//! order of its messages; and when the faults end, every message has exactly one effect or one dead letter.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use oncebox_kafka::{Headers, Message};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use uuid::Uuid;

use crate::chain::{Move, Term};
use crate::delivery::identify;
use crate::foreign::ForeignId;
use crate::lane::{Batch, Standing, Task};
use crate::partition::{Attempt, Failed, Failure, Limits, Partition, Received, Work};
use crate::position::{Key, Known, Row, judge};
use crate::retry::RetryPolicy;
use crate::start::{Facts, Start, decide};

const PROCESSES: usize = 3;
const KEYS: u32 = 3;
const POLICY: RetryPolicy = RetryPolicy {
    attempts: 3,
    initial: Duration::from_millis(400),
    max: Duration::from_secs(1),
    fast: 0,
};

/// What is committed. A message is known by its id, or by its offset where there are no marks.
#[derive(Clone, Default)]
struct Database {
    row: Option<Row>,
    marks: BTreeSet<i64>,
    effects: BTreeMap<i64, u32>,
    letters: BTreeMap<i64, u32>,
    /// (key, offset) of the effects, in the order of their commits.
    order: Vec<(u32, i64)>,
    attempts: BTreeMap<i64, Attempt>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Handle,
    Bury,
    Note,
    Advance,
}

/// A transaction.
struct Open {
    what: What,
    lane: Option<(usize, Batch)>,
    term: Arc<Term>,
    /// The marks are inserted and the handlers have returned: which messages are not duplicates.
    fresh: Option<Vec<bool>>,
}

/// What a COMMIT does when it lands.
struct Landing {
    what: What,
    from: Known,
    to: Known,
    /// (id or offset, offset) of the messages that are not duplicates.
    messages: Vec<(i64, i64)>,
    attempts: Vec<(i64, Attempt)>,
}

#[derive(Default)]
struct Process {
    partition: Option<Partition>,
    /// Rebalances it has not polled yet: assigned or revoked.
    events: VecDeque<bool>,
    /// Index of the next record that Kafka delivers.
    fetch: usize,
    open: Vec<Open>,
    /// The COMMIT was sent and the session lost: the database still has it.
    orphans: Vec<Landing>,
}

struct World {
    rng: StdRng,
    now: Instant,
    marks: bool,
    lanes: usize,
    log: Vec<(i64, u32)>,
    database: Database,
    backup: Database,
    processes: Vec<Process>,
    tokens: u128,
    /// Messages whose handler failed for the last time: only these may become dead letters.
    given_up: BTreeSet<i64>,
    faults: bool,
    trace: Vec<String>,
    seen: BTreeSet<&'static str>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let marks = !seed.is_multiple_of(4);
        let mut log: Vec<(i64, u32)> = Vec::new();
        let mut offset = 0;
        for id in 0..24 {
            // A control record in between, or the same message once more (a producer's duplicate).
            offset += i64::from(rng.random_bool(0.2));
            let again = marks && !log.is_empty() && rng.random_bool(0.2);
            let id = if again {
                log[rng.random_range(0..log.len())].1
            } else {
                id
            };
            log.push((offset, id));
            offset += 1;
        }
        let mut world = Self {
            lanes: if marks { rng.random_range(1..4) } else { 1 },
            rng,
            now: Instant::now(),
            marks,
            log,
            database: Database::default(),
            backup: Database::default(),
            processes: (0..PROCESSES).map(|_| Process::default()).collect(),
            tokens: 0,
            given_up: BTreeSet::new(),
            faults: true,
            trace: Vec::new(),
            seen: BTreeSet::new(),
        };
        world.processes[0].events.push_back(true);
        world
    }

    fn chance(&mut self, probability: f64) -> bool {
        self.faults && self.rng.random_bool(probability)
    }

    fn jitter(&mut self) -> f64 {
        self.rng.random()
    }

    fn end(&self) -> i64 {
        self.log.last().map_or(0, |(offset, _)| offset + 1)
    }

    /// What a message is known by.
    fn name(&self, offset: i64) -> i64 {
        if !self.marks {
            return offset;
        }
        let at = self.log.binary_search_by_key(&offset, |(o, _)| *o).unwrap();
        i64::from(self.log[at].1)
    }

    /// One random step of one process, or of the world around them.
    fn step(&mut self) {
        self.now += Duration::from_millis(self.rng.random_range(0..300));
        if self.chance(0.03) {
            self.rebalance();
        }
        if self.chance(0.02) {
            self.backup = self.database.clone();
        }
        if self.chance(0.008) {
            self.restore();
        }
        let i = self.rng.random_range(0..PROCESSES);
        match self.rng.random_range(0..8) {
            0..3 => self.poll(i),
            3 => self.land_orphan(i),
            4..6 if !self.processes[i].open.is_empty() => self.go_on(i),
            _ => self.work(i),
        }
        self.check();
    }

    /// Kafka gives the partition to another process; neither hears of it before it polls.
    fn rebalance(&mut self) {
        let to = self.rng.random_range(0..PROCESSES);
        self.trace.push(format!("rebalance to {to}"));
        for (i, process) in self.processes.iter_mut().enumerate() {
            process.events.push_back(false);
            if i == to {
                process.events.push_back(true);
            }
        }
    }

    /// The database loses everything since the last backup, and every session.
    fn restore(&mut self) {
        self.trace.push("restore".to_owned());
        self.database = self.backup.clone();
        for process in &mut self.processes {
            process.orphans.clear();
            for open in process.open.drain(..) {
                if let Some(partition) = &mut process.partition {
                    partition.outage(open.lane, 0.0, self.now);
                }
            }
        }
    }

    fn poll(&mut self, i: usize) {
        let now = self.now;
        let limits = Limits {
            lanes: self.lanes,
            batch: 3,
            check: Duration::from_secs(3),
            delayed_retries: false,
        };
        let process = &mut self.processes[i];
        match process.events.pop_front() {
            Some(false) => {
                // The worker aborts what it is doing: an open transaction is rolled back.
                process.partition = None;
                process.open.clear();
            }
            Some(true) => {
                let key = Key {
                    consumer: "c".into(),
                    topic: "t".into(),
                    partition: 0,
                };
                process.partition = Some(Partition::new(key, limits, now));
            }
            None => {
                let Some(partition) = &mut process.partition else {
                    return;
                };
                let Some((offset, id)) = self.log.get(process.fetch).copied() else {
                    return;
                };
                let received = partition.receive(offset, now, |topic| {
                    let message = message(offset, id);
                    let policy = ForeignId::Header("id".into());
                    (identify(message, topic, &policy).0, Standing::default())
                });
                if received != Received::Ignored || partition.next().is_some() {
                    process.fetch += 1;
                }
            }
        }
    }

    fn work(&mut self, i: usize) {
        let now = self.now;
        let Some(partition) = &mut self.processes[i].partition else {
            return;
        };
        let term = Arc::clone(partition.term());
        let (what, lane) = match partition.work(now) {
            Some(Work::Take) => return self.take(i),
            Some(Work::Check(known)) => return self.read(i, known),
            Some(Work::Advance) => (What::Advance, None),
            Some(Work::Lane(lane, Task::Deliver(batch))) => (What::Handle, Some((lane, batch))),
            Some(Work::Lane(lane, Task::Bury(batch))) => (What::Bury, Some((lane, batch))),
            Some(Work::Lane(lane, Task::Note(batch, _))) => (What::Note, Some((lane, batch))),
            Some(Work::Stop(e)) => panic!("{e}"),
            None => return,
        };
        if let Some((_, batch)) = &lane
            && batch.deliveries.len() > 1
        {
            self.seen.insert("a batch");
        }
        self.processes[i].open.push(Open {
            what,
            lane,
            term,
            fresh: None,
        });
        if self.processes[i].open.len() > 1 {
            self.seen.insert("lanes side by side");
        }
    }

    /// Somebody's COMMIT that is on its way holds the lock of the position row.
    fn row_is_locked(&self) -> bool {
        self.processes.iter().any(|p| !p.orphans.is_empty())
    }

    fn take(&mut self, i: usize) {
        let (now, jitter) = (self.now, self.jitter());
        let outage = self.row_is_locked() || self.chance(0.1);
        let lost_answer = self.chance(0.05);
        if outage {
            self.part(i).outage(None, jitter, now);
            return;
        }
        self.tokens += 1;
        let owner = Uuid::from_u128(self.tokens);
        let facts = Facts {
            topic_id: "a".into(),
            low: 0,
            high: self.end(),
            committed: None,
        };
        let mut row = self.database.row.clone();
        if let Some(row) = &mut row {
            row.owner = owner;
            row.seq += 1;
        }
        let row = match (decide(row.as_ref(), &facts).unwrap(), row) {
            (Start::AtRow, Some(row)) => row,
            (_, _) => Row {
                topic_id: "a".into(),
                next: 0,
                seq: 0,
                owner,
            },
        };
        self.trace.push(format!("{i} takes at {}", row.next));
        self.database.row = Some(row.clone());
        if lost_answer {
            self.part(i).outage(None, jitter, now);
            return;
        }
        let attempts = self.database.attempts.split_off(&row.next);
        self.database.attempts = attempts.clone();
        self.processes[i].fetch = self.log.partition_point(|(offset, _)| *offset < row.next);
        let partition = self.part(i);
        partition.owned(row.known(), facts.high, row.topic_id, attempts, now);
        partition.listens();
    }

    fn read(&mut self, i: usize, known: Known) {
        let (now, jitter) = (self.now, self.jitter());
        if self.chance(0.1) {
            self.part(i).outage(None, jitter, now);
            return;
        }
        let verdict = judge(&known, self.database.row.as_ref());
        self.trace.push(format!("{i} reads: {verdict:?}"));
        self.part(i).judged(verdict, jitter, now);
    }

    /// Takes one of the open transactions a step further.
    fn go_on(&mut self, i: usize) {
        let pick = self.rng.random_range(0..self.processes[i].open.len());
        let open = self.processes[i].open.swap_remove(pick);
        if open.fresh.is_none() {
            self.handle(i, open);
        } else {
            self.finish(i, open);
        }
    }

    /// Up to the end of the handlers.
    fn handle(&mut self, i: usize, mut open: Open) {
        let (now, jitter) = (self.now, self.jitter());
        if self.chance(0.05) {
            self.part(i).outage(open.lane, jitter, now);
            return;
        }
        let mut fresh = Vec::new();
        let marks_nothing = open.what == What::Note;
        let Some((lane, batch)) = open.lane.take_if(|_| !marks_nothing) else {
            open.fresh = Some(fresh);
            self.processes[i].open.push(open);
            return;
        };
        let mut names = BTreeSet::new();
        for delivery in &batch.deliveries {
            let name = self.name(delivery.offset);
            fresh.push(!(self.marks && self.database.marks.contains(&name)) && names.insert(name));
        }
        // Another transaction has inserted one of these marks: this one waits for its end.
        let offsets = |o: &Open| {
            o.fresh
                .as_ref()
                .and(o.lane.as_ref())
                .map(|(_, b)| b.offsets())
        };
        let others = self
            .processes
            .iter()
            .flat_map(|p| p.open.iter().filter_map(offsets));
        let mut theirs: BTreeSet<i64> = others.flatten().map(|o| self.name(o)).collect();
        let orphans = self.processes.iter().flat_map(|p| &p.orphans);
        theirs.extend(orphans.flat_map(|o| o.messages.iter().map(|(name, _)| *name)));
        if self.marks && !theirs.is_disjoint(&names) {
            open.lane = Some((lane, batch));
            self.processes[i].open.push(open);
            return;
        }
        for (at, fresh) in fresh.iter().enumerate() {
            let offset = batch.deliveries[at].offset;
            let name = self.name(offset);
            // Every fifth message is poison.
            let fails = open.what == What::Handle && *fresh;
            if fails && (name % 5 == 4 || self.chance(0.08)) {
                let at = self.rng.random_bool(0.7).then_some(at);
                let failure = Failure {
                    at,
                    error: "no".into(),
                    fatal: name % 2 == 0,
                    conflict: false,
                    now_micros: 1,
                };
                let part = self.processes[i].partition.as_mut().unwrap();
                match part.failed(lane, batch, failure, &POLICY, jitter, now) {
                    Failed::GivenUp => {
                        self.given_up.insert(name);
                    }
                    Failed::Isolated => {
                        self.seen.insert("a batch taken apart");
                    }
                    Failed::Again => {}
                }
                return;
            }
        }
        open.fresh = Some(fresh);
        open.lane = Some((lane, batch));
        self.processes[i].open.push(open);
    }

    /// Compare-and-set and COMMIT, with every way in which the answer can get lost.
    fn finish(&mut self, i: usize, open: Open) {
        if self.row_is_locked() {
            self.processes[i].open.push(open);
            return;
        }
        let (now, jitter) = (self.now, self.jitter());
        let settles = matches!(open.what, What::Handle | What::Bury);
        let offsets = match &open.lane {
            Some((_, batch)) if settles => batch.offsets(),
            _ => Vec::new(),
        };
        let Some(Move { from, to, .. }) = open.term.begin_commit(&offsets) else {
            self.part(i).unsure(open.lane);
            return;
        };
        if self.database.row.as_ref().map(Row::known) != Some(from) {
            self.trace.push(format!("{i}: 0 rows for {offsets:?}"));
            self.part(i).unsure(open.lane);
            return;
        }
        if self.chance(0.05) {
            open.term.chain().in_doubt = false;
            self.part(i).outage(open.lane, jitter, now);
            return;
        }
        let fresh = open.fresh.unwrap_or_default();
        let mut landing = Landing {
            what: open.what,
            from,
            to,
            messages: Vec::new(),
            attempts: Vec::new(),
        };
        for (offset, fresh) in offsets.iter().zip(fresh) {
            if fresh {
                landing.messages.push((self.name(*offset), *offset));
            }
        }
        if let (What::Note, Some((_, batch))) = (open.what, &open.lane) {
            let (delivery, standing) = (&batch.deliveries[0], &batch.standings[0]);
            let attempt = Attempt {
                message_id: delivery.message_id,
                attempts: standing.attempts,
                error: standing.error.clone(),
                first_failed_at: 1,
                wait: Duration::ZERO,
            };
            landing.attempts.push((delivery.offset, attempt));
        }
        if self.chance(0.05) {
            // Sent, no answer yet, and there never will be one.
            self.trace.push(format!("{i}: lost {offsets:?}"));
            self.processes[i].orphans.push(landing);
            self.part(i).unsure(open.lane);
            return;
        }
        self.commit(i, &landing);
        if self.chance(0.1) {
            self.part(i).unsure(open.lane);
            return;
        }
        let mut chain = open.term.chain();
        chain.commit(&offsets, to);
        chain.in_doubt = false;
        drop(chain);
        let partition = self.part(i);
        match (open.what, open.lane) {
            (What::Note, Some((lane, batch))) => partition.noted(lane, batch, now),
            (_, Some((lane, batch))) => {
                partition.settled(lane, batch.deliveries.len(), Duration::ZERO, now);
            }
            (_, None) => partition.advanced(now),
        }
    }

    /// A COMMIT whose answer was lost takes effect, or does not.
    fn land_orphan(&mut self, i: usize) {
        if let Some(landing) = self.processes[i].orphans.pop()
            && self.rng.random_bool(0.5)
        {
            self.seen.insert("a late commit");
            self.commit(i, &landing);
        }
    }

    fn commit(&mut self, i: usize, landing: &Landing) {
        let Landing { what, to, .. } = landing;
        self.trace.push(format!(
            "{i} commits {what:?} {:?} -> {}",
            landing.messages, to.next
        ));
        let database = &mut self.database;
        let row = database.row.as_mut().unwrap();
        assert_eq!(row.known(), landing.from, "the row was locked");
        assert!(to.next >= row.next, "the position moves back");
        row.next = to.next;
        row.seq = to.seq;
        for (offset, attempt) in &landing.attempts {
            self.seen.insert("an attempt written down");
            database.attempts.insert(*offset, attempt.clone());
        }
        for (name, offset) in &landing.messages {
            let fresh = database.marks.insert(*name);
            assert!(fresh || !self.marks, "the mark is unique");
            database.attempts.remove(offset);
            if *what == What::Bury {
                assert!(
                    self.given_up.contains(name),
                    "message {name} is written off, but another one was given up"
                );
                *database.letters.entry(*name).or_default() += 1;
            } else {
                *database.effects.entry(*name).or_default() += 1;
                let at = self.log.binary_search_by_key(offset, |(o, _)| *o).unwrap();
                let key = self.log[at].1 % KEYS;
                let last = database.order.iter().rev().find(|(k, _)| *k == key);
                assert!(
                    last.is_none_or(|(_, last)| last < offset),
                    "key {key}: {offset} after {last:?}"
                );
                database.order.push((key, *offset));
            }
        }
        if landing.messages.len() != 1 && to.next == landing.from.next && *what == What::Handle {
            self.seen.insert("a lane above a hole");
        }
    }

    fn part(&mut self, i: usize) -> &mut Partition {
        self.processes[i].partition.as_mut().unwrap()
    }

    fn check(&self) {
        let Database {
            row,
            marks,
            effects,
            letters,
            ..
        } = &self.database;
        for name in marks {
            let times = effects.get(name).unwrap_or(&0) + letters.get(name).unwrap_or(&0);
            assert_eq!(times, 1, "message {name} has {times} effects");
        }
        if let Some(row) = row {
            for (offset, _) in &self.log {
                assert!(
                    *offset >= row.next || marks.contains(&self.name(*offset)),
                    "offset {offset} is below the position {} and not settled",
                    row.next
                );
            }
        }
    }

    /// No more faults: one owner, and time.
    fn drain(&mut self) {
        self.faults = false;
        self.rebalance();
        for _ in 0..40_000 {
            self.step();
            if self
                .database
                .row
                .as_ref()
                .is_some_and(|row| row.next == self.end())
            {
                break;
            }
        }
        let next = self.database.row.as_ref().map(|row| row.next);
        assert_eq!(
            next,
            Some(self.end()),
            "the partition has a worker and reaches its end"
        );
        let expected: BTreeSet<i64> = self.log.iter().map(|(o, _)| self.name(*o)).collect();
        assert_eq!(self.database.marks, expected);
    }
}

fn message(offset: i64, id: u32) -> Message {
    let id_header = Uuid::from_u128(u128::from(id) + 1).to_string();
    Message {
        topic: "t".into(),
        partition: 0,
        offset,
        timestamp_ms: -1,
        key: Some(Bytes::from(vec![u8::try_from(id % KEYS).unwrap()])),
        payload: None,
        headers: Headers::from_iter([("id", Some(id_header.as_bytes()))]),
    }
}

fn run(seed: u64) -> BTreeSet<&'static str> {
    let world = std::sync::Mutex::new(World::new(seed));
    let result = std::panic::catch_unwind(|| {
        let mut world = world.lock().unwrap();
        for _ in 0..600 {
            world.step();
        }
        world.drain();
        world.seen.clone()
    });
    result.unwrap_or_else(|panic| {
        let world = world
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let last = world.trace.len().saturating_sub(40);
        println!("{}", world.trace[last..].join("\n"));
        println!("replay: ONCEBOX_SEED={seed} cargo test -p oncebox-inbox simulation");
        std::panic::resume_unwind(panic);
    })
}

#[test]
fn every_schedule_ends_with_one_effect_per_message() {
    if let Ok(seed) = std::env::var("ONCEBOX_SEED") {
        run(seed.parse().unwrap());
        return;
    }
    let mut seen = BTreeSet::new();
    for seed in 0..500 {
        seen.extend(run(seed));
    }
    // What never happened was not tested.
    let expected = [
        "a batch",
        "a batch taken apart",
        "a lane above a hole",
        "a late commit",
        "an attempt written down",
        "lanes side by side",
    ];
    assert_eq!(Vec::from_iter(seen), expected);
}
