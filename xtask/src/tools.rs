//! Commands that are programs of `integration-tests`: built, and given the arguments; they know their own.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::test;

/// `cargo xtask bench <what>`: measurements, with the release profile.
pub(crate) fn bench(arguments: &[String]) -> Result<ExitCode> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["run", "--release", "--package", "oncebox-integration-tests"])
        .args(["--bin", "oncebox-bench", "--"])
        .current_dir(crate::workspace());
    run(cargo, arguments)
}

/// `cargo xtask faults`: the program that the tests are built with.
pub(crate) fn faults(arguments: &[String]) -> Result<ExitCode> {
    test::prepare()?;
    let programs = test::build::tests()?;
    let program = programs.find("oncebox-integration-tests oncebox-faults")?;
    run(Command::new(&program.executable), arguments)
}

/// `cargo xtask bare-root`: the fresh-machine test; the script says what it does.
pub(crate) fn bare_root(arguments: &[String]) -> Result<ExitCode> {
    let script = crate::workspace().join("integration-tests/bare-root.sh");
    run(Command::new(script), arguments)
}

fn run(mut command: Command, arguments: &[String]) -> Result<ExitCode> {
    let program = command.get_program().display().to_string();
    let status = command.args(arguments).status().context(program)?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
