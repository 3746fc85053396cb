//! Relays as processes of their own, killed by SIGKILL at named points.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use oncebox_relay::Step;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::config::{Settings, kafka_variable};
use crate::kill_at::KillAt;

/// Where the relays of the demo die, in turn.
pub(super) const POINTS: [Step; 5] = [
    Step::BatchRead,
    Step::Producing,
    Step::OffsetsSent,
    Step::EndTxnSent,
    Step::Committed,
];

/// A killed leader is replaced when its lease has run out: short, so that kills cost little.
const LEASE: &str = "500ms";
/// How long a relay may take to its point. Far more than it needs: this bound only ends a broken run.
const PATIENCE: Duration = Duration::from_secs(90);
/// How often a relay that ends with an error is started, and the pause before the next time.
const ATTEMPTS: u32 = 4;
const PAUSE: Duration = Duration::from_secs(1);
const SIGKILL: i32 = 9;

/// The k-th kill: the points in turn, and now the first, now a later time that the point is reached.
pub(super) fn kill(k: usize) -> KillAt {
    let step = POINTS[k % POINTS.len()];
    // The claim at the start passes the Kafka steps once, without records.
    let first = if matches!(step, Step::BatchRead | Step::Producing) {
        1
    } else {
        2
    };
    let later = u32::try_from(k / POINTS.len() % 3).unwrap_or(0);
    KillAt {
        step,
        nth: first + later,
    }
}

/// How to start a relay of this demo.
#[derive(Clone, Debug)]
pub(super) struct Relays {
    program: PathBuf,
    arguments: Vec<String>,
    // By environment, not by argument: it may hold passwords, and anybody can read command lines.
    variables: Vec<(String, String)>,
    log: PathBuf,
}

impl Relays {
    /// Relays for the database, broker and names of `settings`; they write to `log`.
    pub(super) fn new(settings: &Settings, log: PathBuf) -> anyhow::Result<Self> {
        let mut variables = vec![
            (
                "ONCEBOX_DATABASE_URL".to_owned(),
                settings.database_url()?.expose().to_owned(),
            ),
            ("ONCEBOX_KAFKA".to_owned(), settings.kafka()?.bootstrap),
        ];
        for (property, value) in settings.kafka.properties.expose() {
            variables.push((kafka_variable(property), value.clone()));
        }
        let arguments = [
            ("--source", settings.source()?.as_str()),
            ("--schema", settings.schema.as_str()),
            ("--prefix", settings.prefix.as_str()),
            ("--lease", LEASE),
        ];
        Ok(Self {
            program: std::env::current_exe().context("cannot find this program's file")?,
            arguments: arguments
                .iter()
                .flat_map(|(flag, value)| [(*flag).to_owned(), (*value).to_owned()])
                .collect(),
            variables,
            log,
        })
    }

    fn spawn(&self, extra: &[&str]) -> anyhow::Result<Child> {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(&self.log)
            .with_context(|| format!("cannot write {}", self.log.display()))?;
        let mut command = Command::new(&self.program);
        // The settings of this process are not the relay's.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("ONCEBOX_") {
                command.env_remove(name);
            }
        }
        command
            .arg("relay")
            .args(&self.arguments)
            .args(extra)
            .envs(self.variables.iter().cloned())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a relay")
    }

    /// Runs a relay until it has killed itself at this point.
    ///
    /// # Errors
    /// It ended in another way, or did not reach the point.
    pub(super) async fn run_until_killed(&self, at: KillAt) -> anyhow::Result<()> {
        let status = self.supervise(&["--kill-at", &at.to_string()]).await?;
        if status.signal() != Some(SIGKILL) {
            bail!(
                "a relay that should die at {at} ended with {status}; its log ends:\n{}",
                self.log_end()
            );
        }
        Ok(())
    }

    /// Runs a relay until everything committed is published.
    ///
    /// # Errors
    /// It did not get there.
    pub(super) async fn run_until_empty(&self) -> anyhow::Result<()> {
        let status = self.supervise(&["--until-empty"]).await?;
        if !status.success() {
            bail!(
                "relay --until-empty ended with {status}; its log ends:\n{}",
                self.log_end()
            );
        }
        Ok(())
    }

    /// Runs a relay to its end, and again when it ends with "starting again may help", as a supervisor would.
    async fn supervise(&self, extra: &[&str]) -> anyhow::Result<ExitStatus> {
        let mut attempt = 1;
        loop {
            let mut relay = self.spawn(extra)?;
            let Ok(status) = timeout(PATIENCE, relay.wait()).await else {
                relay.kill().await?;
                bail!(
                    "relay {} did not end within {PATIENCE:?}; its log ends:\n{}",
                    extra.join(" "),
                    self.log_end()
                );
            };
            let status = status?;
            if status.code() != Some(i32::from(crate::exit::ERROR)) || attempt == ATTEMPTS {
                return Ok(status);
            }
            tracing::warn!(
                attempt,
                log = self.log_end().lines().last(),
                "a relay ended with an error and is started again"
            );
            tokio::time::sleep(PAUSE).await;
            attempt += 1;
        }
    }

    fn log_end(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fifteen_kills_are_three_at_every_point_and_never_in_the_claim() {
        for step in POINTS {
            let kills: Vec<KillAt> = (0..15).map(kill).filter(|k| k.step == step).collect();
            assert_eq!(kills.len(), 3, "{step}");
            if !matches!(step, Step::BatchRead | Step::Producing) {
                assert!(kills.iter().all(|k| k.nth >= 2));
            }
        }
    }
}
