//! The state of the whole system, and what can happen next.

use crate::database::{Database, Fate, Writer};
use crate::kafka::Kafka;
use crate::properties;
use crate::relay::{Relay, Stage, Start};
use crate::rules::{Rule, Rules};
use crate::scenario::{Budget, Scenario};
use crate::set::Set;

/// The protocol in one scenario, with all rules or without one.
#[derive(Debug, Clone)]
pub struct Protocol {
    /// What can happen.
    pub scenario: Scenario,
    /// What is kept.
    pub rules: Rules,
}

impl Protocol {
    /// The protocol as it is.
    #[must_use]
    pub fn new(scenario: Scenario) -> Self {
        Self {
            scenario,
            rules: Rules::all(),
        }
    }

    /// The protocol without one rule.
    #[must_use]
    pub fn without(scenario: Scenario, rule: Rule) -> Self {
        Self {
            scenario,
            rules: Rules::without(rule),
        }
    }
}

/// Everything.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    /// The database that answers.
    pub database: Database,
    /// What the standby database knows, once it has fallen behind.
    pub replica: Option<Box<Database>>,
    /// The brokers.
    pub kafka: Kafka,
    /// The relay processes.
    pub relays: Vec<Relay>,
    /// What may still go wrong.
    pub budget: Budget,
    /// Kafka takes what it refused.
    pub repaired: bool,
    /// A failover lost something: a commit, a rollback, the mark, a parking, a clean-up.
    pub lossy: bool,
    /// Messages whose commit it lost.
    pub lost: Set,
}

/// One atomic step of a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A step of its start.
    Start(Start),
    /// The reader asks who holds the insert lock, before the rows.
    ProbeBefore,
    /// The reader looks at the rows.
    ReadRows,
    /// The reader asks who holds the insert lock, after the rows.
    ProbeAfter,
    /// That fails, and the reader goes on.
    LoseProbe,
    /// The publisher decides what to publish and what to park.
    Plan,
    /// It writes what it parks.
    Park,
    /// It sends the records, which are all acknowledged.
    Produce,
    /// It sends the checkpoint, perhaps twice.
    SendOffsets {
        /// The first request is late.
        again: bool,
    },
    /// It sends EndTxn(commit), perhaps twice.
    Commit {
        /// The first request is late.
        again: bool,
    },
    /// It sends EndTxn(abort), perhaps twice, and will try the batch again.
    Abort {
        /// The first request is late.
        again: bool,
    },
    /// It learns that the transaction is committed.
    Acknowledge,
    /// The keeper writes the mark.
    WriteMark,
    /// The keeper deletes rows.
    CleanUp,
    /// The publisher publishes parked rows.
    Release,
    /// It deletes them from the parked table.
    Unpark,
    /// The relay notices that its database session is dead.
    Reconnect,
    /// The process is killed.
    Crash,
}

/// Something that happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// A writer inserts a row.
    Insert(usize),
    /// A writer commits; its rows are visible.
    Commit(usize),
    /// Its locks are released.
    Unlock(usize),
    /// A writer rolls back.
    RollBack(usize),
    /// A relay process is started.
    Start(usize),
    /// A relay takes a step.
    Relay(usize, Step),
    /// A late request arrives at the broker.
    Deliver(usize),
    /// The standby database falls behind.
    FallBehind,
    /// The standby database takes over.
    FailOver,
    /// Kafka will take what it refused.
    Repair,
    /// An operator wants this parked row to be published.
    Request(u8),
}

impl Protocol {
    fn writer_actions(&self, state: &State, actions: &mut Vec<Action>) {
        let writers = &state.database.writers;
        let key = |w: usize| self.scenario.writers[w].key;
        for (w, writer) in writers.iter().enumerate() {
            let spec = &self.scenario.writers[w];
            let rows = u32::from(spec.rows);
            match writer.fate {
                // Writers are alike until they begin, so they begin in order. G4: one key, one lock until the end.
                Fate::Waiting => {
                    let first = writers[..w].iter().all(|w| w.fate != Fate::Waiting);
                    let holders = state.database.holders();
                    if first && holders.iter().all(|h| key(usize::from(h)) != spec.key) {
                        actions.push(Action::Insert(w));
                    }
                }
                Fate::Open => {
                    if writer.ids.len() < rows {
                        actions.push(Action::Insert(w));
                    } else {
                        actions.push(Action::Commit(w));
                    }
                    if spec.may_roll_back {
                        actions.push(Action::RollBack(w));
                    }
                }
                Fate::Visible => actions.push(Action::Unlock(w)),
                Fate::Committed | Fate::RolledBack | Fate::Lost => {}
            }
        }
    }

    fn relay_actions(&self, state: &State, r: usize, actions: &mut Vec<Action>) {
        let relay = &state.relays[r];
        if relay.stage == Stage::Down {
            let others = state.relays.iter().any(Relay::runs);
            if !others || state.budget.take_overs > 0 {
                actions.push(Action::Start(r));
            }
        }
        if !relay.runs() {
            return;
        }
        let mut steps = Vec::new();
        let connected = relay.session == state.database.server;
        match relay.stage {
            Stage::Start(start) => self.start_steps(state, r, start, &mut steps),
            _ => {
                if connected {
                    self.reader_steps(state, r, &mut steps);
                }
                self.publisher_steps(state, r, &mut steps);
            }
        }
        if !connected && relay.stage != Stage::Start(Start::Look) {
            steps.push(Step::Reconnect);
        }
        if state.budget.crashes > 0 {
            steps.push(Step::Crash);
        }
        actions.extend(steps.into_iter().map(|step| Action::Relay(r, step)));
    }

    fn fault_actions(&self, state: &State, actions: &mut Vec<Action>) {
        actions.extend((0..state.kafka.late.len()).map(Action::Deliver));
        if state.budget.fail_overs > 0 {
            actions.push(match state.replica {
                None => Action::FallBehind,
                Some(_) => Action::FailOver,
            });
        }
        if !state.database.parked.is_empty() {
            if !state.repaired {
                actions.push(Action::Repair);
            }
            let parked = state.database.parked.iter();
            let undecided = parked.filter(|(_, p)| state.repaired && p.refused && !p.requested);
            actions.extend(undecided.map(|(id, _)| Action::Request(*id)));
        }
    }

    fn start_process(&self, state: &mut State, r: usize) {
        if state.relays.iter().any(Relay::runs) {
            state.budget.take_overs -= 1;
        }
        state.relays[r].start();
    }

    fn step(&self, state: &mut State, r: usize, step: Step) {
        match step {
            Step::Start(start) => self.start(state, r, start),
            Step::ProbeBefore | Step::ReadRows | Step::ProbeAfter | Step::LoseProbe => {
                self.read(state, r, step);
            }
            Step::Reconnect => self.reconnect(state, r),
            Step::Crash => {
                state.budget.crashes -= 1;
                state.relays[r].end();
            }
            _ => self.publish(state, r, step),
        }
    }

    fn fail_over(&self, state: &mut State) {
        let Some(replica) = state.replica.take() else {
            return;
        };
        let new = state.database.fail_over(&replica, &self.scenario);
        state.budget.fail_overs -= 1;
        let visible = |w: &Writer| matches!(w.fate, Fate::Visible | Fate::Committed);
        let both = state.database.writers.iter().zip(&new.writers);
        let lost = (0..)
            .zip(both)
            .filter(|(_, (old, new))| visible(old) && !visible(new));
        state.lost = lost.flat_map(|(w, _)| self.scenario.messages(w)).collect();
        state.lossy = *replica != state.database;
        state.database = new;
    }
}

impl stateright::Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            database: Database::new(&self.scenario),
            replica: None,
            kafka: Kafka::default(),
            relays: vec![Relay::default(); self.scenario.relays],
            budget: self.scenario.budget,
            repaired: false,
            lossy: false,
            lost: Set::default(),
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        self.writer_actions(state, actions);
        for r in 0..state.relays.len() {
            self.relay_actions(state, r, actions);
        }
        self.fault_actions(state, actions);
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Insert(w) => state.database.draw(w),
            Action::Commit(w) => state.database.commit(&self.scenario, w),
            Action::Unlock(w) => state.database.writers[w].fate = Fate::Committed,
            Action::RollBack(w) => state.database.writers[w].fate = Fate::RolledBack,
            Action::Start(r) => self.start_process(&mut state, r),
            Action::Relay(r, step) => self.step(&mut state, r, step),
            Action::Deliver(late) => state.kafka.deliver(late),
            Action::FallBehind => state.replica = Some(Box::new(state.database.clone())),
            Action::FailOver => self.fail_over(&mut state),
            Action::Repair => state.repaired = true,
            Action::Request(id) => {
                if let Some(parked) = state.database.parked.get_mut(&id) {
                    parked.requested = true;
                }
            }
        }
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<stateright::Property<Self>> {
        properties::all(&self.scenario.events)
    }
}
