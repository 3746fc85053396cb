//! Named points of the publish loop, for tests and the demo that kill a relay between two steps.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// A point that the leading relay has just reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// A batch was read from the database; nothing was sent.
    BatchRead,
    /// The Kafka transaction was begun.
    Begun,
    /// About half of the batch's records were handed to the producer.
    Producing,
    /// Every record was acknowledged; the checkpoint of a large transaction was not sent.
    Acked,
    /// The checkpoint was sent inside the transaction; EndTxn was not.
    OffsetsSent,
    /// The EndTxn request was written; its answer was not read. Reported on a librdkafka thread.
    EndTxnSent,
    /// The transaction committed; the mark in the database was not written.
    Committed,
    /// The mark was written.
    Marked,
    /// Rows were parked in the database; no checkpoint has passed them.
    Parked,
    /// A transaction that releases parked rows committed; they still stand in the table.
    Released,
    /// The released rows are gone from the table.
    Unparked,
}

impl Step {
    /// The steps of every batch, in the order in which a large one passes them; a small one sends its checkpoint before its
    /// records.
    pub const LOOP: [Self; 8] = [
        Self::BatchRead,
        Self::Begun,
        Self::Producing,
        Self::Acked,
        Self::OffsetsSent,
        Self::EndTxnSent,
        Self::Committed,
        Self::Marked,
    ];

    /// The steps that only happen when something is parked or released.
    pub const PARKING: [Self; 3] = [Self::Parked, Self::Released, Self::Unparked];

    /// Every step.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::LOOP.into_iter().chain(Self::PARKING)
    }

    fn name(self) -> &'static str {
        match self {
            Self::BatchRead => "batch-read",
            Self::Begun => "begun",
            Self::Producing => "producing",
            Self::Acked => "acked",
            Self::OffsetsSent => "offsets-sent",
            Self::EndTxnSent => "endtxn-sent",
            Self::Committed => "committed",
            Self::Marked => "marked",
            Self::Parked => "parked",
            Self::Released => "released",
            Self::Unparked => "unparked",
        }
    }
}

impl From<oncebox_kafka::Step> for Step {
    fn from(step: oncebox_kafka::Step) -> Self {
        match step {
            oncebox_kafka::Step::Begun => Self::Begun,
            oncebox_kafka::Step::Producing => Self::Producing,
            oncebox_kafka::Step::Acked => Self::Acked,
            oncebox_kafka::Step::OffsetsSent => Self::OffsetsSent,
            oncebox_kafka::Step::EndTxnSent => Self::EndTxnSent,
            oncebox_kafka::Step::Committed => Self::Committed,
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Step {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::all().find(|step| step.name() == name).ok_or_else(|| {
            let known: Vec<_> = Self::all().map(Self::name).collect();
            format!("unknown step {name:?}; the steps are {}", known.join(", "))
        })
    }
}

/// Called at every [`Step`]. Must not block: `EndTxnSent` is reported from inside the Kafka client.
pub type StepHook = Arc<dyn Fn(Step) + Send + Sync>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for step in Step::all() {
            assert_eq!(step.to_string().parse::<Step>().unwrap(), step);
        }
        assert!(
            "between"
                .parse::<Step>()
                .unwrap_err()
                .contains("endtxn-sent")
        );
    }
}
