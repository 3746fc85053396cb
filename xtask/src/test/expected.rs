//! The suites that have to be there: a suite that vanishes, or runs nothing, must not look like success.

/// Every suite: the unit tests of a crate, its integration tests by target, its doc tests.
pub(super) const SUITES: &[&str] = &[
    "oncebox embedded",
    "oncebox unit",
    "oncebox-integration-tests it",
    "oncebox-integration-tests unit",
    "oncebox-kafka unit",
    "oncebox-migrations unit",
    "oncebox-outbox unit",
    "oncebox-relay unit",
    "oncebox-inbox unit",
    "xtask bin xtask",
    ON_CONTAINERS,
];

/// The suite of the integration tests that run on testcontainers as well.
pub(super) const ON_CONTAINERS: &str = "on testcontainers";

/// Which integration tests these are: beginnings of their names.
pub(super) const CONTAINER_TESTS: &[&str] = &["services_come_and_go::"];
