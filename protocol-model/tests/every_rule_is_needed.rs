//! With all rules, no schedule of any scenario breaks a guarantee; without a rule, one is found that does.

use std::time::Instant;

use oncebox_protocol_model::properties::{DELETED, NO_FALSE_STOP, NOTICED, ONCE, ORDER, PUBLISHED};
use oncebox_protocol_model::{Protocol, Rule, Scenario};
use stateright::{Checker, HasDiscoveries, Model};

/// Searches everything: no guarantee breaks, the search was neither short nor cut short, and the events happen.
#[track_caller]
fn holds(scenario: Scenario, at_least: usize) {
    let (name, started) = (scenario.name, Instant::now());
    let checker = Protocol::new(scenario).checker().spawn_bfs().join();
    println!(
        "{name}: {} states, depth {}, {:.1} s",
        checker.unique_state_count(),
        checker.max_depth(),
        started.elapsed().as_secs_f32()
    );
    checker.assert_properties();
    assert!(checker.is_done());
    let states = checker.unique_state_count();
    assert!(states >= at_least, "{name}: only {states} states");
}

/// Finds a schedule that breaks the guarantee.
#[track_caller]
fn breaks(rule: Rule, scenario: Scenario, guarantee: &'static str) {
    let (name, started) = (scenario.name, Instant::now());
    let checker = Protocol::without(scenario, rule)
        .checker()
        .finish_when(HasDiscoveries::AnyOf([guarantee].into()))
        .spawn_bfs()
        .join();
    let Some(path) = checker.discovery(guarantee) else {
        panic!(
            "without {rule:?}, \"{guarantee}\" still holds in the scenario \"{name}\"; broken: {:?}",
            checker.discoveries().keys().collect::<Vec<_>>()
        );
    };
    let steps = path.into_actions();
    println!(
        "{rule:?}, {name}: {} steps, {} states, {:.1} s",
        steps.len(),
        checker.unique_state_count(),
        started.elapsed().as_secs_f32()
    );
    steps.iter().for_each(|step| println!("    {step:?}"));
}

#[test]
fn with_all_rules_whatever_commits_out_of_id_order() {
    holds(Scenario::out_of_order(), 40_000);
}

#[test]
fn with_all_rules_a_bulk_insert_that_exceeds_a_look() {
    holds(Scenario::cut_off(), 30_000);
}

#[test]
fn with_all_rules_a_crash_between_any_two_steps_while_a_batch_is_read_ahead() {
    holds(Scenario::read_ahead(), 60_000);
}

#[test]
fn with_all_rules_late_requests_do_no_damage() {
    holds(Scenario::late_requests(), 30_000);
}

#[test]
fn with_all_rules_two_relays_believe_they_lead() {
    holds(Scenario::two_leaders(), 50_000);
}

#[test]
fn with_all_rules_clean_up_stays_behind() {
    holds(Scenario::clean_up(), 15_000);
}

#[test]
fn with_all_rules_a_crash_at_every_step_of_park_and_release() {
    holds(Scenario::parking(), 15_000);
}

#[test]
fn with_all_rules_a_zombie_parks_and_releases() {
    holds(Scenario::parking_by_two(), 70_000);
}

#[test]
fn with_all_rules_a_lossy_failover_is_noticed_or_harmless() {
    holds(Scenario::lossy_failover(), 70_000);
}

#[test]
fn with_all_rules_a_rollback_that_is_lost_is_noticed() {
    holds(Scenario::revived(), 50_000);
}

#[test]
fn with_all_rules_a_parking_that_is_lost_is_noticed() {
    holds(Scenario::lost_parking(), 1_000);
}

#[test]
fn without_the_taint_rule_a_late_end_txn_loses_the_next_transaction() {
    breaks(Rule::Taint, Scenario::late_requests(), PUBLISHED);
}

#[test]
fn without_the_taint_rule_a_late_offset_commit_doubles_a_batch() {
    breaks(Rule::Taint, Scenario::late_offsets(), ONCE);
}

#[test]
fn without_the_taint_rule_a_late_commit_doubles_a_batch() {
    breaks(Rule::Taint, Scenario::late_requests(), ONCE);
}

#[test]
fn with_holders_read_after_the_rows_a_late_row_is_lost() {
    breaks(Rule::HoldersBeforeRows, Scenario::out_of_order(), PUBLISHED);
}

#[test]
fn with_holders_of_new_holes_read_before_the_rows_a_late_row_is_lost() {
    breaks(Rule::HoldersAfterRows, Scenario::out_of_order(), PUBLISHED);
}

#[test]
fn with_a_burn_after_a_cut_off_read_the_rest_of_a_bulk_insert_is_lost() {
    breaks(Rule::BurnBelowTheCut, Scenario::cut_off(), PUBLISHED);
}

#[test]
fn with_a_burn_without_recorded_holders_a_late_row_is_lost() {
    breaks(Rule::BurnOnlyWithHolders, Scenario::cut_off(), PUBLISHED);
}

#[test]
fn without_waiting_for_late_rows_a_key_is_inverted() {
    breaks(Rule::NewRowsWaitForLateOnes, Scenario::cut_off(), ORDER);
}

#[test]
fn without_the_holders_of_now_a_restart_loses_a_late_row() {
    breaks(Rule::HoldersOfNow, Scenario::out_of_order(), PUBLISHED);
}

#[test]
fn with_a_live_checkpoint_a_crash_loses_the_batch_that_was_read_ahead() {
    breaks(Rule::ImmutableCheckpoint, Scenario::read_ahead(), PUBLISHED);
}

#[test]
fn with_a_reconnect_that_keeps_its_read_ahead_an_id_issued_twice_is_lost() {
    breaks(
        Rule::NewSessionForgets,
        Scenario::lossy_failover(),
        PUBLISHED,
    );
}

#[test]
fn with_a_position_read_before_the_fence_the_zombies_batch_is_doubled() {
    breaks(Rule::FenceBeforePosition, Scenario::two_leaders(), ONCE);
}

#[test]
fn with_the_larger_number_instead_of_the_larger_seq_a_late_row_is_doubled() {
    breaks(Rule::LargerSeq, Scenario::out_of_order(), ONCE);
}

#[test]
fn with_clean_up_before_confirmation_a_row_is_deleted_unpublished() {
    breaks(Rule::CleanUpBehindTheMark, Scenario::clean_up(), DELETED);
}

#[test]
fn without_the_epoch_check_a_zombie_parks_what_was_published() {
    breaks(Rule::WritesCheckTheEpoch, Scenario::parking_by_two(), ONCE);
}

#[test]
fn with_counts_without_fingerprints_a_revived_row_compensates_a_lost_one() {
    breaks(Rule::Fingerprints, Scenario::revived(), PUBLISHED);
}

#[test]
fn without_the_second_check_a_revived_row_is_lost() {
    breaks(Rule::CheckAgainAfterHolders, Scenario::revived(), PUBLISHED);
}

#[test]
fn with_start_holders_read_after_the_check_a_revived_row_is_lost() {
    breaks(
        Rule::StartHoldersBeforeCheck,
        Scenario::revived(),
        PUBLISHED,
    );
}

#[test]
fn with_a_checkpoint_before_the_parking_a_start_stops_for_nothing() {
    breaks(
        Rule::ParkBeforeCheckpoint,
        Scenario::parking(),
        NO_FALSE_STOP,
    );
}

#[test]
fn with_a_release_before_it_is_settled_a_row_is_doubled() {
    breaks(Rule::ReleaseOnlySettled, Scenario::parking(), ONCE);
}

#[test]
fn with_a_release_that_deletes_a_range_a_parked_row_is_lost() {
    breaks(Rule::ReleaseNamesIds, Scenario::parking(), PUBLISHED);
}

#[test]
fn without_finishing_the_release_a_start_doubles_it() {
    breaks(Rule::StartFinishesRelease, Scenario::parking(), ONCE);
}

#[test]
fn with_a_reconnect_that_keeps_its_read_ahead_a_lost_message_is_published() {
    breaks(Rule::NewSessionForgets, Scenario::lossy_failover(), NOTICED);
}

#[test]
fn with_all_rules_a_late_checkpoint_does_no_damage() {
    holds(Scenario::late_offsets(), 5_000);
}
