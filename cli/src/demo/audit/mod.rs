//! The audit: does what arrived agree with what was committed?
//!
//! Pure: it takes the committed orders, the records that a `read_committed` reader sees in the whole
//! topic, and the tables of the inventory service, and lists every disagreement. The demo ends with
//! it, and the integration tests use it to prove G1 to G5.

mod mismatch;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use uuid::Uuid;

pub use mismatch::Mismatch;

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

/// The balances of the inventory service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Balances {
    /// By sku: (at the beginning, now).
    pub stock: BTreeMap<String, (i64, i64)>,
    /// Points by customer.
    pub points: BTreeMap<String, i64>,
}

/// What the audit counted, and what does not agree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Orders committed.
    pub orders: usize,
    /// Records in the topic without the injected copies.
    pub published: usize,
    /// Injected copies in the topic.
    pub copies: usize,
    /// Keys whose order was checked.
    pub keys: usize,
    /// Records published after a record with a higher outbox id: late commits of low ids, for example.
    pub out_of_id_order: usize,
    /// Rows in the ledger of effects.
    pub effects: usize,
    /// Pieces that should be in stock, and are.
    pub stock: (i64, i64),
    /// Points that should be granted, and are.
    pub points: (i64, i64),
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
pub fn audit(orders: &[Order], seen: &[Seen], effects: &[Effect], balances: &Balances) -> Report {
    let mut report = Report {
        orders: orders.len(),
        ..Report::default()
    };
    let committed: HashMap<i64, &Order> = orders.iter().map(|o| (o.id, o)).collect();
    topic(&committed, seen, &mut report);
    ledger(&committed, effects, &mut report);
    balance(orders, balances, &mut report);
    report
}

/// G1, G2, G3, G4: the topic against the committed orders.
fn topic(committed: &HashMap<i64, &Order>, seen: &[Seen], report: &mut Report) {
    let mut sorted: Vec<&Seen> = seen.iter().collect();
    sorted.sort_by_key(|s| (s.partition, s.offset));
    let mut times: BTreeMap<i64, usize> = BTreeMap::new();
    let mut last: HashMap<(&str, i32), i64> = HashMap::new();
    let mut partitions: BTreeMap<&str, BTreeSet<i32>> = BTreeMap::new();
    let mut highest: HashMap<i32, i64> = HashMap::new();
    for s in sorted {
        let at = (s.partition, s.offset);
        match committed.get(&s.order.id) {
            None => report.mismatches.push(Mismatch::Phantom {
                order: s.order.id,
                at,
            }),
            Some(order) if **order != s.order || s.key != order.customer => {
                report.mismatches.push(Mismatch::Altered {
                    order: s.order.id,
                    at,
                });
            }
            Some(_) => {}
        }
        partitions.entry(&s.key).or_default().insert(s.partition);
        if s.copy {
            // Somebody else's late copy says nothing about the relay's order or count.
            report.copies += 1;
            continue;
        }
        report.published += 1;
        *times.entry(s.order.id).or_default() += 1;
        let before = last.entry((&s.key, s.partition)).or_insert(i64::MIN);
        if s.order.seq < *before {
            report.mismatches.push(Mismatch::Inverted {
                key: s.key.clone(),
                at,
                seq: s.order.seq,
                after: *before,
            });
        }
        *before = s.order.seq.max(*before);
        let high = highest.entry(s.partition).or_insert(i64::MIN);
        if s.outbox_id < *high {
            report.out_of_id_order += 1;
        }
        *high = s.outbox_id.max(*high);
    }
    for (order, times) in &times {
        if *times > 1 {
            report.mismatches.push(Mismatch::PublishedTwice {
                order: *order,
                times: *times,
            });
        }
    }
    let mut lost: Vec<i64> = committed
        .keys()
        .filter(|id| !times.contains_key(id))
        .copied()
        .collect();
    lost.sort_unstable();
    report
        .mismatches
        .extend(lost.into_iter().map(|order| Mismatch::Lost { order }));
    report.keys = partitions.len();
    for (key, partitions) in partitions {
        if partitions.len() > 1 {
            let partitions = partitions.into_iter().collect();
            report.mismatches.push(Mismatch::Scattered {
                key: key.to_owned(),
                partitions,
            });
        }
    }
}

/// G5: the ledger against the committed orders.
fn ledger(committed: &HashMap<i64, &Order>, effects: &[Effect], report: &mut Report) {
    report.effects = effects.len();
    let mut times: BTreeMap<i64, usize> = BTreeMap::new();
    for effect in effects {
        *times.entry(effect.order).or_default() += 1;
        let Some(order) = committed.get(&effect.order) else {
            continue;
        };
        let same = order.sku == effect.sku
            && order.quantity == effect.quantity
            && order.customer == effect.customer
            && order.points == effect.points;
        if !same {
            report.mismatches.push(Mismatch::WrongEffect {
                order: effect.order,
            });
        }
    }
    for (order, times) in &times {
        if !committed.contains_key(order) {
            report
                .mismatches
                .push(Mismatch::PhantomEffect { order: *order });
        } else if *times > 1 {
            report.mismatches.push(Mismatch::EffectTwice {
                order: *order,
                times: *times,
            });
        }
    }
    let mut missing: Vec<i64> = committed
        .keys()
        .filter(|id| !times.contains_key(id))
        .copied()
        .collect();
    missing.sort_unstable();
    report.mismatches.extend(
        missing
            .into_iter()
            .map(|order| Mismatch::NoEffect { order }),
    );
}

/// G5: the balances against the committed orders; independent of the ledger.
fn balance(orders: &[Order], balances: &Balances, report: &mut Report) {
    let mut taken: BTreeMap<&str, i64> = BTreeMap::new();
    let mut granted: BTreeMap<&str, i64> = BTreeMap::new();
    for order in orders {
        *taken.entry(&order.sku).or_default() += order.quantity;
        *granted.entry(&order.customer).or_default() += order.points;
    }
    let skus: BTreeSet<&str> = taken
        .keys()
        .copied()
        .chain(balances.stock.keys().map(String::as_str))
        .collect();
    for sku in skus {
        let (initial, found) = balances.stock.get(sku).copied().unwrap_or_default();
        let expected = initial - taken.get(sku).copied().unwrap_or_default();
        report.stock.0 += expected;
        report.stock.1 += found;
        if expected != found {
            report.mismatches.push(Mismatch::Stock {
                sku: sku.to_owned(),
                expected,
                found,
            });
        }
    }
    let customers: BTreeSet<&str> = granted
        .keys()
        .copied()
        .chain(balances.points.keys().map(String::as_str))
        .collect();
    for customer in customers {
        let expected = granted.get(customer).copied().unwrap_or_default();
        let found = balances.points.get(customer).copied().unwrap_or_default();
        report.points.0 += expected;
        report.points.1 += found;
        if expected != found {
            report.mismatches.push(Mismatch::Points {
                customer: customer.to_owned(),
                expected,
                found,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three customers, two skus, twelve orders; everything arrived once.
    fn world() -> (Vec<Order>, Vec<Seen>, Vec<Effect>, Balances) {
        let mut orders = Vec::new();
        let mut seen = Vec::new();
        let mut effects = Vec::new();
        let mut balances = Balances::default();
        for sku in ["tea", "cup"] {
            balances.stock.insert(sku.into(), (100, 100));
        }
        for id in 1..=12_i64 {
            let customer = format!("customer-{}", id % 3);
            let sku = if id % 2 == 0 { "tea" } else { "cup" };
            let order = Order {
                id,
                customer: customer.clone(),
                seq: (id + 2) / 3,
                sku: sku.into(),
                quantity: 1 + id % 4,
                points: 10 * id,
            };
            let partition = i32::try_from(id % 3 % 2).unwrap();
            seen.push(Seen {
                partition,
                offset: 2 * id,
                key: customer.clone(),
                order: order.clone(),
                message_id: Uuid::from_u128(id.unsigned_abs().into()),
                outbox_id: id,
                copy: false,
            });
            effects.push(Effect {
                order: id,
                sku: sku.into(),
                quantity: order.quantity,
                customer: customer.clone(),
                points: order.points,
            });
            balances.stock.get_mut(sku).unwrap().1 -= order.quantity;
            *balances.points.entry(customer).or_default() += order.points;
            orders.push(order);
        }
        (orders, seen, effects, balances)
    }

    fn only(report: &Report) -> &Mismatch {
        assert_eq!(report.mismatches.len(), 1, "{:?}", report.mismatches);
        &report.mismatches[0]
    }

    #[test]
    fn a_perfect_run_is_clean() {
        let (orders, seen, effects, balances) = world();
        let report = audit(&orders, &seen, &effects, &balances);
        assert!(report.is_clean(), "{:?}", report.mismatches);
        assert_eq!(
            (report.orders, report.published, report.effects, report.keys),
            (12, 12, 12, 3)
        );
        assert_eq!(report.stock.0, report.stock.1);
    }

    #[test]
    fn one_lost_message_is_found() {
        let (orders, mut seen, effects, balances) = world();
        seen.remove(4);
        assert_eq!(
            only(&audit(&orders, &seen, &effects, &balances)),
            &Mismatch::Lost { order: 5 }
        );
    }

    #[test]
    fn one_duplicate_is_found() {
        let (orders, mut seen, effects, balances) = world();
        // The last of its key, again: no inversion comes with it.
        let mut again = seen[11].clone();
        again.offset += 1;
        seen.push(again);
        assert_eq!(
            only(&audit(&orders, &seen, &effects, &balances)),
            &Mismatch::PublishedTwice {
                order: 12,
                times: 2
            }
        );
    }

    #[test]
    fn an_injected_copy_is_counted_and_is_no_duplicate() {
        let (orders, mut seen, effects, balances) = world();
        let mut copy = seen[0].clone();
        (copy.offset, copy.copy) = (100, true);
        seen.push(copy);
        let report = audit(&orders, &seen, &effects, &balances);
        assert!(report.is_clean());
        assert_eq!((report.published, report.copies), (12, 1));
    }

    #[test]
    fn one_inversion_is_found() {
        let (orders, mut seen, effects, balances) = world();
        // Orders 3 and 6 belong to one key and one partition.
        let (a, b) = (seen[2].offset, seen[5].offset);
        (seen[2].offset, seen[5].offset) = (b, a);
        let report = audit(&orders, &seen, &effects, &balances);
        assert_eq!(
            only(&report),
            &Mismatch::Inverted {
                key: "customer-0".into(),
                at: (0, b),
                seq: 1,
                after: 2
            }
        );
        assert_eq!(
            report.out_of_id_order,
            1 + 1,
            "order 5 of the same partition stands between them"
        );
    }

    #[test]
    fn one_phantom_is_found() {
        let (mut orders, seen, mut effects, mut balances) = world();
        let rolled_back = orders.remove(11);
        effects.remove(11);
        balances.stock.get_mut(&rolled_back.sku).unwrap().1 += rolled_back.quantity;
        *balances.points.get_mut(&rolled_back.customer).unwrap() -= rolled_back.points;
        let report = audit(&orders, &seen, &effects, &balances);
        assert_eq!(
            only(&report),
            &Mismatch::Phantom {
                order: 12,
                at: (0, 24)
            }
        );
    }

    #[test]
    fn one_double_effect_is_found_in_ledger_and_balances() {
        let (orders, seen, mut effects, mut balances) = world();
        effects.push(effects[1].clone());
        balances.stock.get_mut("tea").unwrap().1 -= effects[1].quantity;
        *balances.points.get_mut("customer-2").unwrap() += effects[1].points;
        let report = audit(&orders, &seen, &effects, &balances);
        assert_eq!(report.mismatches.len(), 3, "{:?}", report.mismatches);
        assert_eq!(
            report.mismatches[0],
            Mismatch::EffectTwice { order: 2, times: 2 }
        );
    }

    #[test]
    fn one_missing_and_one_phantom_effect_are_found() {
        let (orders, seen, mut effects, balances) = world();
        effects[0].order = 99;
        let report = audit(&orders, &seen, &effects, &balances);
        assert_eq!(
            report.mismatches,
            [
                Mismatch::PhantomEffect { order: 99 },
                Mismatch::NoEffect { order: 1 }
            ]
        );
    }

    #[test]
    fn a_balance_off_by_one_is_found() {
        let (orders, seen, effects, mut balances) = world();
        balances.stock.get_mut("cup").unwrap().1 += 1;
        assert!(matches!(
            only(&audit(&orders, &seen, &effects, &balances)),
            Mismatch::Stock { .. }
        ));
    }

    #[test]
    fn a_scattered_key_and_an_altered_record_are_found() {
        let (orders, mut seen, effects, balances) = world();
        seen[11].partition = 7;
        assert!(matches!(
            only(&audit(&orders, &seen, &effects, &balances)),
            Mismatch::Scattered { .. }
        ));
        seen[11].partition = 0;
        seen[3].order.quantity += 1;
        assert!(matches!(
            only(&audit(&orders, &seen, &effects, &balances)),
            Mismatch::Altered { order: 4, .. }
        ));
    }
}
