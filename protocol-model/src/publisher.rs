//! The publisher: batch after batch with its position, parking and release in between, mark and clean-up behind (§3, §4).

use crate::database::{Database, Parked};
use crate::kafka::{Late, Refused, Request};
use crate::model::{Protocol, State, Step};
use crate::position::Checkpoint;
use crate::relay::{Batch, Plan, Publishing, Stage};
use crate::rules::Rule;
use crate::set::Set;

impl Protocol {
    /// What the publisher of a leader can do next.
    pub(crate) fn publisher_steps(&self, state: &State, r: usize, steps: &mut Vec<Step>) {
        let relay = &state.relays[r];
        let connected = relay.session == state.database.server;
        let late_ends = state.budget.late_ends > 0;
        match &relay.publishing {
            Publishing::Idle if connected && !relay.batches.is_empty() => steps.push(Step::Plan),
            Publishing::Planned(_) if connected => steps.push(Step::Park),
            Publishing::Begun(_) => steps.push(Step::Produce),
            Publishing::Produced(_) => {
                steps.push(Step::SendOffsets { again: false });
                if state.budget.late_offsets > 0 {
                    steps.push(Step::SendOffsets { again: true });
                }
            }
            Publishing::OffsetsSent(..) => {
                steps.push(Step::Commit { again: false });
                if late_ends {
                    steps.push(Step::Commit { again: true });
                }
            }
            Publishing::Committed(..) => steps.push(Step::Acknowledge),
            Publishing::Released(_) if connected => steps.push(Step::Unpark),
            _ => {}
        }
        if matches!(relay.publishing, Publishing::Produced(_)) && state.budget.aborts > 0 {
            steps.push(Step::Abort { again: false });
            if late_ends {
                steps.push(Step::Abort { again: true });
            }
        }
        if connected {
            self.keeper_steps(state, r, steps);
        }
    }

    fn keeper_steps(&self, state: &State, r: usize, steps: &mut Vec<Step>) {
        let relay = &state.relays[r];
        let confirmed = state.database.mark.checkpoint.map_or(0, |c| c.seq);
        if relay.acknowledged.seq > confirmed {
            steps.push(Step::WriteMark);
        }
        if self.scenario.cleans_up && !self.cleanable(state, r).is_empty() {
            steps.push(Step::CleanUp);
        }
        if relay.publishing == Publishing::Idle && !self.releasable(state, r).is_empty() {
            steps.push(Step::Release);
        }
    }

    /// Takes a step of the publisher.
    pub(crate) fn publish(&self, state: &mut State, r: usize, step: Step) {
        let publishing = std::mem::take(&mut state.relays[r].publishing);
        match (step, publishing) {
            (Step::Plan, _) => {
                let plan = self.plan(state, &state.relays[r].batches[0]);
                state.relays[r].publishing = match plan.park.is_empty() {
                    true => Publishing::Begun(plan),
                    false => Publishing::Planned(plan),
                };
            }
            (Step::Park, Publishing::Planned(plan)) => {
                if self.deposed(state, r) {
                    return state.relays[r].end();
                }
                if self.rules.hold(Rule::ParkBeforeCheckpoint) {
                    park(&mut state.database, &plan);
                }
                state.relays[r].publishing = Publishing::Begun(plan);
            }
            (Step::Acknowledge, Publishing::Committed(plan, next)) => {
                if !self.rules.hold(Rule::ParkBeforeCheckpoint) {
                    park(&mut state.database, &plan);
                }
                state.relays[r].acknowledged = next;
                state.relays[r].batches.remove(0);
                self.rebuild_if_tainted(state, r);
            }
            (Step::Unpark, Publishing::Released(next)) => {
                if self.deposed(state, r) {
                    return state.relays[r].end();
                }
                state.database.finish_release(next, self.rules);
                state.relays[r].acknowledged = next;
            }
            (Step::WriteMark | Step::CleanUp | Step::Release, publishing) => {
                state.relays[r].publishing = publishing;
                self.keep(state, r, step);
            }
            (step, publishing) => {
                if self.send(state, r, step, publishing).is_err() {
                    self.fenced(state, r);
                }
            }
        }
    }

    /// Takes a step of the Kafka transaction.
    fn send(
        &self,
        state: &mut State,
        r: usize,
        step: Step,
        publishing: Publishing,
    ) -> Result<(), Refused> {
        let producer = state.relays[r].producer;
        let next = match (step, publishing) {
            (Step::Produce, Publishing::Begun(plan)) => {
                if !plan.publish.is_empty() {
                    state.kafka.append(producer, &plan.publish)?;
                }
                Publishing::Produced(plan)
            }
            (Step::SendOffsets { again }, Publishing::Produced(plan)) => {
                let next = self.next_checkpoint(state, r, &plan);
                state.kafka.send_offsets(producer, next)?;
                self.resend(state, r, again, Request::Offsets(next));
                Publishing::OffsetsSent(plan, next)
            }
            (Step::Commit { again }, Publishing::OffsetsSent(plan, next)) => {
                state.kafka.end(producer, true)?;
                self.resend(state, r, again, Request::Commit);
                Publishing::Committed(plan, next)
            }
            (Step::Abort { again }, _) => {
                state.budget.aborts -= 1;
                state.kafka.end(producer, false)?;
                self.resend(state, r, again, Request::Abort);
                self.rebuild_if_tainted(state, r);
                Publishing::Idle
            }
            (_, publishing) => publishing,
        };
        state.relays[r].publishing = next;
        Ok(())
    }

    /// Mark, clean-up and release: every write locks the mark and checks the epoch.
    fn keep(&self, state: &mut State, r: usize, step: Step) {
        if self.deposed(state, r) {
            return state.relays[r].end();
        }
        match step {
            Step::WriteMark => {
                state.database.mark.checkpoint = Some(state.relays[r].acknowledged);
            }
            Step::CleanUp => {
                let ids = self.cleanable(state, r);
                state.database.clean_up(ids);
            }
            Step::Release => self.release(state, r),
            _ => {}
        }
    }

    fn deposed(&self, state: &State, r: usize) -> bool {
        self.rules.hold(Rule::WritesCheckTheEpoch)
            && state.database.mark.epoch != state.relays[r].epoch
    }

    /// The request was given up, sent again and answered; the first one is still on its way.
    fn resend(&self, state: &mut State, r: usize, again: bool, request: Request) {
        if again {
            let budget = match request {
                Request::Offsets(_) => &mut state.budget.late_offsets,
                Request::Commit | Request::Abort => &mut state.budget.late_ends,
            };
            *budget -= 1;
            let producer = state.relays[r].producer;
            state.kafka.late.push(Late { producer, request });
            state.relays[r].tainted = self.rules.hold(Rule::Taint);
        }
    }

    fn rebuild_if_tainted(&self, state: &mut State, r: usize) {
        if state.relays[r].tainted {
            state.relays[r].start();
        }
    }

    /// Fixed when the batch was read; only seq and parked rows are added now.
    fn next_checkpoint(&self, state: &State, r: usize, plan: &Plan) -> Checkpoint {
        let relay = &state.relays[r];
        Checkpoint {
            seq: relay.acknowledged.seq + 1,
            epoch: relay.epoch,
            position: match self.rules.hold(Rule::ImmutableCheckpoint) {
                true => relay.batches[0].position,
                false => relay.live.position,
            },
            parked: relay.acknowledged.parked.union(plan.parked),
            released: Set::default(),
        }
    }

    /// §4: a refused row is parked, and every later row of its key; a parked one is never published by this path.
    fn plan(&self, state: &State, batch: &Batch) -> Plan {
        let mut plan = Plan::default();
        for row in &batch.rows {
            if let Some(parked) = state.database.parked.get(&row.id) {
                plan.parked = plan.parked.with(parked.message);
                continue;
            }
            let refused = !state.repaired && self.scenario.refused.contains(&row.message);
            let key = self.scenario.key(row.message);
            let mut parked = state.database.parked.iter().map(|(id, p)| (*id, *p));
            let blocks = |(id, p): (u8, Parked)| id < row.id && self.scenario.key(p.message) == key;
            if refused || parked.any(blocks) || plan.park.iter().any(|p| blocks(*p)) {
                let parked = Parked {
                    message: row.message,
                    refused,
                    requested: false,
                };
                plan.park.push((row.id, parked));
                plan.parked = plan.parked.with(row.message);
            } else {
                plan.publish.push(row.message);
            }
        }
        plan
    }

    fn cleanable(&self, state: &State, r: usize) -> Set {
        let confirmed = state.database.mark.checkpoint.unwrap_or_default().position;
        state
            .database
            .cleanable(match self.rules.hold(Rule::CleanUpBehindTheMark) {
                true => &confirmed,
                false => &state.relays[r].live.position,
            })
    }

    /// The next chunk: what nothing holds any more, in id order, up to the first that the acknowledged position has not
    /// settled.
    pub(crate) fn releasable(&self, state: &State, r: usize) -> Set {
        let parked = &state.database.parked;
        let held = |id: u8, p: &Parked| {
            let key = self.scenario.key(p.message);
            let mut before = parked.range(..=id);
            before.any(|(_, b)| self.scenario.key(b.message) == key && b.refused && !b.requested)
        };
        let settled = self.rules.hold(Rule::ReleaseOnlySettled);
        let position = state.relays[r].acknowledged.position;
        let free = parked.iter().filter(|(id, p)| !held(**id, p));
        free.map(|(id, _)| *id)
            .take_while(|id| !settled || position.settles(*id))
            .collect()
    }

    fn release(&self, state: &mut State, r: usize) {
        let ids = self.releasable(state, r);
        let messages: Vec<u8> = ids
            .iter()
            .filter_map(|id| Some(state.database.parked.get(&id)?.message))
            .collect();
        let relay = &state.relays[r];
        let acknowledged = relay.acknowledged;
        let next = Checkpoint {
            seq: acknowledged.seq + 1,
            epoch: relay.epoch,
            parked: acknowledged
                .parked
                .minus(messages.iter().copied().collect()),
            released: ids,
            ..acknowledged
        };
        if state.kafka.commit(relay.producer, &messages, next).is_err() {
            return self.fenced(state, r);
        }
        state.relays[r].publishing = Publishing::Released(next);
    }

    /// A new database session. Everything that was read in the old one is thrown away, and the relay starts anew.
    pub(crate) fn reconnect(&self, state: &mut State, r: usize) {
        let relay = &mut state.relays[r];
        if relay.stage != Stage::Leading || self.rules.hold(Rule::NewSessionForgets) {
            return relay.start();
        }
        relay.session = state.database.server;
        if state.database.mark.epoch != relay.epoch {
            relay.end();
        } else if !state.database.matches(&relay.acknowledged, self.rules) {
            relay.stop();
        }
    }
}

fn park(database: &mut Database, plan: &Plan) {
    database.parked.extend(plan.park.iter().copied());
}
