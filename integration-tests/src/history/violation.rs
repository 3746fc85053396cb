//! The ways to break a promise.

use std::fmt;

use super::{Entry, Origin, Place};

/// A promise that was broken, by which message and where.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Violation {
    /// G1: in the topic, and never committed.
    Phantom(Entry, Place),
    /// In the topic with another key or number than it was committed with.
    Altered(Entry, Place),
    /// G2: committed, and not in the topic.
    Lost(Entry),
    /// G3: once more in the topic.
    Duplicate(Entry, Place),
    /// G4: after this later number of its key.
    Inversion(Entry, Place, i64),
    /// G4: one key in several partitions.
    Scattered(String, Vec<i32>),
    /// G1, G5: an effect of what was never committed.
    PhantomEffect(Entry),
    /// G5: no effect.
    LostEffect(Entry),
    /// G5: one more effect.
    DuplicateEffect(Entry),
    /// G4, at the consumer: after this later number of its key.
    InvertedEffect(Entry, i64),
    /// G6: committed after another process had committed this offset, at or past the record.
    ZombieEffect(Entry, Origin, i64),
    /// G7: a record without a committed effect, below this offset that Kafka already had.
    AcknowledgedEarly(Entry, Place, i64),
}

impl Violation {
    /// Every [`Violation::name`].
    pub const NAMES: [&str; 12] = [
        "phantom",
        "altered",
        "lost",
        "duplicate",
        "inversion",
        "scattered",
        "phantom effect",
        "lost effect",
        "duplicate effect",
        "inverted effect",
        "zombie effect",
        "acknowledged early",
    ];

    /// Its kind in a word or two.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Phantom(..) => "phantom",
            Self::Altered(..) => "altered",
            Self::Lost(..) => "lost",
            Self::Duplicate(..) => "duplicate",
            Self::Inversion(..) => "inversion",
            Self::Scattered(..) => "scattered",
            Self::PhantomEffect(..) => "phantom effect",
            Self::LostEffect(..) => "lost effect",
            Self::DuplicateEffect(..) => "duplicate effect",
            Self::InvertedEffect(..) => "inverted effect",
            Self::ZombieEffect(..) => "zombie effect",
            Self::AcknowledgedEarly(..) => "acknowledged early",
        }
    }

    fn guarantee(&self) -> &'static str {
        match self {
            Self::Phantom(..) | Self::Altered(..) => "G1",
            Self::Lost(..) => "G2",
            Self::Duplicate(..) => "G3",
            Self::Inversion(..) | Self::Scattered(..) | Self::InvertedEffect(..) => "G4",
            Self::PhantomEffect(..) | Self::LostEffect(..) | Self::DuplicateEffect(..) => "G5",
            Self::ZombieEffect(..) => "G6",
            Self::AcknowledgedEarly(..) => "G7",
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: ", self.guarantee(), self.name())?;
        match self {
            Self::Phantom(e, at) => write!(f, "{e}, {at}, was never committed"),
            Self::Altered(e, at) => {
                write!(f, "{e}, {at}, was committed with another key or number")
            }
            Self::Lost(e) => write!(f, "{e} was committed and is not in the topic"),
            Self::Duplicate(e, at) => write!(f, "{e} is once more in the topic, {at}"),
            Self::Inversion(e, at, after) => write!(f, "{e}, {at}, comes after number {after}"),
            Self::Scattered(key, partitions) => {
                write!(f, "key {key} is in the partitions {partitions:?}")
            }
            Self::PhantomEffect(e) => write!(f, "{e} has an effect and was never committed"),
            Self::LostEffect(e) => write!(f, "{e} was committed and has no effect"),
            Self::DuplicateEffect(e) => write!(f, "{e} has one more effect"),
            Self::InvertedEffect(e, after) => write!(f, "{e} has its effect after number {after}"),
            Self::ZombieEffect(e, origin, passed) => write!(
                f,
                "{e}, {}, has an effect by process {}, when another one had done offset {passed}",
                origin.place, origin.process
            ),
            Self::AcknowledgedEarly(e, at, next) => write!(
                f,
                "{e}, {at}, had no effect when offset {next} was already acknowledged"
            ),
        }
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "message {} (key {}, number {})",
            self.id, self.key, self.number
        )
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "partition {} offset {}", self.partition, self.offset)
    }
}
