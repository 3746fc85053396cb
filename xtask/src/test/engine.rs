//! A Docker engine for the tests on containers: the one that answers, or one started for the time of the tests.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::setup;

/// Starts the engine and stops it when standard input ends: also when this process is killed.
const DOCKERD: &str = r#"
trap '' INT TERM HUP
dockerd </dev/null >"$1" 2>&1 &
engine=$!
cat >/dev/null
kill "$engine"
wait "$engine"
"#;

/// An engine that answers.
pub(super) struct Engine {
    /// Ours, if we had to start it.
    dockerd: Option<Child>,
}

impl Engine {
    /// Finds or starts one, installing it as root on Debian. The inner error says why there is none.
    pub(super) fn obtain(logs: &Path) -> Result<Result<Self, String>> {
        if answers() {
            return Ok(Ok(Self { dockerd: None }));
        }
        if !setup::may_install() {
            return Ok(Err(
                "no Docker engine answers, and only root on Debian can start one".to_owned(),
            ));
        }
        let needs = [
            ("dockerd", "docker.io"),
            ("iptables", "iptables"),
            ("debootstrap", "debootstrap"),
        ];
        let packages: Vec<_> = needs
            .iter()
            .filter(|(program, _)| !setup::on_path(program))
            .map(|n| n.1)
            .collect();
        if !packages.is_empty() {
            setup::install(&packages)?;
        }
        let log = logs.join("dockerd.log");
        let dockerd = Command::new("sh")
            .args(["-c", DOCKERD, "sh"])
            .arg(&log)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let engine = Self {
            dockerd: Some(dockerd),
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut last = String::new();
        while Instant::now() < deadline && !last.contains("failed to start daemon") {
            if answers() {
                forget_earlier_runs();
                return Ok(Ok(engine));
            }
            std::thread::sleep(Duration::from_millis(500));
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            text.lines()
                .last()
                .unwrap_or("it said nothing")
                .clone_into(&mut last);
        }
        Ok(Err(format!("dockerd does not come up here: {last}")))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(dockerd) = &mut self.dockerd {
            drop(dockerd.stdin.take());
            let _ = dockerd.wait();
        }
    }
}

/// Removes what earlier runs left behind in an engine that is ours alone: the address pool of its networks holds some thirty.
fn forget_earlier_runs() {
    for what in ["container", "network"] {
        let _ = Command::new("docker")
            .args([what, "prune", "--force"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
    }
}

/// Whether an engine answers.
pub(super) fn answers() -> bool {
    let version = Command::new("docker")
        .args(["version", "--format", "{{.Server.Version}}"])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    version.is_ok_and(|v| v.status.success())
}
