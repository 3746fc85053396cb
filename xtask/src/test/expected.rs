//! The suites that have to be there: a suite that vanishes, or runs nothing, must not look like success.

/// Every suite: the unit tests of a crate, its integration tests by target, its doc tests.
pub(super) const SUITES: &[&str] = &[
    "oncebox unit",
    "oncebox command",
    "oncebox demo",
    "oncebox embedded",
    "oncebox operator",
    "oncebox-guard unit",
    "oncebox-guard it",
    "oncebox-guard doc",
    "oncebox-gate unit",
    "oncebox-gate it",
    "oncebox-gate doc",
    "oncebox-inbox unit",
    "oncebox-inbox it",
    "oncebox-inbox doc",
    "oncebox-integration-tests unit",
    "oncebox-integration-tests it",
    "oncebox-integration-tests doc",
    "oncebox-kafka unit",
    "oncebox-kafka it",
    "oncebox-kafka doc",
    "oncebox-migrations unit",
    "oncebox-migrations it",
    "oncebox-migrations doc",
    "oncebox-outbox unit",
    "oncebox-outbox it",
    "oncebox-outbox doc",
    "oncebox-protocol-model every_rule_is_needed",
    "oncebox-protocol-model doc",
    "oncebox-relay unit",
    "oncebox-relay doc",
    "xtask bin xtask",
    ON_CONTAINERS,
];

/// The suite of the integration tests that run on testcontainers as well.
pub(super) const ON_CONTAINERS: &str = "on testcontainers";

/// Which integration tests these are: beginnings of their names.
pub(super) const CONTAINER_TESTS: &[&str] = &[
    "services_come_and_go::",
    "first_use::",
    "kafkas_own_tools::",
];
