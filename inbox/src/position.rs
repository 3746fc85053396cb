//! The position of a partition, and what to do when the database disagrees with us.
//!
//! The row (consumer, topic, partition → topic id, next, seq, owner) says that everything below `next` is settled.
//! Every transaction of the partition ends with a compare-and-set on the (owner, next, seq) that this process
//! knows. This module holds the decision that follows when that compare-and-set hits no row, when the answer to a
//! COMMIT is lost, and when the row is looked at in an idle moment. It does no I/O.

use uuid::Uuid;

/// Name of one partition of one consumer: the primary key of its position row.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The consumer's name, which is also the Kafka group.
    pub consumer: std::sync::Arc<str>,
    /// Topic.
    pub topic: std::sync::Arc<str>,
    /// Partition of the topic.
    pub partition: i32,
}

/// What this process last wrote to the position row, or adopted from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// The token this process wrote when it took the partition.
    pub owner: Uuid,
    /// Everything below this offset is settled.
    pub next: i64,
    /// Counts the transactions of the partition.
    pub seq: i64,
}

impl Known {
    /// The position after the message at `offset` is settled.
    #[must_use]
    pub fn after(self, offset: i64) -> Self {
        Self {
            next: offset + 1,
            seq: self.seq + 1,
            ..self
        }
    }
}

/// The position row as it stands in the database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Kafka's id of the topic at the time the row was created.
    pub topic_id: String,
    /// Everything below this offset is settled.
    pub next: i64,
    /// Counts the transactions of the partition.
    pub seq: i64,
    /// Token of the process that owns the partition.
    pub owner: Uuid,
}

impl Row {
    /// The part that a compare-and-set compares.
    #[must_use]
    pub fn known(&self) -> Known {
        Known {
            owner: self.owner,
            next: self.next,
            seq: self.seq,
        }
    }
}

/// What the row says about what this process believes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The row is what this process last wrote: go on.
    Unchanged,
    /// A transaction of this process landed although its answer was lost: take over what the row says, skip every
    /// message below its `next`.
    Adopt(Known),
    /// The partition has another owner, or the database lost commits: drop everything local and take ownership
    /// again, if Kafka still assigns the partition to this process.
    Lost(Loss),
}

/// Why the position was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// Another process (or `oncebox inbox resume`) has written the row.
    OtherOwner,
    /// The row is older than what this process committed: the database was restored or failed over with loss.
    Behind,
    /// The row is gone.
    Gone,
}

/// Compares what this process knows with the row (G5, G6).
///
/// Never call it with a row that was read inside the transaction that failed: that one must be rolled back first.
pub(crate) fn judge(known: &Known, row: Option<&Row>) -> Verdict {
    let Some(row) = row else {
        return Verdict::Lost(Loss::Gone);
    };
    if row.owner != known.owner {
        return Verdict::Lost(Loss::OtherOwner);
    }
    let row = row.known();
    if row == *known {
        return Verdict::Unchanged;
    }
    // Both must have moved forward: a row with a larger seq and a smaller next is another history of the database.
    if row.seq > known.seq && row.next >= known.next {
        Verdict::Adopt(row)
    } else {
        Verdict::Lost(Loss::Behind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn row(owner: Uuid, next: i64, seq: i64) -> Row {
        Row {
            topic_id: "t".into(),
            next,
            seq,
            owner,
        }
    }

    #[test]
    fn the_row_decides_after_a_lost_answer() {
        let me = Uuid::from_u128(1);
        let other = Uuid::from_u128(2);
        let known = Known {
            owner: me,
            next: 10,
            seq: 4,
        };
        assert_eq!(judge(&known, Some(&row(me, 10, 4))), Verdict::Unchanged);
        let landed = known.after(10);
        assert_eq!(judge(&known, Some(&row(me, 11, 5))), Verdict::Adopt(landed));
        assert_eq!(
            judge(&known, Some(&row(other, 10, 4))),
            Verdict::Lost(Loss::OtherOwner)
        );
        assert_eq!(
            judge(&known, Some(&row(me, 9, 3))),
            Verdict::Lost(Loss::Behind)
        );
        assert_eq!(judge(&known, None), Verdict::Lost(Loss::Gone));
    }

    proptest! {
        #[test]
        fn never_adopts_a_position_behind_or_foreign(next in 0i64..50, seq in 0i64..50, r_next in 0i64..50, r_seq in 0i64..50, mine: bool) {
            let me = Uuid::from_u128(1);
            let owner = if mine { me } else { Uuid::from_u128(2) };
            let known = Known { owner: me, next, seq };
            match judge(&known, Some(&row(owner, r_next, r_seq))) {
                Verdict::Unchanged => prop_assert!(mine && r_next == next && r_seq == seq),
                Verdict::Adopt(k) => {
                    prop_assert!(mine && r_next >= next && r_seq > seq);
                    prop_assert_eq!(k, Known { owner: me, next: r_next, seq: r_seq });
                }
                Verdict::Lost(Loss::OtherOwner) => prop_assert!(!mine),
                Verdict::Lost(_) => prop_assert!(r_next < next || r_seq <= seq),
            }
        }
    }
}
