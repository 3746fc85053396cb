//! What the lanes of a partition share while it is ours: the position that the next compare-and-set has to find.
//!
//! Handlers of different lanes run side by side; their compare-and-set and COMMIT go one after the other ([`Term::turn`]),
//! until the answer is known or lost. A lost answer puts the whole term in doubt: nobody commits any more before the row
//! was read.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::position::Known;

/// One ownership of a partition, from taking the row until it is lost.
#[derive(Debug)]
pub(crate) struct Term {
    chain: Mutex<Chain>,
    /// Held from the compare-and-set until the answer to its COMMIT.
    pub(crate) turn: tokio::sync::Mutex<()>,
}

/// See [`Term`].
#[derive(Debug)]
pub(crate) struct Chain {
    /// What this process last wrote to the row, or adopted from it.
    pub(crate) known: Known,
    /// Received and not settled.
    pending: BTreeSet<i64>,
    /// After the last offset that was received: everything below is settled or pending.
    end: i64,
    /// Nothing has been settled from here on, neither by this owner nor by an earlier one.
    reach: i64,
    /// Commit nothing: an answer was lost, or the partition is ours no more.
    pub(crate) in_doubt: bool,
}

/// What a compare-and-set does to the position row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// What the row must say.
    pub from: Known,
    /// What it says then.
    pub to: Known,
    /// Messages above `to.next` may have been settled: their marks are needed for as long as that is so, whatever their age.
    pub hole: bool,
}

impl Term {
    /// A term that begins at this row. `reach`: where the partition ended then, and with it all that earlier owners can have settled.
    pub(crate) fn new(known: Known, reach: i64) -> Self {
        let chain = Chain {
            known,
            pending: BTreeSet::new(),
            end: known.next,
            reach,
            in_doubt: false,
        };
        Self {
            chain: Mutex::new(chain),
            turn: tokio::sync::Mutex::new(()),
        }
    }

    /// The move of the position by a transaction that settles these messages, in their order; `None` when nobody may commit. Leaves
    /// a doubt behind until the answer is known: whoever is dropped in between has not resolved it.
    pub(crate) fn begin_commit(&self, settled: &[i64]) -> Option<Move> {
        let mut chain = self.chain();
        if std::mem::replace(&mut chain.in_doubt, true) {
            return None;
        }
        // Also if nobody ever learns that it was committed.
        chain.reach = settled
            .last()
            .map_or(chain.reach, |last| chain.reach.max(last + 1));
        let to = chain.after(settled);
        Some(Move {
            from: chain.known,
            to,
            hole: to.next < chain.reach,
        })
    }

    pub(crate) fn chain(&self) -> MutexGuard<'_, Chain> {
        self.chain.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Chain {
    /// A message came. It is not below [`Self::end`].
    pub(crate) fn receive(&mut self, offset: i64) {
        self.pending.insert(offset);
        self.end = offset + 1;
    }

    /// Where Kafka delivers from: what is below was received.
    pub(crate) fn end(&self) -> i64 {
        self.end
    }

    /// Nothing is pending below this. Above what the row says when messages were skipped without a transaction.
    pub(crate) fn settled_below(&self) -> i64 {
        self.pending.first().copied().unwrap_or(self.end)
    }

    /// The position when these messages, in their order, are settled too (G7: a hole below them keeps `next` where it is).
    pub(crate) fn after(&self, settled: &[i64]) -> Known {
        let is_open = |offset: &&i64| settled.binary_search(offset).is_err();
        let hole = self.pending.iter().find(is_open);
        Known {
            next: hole.copied().unwrap_or(self.end),
            seq: self.known.seq + 1,
            ..self.known
        }
    }

    /// A transaction was committed: it settled these messages and wrote this position.
    pub(crate) fn commit(&mut self, settled: &[i64], known: Known) {
        self.skip(settled);
        self.known = known;
    }

    /// These messages need no transaction.
    pub(crate) fn skip(&mut self, settled: &[i64]) {
        for offset in settled {
            self.pending.remove(offset);
        }
    }

    /// Everything below was seen by Kafka's client, also what is no message (transaction markers).
    pub(crate) fn reached(&mut self, end: i64) {
        self.end = self.end.max(end);
    }

    /// The row says more than we knew: it is ours, and everything below its `next` is settled.
    pub(crate) fn adopt(&mut self, known: Known) {
        self.known = known;
        self.in_doubt = false;
        self.pending = self.pending.split_off(&known.next);
        self.end = self.end.max(known.next);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;

    fn known(next: i64) -> Known {
        Known {
            owner: Uuid::nil(),
            next,
            seq: 3,
        }
    }

    #[test]
    fn g7_a_lane_above_a_hole_does_not_move_the_position() {
        let term = Term::new(known(5), 5);
        let mut chain = term.chain();
        for offset in [5, 6, 9] {
            chain.receive(offset);
        }
        let above = chain.after(&[6, 9]);
        assert_eq!(
            (above.next, above.seq),
            (5, 4),
            "seq counts it all the same"
        );
        chain.commit(&[6, 9], above);
        let all = chain.after(&[5]);
        assert_eq!((all.next, all.seq), (10, 5));
    }

    #[test]
    fn g5_a_hole_is_known_until_nothing_above_the_position_is_settled() {
        // An earlier owner may have settled what lies below 8.
        let term = Term::new(known(5), 8);
        for offset in [5, 6, 9] {
            term.chain().receive(offset);
        }
        let settle = |offset: i64, known_to_us: bool| {
            let step = term.begin_commit(&[offset]).unwrap();
            let mut chain = term.chain();
            if known_to_us {
                chain.commit(&[offset], step.to);
            }
            chain.in_doubt = false;
            (step.to.next, step.hole)
        };
        assert_eq!(settle(5, true), (6, true), "of the earlier owner");
        assert_eq!(
            settle(9, false),
            (6, true),
            "and of a commit without an answer"
        );
        assert_eq!(settle(6, true), (9, true));
        assert_eq!(settle(9, true), (10, false));
    }

    proptest! {
        #[test]
        fn g7_everything_below_the_position_is_settled(steps in proptest::collection::vec((0usize..8, 1i64..4), 1..40)) {
            let term = Term::new(known(0), 0);
            let mut chain = term.chain();
            let mut open: Vec<i64> = Vec::new();
            let mut settled = BTreeSet::new();
            for (pick, gap) in steps {
                let offset = chain.end() + gap - 1;
                chain.receive(offset);
                open.push(offset);
                if pick < open.len() {
                    let done = open.remove(pick);
                    let to = chain.after(&[done]);
                    prop_assert!(to.next >= chain.known.next);
                    chain.commit(&[done], to);
                    settled.insert(done);
                    prop_assert!(open.iter().all(|o| *o >= to.next));
                    prop_assert_eq!(chain.settled_below(), to.next);
                }
            }
        }
    }
}
