//! The integration tests of Oncebox: one module per promise.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests; clippy knows only #[test] functions as such"
)]

mod clear_errors;
mod first_use;
mod g10_failover;
mod g10_upgrade;
mod g1_rolled_back_is_never_published;
mod g2_committed_means_published;
mod g3_each_message_once;
mod g4_order_per_key;
mod g5_inbox_under_fire;
mod g8_parked_and_paused;
mod kafkas_own_tools;
mod late_requests;
mod proxy_faults;
mod relays;
#[cfg(feature = "tls")]
mod secure;
mod services_come_and_go;
