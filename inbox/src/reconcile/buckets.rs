//! Counters over time: where two sets of UUIDv7 differ in number. Pure: no I/O.

use uuid::Uuid;

/// Counters, at most; memory does not depend on the number of messages.
const MOST: i64 = 4_096;

/// A counter for each interval of the time that is compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Buckets {
    /// Milliseconds.
    from: i64,
    until: i64,
    width: i64,
    counts: Vec<i64>,
}

impl Buckets {
    /// Counters for the ids that were made in this range of milliseconds; an empty range counts nothing.
    pub(super) fn new(from: i64, until: i64) -> Self {
        let from = from.max(0);
        let until = until.max(from);
        let width = (until - from) / MOST + 1;
        let number = usize::try_from((until - from + width - 1) / width).unwrap_or(0);
        Self {
            from,
            until,
            width,
            counts: vec![0; number],
        }
    }

    /// Counts an id, if it is a UUIDv7 of the range.
    pub(super) fn add(&mut self, id: Uuid, number: i64) {
        let Some(made) = made_at(id).filter(|at| (self.from..self.until).contains(at)) else {
            return;
        };
        let at = usize::try_from((made - self.from) / self.width).unwrap_or(usize::MAX);
        if let Some(count) = self.counts.get_mut(at) {
            *count += number;
        }
    }

    /// The smallest id that is meant, and the first that is not any more.
    pub(super) fn ids(&self) -> (Uuid, Uuid) {
        (smallest(self.from), smallest(self.until))
    }

    /// Ranges of ids whose counters are not zero; neighbours in one.
    pub(super) fn uneven(&self) -> Vec<(Uuid, Uuid)> {
        let mut ranges: Vec<(i64, i64)> = Vec::new();
        let mut begin = self.from;
        for count in &self.counts {
            let end = (begin + self.width).min(self.until);
            if *count != 0 {
                match ranges.last_mut() {
                    Some(last) if last.1 == begin => last.1 = end,
                    _ => ranges.push((begin, end)),
                }
            }
            begin = end;
        }
        let ids = ranges.into_iter();
        ids.map(|(from, until)| (smallest(from), smallest(until)))
            .collect()
    }
}

/// When a UUIDv7 was made, milliseconds since the Unix epoch (RFC 9562 §5.7); `None`: it is another kind of id.
pub(super) fn made_at(id: Uuid) -> Option<i64> {
    let is_v7 = id.get_version_num() == 7;
    let (high, _) = id.as_u64_pair();
    i64::try_from(high >> 16).ok().filter(|_| is_v7)
}

/// The smallest id that can have been made in this millisecond.
fn smallest(millis: i64) -> Uuid {
    // 48 bits.
    let millis = u64::try_from(millis).unwrap_or(0).min((1 << 48) - 1);
    Uuid::from_u64_pair(millis << 16, 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(millis: i64, low: u64) -> Uuid {
        let high = (u64::try_from(millis).unwrap() << 16) | 0x7000;
        Uuid::from_u64_pair(high, (low >> 2) | (1 << 63))
    }

    #[test]
    fn an_id_knows_when_it_was_made() {
        let id = Uuid::now_v7();
        let (seconds, nanos) = id.get_timestamp().unwrap().to_unix();
        let millis = i64::try_from(seconds).unwrap() * 1_000 + i64::from(nanos) / 1_000_000;
        assert_eq!(made_at(id), Some(millis));
        assert_eq!(made_at(Uuid::new_v4()), None);
        assert!(smallest(millis) <= id && id < smallest(millis + 1));
    }

    #[test]
    fn an_empty_range_counts_nothing() {
        for (from, until) in [(5, 5), (6, 5), (-3, 0)] {
            let mut buckets = Buckets::new(from, until);
            buckets.add(id(5, 1), 1);
            assert!(buckets.uneven().is_empty());
        }
    }

    proptest! {
        #[test]
        fn what_only_one_side_has_lies_in_an_uneven_range(
            both in prop::collection::vec((1_000_000i64..9_000_000, any::<u64>()), 0..50),
            only in prop::collection::vec((1_000_000i64..9_000_000, any::<u64>()), 0..5),
        ) {
            let mut buckets = Buckets::new(1_000_000, 9_000_000);
            for (millis, low) in &both {
                buckets.add(id(*millis, *low), 1);
                buckets.add(id(*millis, *low), -1);
            }
            prop_assert!(buckets.uneven().is_empty());
            for (millis, low) in &only {
                buckets.add(id(*millis, *low), 1);
            }
            let ranges = buckets.uneven();
            for (millis, low) in &only {
                let id = id(*millis, *low);
                prop_assert!(ranges.iter().any(|(from, until)| (*from..*until).contains(&id)));
            }
            let (first, end) = buckets.ids();
            prop_assert!(ranges.iter().all(|(from, until)| *from >= first && *until <= end && from < until));
        }
    }
}
