//! Processes of one kind, relays or consumers, under a supervisor that starts again whatever ends.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use oncebox_integration_tests::source as process;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// Pause of the supervisor before a process is started again.
const PAUSE: Duration = Duration::from_millis(200);
/// The exit code of a process that stopped because a promise is in danger. No fault here justifies it.
const IN_DANGER: i32 = 4;

type Ended = Option<(bool, ExitStatus)>;

/// One place for a process.
struct Slot {
    pid: watch::Receiver<Option<u32>>,
    /// Arguments for the next start only.
    next: Arc<Mutex<Vec<String>>>,
    /// How the last process here ended, and whether it was armed; `None` while one lives.
    ended: watch::Receiver<Ended>,
    supervisor: AbortOnDropHandle<Result<()>>,
}

/// The processes.
pub(crate) struct Crew {
    slots: Vec<Slot>,
    pub(crate) log: std::path::PathBuf,
    stop: CancellationToken,
}

impl Crew {
    /// Starts one process for each list of arguments; they append to `log`.
    pub(crate) fn start(all: Vec<Vec<String>>, log: std::path::PathBuf) -> Self {
        let stop = CancellationToken::new();
        let slots = all
            .into_iter()
            .map(|arguments| {
                let (pid, pid_seen) = watch::channel(None);
                let (ended, ended_seen) = watch::channel(None);
                let next = Arc::new(Mutex::new(Vec::new()));
                let supervisor = supervise(
                    arguments,
                    log.clone(),
                    Arc::clone(&next),
                    (pid, ended),
                    stop.clone(),
                );
                Slot {
                    pid: pid_seen,
                    next,
                    ended: ended_seen,
                    supervisor: AbortOnDropHandle::new(tokio::spawn(supervisor)),
                }
            })
            .collect();
        Self { slots, log, stop }
    }

    /// The place of a process that lives now.
    pub(crate) fn slot(&self, pid: u32) -> Option<usize> {
        self.slots.iter().position(|s| *s.pid.borrow() == Some(pid))
    }

    /// The processes that live now.
    pub(crate) fn pids(&self) -> Vec<u32> {
        self.slots.iter().filter_map(|s| *s.pid.borrow()).collect()
    }

    /// The last that they said.
    pub(crate) fn log_end(&self) -> String {
        log_end(&self.log)
    }

    /// Fails if a supervisor gave up: one stopped because it saw a promise in danger.
    pub(crate) async fn check(&mut self) -> Result<()> {
        for slot in &mut self.slots {
            if slot.supervisor.is_finished() {
                (&mut slot.supervisor).await??;
            }
        }
        Ok(())
    }

    /// Arms all: gives them these arguments for their next start and ends those that live.
    pub(crate) fn arm(&self, more: &[String]) {
        for slot in &self.slots {
            *lock(&slot.next) = more.to_vec();
        }
        for pid in self.pids() {
            signal(pid, "TERM");
        }
    }

    /// Waits until one of those that were armed has killed itself, and starts all without arms. Whether one did.
    pub(crate) async fn one_died(&self, patience: Duration) -> bool {
        let has_died = |slot: &Slot| matches!(*slot.ended.borrow(), Some((true, status)) if status.signal() == Some(9));
        let deadline = Instant::now() + patience;
        let mut died = false;
        while !died && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(10)).await;
            died = self.slots.iter().any(has_died);
        }
        // The other one is armed as well: one that is not takes its place.
        for slot in &self.slots {
            lock(&slot.next).clear();
        }
        for pid in self.pids() {
            signal(pid, "KILL");
        }
        died
    }

    /// [`Crew::arm`] and [`Crew::one_died`].
    pub(crate) async fn run_armed(&self, more: &[String], patience: Duration) -> bool {
        self.arm(more);
        self.one_died(patience).await
    }

    /// Ends all.
    pub(crate) async fn finish(mut self) -> Result<()> {
        self.check().await?;
        self.stop.cancel();
        for slot in &mut self.slots {
            (&mut slot.supervisor).await??;
        }
        Ok(())
    }
}

/// Lets a relay with these arguments publish everything that is visible.
pub(crate) async fn until_empty(mut arguments: Vec<String>, log: &std::path::Path) -> Result<()> {
    arguments.push("--until-empty".into());
    run(&arguments, log).await
}

/// Runs a command of this program to its end.
///
/// # Errors
/// It does not end, or not with success; the text has its status.
pub(crate) async fn run(arguments: &[String], log: &std::path::Path) -> Result<()> {
    let mut process = spawn(arguments, log)?;
    let status = tokio::time::timeout(Duration::from_secs(120), process.wait())
        .await
        .with_context(|| format!("{arguments:?} does not come to an end"))??;
    if !status.success() {
        bail!("{arguments:?} ended with {status}; {}", log_end(log));
    }
    Ok(())
}

async fn supervise(
    arguments: Vec<String>,
    log: std::path::PathBuf,
    next: Arc<Mutex<Vec<String>>>,
    (pid, ended): (watch::Sender<Option<u32>>, watch::Sender<Ended>),
    stop: CancellationToken,
) -> Result<()> {
    loop {
        let mut all = arguments.clone();
        let armed = !lock(&next).is_empty();
        all.append(&mut lock(&next));
        let mut relay = spawn(&all, &log)?;
        ended.send_replace(None);
        pid.send_replace(relay.id());
        let status = tokio::select! {
            status = relay.wait() => status?,
            () = stop.cancelled() => {
                relay.kill().await?;
                return Ok(());
            }
        };
        pid.send_replace(None);
        ended.send_replace(Some((armed, status)));
        if status.code() == Some(IN_DANGER) {
            bail!(
                "it stopped although no promise was in danger; {}",
                log_end(&log)
            );
        }
        tokio::time::sleep(PAUSE).await;
    }
}

fn spawn(arguments: &[String], log: &std::path::Path) -> Result<Child> {
    let log = std::fs::File::options()
        .create(true)
        .append(true)
        .open(log)?;
    Command::new(std::env::current_exe()?)
        .args(arguments)
        .env("RUST_LOG", "info,librdkafka=error")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .kill_on_drop(true)
        .spawn()
        .context("cannot start a process")
}

/// Sends a signal to a process that may have ended meanwhile.
pub(crate) fn signal(pid: u32, name: &str) -> bool {
    process::signal(pid, name).is_ok()
}

fn log_end(log: &std::path::Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let end = lines[lines.len().saturating_sub(60)..].join("\n");
    format!("its log ends:\n{end}")
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
