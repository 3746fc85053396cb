//! The machine that moves a position: what a read may publish, and which gaps may be burnt.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::format::gap_bytes;
use super::{Gaps, Interval, Position};

/// Transactions that hold the outbox's insert lock: names are opaque (`virtualtransaction` on PostgreSQL).
pub type Holders = BTreeSet<String>;

/// What one round saw in the database, in the order in which it must be looked at.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    /// The holders, looked at **before** the rows; `None` when nobody looked: then nothing is burnt.
    pub before: Option<&'a Holders>,
    /// Ids of rows found inside the gaps, ascending.
    pub late: &'a [i64],
    /// The look at the gaps was cut off by rows or bytes.
    pub late_cut: bool,
    /// Ids of rows above `high`, ascending; of the same snapshot as `late`.
    pub new: &'a [i64],
}

/// What may be done with a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Round {
    /// The first `late` rows to publish, before the new ones.
    pub late: usize,
    /// The first `new` rows to publish.
    pub new: usize,
    /// New gaps were found: look at the holders now and give them to [`Tracker::record`].
    pub needs_holders: bool,
    /// Gaps no longer fit: the rest waits until some close.
    pub held: bool,
}

/// Rows that the protocol excludes: an id out of order, or outside every gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("row {0} came out of order or lies outside every gap")]
pub struct Unexpected(pub i64);

#[derive(Debug, Clone)]
struct Gap {
    high: i64,
    /// `None` = nobody has looked yet: never burnt. A recorded empty set may be.
    holders: Option<Arc<Holders>>,
}

impl Gap {
    /// Nobody can fill it any more: every recorded holder is gone. Without a record, nobody knows.
    fn is_over(&self, before: &Holders) -> bool {
        self.holders
            .as_ref()
            .is_some_and(|holders| holders.is_disjoint(before))
    }
}

/// The reader's live state: the position after everything read so far, and who could still fill its gaps.
///
/// It is ahead of what Kafka has acknowledged. Never store it: take [`Tracker::position`] when the batch is read.
#[derive(Debug, Clone)]
pub struct Tracker {
    position: Position,
    gaps: BTreeMap<i64, Gap>,
    gap_bytes_limit: usize,
    gapless: bool,
}

impl Tracker {
    /// Bytes by which the gaps may exceed their limit while closed ones are worked off.
    pub const RESERVE: usize = 64;

    /// Starts from a stored position. Every gap of it takes the holders of *now*: the names of before may mean
    /// nothing any more (a prepared transaction changes its name over a server restart).
    ///
    /// `gap_bytes_limit` is what the gaps may take in the checkpoint; they may exceed it by [`Tracker::RESERVE`].
    #[must_use]
    pub fn load(position: Position, holders: Holders, gap_bytes_limit: usize) -> Self {
        let holders = Arc::new(holders);
        let gaps = position.gaps.intervals().iter().map(|g| {
            (
                g.low,
                Gap {
                    high: g.high,
                    holders: Some(Arc::clone(&holders)),
                },
            )
        });
        Self {
            gaps: gaps.collect(),
            position,
            gap_bytes_limit,
            gapless: false,
        }
    }

    /// For a database with one writer at a time: no id below a visible one can still get a row.
    #[must_use]
    pub fn gapless(self) -> Self {
        Self {
            gapless: true,
            ..self
        }
    }

    /// The highest id read.
    #[must_use]
    pub fn high(&self) -> i64 {
        self.position.high
    }

    /// The open gaps, ascending.
    #[must_use]
    pub fn gaps(&self) -> Gaps {
        let intervals = self
            .gaps
            .iter()
            .map(|(low, gap)| Interval {
                low: *low,
                high: gap.high,
            })
            .collect();
        Gaps::new(intervals).unwrap_or_default()
    }

    /// The position after everything taken so far: a copy that no later round changes.
    #[must_use]
    pub fn position(&self) -> Position {
        Position {
            gaps: self.gaps(),
            ..self.position.clone()
        }
    }

    /// Names the row that [`Tracker::high`] belongs to.
    pub fn name_high(&mut self, message_id: uuid::Uuid) {
        self.position.high_message_id = Some(message_id);
    }

    /// Takes one round. The order of the steps is the guarantee (G2): holders before rows decide what is burnt,
    /// holders after rows decide who may still fill a new hole.
    ///
    /// # Errors
    /// [`Unexpected`] when a row lies where none may be. The state is then undefined: start over.
    pub fn advance(&mut self, sample: Sample<'_>) -> Result<Round, Unexpected> {
        let (late, late_held) = self.take_late(sample.late, sample.before)?;
        let late_cut = sample.late_cut || late_held;
        if let Some(before) = sample.before {
            // Below a cut, a gap was read to its end; above it, its rows may be on the other side.
            let bound = if late_cut {
                sample.late.last().copied().unwrap_or(0)
            } else {
                i64::MAX
            };
            let bound = if late_held {
                sample.late[late] - 1
            } else {
                bound
            };
            self.gaps
                .retain(|_, gap| !(gap.high <= bound && gap.is_over(before)));
        }
        // G4: late rows go before new ones; rows behind a cut may belong to a key of the new ones.
        let new_rows = if late_cut { &[] } else { sample.new };
        let (new, new_held) = self.take_new(new_rows)?;
        let needs_holders = self.gaps.values().any(|gap| gap.holders.is_none());
        Ok(Round {
            late,
            new,
            needs_holders,
            held: late_held || new_held,
        })
    }

    /// Records who could fill the gaps that [`Tracker::advance`] found: the holders, looked at **after** the rows.
    pub fn record(&mut self, after: &Holders) {
        let after = Arc::new(after.clone());
        for gap in self.gaps.values_mut().filter(|gap| gap.holders.is_none()) {
            gap.holders = Some(Arc::clone(&after));
        }
    }

    /// Late rows split their gap; the parts keep its holders, and the part below the row is burnt at once when they
    /// are all gone. Returns how many rows fit, and whether some did not.
    fn take_late(
        &mut self,
        ids: &[i64],
        before: Option<&Holders>,
    ) -> Result<(usize, bool), Unexpected> {
        let mut bytes = self.bytes();
        let mut last = 0;
        for (n, &id) in ids.iter().enumerate() {
            let (&low, gap) = self.gaps.range(..=id).next_back().ok_or(Unexpected(id))?;
            if gap.high < id || id <= last {
                return Err(Unexpected(id));
            }
            let gap = gap.clone();
            let over = before.is_some_and(|before| gap.is_over(before));
            let left = (low < id && !over).then_some(Interval { low, high: id - 1 });
            let right = (id < gap.high).then_some(Interval {
                low: id + 1,
                high: gap.high,
            });
            let parts = || left.into_iter().chain(right);
            let old = self.bytes_at(
                Some(Interval {
                    low,
                    high: gap.high,
                })
                .into_iter(),
                low,
            );
            let new = self.bytes_at(parts(), low);
            // A gap whose holders are gone only shrinks: it may always go on, or nothing would ever close it. What
            // its numbers may grow by is kept in reserve by the caller.
            if !over && new > old && bytes - old + new > self.gap_bytes_limit {
                return Ok((n, true));
            }
            bytes = bytes - old + new;
            self.gaps.remove(&low);
            for part in parts() {
                self.gaps.insert(
                    part.low,
                    Gap {
                        high: part.high,
                        holders: gap.holders.clone(),
                    },
                );
            }
            last = id;
            self.position.settled.add(id);
        }
        Ok((ids.len(), false))
    }

    /// Bytes of these parts, standing in place of the gap `low`, and of the gap behind them.
    fn bytes_at(&self, parts: impl Iterator<Item = Interval>, low: i64) -> usize {
        let mut end = self
            .gaps
            .range(..low)
            .next_back()
            .map_or(0, |(_, gap)| gap.high);
        let behind = self
            .gaps
            .range(low + 1..)
            .next()
            .map(|(low, gap)| Interval {
                low: *low,
                high: gap.high,
            });
        let sizes = parts.chain(behind).map(|part| {
            let size = gap_bytes(part, end);
            end = part.high;
            size
        });
        sizes.sum()
    }

    /// New rows raise `high`; the holes between them become gaps that nobody has looked at yet.
    fn take_new(&mut self, ids: &[i64]) -> Result<(usize, bool), Unexpected> {
        let mut bytes = self.bytes();
        let mut end = self.gaps.last_key_value().map_or(0, |(_, gap)| gap.high);
        for (n, &id) in ids.iter().enumerate() {
            if id <= self.position.high {
                return Err(Unexpected(id));
            }
            if id > self.position.high + 1 && !self.gapless {
                let hole = Interval {
                    low: self.position.high + 1,
                    high: id - 1,
                };
                let more = gap_bytes(hole, end);
                if bytes + more > self.gap_bytes_limit {
                    return Ok((n, true));
                }
                bytes += more;
                end = hole.high;
                self.gaps.insert(
                    hole.low,
                    Gap {
                        high: hole.high,
                        holders: None,
                    },
                );
            }
            self.position.high = id;
            self.position.high_message_id = None;
            self.position.settled.add(id);
        }
        Ok((ids.len(), false))
    }

    fn bytes(&self) -> usize {
        let mut end = 0;
        let sizes = self.gaps.iter().map(|(low, gap)| {
            let size = gap_bytes(
                Interval {
                    low: *low,
                    high: gap.high,
                },
                end,
            );
            end = gap.high;
            size
        });
        sizes.sum()
    }
}

#[cfg(test)]
mod tests;
