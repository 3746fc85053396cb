//! The Docker engine's command line: does an engine answer, and the few commands the services need.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::process::Command;

/// The version of the engine that answers, if one does.
pub(crate) async fn engine() -> Option<String> {
    let asked = run(&["version", "--format", "{{.Server.Version}}"]);
    let version = tokio::time::timeout(Duration::from_secs(10), asked)
        .await
        .ok()?
        .ok()?;
    Some(version.trim().to_owned()).filter(|v| !v.is_empty())
}

/// Runs `docker <args>`; its standard output.
pub(crate) async fn run(args: &[&str]) -> Result<String> {
    let output = Command::new("docker")
        .args(args)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .context("cannot run the docker command")?;
    if !output.status.success() {
        bail!(
            "docker {}: {}",
            args.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Like [`run`], with both outputs and without a look at the status.
pub(crate) async fn run_both(args: &[&str]) -> Result<String> {
    let output = Command::new("docker")
        .args(args)
        .stdin(Stdio::null())
        .output()
        .await?;
    Ok(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

/// Removes a container, from a place that cannot wait for a runtime.
pub(crate) fn remove_container(id: &str) {
    let _ = std::process::Command::new("docker")
        .args(["rm", "-f", "-v", id])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
}
