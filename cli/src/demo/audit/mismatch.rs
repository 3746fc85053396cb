//! The kinds of disagreement, each with the guarantee that it breaks.

use std::fmt;

use super::Notice;

/// A disagreement.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mismatch {
    /// G2: committed, but not in the topic.
    Lost {
        /// The order.
        order: i64,
    },
    /// G1: in the topic, but not committed.
    Phantom {
        /// The order.
        order: i64,
        /// Where it is.
        at: (i32, i64),
    },
    /// G3: more than once in the topic.
    PublishedTwice {
        /// The order.
        order: i64,
        /// How often.
        times: usize,
    },
    /// A record that says something else than its order, or has another key.
    Altered {
        /// The order.
        order: i64,
        /// Where it is.
        at: (i32, i64),
    },
    /// G4: a later order of the key came first.
    Inverted {
        /// The key.
        key: String,
        /// Where the late one is.
        at: (i32, i64),
        /// Its number within the key.
        seq: i64,
        /// The number that came before it.
        after: i64,
    },
    /// G4: the records of one key are in several partitions.
    Scattered {
        /// The key.
        key: String,
        /// The partitions.
        partitions: Vec<i32>,
    },
    /// G5: no effect.
    NoEffect {
        /// The order.
        order: i64,
    },
    /// G5: more than one effect.
    EffectTwice {
        /// The order.
        order: i64,
        /// How many.
        times: usize,
    },
    /// G1, G5: an effect of an order that was not committed.
    PhantomEffect {
        /// The order.
        order: i64,
    },
    /// An effect of another size than its order's.
    WrongEffect {
        /// The order.
        order: i64,
    },
    /// The stock of a sku is not what the orders leave.
    Stock {
        /// The sku.
        sku: String,
        /// What should be there.
        expected: i64,
        /// What is there.
        found: i64,
    },
    /// The points of a customer are not what the orders grant.
    Points {
        /// The customer.
        customer: String,
        /// What should be there.
        expected: i64,
        /// What is there.
        found: i64,
    },
    /// The state of an order is not the last one: it went back, or never came so far.
    State {
        /// The order.
        order: i64,
        /// What should be there.
        expected: Option<&'static str>,
        /// What is there.
        found: Option<String>,
    },
    /// A guard did not refuse as many messages about an order as there were to refuse.
    Refusals {
        /// The order.
        order: i64,
        /// Which messages.
        notice: Notice,
        /// How many there were.
        expected: usize,
        /// How many were refused.
        found: usize,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost { order } => write!(
                f,
                "lost: order {order} was committed, but is not in the topic (G2)"
            ),
            Self::Phantom { order, at: (p, o) } => {
                write!(
                    f,
                    "phantom: order {order} at partition {p} offset {o} was never committed (G1)"
                )
            }
            Self::PublishedTwice { order, times } => {
                write!(
                    f,
                    "duplicate: order {order} is {times} times in the topic (G3)"
                )
            }
            Self::Altered { order, at: (p, o) } => {
                write!(
                    f,
                    "altered: the record at partition {p} offset {o} differs from order {order}"
                )
            }
            Self::Inverted {
                key,
                at: (p, o),
                seq,
                after,
            } => {
                write!(
                    f,
                    "inversion: key {key}: number {seq} comes after {after}, partition {p} offset {o} (G4)"
                )
            }
            Self::Scattered { key, partitions } => {
                write!(
                    f,
                    "scattered: key {key} is in the partitions {partitions:?} (G4)"
                )
            }
            Self::NoEffect { order } => write!(f, "no effect: order {order} was not applied (G5)"),
            Self::EffectTwice { order, times } => write!(
                f,
                "double effect: order {order} was applied {times} times (G5)"
            ),
            Self::PhantomEffect { order } => write!(
                f,
                "phantom effect: order {order} was applied, but never committed (G1)"
            ),
            Self::WrongEffect { order } => write!(
                f,
                "wrong effect: order {order} was applied with other amounts (G5)"
            ),
            Self::Stock {
                sku,
                expected,
                found,
            } => write!(f, "stock of {sku}: expected {expected}, found {found} (G5)"),
            Self::Points {
                customer,
                expected,
                found,
            } => {
                write!(
                    f,
                    "points of {customer}: expected {expected}, found {found} (G5)"
                )
            }
            Self::State {
                order,
                expected,
                found,
            } => write!(
                f,
                "state of order {order}: expected {}, found {} (G5)",
                expected.unwrap_or("none"),
                found.as_deref().unwrap_or("none")
            ),
            Self::Refusals {
                order,
                notice,
                expected,
                found,
            } => write!(
                f,
                "{} messages of order {order}: expected {expected} refused, found {found} (G5)",
                notice.name()
            ),
        }
    }
}
