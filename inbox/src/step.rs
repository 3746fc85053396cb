//! Named points in the life of a delivery, for tests and for the demo's fault injection.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Called at every [`Step`], on a thread of the runtime or of the consumer. It may end the process: that is what it is for. To
/// block on a thread of the runtime it needs `tokio::task::block_in_place`.
pub type StepHook = Arc<dyn Fn(Step) + Send + Sync>;

/// A point that a delivery passes. `Display` and `FromStr` use the names given here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Step {
    /// `owned`: a position row was taken; Kafka does not deliver yet.
    Owned,
    /// `received`: a message came from Kafka; no transaction yet.
    Received,
    /// `marked`: the dedup mark is inserted, the handler was not called yet.
    Marked,
    /// `duplicate`: the mark was there; the handler is skipped.
    Duplicate,
    /// `handled`: the handler returned Ok; the position is not advanced yet.
    Handled,
    /// `failed`: the handler failed and its writes are rolled back.
    Failed,
    /// `before-commit`: the position is advanced; COMMIT is the next statement.
    BeforeCommit,
    /// `committed`: the database has answered the COMMIT; the offset is not stored yet.
    Committed,
    /// `offset-stored`: the offset is ready for Kafka.
    OffsetStored,
    /// `dead-lettered`: a dead letter, its mark and the position are committed.
    DeadLettered,
}

impl Step {
    const ALL: [(Self, &'static str); 10] = [
        (Self::Owned, "owned"),
        (Self::Received, "received"),
        (Self::Marked, "marked"),
        (Self::Duplicate, "duplicate"),
        (Self::Handled, "handled"),
        (Self::Failed, "failed"),
        (Self::BeforeCommit, "before-commit"),
        (Self::Committed, "committed"),
        (Self::OffsetStored, "offset-stored"),
        (Self::DeadLettered, "dead-lettered"),
    ];
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL
            .iter()
            .find(|(step, _)| step == self)
            .map_or("", |(_, name)| name);
        f.pad(name)
    }
}

/// The name belongs to no step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown step {name:?}; the steps of a delivery are {}", Step::ALL.map(|(_, name)| name).join(", "))]
pub struct UnknownStep {
    name: String,
}

impl FromStr for Step {
    type Err = UnknownStep;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .iter()
            .find(|(_, n)| *n == name)
            .map(|(step, _)| *step)
            .ok_or_else(|| UnknownStep {
                name: name.to_owned(),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for (step, name) in Step::ALL {
            assert_eq!(step.to_string(), name);
            assert_eq!(name.parse::<Step>(), Ok(step));
        }
        assert!(
            "commited"
                .parse::<Step>()
                .unwrap_err()
                .to_string()
                .contains("committed")
        );
    }
}
