//! Commands that are programs of `oncebox-integration-tests`: built, and given the arguments; they know their own.

use std::process::{Command, ExitCode};

use anyhow::Result;

/// `cargo xtask bench <what>`: measurements, with the release profile.
pub(crate) fn bench(arguments: &[String]) -> Result<ExitCode> {
    run(&["--release", "--bin", "oncebox-bench"], arguments)
}

/// `cargo xtask faults`: with the profile of the tests, whose build it shares.
pub(crate) fn faults(arguments: &[String]) -> Result<ExitCode> {
    run(&["--bin", "oncebox-faults"], arguments)
}

fn run(program: &[&str], arguments: &[String]) -> Result<ExitCode> {
    let status = Command::new(env!("CARGO"))
        .args(["run", "--package", "oncebox-integration-tests"])
        .args(program)
        .arg("--")
        .args(arguments)
        .current_dir(crate::workspace())
        .status()?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
