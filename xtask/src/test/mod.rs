//! `cargo xtask test`: everything, on real PostgreSQL, real Apache Kafka and real Redis.
//!
//! 1. What is missing is installed, or named in one line ([`setup`]).
//! 2. The workspace's tests are built once, with one set of features.
//! 3. One PostgreSQL, one Kafka and one Redis are started for the whole run ([`services`]), as local processes where PostgreSQL is
//!    installed, otherwise as containers.
//! 4. Every test program runs, then the doc tests ([`suite`]).
//! 5. A chosen part of the integration tests runs once more on containers ([`engine`]).
//! 6. The summary names every suite that has to be there ([`expected`]).

pub(crate) mod build;
mod engine;
mod expected;
mod report;
pub(crate) mod services;
mod setup;
mod suite;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};

use self::engine::Engine;
use self::report::Report;
use self::services::Services;
use self::suite::Suite;

/// The services are processes of this machine.
const LOCAL: &str = "local";

/// Runs everything; the exit code says whether all of it passed.
pub(crate) fn run(arguments: &[String]) -> Result<ExitCode> {
    if let Some(unknown) = arguments.first() {
        bail!("`cargo xtask test` takes no arguments, not {unknown}");
    }
    let logs = crate::workspace().join("target/xtask-test");
    std::fs::create_dir_all(&logs)?;
    let mut report = Report::default();

    let runner = prepare()?;
    let local = runner == LOCAL;
    let programs = report.timed("build", build::tests)?;

    let services = report.timed("services", || Services::start(&programs, runner))?;
    for program in programs.tests() {
        let suite = Suite::program(program, &logs);
        report.add(suite.run(services.environment(), &[])?);
    }
    for suite in suite::doc_tests(services.environment(), &logs)? {
        report.add(suite);
    }
    services.stop();

    report.add(on_containers(&programs, &logs, local)?);
    let passed = report.print(&logs)?;
    Ok(if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Sees to it that everything is there that tests need; says what runs the services.
pub(crate) fn prepare() -> Result<&'static str> {
    setup::prepare(engine::answers())?;
    // local processes whenever they are possible, so that both ways are exercised where both are
    Ok(if setup::has_postgres() {
        LOCAL
    } else {
        "containers"
    })
}

/// The part of the integration tests that has to pass on testcontainers, unless the whole suite ran there already.
fn on_containers(
    programs: &build::Programs,
    logs: &std::path::Path,
    local: bool,
) -> Result<suite::Outcome> {
    let name = expected::ON_CONTAINERS;
    if !local {
        return Ok(suite::Outcome::skipped(
            name,
            "the whole suite ran on containers",
        ));
    }
    let engine = match Engine::obtain(logs)? {
        Ok(engine) => engine,
        Err(reason) => return Ok(suite::Outcome::skipped(name, &reason)),
    };
    let suite = Suite::named(
        name,
        programs.integration_tests()?,
        logs,
        Duration::from_secs(1200),
    );
    let environment = [("ONCEBOX_TEST_SERVICES".to_owned(), "containers".to_owned())];
    let outcome = suite.run(&environment, expected::CONTAINER_TESTS);
    drop(engine);
    outcome
}
