//! A model of a database whose transactions commit in any order, for the tests of the position machine and of the reader.

use std::collections::{BTreeMap, BTreeSet};

use rand::RngExt as _;
use rand::rngs::StdRng;

use super::Holders;

/// A transaction holds its key's lock from before its first id until its end, as `enqueue` demands for G4.
#[derive(Debug, Default)]
pub(crate) struct Tx {
    pub(crate) name: String,
    pub(crate) key: usize,
    pub(crate) ids: Vec<i64>,
    /// Committed and visible, but its locks are not released yet.
    pub(crate) visible: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Db {
    pub(crate) open: Vec<Tx>,
    pub(crate) next_id: i64,
    pub(crate) begun: usize,
    pub(crate) restarts: usize,
    /// The server does not restart.
    pub(crate) steady: bool,
    pub(crate) rows: BTreeMap<i64, usize>,
    pub(crate) rolled_back: BTreeSet<i64>,
}

impl Db {
    pub(crate) fn holders(&self) -> Holders {
        self.open
            .iter()
            .filter(|tx| !tx.ids.is_empty())
            .map(|tx| tx.name.clone())
            .collect()
    }

    pub(crate) fn step(&mut self, rng: &mut StdRng) {
        match rng.random_range(0..10) {
            0..=3 => self.insert(rng),
            4..=5 => {
                let key = rng.random_range(0..4);
                if self.open.iter().all(|tx| tx.key != key) {
                    self.begun += 1;
                    self.open.push(Tx {
                        name: format!("3/{}", self.begun),
                        key,
                        ..Tx::default()
                    });
                }
            }
            6..=7 => self.end(rng, true),
            8 => self.end(rng, false),
            9 if !self.steady && rng.random_bool(0.2) => self.restart(rng),
            _ => {}
        }
    }

    fn insert(&mut self, rng: &mut StdRng) {
        let candidates: Vec<_> = (0..self.open.len())
            .filter(|n| !self.open[*n].visible)
            .collect();
        if candidates.is_empty() {
            return;
        }
        let tx = &mut self.open[candidates[rng.random_range(0..candidates.len())]];
        for _ in 0..rng.random_range(1..4) {
            self.next_id += 1;
            tx.ids.push(self.next_id);
            if rng.random_bool(0.1) {
                // ROLLBACK TO SAVEPOINT: the id is burnt, the transaction keeps its lock.
                self.rolled_back.extend(tx.ids.pop());
                tx.ids.insert(0, i64::MIN);
            }
        }
    }

    /// A commit becomes visible first and releases its locks later.
    fn end(&mut self, rng: &mut StdRng, commit: bool) {
        if self.open.is_empty() {
            return;
        }
        let n = rng.random_range(0..self.open.len());
        if self.open[n].visible {
            self.open.swap_remove(n);
            return;
        }
        let ids: Vec<_> = self.open[n]
            .ids
            .iter()
            .copied()
            .filter(|id| *id > 0)
            .collect();
        if commit {
            self.rows
                .extend(ids.into_iter().map(|id| (id, self.open[n].key)));
            self.open[n].visible = true;
        } else {
            self.rolled_back.extend(ids);
            self.open.swap_remove(n);
        }
    }

    /// Prepared transactions survive a restart under another name; the others roll back. Every session is new.
    fn restart(&mut self, rng: &mut StdRng) {
        self.restarts += 1;
        for mut tx in std::mem::take(&mut self.open) {
            if tx.visible {
                continue;
            }
            if rng.random_bool(0.5) {
                tx.name = format!("-1/{}", tx.name);
                self.open.push(tx);
            } else {
                self.rolled_back
                    .extend(tx.ids.into_iter().filter(|id| *id > 0));
            }
        }
    }

    pub(crate) fn finish(&mut self, rng: &mut StdRng) {
        while !self.open.is_empty() {
            let commit = rng.random_bool(0.7);
            self.end(rng, commit);
        }
    }
}
