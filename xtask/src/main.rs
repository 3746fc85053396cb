//! The project's own commands: `cargo xtask <command>`.

mod features;
mod sabotage;
mod test;
mod tools;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};

/// Takes the arguments after the command's name.
type Body = fn(&[String]) -> Result<ExitCode>;

/// Name, description and body of every command.
const COMMANDS: &[(&str, &str, Body)] = &[
    (
        "test",
        "set up what is missing, start the services and run every test",
        test::run,
    ),
    (
        "features",
        "check the features one by one; a producing service compiles no C",
        features::run,
    ),
    (
        "bench",
        "measure on real services: `bench relay [--rows N] [--runs N] [--json]`",
        tools::bench,
    ),
    (
        "faults",
        "inject faults into relays and consumers on real services: `faults [--each N] [--kind PREFIX] [--seed N]`",
        tools::faults,
    ),
    (
        "sabotage",
        "take out one protection at a time: the test that guards it has to fail; `--check`: do the patches apply",
        sabotage::run,
    ),
    (
        "bare-root",
        "run `cargo xtask test` inside a bare Debian root (root on Debian only)",
        tools::bare_root,
    ),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(arguments: &[String]) -> Result<ExitCode> {
    if let Some((name, rest)) = arguments.split_first()
        && let Some((_, _, run)) = COMMANDS.iter().find(|(known, ..)| known == name)
    {
        return run(rest);
    }
    let list: Vec<_> = COMMANDS
        .iter()
        .map(|(name, about, _)| format!("  {name:<10} {about}"))
        .collect();
    bail!("usage: cargo xtask <command>\n{}", list.join("\n"))
}

/// The root of the workspace.
fn workspace() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_owned()
}
