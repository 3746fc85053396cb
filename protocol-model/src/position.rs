//! Position, checkpoint, and the reader's machine that moves them (§2 of the protocol).

use std::collections::BTreeMap;

use crate::database::Row;
use crate::rules::{Rule, Rules};
use crate::set::Set;

/// Every id up to `high` is settled, except those in `gaps`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Position {
    /// The highest settled id that has a row; 0 before the first.
    pub high: u8,
    /// The message of the row `high`.
    pub high_message: Option<u8>,
    /// Ids below `high` that may still get a row.
    pub gaps: Set,
    /// The rows published or parked so far.
    pub settled: Set,
}

impl Position {
    /// Whether nobody needs to look at this id again.
    #[must_use]
    pub fn settles(&self, id: u8) -> bool {
        id <= self.high && !self.gaps.contains(id)
    }
}

/// What travels in the Kafka transaction, and what the mark repeats.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Checkpoint {
    /// Counts positions.
    pub seq: u8,
    /// Of the leader that wrote it.
    pub epoch: u8,
    /// Where it stands.
    pub position: Position,
    /// Messages that the position settled by parking them.
    pub parked: Set,
    /// Ids that this very transaction released.
    pub released: Set,
}

/// The newer of mark and checkpoint.
#[must_use]
pub fn newer(mark: Option<Checkpoint>, checkpoint: Option<Checkpoint>, rules: Rules) -> Checkpoint {
    let age = |c: &Checkpoint| match rules.hold(Rule::LargerSeq) {
        true => c.seq,
        false => c.position.high,
    };
    let both = checkpoint.into_iter().chain(mark);
    both.max_by_key(age).unwrap_or_default()
}

/// One look at the rows: one snapshot, both halves limited.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Look {
    /// Rows in gaps, ascending.
    pub late: Vec<Row>,
    /// There are more of them.
    pub late_cut: bool,
    /// Rows above `high`, ascending.
    pub new: Vec<Row>,
}

/// The reader's live position, and who could still fill each gap; `None` = nobody has looked yet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Live {
    /// After everything that was read, acknowledged or not.
    pub position: Position,
    /// The recorded holders of every gap.
    pub holders: BTreeMap<u8, Option<Set>>,
}

impl Live {
    /// Starts from a stored position: every gap takes the holders of now.
    #[must_use]
    pub fn load(position: Position, now: Set) -> Self {
        let holders = position.gaps.iter().map(|id| (id, Some(now))).collect();
        Self { position, holders }
    }

    /// Takes one round and returns the rows to publish, late ones first (G4).
    pub fn advance(&mut self, look: &Look, before: Option<Set>, rules: Rules) -> Vec<Row> {
        for row in &look.late {
            self.close(row.id);
            self.position.settled = self.position.settled.with(row.id);
        }
        if let Some(before) = before {
            self.burn(look, before, rules);
        }
        let mut rows = look.late.clone();
        if look.late_cut && rules.hold(Rule::NewRowsWaitForLateOnes) {
            return rows;
        }
        for row in &look.new {
            for hole in self.position.high + 1..row.id {
                self.position.gaps = self.position.gaps.with(hole);
                self.holders.insert(hole, None);
            }
            self.position.high = row.id;
            self.position.high_message = Some(row.message);
            self.position.settled = self.position.settled.with(row.id);
        }
        rows.extend(&look.new);
        rows
    }

    /// Whether some gap has no recorded holders.
    #[must_use]
    pub fn needs_holders(&self) -> bool {
        self.holders.values().any(Option::is_none)
    }

    /// Records who can fill the gaps that nobody has looked at yet.
    pub fn record(&mut self, holders: Set) {
        for gap in self.holders.values_mut().filter(|gap| gap.is_none()) {
            *gap = Some(holders);
        }
    }

    /// G2: what nobody can fill any more, and did not appear.
    fn burn(&mut self, look: &Look, before: Set, rules: Rules) {
        let cut = look.late_cut && rules.hold(Rule::BurnBelowTheCut);
        let last = look.late.last().map_or(0, |row| row.id);
        let bound = if cut { last } else { u8::MAX };
        let is_over = |holders: &Option<Set>| match holders {
            Some(holders) => holders.is_disjoint(before),
            None => !rules.hold(Rule::BurnOnlyWithHolders),
        };
        let burnt: Set = self
            .holders
            .iter()
            .filter(|(id, holders)| **id <= bound && is_over(holders))
            .map(|(id, _)| *id)
            .collect();
        burnt.iter().for_each(|id| self.close(id));
    }

    fn close(&mut self, id: u8) {
        self.position.gaps = self.position.gaps.without(id);
        self.holders.remove(&id);
    }
}
