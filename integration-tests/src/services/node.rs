//! One running server, whatever it runs in.

use std::time::Duration;

use anyhow::Result;

use super::container::Container;
use super::process::Process;

/// A local process or a container, with the same verbs.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a handful in a whole test run")]
pub(crate) enum Node {
    /// A process of this machine.
    Process(Process),
    /// A container of the machine's Docker engine.
    Container(Container),
}

impl Node {
    /// Starts it again after a stop.
    pub(crate) async fn start_again(&self) -> Result<()> {
        match self {
            Self::Process(p) => p.start_again(),
            Self::Container(c) => c.start_again().await,
        }
    }

    /// Sends a signal and returns.
    pub(crate) async fn signal(&self, signal: &str) -> Result<()> {
        match self {
            Self::Process(p) => p.signal(signal),
            Self::Container(c) => c.signal(signal).await,
        }
    }

    /// Sends a signal that ends it and waits for the end; SIGKILL after `patience`.
    pub(crate) async fn stop(&self, signal: &str, patience: Duration) -> Result<()> {
        match self {
            Self::Process(p) => {
                p.signal(signal)?;
                p.wait_stopped(patience).await
            }
            Self::Container(c) => c.stop(signal, patience).await,
        }
    }

    /// Fails with the last lines of its output when it has ended.
    pub(crate) async fn check_alive(&self) -> Result<()> {
        match self {
            Self::Process(p) => p.check_alive(),
            Self::Container(c) => c.check_alive().await,
        }
    }

    /// The last lines of its output.
    pub(crate) async fn log_tail(&self) -> Result<String> {
        match self {
            Self::Process(p) => Ok(p.log_tail()),
            Self::Container(c) => c.log_tail().await,
        }
    }
}
