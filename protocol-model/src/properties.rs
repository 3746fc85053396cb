//! The guarantees, and what must be able to happen for a search to mean anything.

use stateright::Property;

use crate::database::Fate;
use crate::model::{Protocol, State};
use crate::relay::{Publishing, Relay, Stage};

/// G1.
pub const ROLLED_BACK: &str = "G1: nothing of a rolled-back transaction is published";
/// G2, G8, G10: at rest, whatever was committed is published or parked. A relay that has stopped is not at rest.
pub const PUBLISHED: &str =
    "G2: what was committed is published or parked, or the relay has stopped";
/// G2.
pub const DELETED: &str = "G2: what clean-up deleted was published or parked";
/// G3.
pub const ONCE: &str = "G3: a read_committed reader sees a message once";
/// G4.
pub const ORDER: &str = "G4: the messages of a key keep their order";
/// G10: a failover that lost what was published already is noticed. What it lost unpublished is nobody's.
pub const NOTICED: &str = "G10: a relay does not go on when published messages were lost";
/// G10.
pub const NO_FALSE_STOP: &str = "G10: without a loss nobody stops";

/// Every property.
pub(crate) fn all(events: &[Event]) -> Vec<Property<Protocol>> {
    let mut properties = vec![
        Property::always(ROLLED_BACK, nothing_rolled_back),
        Property::always(PUBLISHED, published_at_rest),
        Property::always(DELETED, deleted_were_published),
        Property::always(ONCE, once),
        Property::always(ORDER, in_order),
        Property::always(NOTICED, loss_is_noticed),
        Property::always(NO_FALSE_STOP, no_false_stop),
        Property::sometimes("at rest", |model, state| model.is_at_rest(state)),
    ];
    properties.extend(
        events
            .iter()
            .map(|(name, event)| Property::sometimes(name, *event)),
    );
    properties
}

impl Protocol {
    /// Nothing happens any more unless somebody does something new: every writer has ended, and the leader has seen and
    /// acknowledged everything that it will ever see.
    #[must_use]
    pub fn is_at_rest(&self, state: &State) -> bool {
        let ended = state.database.writers.iter();
        let mut relays = (0..).zip(&state.relays);
        ended.into_iter().all(|w| has_ended(w.fate))
            && relays.any(|(r, relay)| self.rests(state, r, relay))
    }

    fn rests(&self, state: &State, r: usize, relay: &Relay) -> bool {
        let live = &relay.live.position;
        relay.is_idle()
            && relay.epoch == state.database.mark.epoch
            && relay.producer == state.kafka.producer
            && relay.session == state.database.server
            && relay.start_holders.is_empty()
            && state.database.rows.keys().all(|id| live.settles(*id))
            && self.releasable(state, r).is_empty()
    }

    fn committed(&self, state: &State) -> impl Iterator<Item = u8> {
        let committed = |(_, w): &(usize, _)| matches!(w, Fate::Committed);
        let fates = state.database.writers.iter().map(|w| w.fate);
        let writers: Vec<_> = fates.enumerate().filter(committed).collect();
        writers
            .into_iter()
            .flat_map(|(n, _)| self.scenario.messages(n))
    }

    fn fate(&self, state: &State, message: u8) -> Fate {
        state.database.writers[self.scenario.writer(message)].fate
    }
}

fn has_ended(fate: Fate) -> bool {
    matches!(fate, Fate::Committed | Fate::RolledBack | Fate::Lost)
}

fn is_safe(state: &State, message: u8) -> bool {
    let mut parked = state.database.parked.values();
    state.kafka.log.contains(&message) || parked.any(|p| p.message == message)
}

/// What the database committed, and lost after that, was not rolled back when it was published.
fn nothing_rolled_back(model: &Protocol, state: &State) -> bool {
    let committed = |message| {
        let fate = model.fate(state, message);
        matches!(fate, Fate::Visible | Fate::Committed) || state.lost.contains(message)
    };
    state.kafka.log.iter().all(|message| committed(*message))
}

fn published_at_rest(model: &Protocol, state: &State) -> bool {
    !model.is_at_rest(state) || model.committed(state).all(|m| is_safe(state, m))
}

fn deleted_were_published(model: &Protocol, state: &State) -> bool {
    let exists = |message| state.database.rows.values().any(|m| *m == message);
    let mut committed = model.committed(state);
    committed.all(|m| exists(m) || is_safe(state, m))
}

fn once(_: &Protocol, state: &State) -> bool {
    let log = &state.kafka.log;
    (1..log.len()).all(|n| !log[..n].contains(&log[n]))
}

/// All writers of a key hold one lock, so that the order of its transactions is that of their ids.
fn in_order(model: &Protocol, state: &State) -> bool {
    let log = &state.kafka.log;
    (1..log.len()).all(|n| {
        let same_key = |before: &&u8| model.scenario.key(**before) == model.scenario.key(log[n]);
        log[..n].iter().filter(same_key).all(|b| *b <= log[n])
    })
}

fn loss_is_noticed(model: &Protocol, state: &State) -> bool {
    let is_gone = |message| model.fate(state, message) != Fate::Committed;
    let mut lost = state.lost.iter().filter(|message| is_gone(*message));
    !model.is_at_rest(state) || !lost.any(|message| state.kafka.log.contains(&message))
}

fn no_false_stop(_: &Protocol, state: &State) -> bool {
    state.lossy || state.relays.iter().all(|r| r.stage != Stage::Stopped)
}

/// Something that must be able to happen with all rules, or a scenario proves nothing: its name, and whether it has.
pub type Event = (&'static str, fn(&Protocol, &State) -> bool);

/// A gap was burnt: the read position has passed the id of a rolled-back transaction.
pub const GAP_BURNT: Event = ("gap burnt", gap_burnt);

fn gap_burnt(_: &Protocol, state: &State) -> bool {
    let writers = state.database.writers.iter();
    let mut burnt = writers
        .filter(|w| w.fate == Fate::RolledBack)
        .flat_map(|w| w.ids.iter());
    burnt.any(|id| state.relays[0].live.position.settles(id))
}

/// A late row is published after a later one.
pub const LATE_ROW_PUBLISHED: Event = ("late row published", late_row_published);

fn late_row_published(_: &Protocol, state: &State) -> bool {
    state.kafka.log.is_sorted_by(|a, b| a > b) && state.kafka.log.len() > 1
}

/// A mark lags behind its checkpoint while nobody runs.
pub const CRASHED_BEFORE_THE_MARK: Event = ("crashed before the mark", crashed_before_the_mark);

fn crashed_before_the_mark(_: &Protocol, state: &State) -> bool {
    let seq = |c: Option<crate::position::Checkpoint>| c.map_or(0, |c| c.seq);
    !state.relays.iter().any(Relay::runs)
        && seq(state.database.mark.checkpoint) < seq(state.kafka.checkpoint)
}

/// A request of an older producer is still on its way while the next one has a transaction open.
pub const LATE_REQUEST_IS_FENCED: Event = ("late request is fenced", late_request_is_fenced);

fn late_request_is_fenced(_: &Protocol, state: &State) -> bool {
    let late = &mut state.kafka.late.iter();
    state.kafka.open.is_some() && late.any(|l| l.producer < state.kafka.producer)
}

/// Two processes lead, as they see it.
pub const TWO_LEAD: Event = ("two lead", two_lead);

fn two_lead(_: &Protocol, state: &State) -> bool {
    let lead = |r: &&Relay| r.stage == Stage::Leading;
    state.relays.iter().filter(lead).count() == 2
}

/// A zombie has committed at the last moment, before it was fenced.
pub const ZOMBIE_COMMITTED: Event = ("zombie committed", zombie_committed);

fn zombie_committed(_: &Protocol, state: &State) -> bool {
    let mut relays = state.relays.iter();
    relays.any(|r| {
        matches!(r.publishing, Publishing::Committed(..)) && r.producer < state.kafka.producer
    })
}

/// Rows were deleted.
pub const CLEANED_UP: Event = ("cleaned up", cleaned_up);

fn cleaned_up(_: &Protocol, state: &State) -> bool {
    state.database.mark.low_water > 0
}

/// A refused message was parked, released and published.
pub const RELEASED: Event = ("released", released);

fn released(model: &Protocol, state: &State) -> bool {
    let mut refused = model.scenario.refused.iter();
    state.database.parked.is_empty() && refused.all(|m| state.kafka.log.contains(m))
}

/// A release is committed, and nobody remembers it but the checkpoint.
pub const HALF_RELEASED: Event = ("half released", half_released);

fn half_released(_: &Protocol, state: &State) -> bool {
    let checkpoint = state.kafka.checkpoint.unwrap_or_default();
    !checkpoint.released.is_empty()
        && !state.relays.iter().any(Relay::runs)
        && !state.database.parked.is_empty()
}

/// The relay has stopped, and has said why.
pub const STOPPED: Event = ("stopped", stopped);

fn stopped(_: &Protocol, state: &State) -> bool {
    state.relays.iter().any(|r| r.stage == Stage::Stopped)
}

/// After a loss that concerned nothing published, the relay goes on with an id that was issued twice.
pub const WENT_ON_AFTER_A_LOSS: Event = ("went on after a loss", went_on_after_a_loss);

fn went_on_after_a_loss(model: &Protocol, state: &State) -> bool {
    state.lossy && model.is_at_rest(state)
}
