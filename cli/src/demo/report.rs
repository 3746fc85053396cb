//! The end of a run in numbers, and the verdict.

use std::fmt::Write as _;

use super::audit::{Mismatch, Report};
use super::progress::Counted;
use super::relays::POINTS;

/// The most mismatches that are printed one by one.
const SHOWN: usize = 20;

/// Everything a run knows at its end.
#[derive(Clone, Debug, Default)]
pub(super) struct Summary {
    pub(super) audit: Report,
    pub(super) rolled_back: usize,
    /// Slow orders, and how many of them were overtaken by younger ids; `None` where one writer makes that impossible.
    pub(super) slow: Option<(usize, usize)>,
    pub(super) counted: Counted,
    pub(super) kills: [usize; POINTS.len()],
    /// How many kills of each point were asked for.
    pub(super) planned: [usize; POINTS.len()],
    pub(super) copies: usize,
    pub(super) delivered_again: usize,
    pub(super) seconds: f64,
}

impl Summary {
    /// What disagrees: the audit's mismatches, and faults that were to be injected and did not happen. A run without
    /// faults proves nothing.
    pub(super) fn objections(&self) -> Vec<String> {
        let mut all: Vec<String> = self
            .audit
            .mismatches
            .iter()
            .map(Mismatch::to_string)
            .collect();
        let mut must = |holds: bool, what: &str| {
            if !holds {
                all.push(what.to_owned());
            }
        };
        let counted = self.counted;
        must(
            self.kills == self.planned,
            "not every planned kill happened",
        );
        must(self.rolled_back > 0, "no order was rolled back");
        must(
            self.copies > 0 && self.audit.copies == self.copies,
            "the injected copies are not all in the topic",
        );
        must(self.delivered_again > 0, "nothing was delivered again");
        must(
            counted.duplicates >= (self.copies + self.delivered_again) as u64,
            "fewer duplicates were suppressed than were injected",
        );
        must(
            counted.deliveries >= counted.effects + counted.duplicates + counted.dead_letters,
            "there are fewer deliveries than effects + duplicates + dead letters",
        );
        must(
            counted.effects == self.audit.effects as u64,
            "the inventory counted other effects than its ledger holds",
        );
        must(counted.dead_letters == 0, "there are dead letters");
        if let Some((slow, overtaken)) = self.slow {
            must(
                slow > 0 && overtaken > 0,
                "no slow transaction was overtaken by younger ids",
            );
        }
        all
    }

    /// The audit as text.
    pub(super) fn text(&self) -> String {
        let a = &self.audit;
        let c = &self.counted;
        let mut out = String::new();
        let mut row = |name: &str, value: String| {
            let _ = writeln!(out, "  {name:<22} {value}");
        };
        row(
            "orders committed",
            format!("{}, rolled back {}", a.orders, self.rolled_back),
        );
        row(
            "messages published",
            format!(
                "{} (read_committed, the whole topic), injected copies {}",
                a.published, a.copies
            ),
        );
        row(
            "deliveries",
            format!(
                "{} = effects {} + duplicates suppressed {} + cut short by a stop or rebalance {}",
                c.deliveries,
                c.effects,
                c.duplicates,
                c.deliveries
                    .saturating_sub(c.effects + c.duplicates + c.dead_letters)
            ),
        );
        row(
            "duplicates injected",
            format!(
                "{} copies in the topic, {} delivered again",
                self.copies, self.delivered_again
            ),
        );
        row("effects in the ledger", a.effects.to_string());
        row(
            "stock",
            format!("expected {}, found {}", a.stock.0, a.stock.1),
        );
        row(
            "points",
            format!("expected {}, found {}", a.points.0, a.points.1),
        );
        let inverted = a
            .mismatches
            .iter()
            .filter(|m| matches!(m, Mismatch::Inverted { .. }))
            .count();
        row(
            "order per key",
            format!("{} keys, {inverted} inversions", a.keys),
        );
        match self.slow {
            Some((slow, overtaken)) => row(
                "slow transactions",
                format!(
                    "{slow} held a low id, {overtaken} overtaken; {} records out of id order",
                    a.out_of_id_order
                ),
            ),
            None => row(
                "slow transactions",
                "skipped: SQLite has one writer, nothing can overtake".to_owned(),
            ),
        }
        let kills: Vec<String> = POINTS
            .iter()
            .zip(self.kills)
            .map(|(step, n)| format!("{step} {n}"))
            .collect();
        row(
            "relay kills",
            format!("{}: {}", self.kills.iter().sum::<usize>(), kills.join(", ")),
        );
        row("time", format!("{:.1} s", self.seconds));
        let objections = self.objections();
        if objections.is_empty() {
            out.push_str("RESULT: every committed order arrived exactly once\n");
        } else {
            for objection in objections.iter().take(SHOWN) {
                let _ = writeln!(out, "  MISMATCH {objection}");
            }
            let _ = writeln!(out, "RESULT: {} mismatches", objections.len());
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Summary {
        Summary {
            audit: Report {
                orders: 10,
                published: 10,
                copies: 2,
                effects: 10,
                ..Report::default()
            },
            rolled_back: 1,
            slow: Some((2, 1)),
            counted: Counted {
                deliveries: 17,
                duplicates: 7,
                effects: 10,
                dead_letters: 0,
            },
            kills: [3; POINTS.len()],
            planned: [3; POINTS.len()],
            copies: 2,
            delivered_again: 5,
            seconds: 1.0,
        }
    }

    #[test]
    fn a_good_run_has_no_objections() {
        assert_eq!(good().objections(), Vec::<String>::new());
        assert!(good().text().ends_with("exactly once\n"));
    }

    #[test]
    fn a_fault_that_did_not_happen_is_an_objection() {
        let spoil: [fn(&mut Summary); 8] = [
            |s| s.kills[1] = 2,
            |s| s.rolled_back = 0,
            |s| s.audit.copies = 1,
            |s| s.delivered_again = 0,
            |s| {
                s.counted = Counted {
                    deliveries: 16,
                    duplicates: 6,
                    ..s.counted
                }
            },
            |s| s.counted.deliveries = 16,
            |s| {
                s.counted = Counted {
                    deliveries: 18,
                    dead_letters: 1,
                    ..s.counted
                }
            },
            |s| s.slow = Some((2, 0)),
        ];
        for (i, spoil) in spoil.iter().enumerate() {
            let mut summary = good();
            spoil(&mut summary);
            assert_eq!(
                summary.objections().len(),
                1,
                "{i}: {:?}",
                summary.objections()
            );
        }
    }

    #[test]
    fn a_mismatch_of_the_audit_is_the_result() {
        let mut summary = good();
        summary.audit.mismatches.push(Mismatch::Lost { order: 7 });
        let text = summary.text();
        assert!(
            text.contains("lost: order 7") && text.ends_with("RESULT: 1 mismatches\n"),
            "{text}"
        );
    }
}
