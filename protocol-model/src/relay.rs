//! One relay: what it holds in memory. A crash throws all of it away.

use crate::database::{Parked, Row};
use crate::position::{Checkpoint, Live, Look, Position};
use crate::set::Set;

/// How far a relay is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Not running.
    #[default]
    Down,
    /// On its way to the lead; every recovery comes through here.
    Start(Start),
    /// Reading and publishing.
    Leading,
    /// Stopped with a reason that an operator must look at (G10).
    Stopped,
}

/// The next step of a start (§3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Start {
    /// First look, before anybody is fenced.
    Look,
    /// The compare-and-set of the lease.
    Take {
        /// Who led when it looked.
        seen: u8,
        /// The epoch to take.
        epoch: u8,
    },
    /// `init_transactions`. Without [`FenceBeforePosition`](crate::Rule::FenceBeforePosition), the position is known.
    Fence(Option<Checkpoint>),
    /// Who holds the insert lock before the identity check.
    Holders,
    /// Checkpoint, mark and rows.
    Check,
    /// The chosen position names a release.
    FinishRelease(Checkpoint),
    /// The offsets-only transaction.
    Claim(Checkpoint),
    /// The gaps take the holders of now.
    Load,
}

/// Where the reader is in its round (§2).
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub enum Reading {
    /// Between two rounds.
    #[default]
    Idle,
    /// The holders before the rows are known.
    Probed(Set),
    /// Only without [`HoldersBeforeRows`](crate::Rule::HoldersBeforeRows): the rows are known, the holders are not.
    Looked(Look),
    /// New holes wait for their holders.
    NeedsHolders(Batch),
}

/// Rows to publish together, and the position after them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Batch {
    /// Late rows first.
    pub rows: Vec<Row>,
    /// Fixed when the rows were read.
    pub position: Position,
}

/// What becomes of the rows of a batch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Messages to publish.
    pub publish: Vec<u8>,
    /// Rows to park.
    pub park: Vec<(u8, Parked)>,
    /// Messages of the batch that are parked, now or before.
    pub parked: Set,
}

/// Where the publisher is with its batch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub enum Publishing {
    /// Between two batches.
    #[default]
    Idle,
    /// Knows what to publish and what to park.
    Planned(Plan),
    /// What must be parked is written.
    Begun(Plan),
    /// Every record is acknowledged.
    Produced(Plan),
    /// The checkpoint is in the transaction.
    OffsetsSent(Plan, Checkpoint),
    /// The brokers have committed; the answer is on its way.
    Committed(Plan, Checkpoint),
    /// A release is committed; its rows still stand in the table.
    Released(Checkpoint),
}

/// A relay process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Relay {
    /// How far it is.
    pub stage: Stage,
    /// Its lease.
    pub epoch: u8,
    /// Its producer's epoch.
    pub producer: u8,
    /// The server that its session is connected to.
    pub session: u8,
    /// The acknowledged position: known to be committed.
    pub acknowledged: Checkpoint,
    /// The read position.
    pub live: Live,
    /// The holders of the start, until they have ended and the rows were checked again.
    pub start_holders: Set,
    /// The reader.
    pub reading: Reading,
    /// Read, not acknowledged.
    pub batches: Vec<Batch>,
    /// The publisher.
    pub publishing: Publishing,
    /// A request had no answer: the producer is made anew after this transaction.
    pub tainted: bool,
}

impl Relay {
    /// The process ends.
    pub fn end(&mut self) {
        *self = Self::default();
    }

    /// It goes on with a start: everything in memory is thrown away.
    pub fn start(&mut self) {
        *self = Self {
            stage: Stage::Start(Start::Look),
            ..Self::default()
        };
    }

    /// It stops, and says why.
    pub fn stop(&mut self) {
        *self = Self {
            stage: Stage::Stopped,
            ..Self::default()
        };
    }

    /// Whether the process runs.
    #[must_use]
    pub fn runs(&self) -> bool {
        !matches!(self.stage, Stage::Down | Stage::Stopped)
    }

    /// Whether everything that it read is acknowledged.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.stage == Stage::Leading
            && self.batches.is_empty()
            && matches!(self.reading, Reading::Idle | Reading::Probed(_))
            && self.publishing == Publishing::Idle
    }
}
