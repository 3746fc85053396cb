//! What the inventory service wrote, against the committed orders and the messages: G5.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{Books, Effect, Mismatch, Notice, Order, PLACED, Report, Seen};

/// The ledger against the committed orders.
pub(super) fn ledger(committed: &HashMap<i64, &Order>, effects: &[Effect], report: &mut Report) {
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

/// Stock and points against the committed orders; independent of the ledger.
pub(super) fn balances(orders: &[Order], books: &Books, report: &mut Report) {
    let mut taken: BTreeMap<&str, i64> = BTreeMap::new();
    let mut granted: BTreeMap<&str, i64> = BTreeMap::new();
    for order in orders {
        *taken.entry(&order.sku).or_default() += order.quantity;
        *granted.entry(&order.customer).or_default() += order.points;
    }
    for sku in names(&taken, &books.stock) {
        let (initial, found) = books.stock.get(sku).copied().unwrap_or_default();
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
    for customer in names(&granted, &books.points) {
        let expected = granted.get(customer).copied().unwrap_or_default();
        let found = books.points.get(customer).copied().unwrap_or_default();
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

/// What either of the two names.
fn names<'a, T>(
    expected: &BTreeMap<&'a str, i64>,
    found: &'a BTreeMap<String, T>,
) -> BTreeSet<&'a str> {
    let found = found.keys().map(String::as_str);
    expected.keys().copied().chain(found).collect()
}

/// No state went back, and none is there without an order.
pub(super) fn states(
    committed: &HashMap<i64, &Order>,
    states: &BTreeMap<i64, String>,
    report: &mut Report,
) {
    let orders: BTreeSet<i64> = committed.keys().chain(states.keys()).copied().collect();
    for order in orders {
        let expected = committed.contains_key(&order).then_some(PLACED);
        let found = states.get(&order);
        if found.map(String::as_str) == expected {
            report.placed += 1;
        } else {
            report.mismatches.push(Mismatch::State {
                order,
                expected,
                found: found.cloned(),
            });
        }
    }
}

/// Of the two announcements of an order one was refused, and every late message was.
pub(super) fn refusals(seen: &[Seen], refused: &[(i64, Notice)], report: &mut Report) {
    let mut times: BTreeMap<(i64, Notice), (usize, usize)> = BTreeMap::new();
    for s in seen.iter().filter(|s| !s.copy && s.notice != Notice::First) {
        times.entry((s.order.id, s.notice)).or_default().0 += 1;
    }
    for (order, notice) in refused {
        times.entry((*order, *notice)).or_default().1 += 1;
        match notice {
            Notice::Late => report.refused_late += 1,
            Notice::First | Notice::Second => report.refused_second += 1,
        }
    }
    for ((order, notice), (expected, found)) in times {
        if expected != found {
            report.mismatches.push(Mismatch::Refusals {
                order,
                notice,
                expected,
                found,
            });
        }
    }
}
