//! The audit: does what arrived agree with what was committed?
//!
//! Pure: it takes the committed orders, the records that a `read_committed` reader sees in the whole
//! topic, and the tables of the inventory service, and lists every disagreement. The demo ends with
//! it, and the integration tests use it to prove G1 to G5.

mod books;
mod mismatch;
#[cfg(test)]
mod tests;
mod topic;

use std::collections::{BTreeMap, HashMap};

use uuid::Uuid;

pub use mismatch::Mismatch;

/// The state that every committed order has in the inventory service at the end.
pub const PLACED: &str = "placed";
/// One order in this many is announced twice.
const TWICE: i64 = 10;

/// A committed order: what has to arrive, and its effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// The order's number.
    pub id: i64,
    /// Who ordered; the key of the message.
    pub customer: String,
    /// 1, 2, 3 … within the customer, in commit order (drawn under the customer's row lock).
    pub seq: i64,
    /// What was ordered.
    pub sku: String,
    /// How many pieces leave the stock.
    pub quantity: i64,
    /// How many points the customer is granted.
    pub points: i64,
}

impl Order {
    /// Whether the order has a second message, as from a payment platform that notifies twice.
    pub fn is_announced_twice(&self) -> bool {
        self.id % TWICE == 0
    }

    /// The key of the second message: seldom in the partition of the first one's, so that the two race.
    pub fn second_key(&self) -> String {
        format!("payment-{}", self.id)
    }
}

/// Which message about an order it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Notice {
    /// The order service's message.
    First,
    /// The same news in a second message of the order service, with an id and a key of its own.
    Second,
    /// Old news with an id of its own, from another producer: the order is not placed yet.
    Late,
}

impl Notice {
    const ALL: [Self; 3] = [Self::First, Self::Second, Self::Late];

    /// `first`, `second` or `late`.
    pub fn name(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Second => "second",
            Self::Late => "late",
        }
    }

    /// The notice of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|notice| notice.name() == name)
    }
}

/// A record that a `read_committed` reader saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Its partition.
    pub partition: i32,
    /// Its offset.
    pub offset: i64,
    /// The record's key.
    pub key: String,
    /// The order in the payload.
    pub order: Order,
    /// Which message about the order it is.
    pub notice: Notice,
    /// The message id in the envelope.
    pub message_id: Uuid,
    /// The outbox id in the envelope.
    pub outbox_id: i64,
    /// A duplicate that was injected on purpose, with the same envelope: not the relay's work.
    pub copy: bool,
}

/// One row of the inventory service's ledger: an effect that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    /// The order that caused it.
    pub order: i64,
    /// What left the stock.
    pub sku: String,
    /// How much of it.
    pub quantity: i64,
    /// Who was granted points.
    pub customer: String,
    /// How many.
    pub points: i64,
}

/// What the inventory service wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Books {
    /// The ledger.
    pub effects: Vec<Effect>,
    /// By sku: (at the beginning, now).
    pub stock: BTreeMap<String, (i64, i64)>,
    /// Points by customer.
    pub points: BTreeMap<String, i64>,
    /// The state of each order.
    pub states: BTreeMap<i64, String>,
    /// The messages that a guard refused, by their order: one row each.
    pub refused: Vec<(i64, Notice)>,
}

/// What the audit counted, and what does not agree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Orders committed.
    pub orders: usize,
    /// First messages in the topic, without the injected ones.
    pub published: usize,
    /// Second messages in the topic.
    pub second: usize,
    /// Second messages in another partition than the first one.
    pub apart: usize,
    /// Injected copies in the topic.
    pub copies: usize,
    /// Injected late messages in the topic.
    pub late: usize,
    /// Keys whose order was checked.
    pub keys: usize,
    /// Records published after a record with a higher outbox id: late commits of low ids, for example.
    pub out_of_id_order: usize,
    /// Rows in the ledger of effects.
    pub effects: usize,
    /// Messages refused because the order was there already.
    pub refused_second: usize,
    /// Messages refused because the order's state would have gone back.
    pub refused_late: usize,
    /// Pieces that should be in stock, and are.
    pub stock: (i64, i64),
    /// Points that should be granted, and are.
    pub points: (i64, i64),
    /// Orders whose state is what it should be.
    pub placed: usize,
    /// Every disagreement.
    pub mismatches: Vec<Mismatch>,
}

impl Report {
    /// Whether everything agrees.
    pub fn is_clean(&self) -> bool {
        self.mismatches.is_empty()
    }
}

/// Compares what was committed with what was published and what was applied.
///
/// `seen` needs no order; it is sorted by partition and offset here.
pub fn audit(orders: &[Order], seen: &[Seen], books: &Books) -> Report {
    let mut report = Report {
        orders: orders.len(),
        ..Report::default()
    };
    let committed: HashMap<i64, &Order> = orders.iter().map(|o| (o.id, o)).collect();
    topic::check(&committed, seen, &mut report);
    books::ledger(&committed, &books.effects, &mut report);
    books::balances(orders, books, &mut report);
    books::states(&committed, &books.states, &mut report);
    books::refusals(seen, &books.refused, &mut report);
    report
}
