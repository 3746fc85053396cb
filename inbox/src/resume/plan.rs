//! What a resume changes, in words.

use std::fmt;

/// What a resume changes. `Display` is the dry run's text.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plan {
    /// The consumer.
    pub consumer: String,
    /// The topic.
    pub topic: String,
    /// Kafka's id of the topic, recorded in the rows.
    pub topic_id: String,
    /// One entry per partition, in order.
    pub partitions: Vec<Change>,
}

/// What a resume changes for one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Change {
    /// The partition.
    pub partition: i32,
    /// First offset that is still there.
    pub low: i64,
    /// Offset after the last record.
    pub high: i64,
    /// The position so far, and the id of the topic it belongs to; `None` when there is no row.
    pub before: Option<(i64, String)>,
    /// The offset the Kafka group has committed.
    pub committed: Option<i64>,
    /// The position to write.
    pub next: i64,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "consumer {}, topic {} (id {})",
            self.consumer, self.topic, self.topic_id
        )?;
        for c in &self.partitions {
            write!(f, "  partition {}: ", c.partition)?;
            match &c.before {
                Some((before, _)) => write!(f, "{before} -> {}", c.next)?,
                None => write!(f, "no position -> {}", c.next)?,
            }
            write!(f, " (Kafka holds {}..{}", c.low, c.high)?;
            if let Some(committed) = c.committed {
                write!(f, ", group at {committed}")?;
            }
            f.write_str(")")?;
            match &c.before {
                Some((_, id)) if *id != self.topic_id => {
                    write!(f, ": another topic, id {id}, so far")?
                }
                Some((before, _)) if c.next > *before => {
                    write!(f, ": skips {} offsets", c.next - before)?;
                }
                Some((before, _)) if c.next < *before => write!(
                    f,
                    ": {} offsets come again, those still marked as handled are recognised",
                    before - c.next
                )?,
                Some(_) => f.write_str(": unchanged")?,
                None if c.next > c.low => write!(f, ": skips {} offsets", c.next - c.low)?,
                None => {}
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(before: Option<(i64, &str)>, next: i64) -> String {
        let plan = Plan {
            consumer: "inventory".into(),
            topic: "orders".into(),
            topic_id: "new".into(),
            partitions: vec![Change {
                partition: 3,
                low: 5,
                high: 20,
                before: before.map(|(next, id)| (next, id.to_owned())),
                committed: Some(8),
                next,
            }],
        };
        plan.to_string()
    }

    #[test]
    fn a_plan_says_what_is_skipped_and_what_comes_again() {
        for (before, next, part) in [
            (None, 5, "no position -> 5 (Kafka holds 5..20, group at 8)"),
            (None, 9, "skips 4 offsets"),
            (Some((7, "new")), 9, "7 -> 9"),
            (Some((7, "new")), 9, "skips 2 offsets"),
            (Some((9, "new")), 6, "3 offsets come again"),
            (Some((9, "new")), 9, "unchanged"),
            (Some((9, "old")), 5, "another topic, id old"),
        ] {
            let text = change(before, next);
            assert!(text.contains(part), "{text}");
        }
    }
}
