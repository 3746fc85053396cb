//! `cargo xtask bench <what>`: measurements on real services, with the release profile.

use std::process::{Command, ExitCode};

use anyhow::Result;

/// Builds the benchmark and hands the arguments on; it knows its own commands.
pub(crate) fn run(arguments: &[String]) -> Result<ExitCode> {
    let status = Command::new(env!("CARGO"))
        .args(["run", "--release", "--package", "oncebox-integration-tests"])
        .args(["--bin", "oncebox-bench", "--"])
        .args(arguments)
        .current_dir(crate::workspace())
        .status()?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
