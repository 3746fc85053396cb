//! A history and its checker: what was committed, what a reader saw, which effects happened, what was acknowledged to
//! Kafka, and whether they agree (G1 to G7).
//!
//! Pure: it needs no database and no broker. The truth about what was committed should come from the database itself (a
//! business row per message, written in the same transaction), because a commit whose answer was lost may have happened.
//!
//! ```
//! use oncebox_integration_tests::history::{Entry, History, Place};
//! use uuid::Uuid;
//!
//! let entry = |n: u128| Entry { id: Uuid::from_u128(n), key: "alice".into(), number: n as i64 };
//! let history = History {
//!     committed: vec![entry(1), entry(2)],
//!     published: vec![(entry(1), Place { partition: 0, offset: 7 })],
//!     ..History::default()
//! };
//! let verdict = history.check();
//! assert_eq!(verdict.violations[0].to_string(), "G2 lost: message 00000000-0000-0000-0000-000000000002 (key alice, number 2) was committed and is not in the topic");
//! ```

mod effects;
mod violation;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use uuid::Uuid;

pub use effects::{Acknowledged, Effect, Origin};
pub use violation::Violation;

/// One message, wherever it was seen.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    /// The message id.
    pub id: Uuid,
    /// The key.
    pub key: String,
    /// Ascending per key in the order in which the key's transactions were serialised: drawn under the key's lock.
    pub number: i64,
}

/// Where a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The partition.
    pub partition: i32,
    /// The offset.
    pub offset: i64,
}

/// What happened, seen from outside.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Messages of committed transactions, in any order.
    pub committed: Vec<Entry>,
    /// Records that a `read_committed` reader saw, in any order.
    pub published: Vec<(Entry, Place)>,
    /// Effects at the consumer in the order in which they were committed; `None` = there is no consumer.
    pub effects: Option<Vec<Effect>>,
    /// What Kafka said that the consumer had acknowledged, from time to time, in any order.
    pub acknowledged: Vec<Acknowledged>,
}

/// The verdict of [`History::check`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Messages of committed transactions.
    pub committed: usize,
    /// Records in the topic.
    pub published: usize,
    /// Effects at the consumer.
    pub effects: usize,
    /// How often it was looked at what was acknowledged.
    pub acknowledged: usize,
    /// Keys seen.
    pub keys: usize,
    /// Everything that breaks a promise.
    pub violations: Vec<Violation>,
}

impl Verdict {
    /// Whether every promise was kept.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.violations.is_empty()
    }

    /// Adds the verdict on another history.
    pub fn add(&mut self, other: Self) {
        self.committed += other.committed;
        self.published += other.published;
        self.effects += other.effects;
        self.acknowledged += other.acknowledged;
        self.keys += other.keys;
        self.violations.extend(other.violations);
    }

    /// How many violations have this name ([`Violation::name`]).
    #[must_use]
    pub fn count(&self, name: &str) -> usize {
        self.violations.iter().filter(|v| v.name() == name).count()
    }
}

impl History {
    /// Compares the parts.
    #[must_use]
    pub fn check(&self) -> Verdict {
        let committed: HashMap<Uuid, &Entry> = self
            .committed
            .iter()
            .map(|entry| (entry.id, entry))
            .collect();
        let mut published: Vec<_> = self.published.iter().collect();
        published.sort_by_key(|(_, place)| *place);

        let mut violations = Vec::new();
        let mut partitions: BTreeMap<&str, BTreeSet<i32>> = BTreeMap::new();
        let mut seen = HashSet::new();
        let mut last: HashMap<(&str, i32), i64> = HashMap::new();
        for (entry, place) in &published {
            match committed.get(&entry.id) {
                None => violations.push(Violation::Phantom(entry.clone(), *place)),
                Some(truth) if *truth != entry => {
                    violations.push(Violation::Altered(entry.clone(), *place));
                }
                Some(_) => {}
            }
            partitions
                .entry(&entry.key)
                .or_default()
                .insert(place.partition);
            if !seen.insert(entry.id) {
                // A second copy says nothing about the order; it is a violation of its own.
                violations.push(Violation::Duplicate(entry.clone(), *place));
                continue;
            }
            let before = last
                .entry((&entry.key, place.partition))
                .or_insert(i64::MIN);
            if entry.number < *before {
                violations.push(Violation::Inversion(entry.clone(), *place, *before));
            }
            *before = entry.number.max(*before);
        }
        for entry in &self.committed {
            if !seen.contains(&entry.id) {
                violations.push(Violation::Lost(entry.clone()));
            }
        }
        for (key, partitions) in &partitions {
            if partitions.len() > 1 {
                let partitions = partitions.iter().copied().collect();
                violations.push(Violation::Scattered((*key).to_owned(), partitions));
            }
        }
        if let Some(happened) = &self.effects {
            effects::check(&committed, &self.committed, happened, &mut violations);
            effects::check_owners(happened, &mut violations);
        }
        effects::check_acknowledged(&self.acknowledged, &published, &mut violations);
        Verdict {
            committed: self.committed.len(),
            published: self.published.len(),
            effects: self.effects.as_ref().map_or(0, Vec::len),
            acknowledged: self.acknowledged.len(),
            keys: partitions.len(),
            violations,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn entry(key: &str, number: i64) -> Entry {
        let name = format!("{key}{number}");
        let mut bytes = [0; 16];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        Entry {
            id: Uuid::from_bytes(bytes),
            key: key.to_owned(),
            number,
        }
    }

    fn place(partition: i32, offset: i64) -> Place {
        Place { partition, offset }
    }

    /// Three keys in two partitions; the ids within a partition are not ascending, as with late commits.
    fn clean() -> History {
        let committed: Vec<_> = ["a", "b", "c"]
            .iter()
            .flat_map(|key| (1..=4).map(|n| entry(key, n)))
            .collect();
        let published = committed
            .iter()
            .map(|e| {
                let partition = i32::from(e.key == "c");
                // b before a, interleaved, with holes for the markers
                let offset = e.number * 10 + i64::from(e.key == "a");
                (e.clone(), place(partition, offset))
            })
            .collect();
        History {
            effects: Some(committed.iter().cloned().map(Effect::from).collect()),
            committed,
            published,
            acknowledged: Vec::new(),
        }
    }

    /// The same, with two consumers that had the partitions one after the other, and with an offset that Kafka has.
    fn owned() -> History {
        let mut history = clean();
        let mut published = history.published.clone();
        published.sort_by_key(|(_, place)| *place);
        let effects = published.iter().map(|(entry, place)| Effect {
            entry: entry.clone(),
            origin: Some(Origin {
                place: *place,
                process: if place.offset < 30 { "first" } else { "second" }.to_owned(),
            }),
        });
        history.effects = Some(effects.collect());
        history.acknowledged = vec![
            Acknowledged {
                next: place(0, 32),
                effect: Some(31),
            },
            Acknowledged {
                next: place(1, 10),
                effect: None,
            },
        ];
        history
    }

    fn violations(history: &History) -> Vec<Violation> {
        history.check().violations
    }

    #[test]
    fn a_clean_history_is_clean() {
        let verdict = clean().check();
        assert!(verdict.is_clean(), "{:?}", verdict.violations);
        let counts = (
            verdict.committed,
            verdict.published,
            verdict.effects,
            verdict.keys,
        );
        assert_eq!(counts, (12, 12, 12, 3));
    }

    #[test]
    fn one_lost_message_is_found() {
        let mut history = clean();
        history.published.retain(|(e, _)| *e != entry("b", 3));
        assert_eq!(violations(&history), [Violation::Lost(entry("b", 3))]);
    }

    #[test]
    fn one_duplicate_is_found_and_is_no_inversion() {
        let mut history = clean();
        history.published.push((entry("a", 2), place(0, 99)));
        let expected = [Violation::Duplicate(entry("a", 2), place(0, 99))];
        assert_eq!(violations(&history), expected);
    }

    #[test]
    fn one_inversion_is_found() {
        let mut history = clean();
        for (e, at) in &mut history.published {
            if *e == entry("c", 2) {
                at.offset = 35;
            }
        }
        let expected = [Violation::Inversion(entry("c", 2), place(1, 35), 3)];
        assert_eq!(violations(&history), expected);
    }

    #[test]
    fn one_phantom_is_found() {
        let mut history = clean();
        history.published.push((entry("d", 1), place(1, 99)));
        let expected = [Violation::Phantom(entry("d", 1), place(1, 99))];
        assert_eq!(violations(&history), expected);
    }

    #[test]
    fn a_record_that_says_something_else_and_a_key_in_two_partitions_are_found() {
        let mut history = clean();
        history.published.retain(|(e, _)| *e != entry("a", 4));
        let altered = Entry {
            number: 5,
            ..entry("a", 4)
        };
        history.published.push((altered.clone(), place(1, 77)));
        let expected = [
            Violation::Altered(altered, place(1, 77)),
            Violation::Scattered("a".into(), vec![0, 1]),
        ];
        assert_eq!(violations(&history), expected);
    }

    #[test]
    fn a_lost_a_double_an_inverted_and_a_phantom_effect_are_found() {
        let mut history = clean();
        let effects = history.effects.as_mut().unwrap();
        effects.retain(|e| e.entry != entry("a", 1) && e.entry != entry("b", 2));
        effects.extend([entry("c", 4), entry("b", 2), entry("d", 9)].map(Effect::from));
        let expected = [
            Violation::DuplicateEffect(entry("c", 4)),
            Violation::InvertedEffect(entry("b", 2), 4),
            Violation::PhantomEffect(entry("d", 9)),
            Violation::LostEffect(entry("a", 1)),
        ];
        assert_eq!(violations(&history), expected);
    }

    #[test]
    fn a_consumer_after_the_other_and_an_offset_behind_its_effects_are_clean() {
        let verdict = owned().check();
        assert!(verdict.is_clean(), "{:?}", verdict.violations);
        assert_eq!(verdict.acknowledged, 2);
    }

    #[test]
    fn one_effect_of_a_consumer_that_had_lost_its_partition_is_found() {
        let mut history = owned();
        let effects = history.effects.as_mut().unwrap();
        let late = effects
            .iter()
            .position(|e| e.entry == entry("a", 2))
            .unwrap();
        // Committed when the second consumer had taken over, and before it, as if nobody had noticed.
        let mut late = effects.remove(late);
        let after = effects
            .iter()
            .position(|e| e.entry == entry("b", 3))
            .unwrap();
        let at = late.origin.clone().unwrap();
        effects.insert(after + 1, late.clone());
        let expected = [Violation::ZombieEffect(entry("a", 2), at.clone(), 30)];
        assert_eq!(violations(&history), expected);

        // The same by the consumer itself is no take-over: it has lanes.
        late.origin = Some(Origin {
            process: "second".into(),
            ..at
        });
        history.effects.as_mut().unwrap()[after + 1] = late;
        assert!(history.check().is_clean());
    }

    #[test]
    fn one_offset_that_was_acknowledged_before_its_effect_is_found() {
        let mut history = owned();
        history.acknowledged.push(Acknowledged {
            next: place(0, 32),
            effect: Some(30),
        });
        history.acknowledged.push(Acknowledged {
            next: place(1, 11),
            effect: None,
        });
        let expected = [
            Violation::AcknowledgedEarly(entry("a", 3), place(0, 31), 32),
            Violation::AcknowledgedEarly(entry("c", 1), place(1, 10), 11),
        ];
        assert_eq!(violations(&history), expected);
    }
}
