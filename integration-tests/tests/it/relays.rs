//! Relays as separate processes.

use oncebox_integration_tests::source::{Process, Source};

/// The binary under test: the same `main` as `oncebox`.
pub(crate) const ONCEBOX: &str = env!("CARGO_BIN_EXE_oncebox-under-test");

/// A relay that runs until it is stopped.
pub(crate) fn relay(source: &Source) -> Process {
    Process::start(ONCEBOX, &source.arguments())
}

/// A relay with further arguments.
pub(crate) fn relay_with(source: &Source, more: &[&str]) -> Process {
    let mut arguments = source.arguments();
    arguments.extend(more.iter().map(|a| (*a).to_owned()));
    Process::start(ONCEBOX, &arguments)
}

/// A relay that reaches Kafka elsewhere.
pub(crate) fn relay_through(source: &Source, bootstrap: &str, more: &[&str]) -> Process {
    let mut arguments = source.arguments_through(bootstrap);
    arguments.extend(more.iter().map(|a| (*a).to_owned()));
    Process::start(ONCEBOX, &arguments)
}

/// Publishes everything visible and ends.
pub(crate) async fn until_empty(source: &Source) {
    relay_with(source, &["--until-empty"]).wait_ok().await;
}
