//! G1, G2 and G4 of the position machine against a model of a database whose transactions commit in any order.

use std::collections::BTreeMap;

use proptest::prelude::*;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use super::super::Tally;
use super::super::model::Db;
use super::*;

/// What Kafka holds: batches, each with the position that travelled in the same transaction.
struct Relay {
    tracker: Tracker,
    published: Vec<i64>,
    acknowledged: (Position, usize),
    unacknowledged: Vec<(Position, usize)>,
    limit: usize,
}

const LIMIT: usize = 3_000;

impl Relay {
    fn new(limit: usize) -> Self {
        let tracker = Tracker::load(Position::default(), Holders::new(), limit);
        Self {
            tracker,
            published: vec![],
            acknowledged: (Position::default(), 0),
            unacknowledged: vec![],
            limit,
        }
    }

    /// One round, the database going on between any two looks. A restart of the server ends it.
    fn round(&mut self, db: &mut Db, rng: &mut StdRng, busy: bool) -> Option<Round> {
        let restarts = db.restarts;
        let gaps = self.tracker.gaps();
        let before = (!gaps.is_empty()).then(|| db.holders());
        db_goes_on(db, rng, busy);
        if db.restarts != restarts {
            self.crash(db);
            return None;
        }
        let limit = rng.random_range(1..6);
        let in_gaps: Vec<_> = db
            .rows
            .keys()
            .copied()
            .filter(|id| gaps.contains(*id))
            .collect();
        let after_high: Vec<_> = db
            .rows
            .range(self.tracker.high() + 1..)
            .map(|(id, _)| *id)
            .take(limit)
            .collect();
        let late = &in_gaps[..in_gaps.len().min(limit)];
        let sample = Sample {
            before: before.as_ref(),
            late,
            late_cut: in_gaps.len() > limit,
            new: &after_high,
        };
        let round = self.tracker.advance(sample).unwrap();
        db_goes_on(db, rng, busy);
        if db.restarts != restarts {
            self.crash(db);
            return None;
        }
        if round.needs_holders {
            self.tracker.record(&db.holders());
        }
        self.published.extend(&late[..round.late]);
        self.published.extend(&after_high[..round.new]);
        if round.late + round.new > 0 {
            self.unacknowledged
                .push((self.tracker.position(), self.published.len()));
        }
        Some(round)
    }

    fn acknowledge(&mut self, n: usize) {
        if let Some(last) = self
            .unacknowledged
            .drain(..n.min(self.unacknowledged.len()))
            .next_back()
        {
            self.acknowledged = last;
        }
    }

    /// Whatever was not acknowledged was aborted; the holders are those of now.
    fn crash(&mut self, db: &Db) {
        self.unacknowledged.clear();
        self.published.truncate(self.acknowledged.1);
        self.tracker = Tracker::load(self.acknowledged.0.clone(), db.holders(), self.limit);
    }
}

fn db_goes_on(db: &mut Db, rng: &mut StdRng, busy: bool) {
    for _ in 0..if busy { rng.random_range(0..4) } else { 0 } {
        db.step(rng);
    }
}

fn check_position(position: &Position, published: &[i64]) {
    let mut settled = Tally::default();
    for id in published {
        settled.add(*id);
        assert!(
            *id <= position.high && !position.gaps.contains(*id),
            "row {id} is published but not settled"
        );
    }
    assert_eq!(settled, position.settled);
}

fn run(seed: u64, limit: usize) {
    let mut rng = StdRng::seed_from_u64(seed);
    let rng = &mut rng;
    let mut db = Db::default();
    let mut relay = Relay::new(limit);
    for _ in 0..120 {
        let restarts = db.restarts;
        db_goes_on(&mut db, rng, true);
        if db.restarts != restarts {
            relay.crash(&db);
        }
        match rng.random_range(0..8) {
            0..=4 => {
                relay.round(&mut db, rng, true);
            }
            5..=6 => relay.acknowledge(rng.random_range(0..4)),
            _ => relay.crash(&db),
        }
        check_position(
            &relay.acknowledged.0,
            &relay.published[..relay.acknowledged.1],
        );
        assert!(relay.tracker.bytes() <= limit + Tracker::RESERVE);
    }
    db.finish(rng);
    let mut idle = 0;
    for _ in 0..100_000 {
        let gaps = relay.tracker.gaps().len();
        let round = relay.round(&mut db, rng, false).unwrap();
        relay.acknowledge(usize::MAX);
        idle = if round.late + round.new == 0 && relay.tracker.gaps().len() == gaps {
            idle + 1
        } else {
            0
        };
        if idle > 3 {
            break;
        }
    }
    // G1 and G2: every committed row once, no other.
    let mut published = relay.published.clone();
    published.sort_unstable();
    assert_eq!(
        published,
        db.rows.keys().copied().collect::<Vec<_>>(),
        "seed {seed}"
    );
    assert!(published.iter().all(|id| !db.rolled_back.contains(id)));
    assert!(
        relay.tracker.gaps().is_empty(),
        "seed {seed}: gaps left: {}",
        relay.tracker.gaps()
    );
    // G4: per key in id order, which is the order in which its transactions were serialised.
    let mut last = BTreeMap::new();
    for id in &relay.published {
        let before = last.insert(db.rows[id], *id).unwrap_or(0);
        assert!(
            before < *id,
            "seed {seed}: key {} inverted: {before} before {id}",
            db.rows[id]
        );
    }
    check_position(&relay.acknowledged.0, &relay.published);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn g2_committed_means_published_once_whatever_commits_when(seed: u64) {
        run(seed, LIMIT);
    }

    #[test]
    fn g2_holds_when_gaps_do_not_fit(seed: u64) {
        run(seed, 12);
    }
}

fn holders(names: &[&str]) -> Holders {
    names.iter().map(|n| (*n).to_owned()).collect()
}

fn tracker_with_gap(limit: usize) -> Tracker {
    let mut tracker = Tracker::load(Position::default(), Holders::new(), limit);
    let round = tracker
        .advance(Sample {
            before: None,
            late: &[],
            late_cut: false,
            new: &[1, 5],
        })
        .unwrap();
    assert!(round.needs_holders);
    tracker
}

#[test]
fn g2_a_gap_that_nobody_looked_at_is_never_burnt() {
    let mut tracker = tracker_with_gap(LIMIT);
    let none = Holders::new();
    tracker
        .advance(Sample {
            before: Some(&none),
            late: &[],
            late_cut: false,
            new: &[],
        })
        .unwrap();
    assert_eq!(tracker.gaps().len(), 1);
    tracker.record(&none);
    tracker
        .advance(Sample {
            before: Some(&none),
            late: &[],
            late_cut: false,
            new: &[],
        })
        .unwrap();
    assert!(
        tracker.gaps().is_empty(),
        "a recorded empty set may be burnt"
    );
}

#[test]
fn g2_a_gap_is_burnt_only_when_every_recorded_holder_is_gone() {
    let mut tracker = tracker_with_gap(LIMIT);
    tracker.record(&holders(&["4/1", "5/1"]));
    for still in [&["4/1"][..], &["5/1", "9/9"]] {
        tracker
            .advance(Sample {
                before: Some(&holders(still)),
                late: &[],
                late_cut: false,
                new: &[],
            })
            .unwrap();
        assert_eq!(tracker.gaps().len(), 1);
    }
    tracker
        .advance(Sample {
            before: Some(&holders(&["9/9"])),
            late: &[],
            late_cut: false,
            new: &[],
        })
        .unwrap();
    assert!(tracker.gaps().is_empty());
}

#[test]
fn g2_nothing_above_a_cut_is_burnt() {
    let mut tracker = tracker_with_gap(LIMIT);
    tracker.record(&holders(&["4/1"]));
    tracker
        .advance(Sample {
            before: Some(&holders(&["4/1"])),
            late: &[],
            late_cut: false,
            new: &[9],
        })
        .unwrap();
    tracker.record(&holders(&["4/1"]));
    // Ids 2 to 4 and 6 to 8 are open; the writer commits 2, 3, 6 and ends; the read stops after 2.
    let gone = Holders::new();
    let round = tracker
        .advance(Sample {
            before: Some(&gone),
            late: &[2],
            late_cut: true,
            new: &[10],
        })
        .unwrap();
    assert_eq!(
        (round.late, round.new),
        (1, 0),
        "new rows wait behind a cut"
    );
    let round = tracker
        .advance(Sample {
            before: Some(&gone),
            late: &[3, 6],
            late_cut: false,
            new: &[10],
        })
        .unwrap();
    assert_eq!((round.late, round.new), (2, 1));
    assert!(tracker.gaps().is_empty());
}

#[test]
fn g2_loaded_gaps_take_the_holders_of_now() {
    let mut first = tracker_with_gap(LIMIT);
    first.record(&holders(&["4/4"]));
    // After a restart of the server the prepared transaction has another name.
    let mut second = Tracker::load(first.position(), holders(&["-1/700"]), LIMIT);
    second
        .advance(Sample {
            before: Some(&holders(&["-1/700"])),
            late: &[],
            late_cut: false,
            new: &[],
        })
        .unwrap();
    assert_eq!(second.gaps().len(), 1);
}

#[test]
fn high_is_held_when_gaps_do_not_fit_and_goes_on_when_they_close() {
    let mut tracker = Tracker::load(Position::default(), Holders::new(), 6);
    let new: Vec<i64> = (1..40).map(|n| n * 2).collect();
    let round = tracker
        .advance(Sample {
            before: None,
            late: &[],
            late_cut: false,
            new: &new,
        })
        .unwrap();
    assert!(round.held && round.new < new.len(), "{round:?}");
    tracker.record(&holders(&["4/1"]));
    let high = tracker.high();
    let rest: Vec<_> = new.iter().copied().filter(|id| *id > high).collect();
    let still = holders(&["4/1"]);
    let round = tracker
        .advance(Sample {
            before: Some(&still),
            late: &[],
            late_cut: false,
            new: &rest,
        })
        .unwrap();
    assert_eq!((round.new, round.held), (0, true));
    let round = tracker
        .advance(Sample {
            before: Some(&Holders::new()),
            late: &[],
            late_cut: false,
            new: &rest,
        })
        .unwrap();
    assert!(round.new > 0);
}

#[test]
fn a_row_outside_every_gap_is_an_error() {
    let mut tracker = tracker_with_gap(LIMIT);
    assert_eq!(
        tracker
            .advance(Sample {
                before: None,
                late: &[7],
                late_cut: false,
                new: &[]
            })
            .unwrap_err(),
        Unexpected(7)
    );
    let mut tracker = tracker_with_gap(LIMIT);
    assert_eq!(
        tracker
            .advance(Sample {
                before: None,
                late: &[],
                late_cut: false,
                new: &[5]
            })
            .unwrap_err(),
        Unexpected(5)
    );
}
