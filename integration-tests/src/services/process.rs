//! A server as a local process that can be signalled, stopped and started again.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::scratch::OwnGroup;

/// Notes its own process id for the watchdog and becomes the server: there is no moment in which the server runs and is
/// not noted.
const NOTE_AND_EXEC: &str = r#"echo "$1 $$" >"$2" && shift 2 && exec "$@""#;

const POLL: Duration = Duration::from_millis(10);

/// How to start a server.
#[derive(Debug)]
pub(crate) struct Program {
    /// Names the log and the process file.
    pub(crate) name: String,
    /// The scratch directory.
    pub(crate) scratch: PathBuf,
    /// Command and arguments.
    pub(crate) argv: Vec<String>,
    /// Run as this (user, group); `None` = as we are.
    pub(crate) user: Option<(u32, u32)>,
    /// The signal that ends it quickly, without leaving anything behind: `KILL` for Java, `QUIT` for PostgreSQL.
    pub(crate) end_signal: &'static str,
}

/// A local server process.
#[derive(Debug)]
pub(crate) struct Process {
    program: Program,
    child: Mutex<Option<Child>>,
}

impl Process {
    /// Starts it. Ready to serve is the caller's question.
    pub(crate) fn start(program: Program) -> Result<Self> {
        let process = Self {
            program,
            child: Mutex::new(None),
        };
        process.start_again()?;
        Ok(process)
    }

    /// Starts it after [`Process::wait_stopped`].
    pub(crate) fn start_again(&self) -> Result<()> {
        let p = &self.program;
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log())?;
        let mut command = Command::new("sh");
        command
            .args(["-c", NOTE_AND_EXEC, "sh", p.end_signal])
            .arg(self.pid_file())
            .args(&p.argv)
            .current_dir(&p.scratch)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .own_group();
        if let Some((uid, gid)) = p.user {
            use std::os::unix::process::CommandExt;
            command.uid(uid).gid(gid);
        }
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {}", p.name))?;
        *self.child() = Some(child);
        Ok(())
    }

    /// Sends a signal (`TERM`, `KILL`, `STOP`, …) to its process group.
    pub(crate) fn signal(&self, signal: &str) -> Result<()> {
        let Some(pid) = self.child().as_ref().map(Child::id) else {
            bail!("{} is not running", self.program.name)
        };
        signal_group(pid, signal)
    }

    /// Waits until it has ended; SIGKILL after `patience`.
    pub(crate) async fn wait_stopped(&self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        while !self.has_ended(deadline)? {
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// Whether it has ended; past the deadline it is made to.
    fn has_ended(&self, deadline: Instant) -> Result<bool> {
        let mut child = self.child();
        let Some(running) = child.as_mut() else {
            return Ok(true);
        };
        if running.try_wait()?.is_none() {
            if Instant::now() < deadline {
                return Ok(false);
            }
            signal_group(running.id(), "KILL")?;
            running.wait()?;
        }
        *child = None;
        let _ = std::fs::remove_file(self.pid_file());
        Ok(true)
    }

    /// Fails with the end of the log when it is no longer running.
    pub(crate) fn check_alive(&self) -> Result<()> {
        let ended = match self.child().as_mut() {
            Some(child) => child.try_wait()?,
            None => bail!("{} is not running", self.program.name),
        };
        match ended {
            None => Ok(()),
            Some(status) => bail!(
                "{} ended with {status}; its last lines:\n{}",
                self.program.name,
                self.log_tail()
            ),
        }
    }

    /// The last lines of its output.
    pub(crate) fn log_tail(&self) -> String {
        let text = std::fs::read(self.log()).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    fn log(&self) -> PathBuf {
        self.program
            .scratch
            .join(format!("{}.log", self.program.name))
    }

    fn pid_file(&self) -> PathBuf {
        self.program
            .scratch
            .join(format!("{}.pid", self.program.name))
    }

    fn child(&self) -> std::sync::MutexGuard<'_, Option<Child>> {
        self.child
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.signal("CONT");
        let _ = self.signal(self.program.end_signal);
        let deadline = Instant::now() + Duration::from_secs(5);
        while let Ok(false) = self.has_ended(deadline) {
            std::thread::sleep(POLL);
        }
    }
}

fn signal_group(pid: u32, signal: &str) -> Result<()> {
    kill(&format!("-{pid}"), signal)
}

/// Sends a signal to a process, or to a group (`-` and its id). `kill` is a shell builtin everywhere; a binary of that
/// name is not.
pub(crate) fn kill(target: &str, signal: &str) -> Result<()> {
    let status = Command::new("sh")
        .args(["-c", r#"kill -s "$1" -- "$2""#, "sh", signal, target])
        .stderr(Stdio::null())
        .status()?;
    if !status.success() {
        bail!("cannot send {signal} to {target}");
    }
    Ok(())
}
