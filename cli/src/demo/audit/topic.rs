//! What a `read_committed` reader sees, against the committed orders: G1 to G4.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{Mismatch, Notice, Order, Report, Seen};

/// The partitions of each key, and the last number of each customer in each of them.
#[derive(Default)]
struct Keys<'a> {
    partitions: BTreeMap<&'a str, BTreeSet<i32>>,
    last: HashMap<(&'a str, i32), i64>,
}

pub(super) fn check(committed: &HashMap<i64, &Order>, seen: &[Seen], report: &mut Report) {
    let mut sorted: Vec<&Seen> = seen.iter().collect();
    sorted.sort_by_key(|s| (s.partition, s.offset));
    let mut partitions: BTreeMap<(i64, Notice), Vec<i32>> = BTreeMap::new();
    let mut keys = Keys::default();
    let mut highest: HashMap<i32, i64> = HashMap::new();
    for s in sorted {
        report.mismatches.extend(content(committed, s));
        keys.partitions
            .entry(&s.key)
            .or_default()
            .insert(s.partition);
        // What somebody else wrote says nothing about the relay's order or count.
        if s.copy {
            report.copies += 1;
            continue;
        }
        match s.notice {
            Notice::Late => {
                report.late += 1;
                continue;
            }
            Notice::First => {
                report.published += 1;
                report.mismatches.extend(keys.inversion(s));
            }
            Notice::Second => report.second += 1,
        }
        let published = partitions.entry((s.order.id, s.notice)).or_default();
        published.push(s.partition);
        let high = highest.entry(s.partition).or_insert(i64::MIN);
        if s.outbox_id < *high {
            report.out_of_id_order += 1;
        }
        *high = s.outbox_id.max(*high);
    }
    counts(committed, &partitions, report);
    let customers: BTreeSet<&str> = keys.last.keys().map(|(key, _)| *key).collect();
    report.keys = customers.len();
    for (key, partitions) in keys.partitions {
        if partitions.len() > 1 {
            let partitions = partitions.into_iter().collect();
            report.mismatches.push(Mismatch::Scattered {
                key: key.to_owned(),
                partitions,
            });
        }
    }
}

/// G1, and that the record says what the order says.
fn content(committed: &HashMap<i64, &Order>, s: &Seen) -> Option<Mismatch> {
    let at = (s.partition, s.offset);
    let id = s.order.id;
    let Some(order) = committed.get(&id) else {
        return Some(Mismatch::Phantom { order: id, at });
    };
    let key = match s.notice {
        Notice::First | Notice::Late => order.customer.clone(),
        Notice::Second => order.second_key(),
    };
    (**order != s.order || s.key != key).then_some(Mismatch::Altered { order: id, at })
}

impl<'a> Keys<'a> {
    /// G4: whether a later order of the customer came first.
    fn inversion(&mut self, s: &'a Seen) -> Option<Mismatch> {
        let last = self.last.entry((&s.key, s.partition)).or_insert(i64::MIN);
        let after = *last;
        *last = s.order.seq.max(after);
        (s.order.seq < after).then(|| Mismatch::Inverted {
            key: s.key.clone(),
            at: (s.partition, s.offset),
            seq: s.order.seq,
            after,
        })
    }
}

/// G2, G3: each message of each order is there once.
fn counts(
    committed: &HashMap<i64, &Order>,
    partitions: &BTreeMap<(i64, Notice), Vec<i32>>,
    report: &mut Report,
) {
    for ((order, _), found) in partitions {
        if found.len() > 1 {
            report.mismatches.push(Mismatch::PublishedTwice {
                order: *order,
                times: found.len(),
            });
        }
    }
    let mut ids: Vec<i64> = committed.keys().copied().collect();
    ids.sort_unstable();
    for order in ids {
        let of = |notice| partitions.get(&(order, notice));
        let twice = committed[&order].is_announced_twice();
        if of(Notice::First).is_none() || (twice && of(Notice::Second).is_none()) {
            report.mismatches.push(Mismatch::Lost { order });
        }
        if let (Some(first), Some(second)) = (of(Notice::First), of(Notice::Second))
            && first != second
        {
            report.apart += 1;
        }
    }
}
