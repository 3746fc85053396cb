//! The consumer's half of a history.

use std::collections::{HashMap, HashSet};

use uuid::Uuid;

use super::{Entry, Place, Violation};

/// A committed effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    /// The message that it is the effect of.
    pub entry: Entry,
    /// Where that was consumed. `None` = not known, or the consumer has several lanes, which commit out of order: then G6 is
    /// judged by the duplicate effects alone.
    pub origin: Option<Origin>,
}

impl From<Entry> for Effect {
    fn from(entry: Entry) -> Self {
        Self {
            entry,
            origin: None,
        }
    }
}

/// Which record an effect came from, and by whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The record.
    pub place: Place,
    /// The consuming process: a name that no other process has, and none had.
    pub process: String,
}

/// One look at a partition: first at the offset in Kafka, then at the effects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acknowledged {
    /// The group's committed offset, so the first one that was not acknowledged.
    pub next: Place,
    /// The highest offset of the partition that had its effect committed when it was looked for *afterwards*; `None` = there
    /// was no effect.
    pub effect: Option<i64>,
}

/// G5, and G4 carried on to the consumer.
pub(super) fn check(
    truth: &HashMap<Uuid, &Entry>,
    committed: &[Entry],
    effects: &[Effect],
    violations: &mut Vec<Violation>,
) {
    let mut happened = HashSet::new();
    let mut last: HashMap<&str, i64> = HashMap::new();
    for Effect { entry, .. } in effects {
        if !truth.contains_key(&entry.id) {
            violations.push(Violation::PhantomEffect(entry.clone()));
        }
        if !happened.insert(entry.id) {
            violations.push(Violation::DuplicateEffect(entry.clone()));
            continue;
        }
        let before = last.entry(&entry.key).or_insert(i64::MIN);
        if entry.number < *before {
            violations.push(Violation::InvertedEffect(entry.clone(), *before));
        }
        *before = entry.number.max(*before);
    }
    for entry in committed {
        if !happened.contains(&entry.id) {
            violations.push(Violation::LostEffect(entry.clone()));
        }
    }
}

/// G6. In the order of the commits, no process is at or below what another one has done before it.
pub(super) fn check_owners(effects: &[Effect], violations: &mut Vec<Violation>) {
    let mut highest: HashMap<i32, &Origin> = HashMap::new();
    for effect in effects {
        let Some(origin) = &effect.origin else {
            continue;
        };
        let before = highest.entry(origin.place.partition).or_insert(origin);
        if origin.place.offset > before.place.offset {
            *before = origin;
        } else if origin.process != before.process {
            violations.push(Violation::ZombieEffect(
                effect.entry.clone(),
                origin.clone(),
                before.place.offset,
            ));
        }
    }
}

/// G7. Every record below an acknowledged offset had its effect. `published` is in the order of the places.
pub(super) fn check_acknowledged(
    acknowledged: &[Acknowledged],
    published: &[&(Entry, Place)],
    violations: &mut Vec<Violation>,
) {
    for Acknowledged { next, effect } in acknowledged {
        let first = Place {
            offset: effect.map_or(0, |effect| effect + 1),
            ..*next
        };
        let before = |end: Place| published.partition_point(|(_, place)| *place < end);
        let early = published.get(before(first)..before(*next));
        let early = early
            .unwrap_or_default()
            .iter()
            .map(|(entry, place)| Violation::AcknowledgedEarly(entry.clone(), *place, next.offset));
        violations.extend(early);
    }
}
