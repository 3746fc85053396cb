//! What a change does, in words.

use std::fmt;
use std::time::Duration;

use super::order::LOOPS;
use super::rate::Rate;

/// Ids that a text names; the rest is a number.
const NAMED: usize = 20;

/// The letters of one consumer and topic that a change is about.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Share {
    /// The consumer.
    pub consumer: String,
    /// The topic.
    pub topic: String,
    /// How many letters.
    pub letters: u64,
    /// How many blocked keys they belong to.
    pub keys: u64,
    /// How many of them the filter did not mean: they are parked behind a key of which it meant another letter.
    pub drawn_in: u64,
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "consumer {}, topic {}: {} letters",
            self.consumer, self.topic, self.letters
        )?;
        if self.keys > 0 {
            write!(f, ", {} blocked keys", self.keys)?;
        }
        if self.drawn_in > 0 {
            write!(f, " ({} more letters of these keys)", self.drawn_in)?;
        }
        Ok(())
    }
}

/// What an order does. `Display` is the dry run's text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReplayPlan {
    /// The letters to order, or that were ordered, in the order in which they become due.
    pub letters: Vec<i64>,
    /// The same by consumer and topic, as planned.
    pub shares: Vec<Share>,
    /// Meant, and ordered before: nothing changes for them.
    pub ordered_before: u64,
    /// Meant, and refused: replayed in vain [`LOOPS`] times or more, or parked behind such a one.
    pub refused: u64,
    /// Somebody else was replaying, ordering or deleting them at the moment of the change.
    pub busy: u64,
    /// How fast.
    pub rate: Option<Rate>,
    /// Whether it was done.
    pub applied: bool,
}

impl ReplayPlan {
    /// From the first to the last letter.
    #[must_use]
    pub fn takes(&self) -> Duration {
        let last = i64::try_from(self.letters.len())
            .unwrap_or(i64::MAX)
            .saturating_sub(1)
            .max(0);
        self.rate.map_or(Duration::ZERO, |rate| {
            let micros = last.saturating_mul(rate.micros()) / rate.count();
            Duration::from_micros(u64::try_from(micros).unwrap_or(0))
        })
    }
}

impl fmt::Display for ReplayPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for share in &self.shares {
            writeln!(f, "{share}")?;
        }
        let verb = if self.applied { "ordered" } else { "to order" };
        writeln!(f, "{} {verb}{}", self.letters.len(), Ids(&self.letters))?;
        if let Some(rate) = self.rate {
            writeln!(
                f,
                "at {rate}, in offset order: the last one {:.1} s after the first",
                self.takes().as_secs_f64()
            )?;
        }
        if self.ordered_before > 0 {
            writeln!(
                f,
                "{} ordered before: nothing changes for them",
                self.ordered_before
            )?;
        }
        if self.refused > 0 {
            writeln!(
                f,
                "{} refused: replayed in vain {LOOPS} times or more, or parked behind such a letter; look at the error (show), then force it or discard it",
                self.refused
            )?;
        }
        if self.busy > 0 {
            writeln!(
                f,
                "{} left alone: somebody else was at work on them",
                self.busy
            )?;
        }
        if self.shares.iter().any(|share| share.keys > 0) {
            writeln!(
                f,
                "a blocked key is released by the consumer in offset order: ordering one of its letters orders all of them"
            )?;
        }
        Ok(())
    }
}

/// What taking orders back does. `Display` is the dry run's text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CancelPlan {
    /// The letters whose orders are, or were, taken back.
    pub letters: Vec<i64>,
    /// The same by consumer and topic, as planned.
    pub shares: Vec<Share>,
    /// Somebody else was replaying or deleting them at the moment of the change.
    pub busy: u64,
    /// Whether it was done.
    pub applied: bool,
}

impl fmt::Display for CancelPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for share in &self.shares {
            writeln!(f, "{share}")?;
        }
        let verb = if self.applied {
            "orders taken back"
        } else {
            "orders to take back"
        };
        writeln!(f, "{} {verb}{}", self.letters.len(), Ids(&self.letters))?;
        if self.busy > 0 {
            writeln!(
                f,
                "{} left alone: they are being replayed right now",
                self.busy
            )?;
        }
        Ok(())
    }
}

/// What discarding does. `Display` is the dry run's text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiscardPlan {
    /// The dead letters to delete, or that were meant to be deleted.
    pub dead: Vec<i64>,
    /// The parked ones.
    pub parked: Vec<i64>,
    /// Blocked keys that lose their last parked letter: they are handled normally again.
    pub unblocked: u64,
    /// Blocked keys that keep parked letters: they stay blocked.
    pub still_blocked: u64,
    /// Letters that were deleted.
    pub deleted: u64,
    /// Letters that were gone already, or that somebody else was at work on.
    pub busy: u64,
    /// Whether it was done.
    pub applied: bool,
}

impl fmt::Display for DiscardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.applied {
            writeln!(f, "{} letters deleted", self.deleted)?;
        } else {
            writeln!(
                f,
                "{} dead letters to delete{}",
                self.dead.len(),
                Ids(&self.dead)
            )?;
            writeln!(
                f,
                "{} parked letters to delete{}",
                self.parked.len(),
                Ids(&self.parked)
            )?;
        }
        if self.unblocked > 0 {
            let verb = if self.applied { "were" } else { "will be" };
            writeln!(
                f,
                "{} blocked keys {verb} unblocked: no parked letter of theirs is left",
                self.unblocked
            )?;
        }
        if self.still_blocked > 0 {
            writeln!(
                f,
                "{} keys stay blocked: their other parked letters wait for a replay",
                self.still_blocked
            )?;
        }
        if self.busy > 0 {
            writeln!(
                f,
                "{} left alone: gone already, or somebody else was at work on them",
                self.busy
            )?;
        }
        if !self.applied {
            writeln!(
                f,
                "what is deleted is lost: its effect will never happen, and a redelivery of it is still recognised as settled"
            )?;
        }
        Ok(())
    }
}

/// `: 1, 2, 3 and 40 more`
struct Ids<'a>(&'a [i64]);

impl fmt::Display for Ids<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named: Vec<String> = self.0.iter().take(NAMED).map(i64::to_string).collect();
        if named.is_empty() {
            return Ok(());
        }
        write!(f, ": {}", named.join(", "))?;
        match self.0.len().saturating_sub(NAMED) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_says_how_many_why_not_and_how_long() {
        let plan = ReplayPlan {
            letters: (1..=30).collect(),
            shares: vec![Share {
                consumer: "inventory".into(),
                topic: "orders".into(),
                letters: 30,
                keys: 2,
                drawn_in: 4,
            }],
            ordered_before: 5,
            refused: 6,
            rate: Some("10/s".parse().unwrap()),
            ..ReplayPlan::default()
        };
        let text = plan.to_string();
        for words in [
            "consumer inventory, topic orders: 30 letters, 2 blocked keys (4 more letters of these keys)",
            "30 to order: 1, 2, 3",
            "and 10 more",
            "at 10/s, in offset order: the last one 2.9 s after the first",
            "5 ordered before",
            "6 refused: replayed in vain 3 times",
            "ordering one of its letters orders all",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
    }
}
