//! What the processes of a simulation share: a database, a Kafka, the wires to both, and the history that is checked.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::database::Tables;
use super::kafka::Kafka;
use crate::position::{Checkpoint, Tally};

/// Everything outside the processes. One step of it happens at one moment.
pub(super) struct World {
    pub(super) rng: StdRng,
    start: Instant,
    pub(super) tables: Tables,
    pub(super) kafka: Kafka,
    /// Faults of one call in a thousand; 0 = none.
    pub(super) faults: f64,
    /// By then, whatever went wrong so far is over.
    pub(super) quiet_at: Instant,
    pub(super) history: History,
    pub(super) trace: Vec<String>,
    pub(super) violations: Vec<String>,
    pub(super) counts: BTreeMap<&'static str, u64>,
}

/// What is known to have happened, whoever knows it.
#[derive(Default)]
pub(super) struct History {
    /// Published, or dropped because an operator said so.
    pub(super) done: BTreeSet<i64>,
    pub(super) skipped: BTreeSet<i64>,
    /// Which process leads an epoch.
    leaders: BTreeMap<i64, usize>,
    /// Every checkpoint that Kafka ever committed.
    checkpoints: BTreeSet<String>,
    /// Ids of which somebody asked for a release, and for a drop.
    pub(super) decided: BTreeSet<i64>,
    pub(super) dropped: BTreeSet<i64>,
    /// Published again after a deleted checkpoint, at most: what the mark did not know then.
    may_repeat: BTreeSet<i64>,
    /// The database has failed over to an older state.
    pub(super) failed_over: bool,
    /// Something acknowledged is missing since then.
    pub(super) lost: bool,
    /// Terms that began since then.
    pub(super) fresh: BTreeSet<(usize, i64)>,
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        Self {
            start: Instant::now(),
            tables: Tables::new(&mut rng),
            kafka: Kafka::default(),
            faults: 0.0,
            quiet_at: Instant::now(),
            history: History::default(),
            trace: Vec::new(),
            violations: Vec::new(),
            counts: BTreeMap::new(),
            rng,
        }
    }

    /// Time since the beginning.
    pub(super) fn now(&self) -> Duration {
        self.start.elapsed()
    }

    pub(super) fn note(&mut self, text: impl std::fmt::Display) {
        let now = self.now().as_millis();
        self.trace.push(format!("{now:>7} ms  {text}"));
    }

    pub(super) fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    pub(super) fn violated(&mut self, text: impl std::fmt::Display) {
        self.note(format_args!("VIOLATED: {text}"));
        self.violations.push(text.to_string());
    }

    /// Whether a fault happens that is this many times as frequent as one in a thousand calls.
    pub(super) fn fault(&mut self, times: f64) -> bool {
        self.faults > 0.0
            && self
                .rng
                .random_bool((self.faults * times / 1000.0).min(0.5))
    }

    /// How long a message is on its way.
    pub(super) fn hop(&mut self) -> Duration {
        let millis = if self.fault(0.3) {
            self.rng.random_range(300..4_000)
        } else if self.fault(15.0) {
            self.rng.random_range(5..100)
        } else {
            self.rng.random_range(0..3)
        };
        Duration::from_millis(millis)
    }

    /// A Kafka transaction commits: `ids` become visible together with the checkpoint. Whatever the relay got wrong
    /// shows here at the latest.
    pub(super) fn committed(&mut self, process: usize, rows: &[(i64, Uuid)], text: &str) {
        let ids: Vec<i64> = rows.iter().map(|(id, _)| *id).collect();
        let next = Checkpoint::decode(text).unwrap();
        let before = self.kafka.checkpoint.as_deref();
        let before = before.map(|text| Checkpoint::decode(text).unwrap());
        self.note(format_args!(
            "kafka: seq {} epoch {} of process {process}: rows {ids:?}, high {}, gaps {}, parked {}, released {}",
            next.seq, next.epoch, next.position.high, next.position.gaps, next.parked.count, next.released
        ));
        self.count("commits");
        if self.history.failed_over {
            return self.committed_after_failover((process, next.epoch), rows, text);
        }
        match before {
            Some(before) if before.seq >= next.seq || before.epoch > next.epoch => self.violated(
                format_args!("G3: seq {} replaces seq {}", next.seq, before.seq),
            ),
            Some(_) => {}
            None => self.repeat(&next),
        }
        let leader = *self.history.leaders.entry(next.epoch).or_insert(process);
        if leader != process {
            self.violated(format_args!(
                "processes {leader} and {process} lead epoch {}",
                next.epoch
            ));
        }
        for id in next
            .released
            .intervals()
            .iter()
            .flat_map(|i| i.low..=i.high)
        {
            self.count("releases");
            if !ids.contains(&id) {
                self.history.skipped.insert(id);
                self.history.done.insert(id);
                self.count("skips");
                if !self.history.dropped.contains(&id) {
                    self.violated(format_args!("G8: row {id} is dropped unasked"));
                }
            }
        }
        for (id, message_id) in rows {
            self.published(*id, *message_id, &next);
        }
        self.check_position(&next);
        self.kafka.checkpoint = Some(text.to_owned());
        self.history.checkpoints.insert(text.to_owned());
    }

    /// Whoever led before may still commit what it has read; whoever leads since then must have noticed what is missing.
    fn committed_after_failover(&mut self, term: (usize, i64), rows: &[(i64, Uuid)], text: &str) {
        if self.history.fresh.contains(&term) {
            if self.history.lost {
                self.violated(format_args!("G10: {term:?} publishes after a loss"));
            }
        } else {
            let there = |(id, message_id): &(i64, Uuid)| {
                let row = self.tables.written.get(id);
                row.is_some_and(|row| row.message_id == *message_id)
            };
            self.history.lost |= !rows.iter().all(there);
        }
        self.kafka.checkpoint = Some(text.to_owned());
        self.history.checkpoints.insert(text.to_owned());
    }

    fn published(&mut self, id: i64, message_id: Uuid, next: &Checkpoint) {
        self.count("published");
        let Some(row) = self.tables.written.get(&id) else {
            return self.violated(format_args!("G1: row {id} was never committed"));
        };
        if row.message_id != message_id {
            return self.violated(format_args!("G1: row {id} is another message"));
        }
        // G4: with the key's lock, all smaller ids of the key are committed before.
        let mut earlier = self.tables.written.range(..id);
        let overtaken = earlier.find(|(earlier, other)| {
            row.key().is_some() && other.kind == row.kind && !self.history.done.contains(earlier)
        });
        if let Some(overtaken) = overtaken.map(|(id, _)| *id) {
            self.violated(format_args!("G4: row {id} overtakes row {overtaken}"));
        }
        if !self.history.done.insert(id) {
            self.violated(format_args!("G3: row {id} is published twice"));
        }
        if let Some(parked) = self.tables.parked.get(&id)
            && (!next.released.contains(id)
                || parked.ever_refused && !self.history.decided.contains(&id))
        {
            self.violated(format_args!("G8: parked row {id} is published"));
        }
    }

    /// The position says of every id what has become of it.
    fn check_position(&mut self, next: &Checkpoint) {
        let covers = |id: i64| id <= next.position.high && !next.position.gaps.contains(id);
        let (mut settled, mut parked, mut wrong) = (Tally::default(), Tally::default(), Vec::new());
        for (id, row) in &self.tables.written {
            let done = self.history.done.contains(id);
            let waits = self.tables.parked.contains_key(id) && !next.released.contains(*id);
            if !covers(*id) {
                if done {
                    wrong.push(format!("G3: row {id} is published and not settled"));
                }
                continue;
            }
            settled.add(*id);
            if waits {
                parked.add_message(row.message_id);
            }
            if done == waits {
                wrong.push(format!(
                    "G2: row {id} is settled; published {done}, parked {waits}"
                ));
            }
        }
        for tx in self.tables.writers.open.iter().filter(|tx| !tx.visible) {
            for id in tx.ids.iter().filter(|id| **id > 0 && covers(**id)) {
                wrong.push(format!("G2: id {id} is burnt while {} is open", tx.name));
            }
        }
        if (settled, parked) != (next.position.settled, next.parked) {
            wrong.push(format!(
                "G10: the position counts {:?} and {:?} parked, it is {settled:?} and {parked:?}",
                next.position.settled, next.parked
            ));
        }
        wrong.into_iter().for_each(|text| self.violated(text));
    }

    /// The checkpoint is gone: what the mark did not know may be published once more.
    pub(super) fn delete_checkpoint(&mut self) {
        if self.kafka.checkpoint.take().is_none() {
            return;
        }
        self.count("checkpoints deleted");
        let mark = self.tables.confirmed();
        let may_repeat = self.unknown_to(mark.as_ref());
        self.note(format_args!(
            "the checkpoint is deleted; may repeat {may_repeat:?}"
        ));
        self.history.may_repeat = may_repeat;
    }

    fn repeat(&mut self, next: &Checkpoint) {
        let again = self.unknown_to(Some(next));
        if !again.is_subset(&self.history.may_repeat) {
            let may = self.history.may_repeat.clone();
            self.violated(format_args!(
                "G3: repeats {again:?}, the mark lagged {may:?}"
            ));
        }
        for id in again {
            self.count("repeats allowed");
            self.history.done.remove(&id);
            self.history.skipped.remove(&id);
        }
    }

    /// What is done and the position does not know.
    fn unknown_to(&self, position: Option<&Checkpoint>) -> BTreeSet<i64> {
        let knows = |id: &i64| {
            position.is_some_and(|c| {
                let covered = *id <= c.position.high && !c.position.gaps.contains(*id);
                let waits = self.tables.parked.contains_key(id) && !c.released.contains(*id);
                covered && !waits
            })
        };
        let done = self.history.done.iter().copied();
        done.filter(|id| !knows(id)).collect()
    }

    /// The mark was written: only what Kafka has committed may stand there.
    pub(super) fn marked(&mut self, text: &str) {
        self.count("marks");
        if !self.history.checkpoints.contains(text) {
            self.violated(format_args!("G3: the mark is ahead of Kafka: {text}"));
        }
    }
}

/// One process. It is the process for whatever runs inside [`Process::SELF`].
pub(super) struct Process {
    pub(super) number: usize,
    world: Arc<Mutex<World>>,
    running: watch::Sender<bool>,
    /// To be killed at the step that it has just reached.
    doomed: AtomicBool,
}

tokio::task_local! {
    /// The process that a relay runs in.
    pub(super) static SELF: Arc<Process>;
}

impl Process {
    pub(super) fn new(number: usize, world: &Arc<Mutex<World>>) -> Arc<Self> {
        Arc::new(Self {
            number,
            world: Arc::clone(world),
            running: watch::Sender::new(true),
            doomed: AtomicBool::new(false),
        })
    }

    pub(super) fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    /// SIGSTOP and SIGCONT: it neither sends nor receives meanwhile.
    pub(super) fn set_running(&self, running: bool) {
        self.running.send_replace(running);
    }

    /// kill -9: nothing leaves it from here on.
    pub(super) fn kill(&self) {
        self.doomed.store(true, Ordering::Relaxed);
        self.set_running(false);
    }

    pub(super) fn is_killed(&self) -> bool {
        self.doomed.load(Ordering::Relaxed)
    }

    pub(super) async fn gate(&self) {
        let mut running = self.running.subscribe();
        let _ = running.wait_for(|running| *running).await;
    }

    /// Asks the world. What is sent arrives, also when the process stops or dies meanwhile.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        there: Duration,
        back: Duration,
        work: impl FnOnce(&mut World) -> T + Send + 'static,
    ) -> T {
        self.gate().await;
        let (sender, answer) = oneshot::channel();
        let world = Arc::clone(&self.world);
        tokio::spawn(async move {
            sleep(there).await;
            let answer = work(&mut world.lock().unwrap());
            sleep(back).await;
            let _ = sender.send(answer);
        });
        let answer = answer.await.expect("the world answers");
        self.gate().await;
        answer
    }
}
