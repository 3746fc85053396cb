//! `cargo xtask features`: the features that the other checks do not reach, because they build everything at once.

use std::process::{Command, ExitCode};

use anyhow::{Result, bail};

/// Packages and features that have to compile on their own.
const CHECKS: &[&[&str]] = &[
    &["-p", "oncebox-migrations", "--no-default-features"],
    &["-p", "oncebox-outbox"],
    &[
        "-p",
        "oncebox-outbox",
        "--no-default-features",
        "--features",
        "sqlite",
    ],
    &[
        "-p",
        "oncebox-guard",
        "--no-default-features",
        "--features",
        "postgres",
    ],
    &[
        "-p",
        "oncebox-guard",
        "--no-default-features",
        "--features",
        "sqlite",
    ],
    &["-p", "oncebox-gate", "--no-default-features"],
    &["-p", "oncebox-gate"],
    &[
        "-p",
        "oncebox-gate",
        "--no-default-features",
        "--features",
        "redis",
    ],
    &["-p", "oncebox", "--no-default-features"],
];

/// What compiles C, by the names of the crates that do it.
const C_COMPILERS: &[&str] = &["cc", "cmake", "autotools", "bindgen"];

/// Checks them one by one.
pub(crate) fn run(arguments: &[String]) -> Result<ExitCode> {
    if let Some(unknown) = arguments.first() {
        bail!("`cargo xtask features` takes no arguments, not {unknown}");
    }
    for check in CHECKS {
        println!("cargo check {}", check.join(" "));
        let status = cargo().args(["check", "--quiet"]).args(*check).status()?;
        if !status.success() {
            bail!("{} does not compile", check.join(" "));
        }
    }
    a_producing_service_compiles_no_c()?;
    Ok(ExitCode::SUCCESS)
}

/// The promise of the README: a service that only produces depends on `oncebox-outbox` alone and needs no C compiler.
fn a_producing_service_compiles_no_c() -> Result<()> {
    let tree = cargo()
        .args([
            "tree",
            "-p",
            "oncebox-outbox",
            "--edges",
            "normal,build",
            "--prefix",
            "none",
            "--format",
            "{p}",
        ])
        .output()?;
    if !tree.status.success() {
        bail!(
            "cargo tree: {}",
            String::from_utf8_lossy(&tree.stderr).trim()
        );
    }
    let text = String::from_utf8(tree.stdout)?;
    let crates = text.lines().filter_map(|line| line.split(' ').next());
    let guilty: Vec<_> = crates
        .filter(|name| C_COMPILERS.contains(name) || name.ends_with("-sys"))
        .collect();
    if !guilty.is_empty() {
        bail!(
            "oncebox-outbox must not compile C, and depends on {}",
            guilty.join(", ")
        );
    }
    println!("oncebox-outbox compiles no C");
    Ok(())
}

fn cargo() -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(crate::workspace());
    cargo
}
