//! Builds every test of the workspace and notes the programs that cargo made.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// A program that cargo built.
#[derive(Debug)]
pub(crate) struct Program {
    /// `package unit`, or `package` and the name of the integration test or binary.
    pub(super) suite: String,
    /// The directory of its package: where cargo runs tests.
    pub(crate) dir: PathBuf,
    pub(crate) executable: PathBuf,
    is_test: bool,
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Programs(Vec<Program>);

impl Programs {
    /// The test programs, in the order cargo runs them.
    pub(super) fn tests(&self) -> impl Iterator<Item = &Program> {
        self.0.iter().filter(|program| program.is_test)
    }

    /// The program that holds the integration tests.
    pub(super) fn integration_tests(&self) -> Result<&Program> {
        self.find("oncebox-integration-tests it")
    }

    /// Takes a program out by its name.
    pub(crate) fn take(self, suite: &str) -> Result<Program> {
        let mut programs = self.0.into_iter();
        programs
            .find(|p| p.suite == suite)
            .with_context(|| format!("cargo built no {suite}"))
    }

    /// A program by its name.
    pub(crate) fn find(&self, suite: &str) -> Result<&Program> {
        self.0
            .iter()
            .find(|p| p.suite == suite)
            .with_context(|| format!("cargo built no {suite}"))
    }
}

/// The tests of TLS. librdkafka needs OpenSSL's headers for it.
const TLS: &str = "oncebox-integration-tests/tls";

/// Whether OpenSSL's headers are there.
pub(super) fn has_openssl() -> bool {
    let asked = Command::new("pkg-config")
        .args(["--exists", "openssl"])
        .status();
    asked.is_ok_and(|status| status.success())
}

/// `cargo test --workspace --no-run`: the same profile and features for everything, so that nothing is built twice.
pub(crate) fn tests() -> Result<Programs> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["test", "--workspace", "--no-run"]);
    if has_openssl() {
        cargo.args(["--features", TLS]);
    }
    cargo
        .current_dir(crate::workspace())
        .stderr(Stdio::inherit());
    programs(&mut cargo)
}

/// Runs a command of cargo that builds, and notes what it built. The error holds what the command wrote, unless that
/// went to the terminal.
pub(crate) fn programs(cargo: &mut Command) -> Result<Programs> {
    let output = cargo
        .arg("--message-format=json-render-diagnostics")
        .stdin(Stdio::null())
        .output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("the tests do not build\n{}", said.trim_end());
    }
    let lines = String::from_utf8(output.stdout)?;
    let mut programs: Vec<Program> = Vec::new();
    for line in lines.lines() {
        let message: Value = serde_json::from_str(line)?;
        programs.extend(program(&message));
    }
    programs.sort_by(|a, b| (&a.dir, &a.suite).cmp(&(&b.dir, &b.suite)));
    Ok(Programs(programs))
}

fn program(message: &Value) -> Option<Program> {
    if message["reason"] != "compiler-artifact" {
        return None;
    }
    let executable = PathBuf::from(message["executable"].as_str()?);
    let manifest = PathBuf::from(message["manifest_path"].as_str()?);
    let dir = manifest.parent()?.to_owned();
    let target = message["target"]["name"].as_str()?;
    let kind = message["target"]["kind"][0].as_str()?;
    let is_test = message["profile"]["test"].as_bool()?;
    let package = package_name(message["package_id"].as_str()?)?;
    let suite = match kind {
        "lib" if is_test => format!("{package} unit"),
        "bin" if is_test => format!("{package} bin {target}"),
        _ => format!("{package} {target}"),
    };
    Some(Program {
        suite,
        dir,
        executable,
        is_test,
    })
}

/// `path+file:///…/kafka#oncebox-kafka@0.1.0`, or `path+file:///…/xtask#0.1.0` when the directory has the package's name.
fn package_name(id: &str) -> Option<String> {
    let (path, fragment) = id.rsplit_once('#')?;
    let name = fragment
        .split_once('@')
        .map_or_else(|| path.rsplit('/').next(), |(name, _)| Some(name))?;
    Some(name.to_owned())
}
