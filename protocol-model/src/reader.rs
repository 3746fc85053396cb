//! The reader: one round is probe, look, probe (§2).

use crate::model::{Protocol, State, Step};
use crate::relay::{Batch, Reading};
use crate::rules::Rule;
use crate::set::Set;

impl Protocol {
    /// What the reader of a connected leader can do next.
    pub(crate) fn reader_steps(&self, state: &State, r: usize, steps: &mut Vec<Step>) {
        let relay = &state.relays[r];
        if relay.batches.len() >= self.scenario.batches {
            return;
        }
        match &relay.reading {
            Reading::Idle if self.looks_first(state, r) => steps.push(Step::ReadRows),
            Reading::Idle => steps.push(Step::ProbeBefore),
            Reading::Probed(_) => steps.push(Step::ReadRows),
            Reading::Looked(_) => steps.push(Step::ProbeBefore),
            Reading::NeedsHolders(_) => {
                steps.push(Step::ProbeAfter);
                if state.budget.lost_probes > 0 {
                    steps.push(Step::LoseProbe);
                }
            }
        }
    }

    /// Without gaps nobody needs to know the holders before the rows.
    fn looks_first(&self, state: &State, r: usize) -> bool {
        let relay = &state.relays[r];
        let gaps = !relay.live.position.gaps.is_empty() || !relay.start_holders.is_empty();
        let for_new_holes = !self.rules.hold(Rule::HoldersAfterRows);
        !self.rules.hold(Rule::HoldersBeforeRows) || !gaps && !for_new_holes
    }

    /// Takes a step of the round.
    pub(crate) fn read(&self, state: &mut State, r: usize, step: Step) {
        let holders = state.database.holders();
        let reading = std::mem::take(&mut state.relays[r].reading);
        match (step, reading) {
            (Step::ProbeBefore, Reading::Idle) => {
                state.relays[r].reading = Reading::Probed(holders);
                self.check_again(state, r, holders);
            }
            (Step::ProbeBefore, Reading::Looked(look)) => {
                let rows = state.relays[r]
                    .live
                    .advance(&look, Some(holders), self.rules);
                self.cut_batch(state, r, rows);
            }
            (Step::ReadRows, before) => {
                let look = state
                    .database
                    .look(&state.relays[r].live.position, self.scenario.limit);
                if !self.rules.hold(Rule::HoldersBeforeRows) {
                    state.relays[r].reading = Reading::Looked(look);
                    return;
                }
                let before = match before {
                    Reading::Probed(holders) => Some(holders),
                    _ => None,
                };
                let live = &mut state.relays[r].live;
                let rows = live.advance(&look, before, self.rules);
                if let Some(before) = before.filter(|_| !self.rules.hold(Rule::HoldersAfterRows)) {
                    live.record(before);
                }
                self.cut_batch(state, r, rows);
            }
            (Step::ProbeAfter, Reading::NeedsHolders(batch)) => {
                state.relays[r].live.record(holders);
                push(state, r, batch);
            }
            (_, Reading::NeedsHolders(batch)) => {
                // The probe failed: the gaps stay without a record until the next round.
                state.budget.lost_probes -= 1;
                push(state, r, batch);
            }
            _ => {}
        }
    }

    fn cut_batch(&self, state: &mut State, r: usize, rows: Vec<crate::database::Row>) {
        let relay = &mut state.relays[r];
        let batch = Batch {
            rows,
            position: relay.live.position,
        };
        if relay.live.needs_holders() {
            relay.reading = Reading::NeedsHolders(batch);
        } else {
            push(state, r, batch);
        }
    }

    /// §3: a lost ROLLBACK PREPARED can revive a burnt id.
    fn check_again(&self, state: &mut State, r: usize, now: Set) {
        let relay = &mut state.relays[r];
        if relay.start_holders.is_empty() || !relay.start_holders.is_disjoint(now) {
            return;
        }
        relay.start_holders = Set::default();
        let again = self.rules.hold(Rule::CheckAgainAfterHolders);
        if again && !state.database.matches(&relay.acknowledged, self.rules) {
            relay.stop();
        }
    }
}

fn push(state: &mut State, r: usize, batch: Batch) {
    if !batch.rows.is_empty() {
        state.relays[r].batches.push(batch);
    }
}
