//! Where a relay stands: `(seq, high, gaps)`, and the machine that moves it. Pure: no I/O, no clock.
//!
//! Ids become visible out of order, so a position is not a number. An id is *settled* when its row was published
//! or when it is *burnt* (rolled back, it will never have a row). Every id at or below `high` is settled, except
//! those in `gaps`. Each gap has *holders*: the transactions that could still fill it.

mod format;
mod gaps;
#[cfg(test)]
pub(crate) mod model;
mod tracker;

pub use format::{Base, Checkpoint, FormatError, Stored, know_format, newest_format};
pub use gaps::{Gaps, Interval};
pub use tracker::{Holders, Round, Sample, Tracker, Unexpected};

use uuid::Uuid;

/// A number of ids, and a fingerprint of which ones: the order does not matter.
///
/// A count alone can compensate: one row lost and one foreign row look like nothing happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// How many.
    pub count: i64,
    /// Exclusive or of [`Tally::hash`] of every id.
    pub fingerprint: i64,
}

impl Tally {
    /// Adds one id.
    pub fn add(&mut self, id: i64) {
        self.count += 1;
        self.fingerprint ^= Self::hash(id);
    }

    /// Adds one message: a message id is random where it counts, so its low half is its own hash.
    pub fn add_message(&mut self, id: Uuid) {
        self.count += 1;
        self.fingerprint ^= Self::message_hash(id);
    }

    /// The last 64 bits of a message id, as a signed number.
    #[must_use]
    pub fn message_hash(id: Uuid) -> i64 {
        let (_, low) = id.as_u64_pair();
        low.cast_signed()
    }

    /// Both together.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self {
            count: self.count + other.count,
            fingerprint: self.fingerprint ^ other.fingerprint,
        }
    }

    /// Takes away a part. The part must be contained for the result to mean anything.
    #[must_use]
    pub fn without(self, part: Self) -> Self {
        Self {
            count: self.count - part.count,
            fingerprint: self.fingerprint ^ part.fingerprint,
        }
    }

    /// PostgreSQL's `hashint8extended(id, 0)`, so that the database can tally a table by itself, index-only
    /// (`src/backend/access/hash/hashfunc.c` and `src/common/hashfn.c`).
    #[must_use]
    pub fn hash(id: i64) -> i64 {
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "halves of the id, as the C code takes them"
        )]
        let (low, high) = (id as u32, (id >> 32) as u32);
        let k = low ^ if id >= 0 { high } else { !high };
        let init = 0x9e37_79b9_u32.wrapping_add(4).wrapping_add(3_923_095);
        let (mut a, mut b, mut c) = (init.wrapping_add(k), init, init);
        c ^= b;
        c = c.wrapping_sub(b.rotate_left(14));
        a ^= c;
        a = a.wrapping_sub(c.rotate_left(11));
        b ^= a;
        b = b.wrapping_sub(a.rotate_left(25));
        c ^= b;
        c = c.wrapping_sub(b.rotate_left(16));
        a ^= c;
        a = a.wrapping_sub(c.rotate_left(4));
        b ^= a;
        b = b.wrapping_sub(a.rotate_left(14));
        c ^= b;
        c = c.wrapping_sub(b.rotate_left(24));
        #[allow(
            clippy::cast_possible_wrap,
            reason = "the database shows it as a signed bigint"
        )]
        let hash = ((u64::from(b) << 32) | u64::from(c)) as i64;
        hash
    }
}

/// Every id up to `high` is settled, except those in `gaps`. Fixed when its batch is read, and never changed after.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Position {
    /// The highest settled id that has a row; 0 before the first.
    pub high: i64,
    /// Message id of the row `high`.
    pub high_message_id: Option<Uuid>,
    /// Ids below `high` that may still get a row.
    pub gaps: Gaps,
    /// The rows published so far, and which.
    pub settled: Tally,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tally_does_not_depend_on_order_and_sees_a_compensated_loss() {
        let tally = |ids: &[i64]| {
            let mut t = Tally::default();
            ids.iter().for_each(|id| t.add(*id));
            t
        };
        assert_eq!(tally(&[1, 2, 3]), tally(&[3, 1, 2]));
        assert_eq!(tally(&[1, 2, 3]).count, tally(&[1, 2, 4]).count);
        assert_ne!(tally(&[1, 2, 3]), tally(&[1, 2, 4]));
        assert_eq!(tally(&[1, 2, 3]).without(tally(&[2])), tally(&[1, 3]));
    }
}
