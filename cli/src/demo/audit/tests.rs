use super::*;

/// Three customers, two skus, twelve orders, one of them announced twice, and a late message; everything arrived once.
fn world() -> (Vec<Order>, Vec<Seen>, Books) {
    let mut orders = Vec::new();
    let mut seen = Vec::new();
    let mut books = Books::default();
    for sku in ["tea", "cup"] {
        books.stock.insert(sku.into(), (100, 100));
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
            notice: Notice::First,
            message_id: Uuid::from_u128(id.unsigned_abs().into()),
            outbox_id: id,
            copy: false,
        });
        books.effects.push(Effect {
            order: id,
            sku: sku.into(),
            quantity: order.quantity,
            customer: customer.clone(),
            points: order.points,
        });
        books.stock.get_mut(sku).unwrap().1 -= order.quantity;
        *books.points.entry(customer).or_default() += order.points;
        books.states.insert(id, PLACED.into());
        orders.push(order);
    }
    let second = Seen {
        partition: 2,
        key: orders[9].second_key(),
        notice: Notice::Second,
        ..seen[9].clone()
    };
    let late = Seen {
        offset: 100,
        notice: Notice::Late,
        ..seen[2].clone()
    };
    seen.extend([second, late]);
    books.refused = vec![(10, Notice::Second), (3, Notice::Late)];
    (orders, seen, books)
}

fn only(report: &Report) -> &Mismatch {
    assert_eq!(report.mismatches.len(), 1, "{:?}", report.mismatches);
    &report.mismatches[0]
}

#[test]
fn a_perfect_run_is_clean() {
    let (orders, seen, books) = world();
    let report = audit(&orders, &seen, &books);
    assert!(report.is_clean(), "{:?}", report.mismatches);
    assert_eq!(
        (report.orders, report.published, report.effects, report.keys),
        (12, 12, 12, 3)
    );
    assert_eq!((report.second, report.apart, report.late), (1, 1, 1));
    assert_eq!((report.refused_second, report.refused_late), (1, 1));
    assert_eq!((report.placed, report.out_of_id_order), (12, 0));
    assert_eq!(report.stock.0, report.stock.1);
}

#[test]
fn one_lost_message_is_found() {
    let (orders, mut seen, books) = world();
    seen.remove(4);
    assert_eq!(
        only(&audit(&orders, &seen, &books)),
        &Mismatch::Lost { order: 5 }
    );
}

#[test]
fn one_duplicate_is_found() {
    let (orders, mut seen, books) = world();
    // The last of its key, again: no inversion comes with it.
    let mut again = seen[11].clone();
    again.offset += 1;
    seen.push(again);
    assert_eq!(
        only(&audit(&orders, &seen, &books)),
        &Mismatch::PublishedTwice {
            order: 12,
            times: 2
        }
    );
}

#[test]
fn an_injected_copy_is_counted_and_is_no_duplicate() {
    let (orders, mut seen, books) = world();
    let mut copy = seen[0].clone();
    (copy.offset, copy.copy) = (100, true);
    seen.push(copy);
    let report = audit(&orders, &seen, &books);
    assert!(report.is_clean());
    assert_eq!((report.published, report.copies), (12, 1));
}

#[test]
fn one_inversion_is_found() {
    let (orders, mut seen, books) = world();
    // Orders 3 and 6 belong to one key and one partition.
    let (a, b) = (seen[2].offset, seen[5].offset);
    (seen[2].offset, seen[5].offset) = (b, a);
    let report = audit(&orders, &seen, &books);
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
    let (mut orders, seen, mut books) = world();
    let rolled_back = orders.remove(11);
    books.states.remove(&12);
    books.effects.remove(11);
    books.stock.get_mut(&rolled_back.sku).unwrap().1 += rolled_back.quantity;
    *books.points.get_mut(&rolled_back.customer).unwrap() -= rolled_back.points;
    let report = audit(&orders, &seen, &books);
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
    let (orders, seen, mut books) = world();
    books.effects.push(books.effects[1].clone());
    books.stock.get_mut("tea").unwrap().1 -= books.effects[1].quantity;
    *books.points.get_mut("customer-2").unwrap() += books.effects[1].points;
    let report = audit(&orders, &seen, &books);
    assert_eq!(report.mismatches.len(), 3, "{:?}", report.mismatches);
    assert_eq!(
        report.mismatches[0],
        Mismatch::EffectTwice { order: 2, times: 2 }
    );
}

#[test]
fn one_missing_and_one_phantom_effect_are_found() {
    let (orders, seen, mut books) = world();
    books.effects[0].order = 99;
    let report = audit(&orders, &seen, &books);
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
    let (orders, seen, mut books) = world();
    books.stock.get_mut("cup").unwrap().1 += 1;
    assert!(matches!(
        only(&audit(&orders, &seen, &books)),
        Mismatch::Stock { .. }
    ));
}

#[test]
fn a_scattered_key_and_an_altered_record_are_found() {
    let (orders, mut seen, books) = world();
    seen[11].partition = 7;
    assert!(matches!(
        only(&audit(&orders, &seen, &books)),
        Mismatch::Scattered { .. }
    ));
    seen[11].partition = 0;
    seen[3].order.quantity += 1;
    assert!(matches!(
        only(&audit(&orders, &seen, &books)),
        Mismatch::Altered { order: 4, .. }
    ));
}

#[test]
fn an_order_that_was_announced_twice_and_had_both_effects_is_found() {
    let (orders, seen, mut books) = world();
    books.effects.push(books.effects[9].clone());
    books.stock.get_mut("tea").unwrap().1 -= orders[9].quantity;
    *books.points.get_mut("customer-1").unwrap() += orders[9].points;
    books.refused.remove(0);
    let report = audit(&orders, &seen, &books);
    assert_eq!(report.mismatches.len(), 4, "{:?}", report.mismatches);
    assert_eq!(
        (&report.mismatches[0], &report.mismatches[3]),
        (
            &Mismatch::EffectTwice {
                order: 10,
                times: 2
            },
            &Mismatch::Refusals {
                order: 10,
                notice: Notice::Second,
                expected: 1,
                found: 0
            }
        )
    );
}

#[test]
fn a_second_message_that_is_not_published_or_has_the_first_ones_key_is_found() {
    let (orders, mut seen, mut books) = world();
    seen[12].key = orders[9].customer.clone();
    let report = audit(&orders, &seen, &books);
    assert!(matches!(
        report.mismatches[..],
        [
            Mismatch::Altered { order: 10, .. },
            Mismatch::Scattered { .. }
        ]
    ));
    seen.remove(12);
    books.refused.remove(0);
    assert_eq!(
        only(&audit(&orders, &seen, &books)),
        &Mismatch::Lost { order: 10 }
    );
}

#[test]
fn a_state_that_went_back_is_found() {
    let (orders, seen, mut books) = world();
    books.states.insert(3, "pending".into());
    books.refused.pop();
    let report = audit(&orders, &seen, &books);
    assert_eq!(
        report.mismatches,
        [
            Mismatch::State {
                order: 3,
                expected: Some(PLACED),
                found: Some("pending".into())
            },
            Mismatch::Refusals {
                order: 3,
                notice: Notice::Late,
                expected: 1,
                found: 0
            }
        ]
    );
    assert_eq!(report.placed, 11);
}

#[test]
fn a_state_that_is_missing_or_has_no_order_is_found() {
    let (orders, seen, mut books) = world();
    books.states.remove(&5);
    books.states.insert(99, PLACED.into());
    let report = audit(&orders, &seen, &books);
    let found = |m: &Mismatch| match m {
        Mismatch::State { order, found, .. } => (*order, found.is_some()),
        other => panic!("{other}"),
    };
    let found: Vec<_> = report.mismatches.iter().map(found).collect();
    assert_eq!(found, [(5, false), (99, true)]);
}

#[test]
fn a_message_that_was_refused_twice_is_found() {
    let (orders, seen, mut books) = world();
    books.refused.push((3, Notice::Late));
    assert!(matches!(
        only(&audit(&orders, &seen, &books)),
        Mismatch::Refusals {
            order: 3,
            expected: 1,
            found: 2,
            ..
        }
    ));
}

#[test]
fn half_of_an_orders_effects_is_found() {
    let (orders, seen, mut books) = world();
    // The stock was taken, the handler failed, and the next attempt took it again.
    books.stock.get_mut("tea").unwrap().1 -= orders[1].quantity;
    assert!(matches!(
        only(&audit(&orders, &seen, &books)),
        Mismatch::Stock { .. }
    ));
}
