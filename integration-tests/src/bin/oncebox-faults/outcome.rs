//! What came of the faults.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use anyhow::Result;
use oncebox_integration_tests::history::{Verdict, Violation};

use crate::kind::Kind;
use crate::scene::Scene;

/// Of one scene, or of all.
#[derive(Default)]
pub(crate) struct Outcome {
    hits: BTreeMap<String, Tally>,
    verdict: Verdict,
    /// Transactions committed, rolled back, held open, in doubt; parked rows seen.
    counts: [usize; 4],
    parked: usize,
    aborted: usize,
}

/// How often a kind hit, how often it found no occasion, and the slowest recovery.
#[derive(Clone, Copy, Default)]
struct Tally {
    hits: usize,
    missed: usize,
    slowest: Duration,
}

impl Outcome {
    /// Notes a fault: how long the recovery took, if it hit.
    pub(crate) fn hit(&mut self, kind: Kind, recovery: Option<Duration>) {
        let tally = self.hits.entry(kind.to_string()).or_default();
        match recovery {
            Some(took) => {
                tally.hits += 1;
                tally.slowest = tally.slowest.max(took);
            }
            None => tally.missed += 1,
        }
    }

    /// Ends a scene and notes what happened in it.
    pub(crate) async fn end(&mut self, scene: Scene) -> Result<()> {
        let counts = std::sync::Arc::clone(&scene.counts);
        self.parked = scene.parked;
        (self.verdict, self.aborted) = scene.end().await?;
        let load = |n: &AtomicUsize| n.load(Relaxed);
        self.counts = [
            load(&counts.committed),
            load(&counts.rolled_back),
            load(&counts.slow),
            load(&counts.unknown),
        ];
        Ok(())
    }

    pub(crate) fn add(&mut self, other: Self) {
        for (kind, tally) in other.hits {
            let all = self.hits.entry(kind).or_default();
            all.hits += tally.hits;
            all.missed += tally.missed;
            all.slowest = all.slowest.max(tally.slowest);
        }
        self.verdict.add(other.verdict);
        for (all, more) in self.counts.iter_mut().zip(other.counts) {
            *all += more;
        }
        self.parked += other.parked;
        self.aborted += other.aborted;
    }

    /// Every fault hit, every promise was kept, and it was looked.
    pub(crate) fn is_clean(&self) -> bool {
        self.hits.values().all(|tally| tally.missed == 0)
            && self.verdict.acknowledged > 0
            && self.verdict.is_clean()
    }

    pub(crate) fn print(&self) {
        println!(
            "\n{:<34} {:>5} {:>7} {:>17}",
            "fault", "hits", "missed", "slowest recovery"
        );
        for (kind, tally) in &self.hits {
            let slowest = tally.slowest.as_secs_f64();
            println!(
                "{kind:<34} {:>5} {:>7} {slowest:>15.1} s",
                tally.hits, tally.missed
            );
        }
        let faults: usize = self.hits.values().map(|t| t.hits).sum();
        println!("{:<34} {faults:>5}", "all");
        let [committed, rolled_back, held, unknown] = self.counts;
        println!(
            "\ntransactions: {committed} committed, {rolled_back} rolled back, {held} held open, {unknown} whose commit got no answer"
        );
        let verdict = &self.verdict;
        println!(
            "rows: {} committed, {} published on {} keys, {} effects, {} seen parked on their way; {} records of aborted transactions stay invisible; {} looks at acknowledged offsets",
            verdict.committed,
            verdict.published,
            verdict.keys,
            verdict.effects,
            self.parked,
            self.aborted,
            verdict.acknowledged
        );
        let found = Violation::NAMES.map(|name| format!("{name} {}", verdict.count(name)));
        println!("{}", found.join(", "));
        for violation in verdict.violations.iter().take(20) {
            println!("  {violation}");
        }
    }
}
