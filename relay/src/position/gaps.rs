//! Sets of ids as intervals: a rolled-back bulk load of ten million ids is one interval, not ten million entries.

use std::fmt;

/// The ids from `low` to `high`, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Interval {
    /// First id.
    pub low: i64,
    /// Last id, at or above `low`.
    pub high: i64,
}

/// Disjoint intervals in ascending order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Gaps(Vec<Interval>);

impl Gaps {
    /// Takes intervals that are already disjoint and ascending.
    ///
    /// Returns `None` when they are not.
    #[must_use]
    pub fn new(intervals: Vec<Interval>) -> Option<Self> {
        let ordered = intervals.iter().all(|i| i.low >= 1 && i.low <= i.high)
            && intervals.windows(2).all(|pair| pair[0].high < pair[1].low);
        ordered.then_some(Self(intervals))
    }

    /// One id, 1 or more.
    #[must_use]
    pub fn single(id: i64) -> Self {
        Self(vec![Interval { low: id, high: id }])
    }

    /// These ids, in any order.
    #[must_use]
    pub fn of(ids: impl IntoIterator<Item = i64>) -> Self {
        let single = |id| Interval { low: id, high: id };
        Self::default().union(&Self(ids.into_iter().map(single).collect()))
    }

    /// The intervals, ascending.
    #[must_use]
    pub fn intervals(&self) -> &[Interval] {
        &self.0
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many intervals.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the id lies in one of them.
    #[must_use]
    pub fn contains(&self, id: i64) -> bool {
        let after = self.0.partition_point(|i| i.low <= id);
        after > 0 && self.0[after - 1].high >= id
    }

    /// The parts at or below `id`.
    #[must_use]
    pub fn up_to(&self, id: i64) -> Self {
        let parts = self.0.iter().filter(|i| i.low <= id);
        Self(
            parts
                .map(|i| Interval {
                    low: i.low,
                    high: i.high.min(id),
                })
                .collect(),
        )
    }

    /// The ids of this that are not of the other.
    #[must_use]
    pub fn minus(&self, other: &Self) -> Self {
        let mut rest = Vec::with_capacity(self.0.len());
        let mut holes = other.0.iter().peekable();
        for mut interval in self.0.iter().copied() {
            while holes.next_if(|hole| hole.high < interval.low).is_some() {}
            let mut here = holes.clone();
            let mut left = true;
            while let Some(hole) = here.next_if(|hole| hole.low <= interval.high) {
                if hole.low > interval.low {
                    rest.push(Interval {
                        high: hole.low - 1,
                        ..interval
                    });
                }
                left = hole.high < interval.high;
                if !left {
                    break;
                }
                interval.low = hole.high + 1;
            }
            if left {
                rest.push(interval);
            }
        }
        Self(rest)
    }

    /// Every id of both.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        let mut all: Vec<_> = self.0.iter().chain(&other.0).copied().collect();
        all.sort_unstable();
        let mut merged: Vec<Interval> = Vec::with_capacity(all.len());
        for next in all {
            match merged.last_mut() {
                Some(last) if next.low <= last.high.saturating_add(1) => {
                    last.high = last.high.max(next.high)
                }
                _ => merged.push(next),
            }
        }
        Self(merged)
    }
}

impl fmt::Display for Gaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, i) in self.0.iter().enumerate() {
            let comma = if n == 0 { "" } else { ", " };
            if i.low == i.high {
                write!(f, "{comma}{}", i.low)?;
            } else {
                write!(f, "{comma}{}–{}", i.low, i.high)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gaps(pairs: &[(i64, i64)]) -> Gaps {
        Gaps::new(
            pairs
                .iter()
                .map(|&(low, high)| Interval { low, high })
                .collect(),
        )
        .unwrap()
    }

    #[test]
    fn only_disjoint_ascending_intervals_are_gaps() {
        for bad in [
            vec![(3, 2)],
            vec![(1, 5), (5, 6)],
            vec![(4, 5), (1, 2)],
            vec![(0, 1)],
        ] {
            let intervals = bad
                .iter()
                .map(|&(low, high)| Interval { low, high })
                .collect();
            assert_eq!(Gaps::new(intervals), None, "{bad:?}");
        }
    }

    #[test]
    fn the_difference_is_that_of_the_sets() {
        use std::collections::BTreeSet;
        for seed in 0..2_000_u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut set = || {
                let ids: BTreeSet<i64> = (1..30)
                    .filter(|_| {
                        state ^= state << 13;
                        state ^= state >> 7;
                        state ^= state << 17;
                        state % 3 == 0
                    })
                    .collect();
                ids
            };
            let (a, b) = (set(), set());
            let expected = Gaps::of(a.difference(&b).copied());
            assert_eq!(Gaps::of(a).minus(&Gaps::of(b)), expected, "seed {seed}");
        }
    }

    #[test]
    fn membership_clipping_and_union() {
        let g = gaps(&[(2, 4), (8, 8)]);
        let inside: Vec<_> = (1..10).filter(|id| g.contains(*id)).collect();
        assert_eq!(inside, [2, 3, 4, 8]);
        assert_eq!(g.up_to(3), gaps(&[(2, 3)]));
        assert_eq!(
            g.union(&gaps(&[(4, 6), (7, 7), (20, 21)])),
            gaps(&[(2, 8), (20, 21)])
        );
        assert_eq!(g.to_string(), "2–4, 8");
    }
}
