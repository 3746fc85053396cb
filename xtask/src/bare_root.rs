//! `cargo xtask bare-root`: the fresh-machine test.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

/// Runs `integration-tests/bare-root.sh`, which says what it does.
pub(crate) fn run(arguments: &[String]) -> Result<ExitCode> {
    let script = crate::workspace().join("integration-tests/bare-root.sh");
    let status = Command::new(&script)
        .args(arguments)
        .status()
        .with_context(|| script.display().to_string())?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
