//! What the demo shows while it runs: one living line on a terminal, plain lines elsewhere.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use oncebox_inbox::Stats;

use super::relays::POINTS;

/// The counters of a run, and the way to show them.
#[derive(Debug)]
pub(super) struct Board {
    pub(super) committed: AtomicUsize,
    pub(super) rolled_back: AtomicUsize,
    pub(super) slow: AtomicUsize,
    pub(super) kills: [AtomicUsize; POINTS.len()],
    inventory: Mutex<Vec<Stats>>,
    planned: (usize, usize),
    started: Instant,
    terminal: bool,
}

/// What instances of the inventory service counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counted {
    pub(super) deliveries: u64,
    pub(super) duplicates: u64,
    /// Of the duplicates: kept out by the mark in the database, and by the hint before it.
    pub(super) by_mark: u64,
    pub(super) by_hint: u64,
    pub(super) effects: u64,
    pub(super) dead_letters: u64,
    /// How often a partition was taken.
    pub(super) ownership: u64,
}

impl Counted {
    pub(super) fn of(stats: &Stats) -> Self {
        Self {
            deliveries: stats.deliveries(),
            duplicates: stats.duplicates(),
            by_mark: stats.duplicates_by_mark(),
            by_hint: stats.duplicates_by_hint(),
            effects: stats.effects(),
            dead_letters: stats.dead_letters(),
            ownership: stats.ownership(),
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            deliveries: self.deliveries + other.deliveries,
            duplicates: self.duplicates + other.duplicates,
            by_mark: self.by_mark + other.by_mark,
            by_hint: self.by_hint + other.by_hint,
            effects: self.effects + other.effects,
            dead_letters: self.dead_letters + other.dead_letters,
            ownership: self.ownership + other.ownership,
        }
    }
}

impl Board {
    pub(super) fn new(orders: usize, kills: usize) -> Self {
        Self {
            committed: AtomicUsize::new(0),
            rolled_back: AtomicUsize::new(0),
            slow: AtomicUsize::new(0),
            kills: Default::default(),
            inventory: Mutex::default(),
            planned: (orders, kills),
            started: Instant::now(),
            terminal: io::stdout().is_terminal(),
        }
    }

    /// An instance of the inventory service, whose counters are shown from now on, also when it has ended.
    pub(super) fn watch(&self, stats: Stats) {
        self.instances().push(stats);
    }

    /// Everything the instances of the inventory service counted so far.
    pub(super) fn counted(&self) -> Counted {
        let all = self.instances();
        all.iter()
            .map(Counted::of)
            .fold(Counted::default(), Counted::plus)
    }

    fn instances(&self) -> MutexGuard<'_, Vec<Stats>> {
        self.inventory
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(super) fn killed(&self) -> usize {
        self.kills.iter().map(|k| k.load(SeqCst)).sum()
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// A line that stays.
    pub(super) fn say(&self, text: &str) {
        let text = crate::redact::scrub(text);
        let mut out = io::stdout().lock();
        // A closed pipe is no reason to stop in the middle of the run: the exit code still tells.
        let _ = if self.terminal {
            writeln!(out, "\r\x1b[K{text}")
        } else {
            writeln!(out, "{text}")
        };
        let _ = out.flush();
    }

    /// Shows the counters for ever; dropped at the end of the run.
    pub(super) async fn show(&self) {
        let pause = if self.terminal {
            Duration::from_millis(150)
        } else {
            Duration::from_secs(5)
        };
        loop {
            tokio::time::sleep(pause).await;
            let line = self.line();
            let mut out = io::stdout().lock();
            let _ = if self.terminal {
                write!(out, "\r\x1b[K{line}")
            } else {
                writeln!(out, "{line}")
            };
            let _ = out.flush();
        }
    }

    fn line(&self) -> String {
        let counted = self.counted();
        format!(
            "{:5.1} s  orders {}/{}  rolled back {}  kills {}/{}  effects {}  duplicates {}",
            self.elapsed().as_secs_f64(),
            self.committed.load(SeqCst),
            self.planned.0,
            self.rolled_back.load(SeqCst),
            self.killed(),
            self.planned.1,
            counted.effects,
            counted.duplicates,
        )
    }
}
