//! Where a partition starts when it is assigned: the database decides, Kafka confirms, and nothing is guessed (G10).

use std::fmt;

use crate::position::Row;

/// What Kafka says about a partition at the moment it is assigned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Kafka's id of the topic; a re-created topic has another one.
    pub topic_id: String,
    /// First offset that is still there.
    pub low: i64,
    /// Offset after the last record.
    pub high: i64,
    /// The group's committed offset. Informational, except that it shows an existing group.
    pub committed: Option<i64>,
}

/// Where to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// At the row's `next`.
    AtRow,
    /// No row yet and no offset in Kafka: a new consumer, or a partition that was added later. Both begin at the
    /// first offset the partition has.
    First(i64),
}

/// Why a partition cannot start, or go on, without somebody's decision.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The database has no position, but Kafka has an offset for this group: an existing group is being adopted, or
    /// the database lost the row.
    ExistingGroup {
        /// The group's committed offset.
        committed: i64,
    },
    /// The topic was deleted and created again: the recorded position belongs to records that no longer exist.
    TopicRecreated {
        /// Id of the topic the position belongs to.
        recorded: String,
        /// Id of the topic as it is now.
        current: String,
        /// The recorded position.
        next: i64,
        /// First offset of the topic as it is now.
        low: i64,
        /// End of the topic as it is now.
        high: i64,
    },
    /// The partition ends below the position: records in `high..next` were settled here, but Kafka lost them.
    EndsBelow {
        /// The recorded position.
        next: i64,
        /// Offset after the last record.
        high: i64,
    },
    /// Records in `next..low` were deleted (retention) before this consumer settled them.
    Deleted {
        /// The recorded position.
        next: i64,
        /// First offset that is still there.
        low: i64,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ExistingGroup { committed } => write!(
                f,
                "the database has no position, but Kafka holds offset {committed} for this group: choose where to begin"
            ),
            Self::TopicRecreated {
                recorded,
                current,
                next,
                low,
                high,
            } => write!(
                f,
                "the topic was re-created (id {recorded} is now {current}): position {next} belongs to the old one, the new one holds {low}..{high}"
            ),
            Self::EndsBelow { next, high } => write!(
                f,
                "the partition ends at {high}, below the position {next}: offsets {high}..{next} are missing in Kafka"
            ),
            Self::Deleted { next, low } => write!(
                f,
                "the partition begins at {low}, above the position {next}: offsets {next}..{low} were deleted before they were consumed"
            ),
        }
    }
}

/// Decides where a partition starts.
///
/// # Errors
///
/// A [`Refusal`] when going on would skip or repeat something without anybody having asked for it.
pub(crate) fn decide(row: Option<&Row>, facts: &Facts) -> Result<Start, Refusal> {
    let Some(row) = row else {
        return match facts.committed {
            // The row is written before the first offset can be committed (G7), so an offset without a row is
            // either somebody else's group or a database that lost its past.
            Some(committed) => Err(Refusal::ExistingGroup { committed }),
            None => Ok(Start::First(facts.low)),
        };
    };
    if row.topic_id != facts.topic_id {
        return Err(Refusal::TopicRecreated {
            recorded: row.topic_id.clone(),
            current: facts.topic_id.clone(),
            next: row.next,
            low: facts.low,
            high: facts.high,
        });
    }
    if row.next > facts.high {
        return Err(Refusal::EndsBelow {
            next: row.next,
            high: facts.high,
        });
    }
    if row.next < facts.low {
        return Err(Refusal::Deleted {
            next: row.next,
            low: facts.low,
        });
    }
    Ok(Start::AtRow)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use uuid::Uuid;

    fn row(topic_id: &str, next: i64) -> Row {
        Row {
            topic_id: topic_id.into(),
            next,
            seq: 3,
            owner: Uuid::nil(),
        }
    }

    fn facts(low: i64, high: i64, committed: Option<i64>) -> Facts {
        Facts {
            topic_id: "a".into(),
            low,
            high,
            committed,
        }
    }

    #[test]
    fn a_new_consumer_begins_at_the_first_offset() {
        assert_eq!(decide(None, &facts(7, 20, None)), Ok(Start::First(7)));
    }

    #[test]
    fn an_existing_group_is_not_adopted_silently() {
        let refusal = decide(None, &facts(0, 20, Some(12))).unwrap_err();
        assert_eq!(refusal, Refusal::ExistingGroup { committed: 12 });
    }

    #[test]
    fn the_row_wins_over_the_committed_offset() {
        assert_eq!(
            decide(Some(&row("a", 5)), &facts(0, 20, Some(12))),
            Ok(Start::AtRow)
        );
    }

    #[test]
    fn a_missing_range_is_named() {
        let deleted = decide(Some(&row("a", 5)), &facts(9, 20, None)).unwrap_err();
        assert!(deleted.to_string().contains("5..9"), "{deleted}");
        let below = decide(Some(&row("a", 25)), &facts(0, 20, None)).unwrap_err();
        assert!(below.to_string().contains("20..25"), "{below}");
        let other = decide(Some(&row("b", 5)), &facts(0, 20, None)).unwrap_err();
        assert!(other.to_string().contains("re-created"), "{other}");
    }

    proptest! {
        #[test]
        fn a_start_is_always_inside_the_partition_and_never_skips(low in 0i64..30, len in 0i64..30, next in 0i64..70, has_row: bool, committed in proptest::option::of(0i64..70)) {
            let facts = facts(low, low + len, committed);
            let row = has_row.then(|| row("a", next));
            match decide(row.as_ref(), &facts) {
                Ok(Start::AtRow) => prop_assert!(has_row && next >= low && next <= low + len),
                Ok(Start::First(at)) => prop_assert!(!has_row && committed.is_none() && at == low),
                Err(_) => prop_assert!(committed.is_some() || has_row),
            }
        }
    }
}
