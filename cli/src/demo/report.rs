//! The end of a run in numbers, and the verdict.

use std::fmt::Write as _;

use super::audit::{Mismatch, Report};
use super::inject::Injected;
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
    pub(super) injected: Injected,
    pub(super) delivered_again: usize,
    /// What the second instance of the inventory service counted, which came and went.
    pub(super) second: Counted,
    /// Duplicates that the hint had known and knew no more.
    pub(super) forgotten: usize,
    /// How often the handler failed between two effects.
    pub(super) half_way: usize,
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
        let Injected { copies, late } = self.injected;
        must(
            copies > 0 && self.audit.copies == copies,
            "the injected copies are not all in the topic",
        );
        must(
            late > 0 && self.audit.late == late,
            "the injected late messages are not all in the topic",
        );
        must(self.audit.second > 0, "no order was announced twice");
        must(self.delivered_again > 0, "nothing was delivered again");
        must(
            counted.duplicates >= (copies + self.delivered_again) as u64,
            "fewer duplicates were suppressed than were injected",
        );
        must(
            self.forgotten > 0,
            "the hint still knew everything that was delivered again",
        );
        must(
            counted.by_mark >= self.forgotten as u64,
            "the marks caught fewer duplicates than the hint forgot",
        );
        must(
            self.second.ownership > 0,
            "the second instance never owned a partition",
        );
        must(self.half_way > 0, "no handler failed between two effects");
        must(
            counted.deliveries >= counted.effects + counted.duplicates + counted.dead_letters,
            "there are fewer deliveries than effects + duplicates + dead letters",
        );
        // Not more, but less is possible: a commit that is under way when its partition is taken away counts for nobody.
        must(
            counted.effects <= self.handled() as u64,
            "the inventory counted more messages than its books hold",
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

    /// The messages that had an effect or a refusal, by the books.
    fn handled(&self) -> usize {
        self.audit.effects + self.audit.refused_second + self.audit.refused_late
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
                "{} (read_committed, the whole topic), announced twice {}, injected copies {}, late {}",
                a.published, a.second, a.copies, a.late
            ),
        );
        row(
            "deliveries",
            format!(
                "{} = handled {} + duplicates suppressed {} + cut short by a stop or rebalance {}",
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
                self.injected.copies, self.delivered_again
            ),
        );
        row(
            "duplicates caught",
            format!(
                "by the mark {}, by the hint {}, by the position {}; the hint had forgotten {}",
                c.by_mark,
                c.by_hint,
                c.duplicates.saturating_sub(c.by_mark + c.by_hint),
                self.forgotten
            ),
        );
        row(
            "rebalances",
            format!(
                "partitions taken {} times, {} of them by a second instance that came, settled {} messages and went",
                c.ownership,
                self.second.ownership,
                self.second.effects + self.second.duplicates
            ),
        );
        row(
            "announced twice",
            format!(
                "{}, {} of them in two partitions; refused by insert_once {}",
                a.second, a.apart, a.refused_second
            ),
        );
        row(
            "state",
            format!(
                "placed {}; late messages {}, refused by the state machine {}",
                a.placed, a.late, a.refused_late
            ),
        );
        row(
            "failed half-way",
            format!(
                "{} handlers, between the stock and the points",
                self.half_way
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
                second: 1,
                copies: 2,
                late: 3,
                effects: 10,
                refused_second: 1,
                refused_late: 3,
                ..Report::default()
            },
            rolled_back: 1,
            slow: Some((2, 1)),
            counted: Counted {
                deliveries: 21,
                duplicates: 7,
                by_mark: 6,
                by_hint: 1,
                effects: 14,
                dead_letters: 0,
                ownership: 9,
            },
            kills: [3; POINTS.len()],
            planned: [3; POINTS.len()],
            injected: Injected { copies: 2, late: 3 },
            delivered_again: 5,
            second: Counted {
                ownership: 3,
                ..Counted::default()
            },
            forgotten: 5,
            half_way: 1,
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
        let spoil: [fn(&mut Summary); 16] = [
            |s| s.kills[1] = 2,
            |s| s.rolled_back = 0,
            |s| s.audit.copies = 1,
            |s| s.injected.copies = 0,
            |s| s.audit.late = 2,
            |s| s.audit.second = 0,
            |s| s.delivered_again = 0,
            |s| s.counted.duplicates = 6,
            |s| s.forgotten = 0,
            |s| s.counted.by_mark = 4,
            |s| s.second.ownership = 0,
            |s| s.half_way = 0,
            |s| s.counted.deliveries = 20,
            |s| s.audit.refused_late = 2,
            |s| {
                s.counted.deliveries = 22;
                s.counted.dead_letters = 1;
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
