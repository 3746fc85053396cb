//! Start and every recovery, which are one code path (§3): look, take the lease, fence, check, claim.

use crate::model::{Protocol, State, Step};
use crate::position::{Checkpoint, Live, newer};
use crate::relay::{Stage, Start};
use crate::rules::Rule;

impl Protocol {
    /// The one step that a starting relay can take next.
    pub(crate) fn start_steps(&self, state: &State, r: usize, start: Start, steps: &mut Vec<Step>) {
        let connected = state.relays[r].session == state.database.server;
        let needs_database = !matches!(start, Start::Look | Start::Fence(_) | Start::Claim(_));
        if connected || !needs_database {
            steps.push(Step::Start(start));
        }
    }

    /// Takes it.
    pub(crate) fn start(&self, state: &mut State, r: usize, start: Start) {
        match start {
            Start::Look => self.first_look(state, r),
            Start::Take { seen, epoch } => {
                let next = match self.rules.hold(Rule::FenceBeforePosition) {
                    true => Start::Fence(None),
                    false => Start::Check,
                };
                if state.database.mark.epoch == seen {
                    state.database.mark.epoch = epoch;
                    state.relays[r].epoch = epoch;
                    state.relays[r].stage = Stage::Start(next);
                } else {
                    // Another standby was faster.
                    state.relays[r].end();
                }
            }
            Start::Fence(position) => {
                let holders = match self.scenario.rolls_back_prepared() {
                    true if self.rules.hold(Rule::StartHoldersBeforeCheck) => Start::Holders,
                    _ => Start::Check,
                };
                state.relays[r].producer = state.kafka.fence();
                state.relays[r].stage = Stage::Start(position.map_or(holders, Start::Claim));
            }
            Start::Holders => {
                state.relays[r].start_holders = state.database.holders();
                state.relays[r].stage = Stage::Start(Start::Check);
            }
            Start::Check => self.check(state, r),
            Start::FinishRelease(chosen) => {
                if state.database.mark.epoch != state.relays[r].epoch {
                    return state.relays[r].end();
                }
                state.database.finish_release(chosen, self.rules);
                state.relays[r].stage = Stage::Start(Start::Claim(chosen));
            }
            Start::Claim(chosen) => self.claim(state, r, chosen),
            Start::Load => self.load(state, r),
        }
    }

    /// A relay that will have to stop must not stop its better first.
    fn first_look(&self, state: &mut State, r: usize) {
        let mark = state.database.mark;
        let chosen = newer(mark.checkpoint, state.kafka.checkpoint, self.rules);
        if !state.database.matches(&chosen, self.rules) {
            return state.relays[r].stop();
        }
        let written = state.kafka.checkpoint.map_or(0, |c| c.epoch);
        state.relays[r].session = state.database.server;
        state.relays[r].stage = Stage::Start(Start::Take {
            seen: mark.epoch,
            epoch: mark.epoch.max(written) + 1,
        });
    }

    /// G3: after the fence, so that nobody can move the checkpoint any more.
    fn check(&self, state: &mut State, r: usize) {
        let mark = state.database.mark;
        let stored = state.kafka.checkpoint;
        let epoch = state.relays[r].epoch;
        if mark.epoch != epoch || stored.is_some_and(|c| c.epoch > epoch) {
            return state.relays[r].end();
        }
        let chosen = newer(mark.checkpoint, stored, self.rules);
        if !state.database.matches(&chosen, self.rules) {
            return state.relays[r].stop();
        }
        let finishes = self.rules.hold(Rule::StartFinishesRelease);
        let next = if finishes && !chosen.released.is_empty() {
            Start::FinishRelease(chosen)
        } else if self.rules.hold(Rule::FenceBeforePosition) {
            Start::Claim(chosen)
        } else {
            Start::Fence(Some(chosen))
        };
        state.relays[r].stage = Stage::Start(next);
    }

    fn claim(&self, state: &mut State, r: usize, chosen: Checkpoint) {
        let seq = state.database.mark.checkpoint.map_or(0, |c| c.seq);
        let claim = Checkpoint {
            seq: chosen.seq.max(seq) + 1,
            epoch: state.relays[r].epoch,
            released: Default::default(),
            ..chosen
        };
        let producer = state.relays[r].producer;
        if state.kafka.commit(producer, &[], claim).is_err() {
            return self.fenced(state, r);
        }
        state.relays[r].acknowledged = claim;
        state.relays[r].stage = Stage::Start(Start::Load);
    }

    /// G2: the holders of before may mean nothing any more.
    fn load(&self, state: &mut State, r: usize) {
        let now = state.database.holders();
        let relay = &mut state.relays[r];
        let holders = match self.rules.hold(Rule::HoldersOfNow) {
            true => now,
            false => Default::default(),
        };
        relay.live = Live::load(relay.acknowledged.position, holders);
        if self.scenario.rolls_back_prepared() && !self.rules.hold(Rule::StartHoldersBeforeCheck) {
            relay.start_holders = now;
        }
        relay.stage = Stage::Leading;
    }

    /// The producer is not the newest any more, or its transaction was ended by somebody else. With the lease still mine
    /// this is a rebuild; otherwise a deposition.
    pub(crate) fn fenced(&self, state: &mut State, r: usize) {
        let connected = state.relays[r].session == state.database.server;
        if connected && state.database.mark.epoch != state.relays[r].epoch {
            state.relays[r].end();
        } else {
            state.relays[r].start();
        }
    }
}
