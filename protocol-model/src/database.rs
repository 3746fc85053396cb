//! The database: writers that commit out of id order, the outbox, the mark and the parked rows (§1 to §4).

use std::collections::BTreeMap;

use crate::position::{Checkpoint, Look, Position};
use crate::rules::{Rule, Rules};
use crate::scenario::Scenario;
use crate::set::Set;

/// A row of the outbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Row {
    /// The position of the row; after a lossy failover it may be issued twice.
    pub id: u8,
    /// The message; never issued twice.
    pub message: u8,
}

/// How far a writer's transaction is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fate {
    /// Not begun.
    Waiting,
    /// Holds the insert lock and ids.
    Open,
    /// Committed and visible, but its locks are not released yet.
    Visible,
    /// Committed.
    Committed,
    /// Rolled back: its ids are burnt.
    RolledBack,
    /// Its commit was acknowledged to the writer, or not; the database that took over does not know it.
    Lost,
}

/// One transaction that enqueues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Writer {
    /// How far it is.
    pub fate: Fate,
    /// What it has drawn.
    pub ids: Set,
}

/// One row of the outbox's lease, confirmed position and clean-up fence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Mark {
    /// Who leads.
    pub epoch: u8,
    /// The confirmed position.
    pub checkpoint: Option<Checkpoint>,
    /// The last deleted id.
    pub low_water: u8,
    /// Everything that clean-up deleted.
    pub deleted: Set,
}

/// A parked row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Parked {
    /// Its message.
    pub message: u8,
    /// Kafka refused it; otherwise it waits behind one of its key.
    pub refused: bool,
    /// An operator wants it to be published again.
    pub requested: bool,
}

/// The database, as the server knows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Database {
    /// Which server answers; a session is one server's.
    pub server: u8,
    /// What the sequence gives next.
    pub next_id: u8,
    /// The transactions, in the order in which they begin.
    pub writers: Vec<Writer>,
    /// Committed rows: message by id.
    pub rows: BTreeMap<u8, u8>,
    /// The mark.
    pub mark: Mark,
    /// Parked rows by id.
    pub parked: BTreeMap<u8, Parked>,
}

impl Database {
    /// Before anybody has published; some writers have begun or committed already.
    #[must_use]
    pub fn new(scenario: &Scenario) -> Self {
        let waiting = Writer {
            fate: Fate::Waiting,
            ids: Set::default(),
        };
        let mut database = Self {
            server: 0,
            next_id: 1,
            writers: vec![waiting; scenario.writers.len()],
            rows: BTreeMap::new(),
            mark: Mark::default(),
            parked: BTreeMap::new(),
        };
        for (writer, spec) in scenario.writers.iter().enumerate() {
            if spec.first != Fate::Waiting {
                (0..spec.rows).for_each(|_| database.draw(writer));
            }
            if spec.first == Fate::Committed {
                database.commit(scenario, writer);
                database.writers[writer].fate = Fate::Committed;
            }
        }
        database
    }

    /// An INSERT: takes the lock, then draws its id.
    pub fn draw(&mut self, writer: usize) {
        let writer = &mut self.writers[writer];
        writer.fate = Fate::Open;
        writer.ids = writer.ids.with(self.next_id);
        self.next_id += 1;
    }

    /// The rows become visible; the locks stay for a moment.
    pub fn commit(&mut self, scenario: &Scenario, writer: usize) {
        let messages = scenario.messages(writer);
        let ids = self.writers[writer].ids;
        self.rows.extend(ids.iter().zip(messages));
        self.writers[writer].fate = Fate::Visible;
    }

    /// Who holds the insert lock.
    #[must_use]
    pub fn holders(&self) -> Set {
        let holds = |w: &Writer| matches!(w.fate, Fate::Open | Fate::Visible);
        let holders = (0..).zip(&self.writers).filter(|(_, w)| holds(w));
        holders.map(|(n, _)| n).collect()
    }

    /// §2, step 2: one statement, one snapshot, both halves limited.
    #[must_use]
    pub fn look(&self, position: &Position, limit: usize) -> Look {
        let row = |(id, message): (&u8, &u8)| Row {
            id: *id,
            message: *message,
        };
        let late = self.rows.iter().map(row);
        let late: Vec<_> = late
            .filter(|row| position.gaps.contains(row.id))
            .take(limit)
            .collect();
        let new = self.rows.range(position.high + 1..).map(row);
        Look {
            // As in SQL: a half that came back full may have more.
            late_cut: late.len() == limit,
            late,
            new: new.take(limit).collect(),
        }
    }

    /// §3, identity check: is this still the outbox that the checkpoint speaks of? One snapshot.
    #[must_use]
    pub fn matches(&self, checkpoint: &Checkpoint, rules: Rules) -> bool {
        let Position {
            high,
            high_message,
            gaps,
            settled,
        } = checkpoint.position;
        let low_water = self.mark.low_water;
        let ids: Set = self.rows.keys().copied().collect();
        let there: Set = ids
            .iter()
            .filter(|id| (low_water + 1..=high).contains(id) && !gaps.contains(*id))
            .collect();
        let parked: Set = self
            .parked
            .iter()
            .filter(|(id, _)| {
                checkpoint.position.settles(**id) && !checkpoint.released.contains(**id)
            })
            .map(|(_, parked)| parked.message)
            .collect();
        let rows = match rules.hold(Rule::Fingerprints) {
            true => there == settled.minus(self.mark.deleted),
            false => there.len() == settled.len() - self.mark.deleted.len(),
        };
        let none_below = ids.iter().all(|id| id > low_water || id == high);
        rows && none_below
            && self.rows.get(&high).copied() == high_message
            && parked == checkpoint.parked
    }

    /// What clean-up may delete below this position: never past the oldest gap, never the row `high`.
    #[must_use]
    pub fn cleanable(&self, position: &Position) -> Set {
        let gap = position.gaps.iter().next().unwrap_or(u8::MAX);
        let bound = position.high.min(gap);
        let ids = self.rows.keys().copied();
        ids.filter(|id| (self.mark.low_water + 1..bound).contains(id))
            .collect()
    }

    /// Deletes these rows and counts them, in one transaction.
    pub fn clean_up(&mut self, ids: Set) {
        self.rows.retain(|id, _| !ids.contains(*id));
        self.mark.deleted = self.mark.deleted.union(ids);
        self.mark.low_water = ids.last().unwrap_or(self.mark.low_water);
    }

    /// §4: the DELETE of a release, with the mark, in one transaction.
    pub fn finish_release(&mut self, checkpoint: Checkpoint, rules: Rules) {
        let released = checkpoint.released;
        let last = released.last().unwrap_or(0);
        self.parked
            .retain(|id, _| match rules.hold(Rule::ReleaseNamesIds) {
                true => !released.contains(*id),
                false => *id > last,
            });
        self.mark.checkpoint = Some(checkpoint);
    }

    /// The server that takes over: what `replica` knew. Open transactions end, prepared ones stay.
    #[must_use]
    pub fn fail_over(&self, replica: &Self, scenario: &Scenario) -> Self {
        let mut new = replica.clone();
        new.server = self.server + 1;
        for (n, writer) in new.writers.iter_mut().enumerate() {
            let lost = match writer.fate {
                Fate::Open => !scenario.writers[n].prepared,
                Fate::Waiting => self.writers[n].fate != Fate::Waiting,
                _ => false,
            };
            match writer.fate {
                _ if lost => writer.fate = Fate::Lost,
                Fate::Visible => writer.fate = Fate::Committed,
                _ => {}
            }
        }
        new
    }
}
