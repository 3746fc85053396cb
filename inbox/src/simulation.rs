//! A seeded simulation of the partition machine: several processes, one database, one log, and everything that can go
//! wrong between them. The decisions are the real ones (`partition`, `position`, `start`, `retry`); the database and Kafka
//! are models small enough to be read.
//!
//! Invariants: no message has two effects; everything below the committed position is settled; and when the faults end,
//! every message has exactly one effect or one dead letter.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use oncebox_kafka::Message;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use uuid::Uuid;

use crate::partition::{Partition, Work};
use crate::position::{Key, Known, Row, judge};
use crate::retry::RetryPolicy;
use crate::start::{Facts, Start, decide};

const CHECK: Duration = Duration::from_secs(3);
const PROCESSES: usize = 3;
const POLICY: RetryPolicy = RetryPolicy {
    attempts: 3,
    initial: Duration::from_millis(100),
    max: Duration::from_secs(1),
};

/// What is committed.
#[derive(Clone, Default)]
struct Database {
    row: Option<Row>,
    marks: BTreeSet<u32>,
    effects: BTreeMap<u32, u32>,
    letters: BTreeMap<u32, u32>,
}

/// A transaction between its mark and its end.
#[derive(Clone)]
struct Open {
    from: Known,
    to: Known,
    id: u32,
    fresh: bool,
    letter: bool,
}

#[derive(Default)]
struct Process {
    partition: Option<Partition>,
    /// Rebalances it has not polled yet: assigned or revoked.
    events: VecDeque<bool>,
    /// Index of the next record that Kafka delivers.
    fetch: usize,
    open: Option<Open>,
    /// The COMMIT was sent and the session lost: the database still has it.
    orphans: Vec<Open>,
}

struct World {
    rng: StdRng,
    now: Instant,
    log: Vec<(i64, u32)>,
    database: Database,
    backup: Database,
    processes: Vec<Process>,
    generation: u64,
    tokens: u128,
    /// Messages whose handler failed for the last time: only these may become dead letters.
    given_up: BTreeSet<u32>,
    faults: bool,
    trace: Vec<String>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut log: Vec<(i64, u32)> = Vec::new();
        let mut offset = 0;
        for id in 0..20 {
            // A control record in between, or the same message once more (a producer's duplicate).
            offset += i64::from(rng.random_bool(0.2));
            let again = !log.is_empty() && rng.random_bool(0.2);
            let id = if again {
                log[rng.random_range(0..log.len())].1
            } else {
                id
            };
            log.push((offset, id));
            offset += 1;
        }
        let mut world = Self {
            rng,
            now: Instant::now(),
            log,
            database: Database::default(),
            backup: Database::default(),
            processes: (0..PROCESSES).map(|_| Process::default()).collect(),
            generation: 0,
            tokens: 0,
            given_up: BTreeSet::new(),
            faults: true,
            trace: Vec::new(),
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

    /// One random step of one process, or of the world around them.
    fn step(&mut self) {
        self.now += Duration::from_millis(self.rng.random_range(0..400));
        if self.chance(0.05) {
            self.rebalance();
        }
        if self.chance(0.02) {
            self.backup = self.database.clone();
        }
        if self.chance(0.01) {
            self.restore();
        }
        let i = self.rng.random_range(0..PROCESSES);
        match self.rng.random_range(0..4) {
            0 => self.poll(i),
            1 => self.land_orphan(i),
            _ if self.processes[i].open.is_some() => self.finish(i),
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
            if process.open.take().is_some()
                && let Some(partition) = &mut process.partition
            {
                partition.unsure();
            }
        }
    }

    fn poll(&mut self, i: usize) {
        let now = self.now;
        let process = &mut self.processes[i];
        match process.events.pop_front() {
            Some(false) => {
                // The worker aborts what it is doing: an open transaction is rolled back.
                process.partition = None;
                process.open = None;
            }
            Some(true) => {
                self.generation += 1;
                let key = Key {
                    consumer: "c".into(),
                    topic: "t".into(),
                    partition: 0,
                };
                process.partition = Some(Partition::new(key, self.generation, now));
            }
            None => {
                if let (Some(partition), Some((offset, id))) =
                    (&mut process.partition, self.log.get(process.fetch))
                {
                    process.fetch += 1;
                    partition.receive(message(*offset, *id));
                }
            }
        }
    }

    fn work(&mut self, i: usize) {
        let Some(partition) = &self.processes[i].partition else {
            return;
        };
        match partition.work(self.now, CHECK) {
            Some(Work::Take) => self.take(i),
            Some(Work::Check(known)) => self.read(i, known),
            Some(Work::Deliver(known)) => self.begin(i, known, false),
            Some(Work::Bury(known)) => self.begin(i, known, true),
            None => {}
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
            self.part(i).outage(jitter, now);
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
            self.part(i).outage(jitter, now);
            return;
        }
        self.processes[i].fetch = self.log.partition_point(|(offset, _)| *offset < row.next);
        let partition = self.part(i);
        partition.owned(row.known(), row.topic_id, now);
        partition.reassigned();
    }

    fn read(&mut self, i: usize, known: Known) {
        let (now, jitter) = (self.now, self.jitter());
        if self.chance(0.1) {
            self.part(i).outage(jitter, now);
            return;
        }
        let verdict = judge(&known, self.database.row.as_ref());
        self.trace.push(format!("{i} reads: {verdict:?}"));
        self.part(i).judged(verdict, jitter, now);
    }

    /// Up to the end of the handler.
    fn begin(&mut self, i: usize, known: Known, letter: bool) {
        let (now, jitter) = (self.now, self.jitter());
        let Some((head, _)) = self.part(i).head() else {
            return;
        };
        let (offset, id) = (head.offset, id_of(head));
        // Another transaction is inserting the same mark: this one waits.
        let waits = |o: &Open| o.fresh && o.id == id;
        if self
            .processes
            .iter()
            .any(|p| p.open.iter().chain(&p.orphans).any(waits))
        {
            return;
        }
        if self.chance(0.05) {
            self.part(i).outage(jitter, now);
            return;
        }
        let fresh = !self.database.marks.contains(&id);
        // Every fifth message is poison.
        if fresh && !letter && (id % 5 == 4 || self.chance(0.1)) {
            let fatal = id % 2 == 0;
            let again = self
                .part(i)
                .failed("no".into(), fatal, &POLICY, jitter, now);
            if !again {
                self.given_up.insert(id);
            }
            return;
        }
        self.processes[i].open = Some(Open {
            from: known,
            to: known.after(offset),
            id,
            fresh,
            letter,
        });
    }

    /// Compare-and-set and COMMIT, with every way in which the answer can get lost.
    fn finish(&mut self, i: usize) {
        if self.row_is_locked() {
            return;
        }
        let Some(open) = self.processes[i].open.take() else {
            return;
        };
        let (now, jitter) = (self.now, self.jitter());
        if self.database.row.as_ref().map(Row::known) != Some(open.from) {
            self.trace.push(format!("{i}: 0 rows for {}", open.id));
            self.part(i).unsure();
            return;
        }
        if self.chance(0.05) {
            self.part(i).outage(jitter, now);
        } else if self.chance(0.05) {
            // Sent, no answer yet, and there never will be one.
            self.trace.push(format!("{i}: lost {}", open.id));
            self.processes[i].orphans.push(open);
            self.part(i).unsure();
        } else {
            self.commit(i, &open);
            let answer_lost = self.chance(0.1);
            let partition = self.part(i);
            if answer_lost {
                partition.unsure();
            } else {
                partition.settled(open.to, now);
            }
        }
    }

    /// A COMMIT whose answer was lost takes effect, or does not.
    fn land_orphan(&mut self, i: usize) {
        if let Some(open) = self.processes[i].orphans.pop()
            && self.rng.random_bool(0.5)
        {
            self.commit(i, &open);
        }
    }

    fn commit(&mut self, i: usize, open: &Open) {
        self.trace
            .push(format!("{i} commits {} -> {}", open.id, open.to.next));
        let row = self.database.row.as_mut().unwrap();
        assert_eq!(row.known(), open.from, "the row was locked");
        row.next = open.to.next;
        row.seq = open.to.seq;
        if open.fresh {
            assert!(self.database.marks.insert(open.id), "the mark is unique");
            assert!(
                !open.letter || self.given_up.contains(&open.id),
                "message {} is written off, but another one was given up",
                open.id
            );
            let table = if open.letter {
                &mut self.database.letters
            } else {
                &mut self.database.effects
            };
            *table.entry(open.id).or_default() += 1;
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
        } = &self.database;
        for id in marks {
            let times = effects.get(id).unwrap_or(&0) + letters.get(id).unwrap_or(&0);
            assert_eq!(times, 1, "message {id} has {times} effects");
        }
        if let Some(row) = row {
            for (offset, id) in &self.log {
                assert!(
                    *offset >= row.next || marks.contains(id),
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
        for _ in 0..20_000 {
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
        let expected: BTreeSet<u32> = self.log.iter().map(|(_, id)| *id).collect();
        assert_eq!(self.database.marks, expected);
    }
}

fn message(offset: i64, id: u32) -> Message {
    Message {
        topic: "t".into(),
        partition: 0,
        offset,
        timestamp_ms: -1,
        key: None,
        payload: Some(id.to_be_bytes().to_vec().into()),
        headers: Vec::new(),
    }
}

fn id_of(message: &Message) -> u32 {
    let payload = message.payload.as_deref().unwrap();
    u32::from_be_bytes(payload.try_into().unwrap())
}

fn run(seed: u64) {
    let world = std::sync::Mutex::new(World::new(seed));
    let result = std::panic::catch_unwind(|| {
        let mut world = world.lock().unwrap();
        for _ in 0..400 {
            world.step();
        }
        world.drain();
    });
    if let Err(panic) = result {
        let world = world
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let last = world.trace.len().saturating_sub(40);
        println!("{}", world.trace[last..].join("\n"));
        println!("replay: ONCEBOX_SEED={seed} cargo test -p oncebox-inbox simulation");
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn every_schedule_ends_with_one_effect_per_message() {
    if let Ok(seed) = std::env::var("ONCEBOX_SEED") {
        return run(seed.parse().unwrap());
    }
    for seed in 0..500 {
        run(seed);
    }
}
