//! Exit codes, and the one way in which a command fails.

use std::process::ExitCode;

use crate::config::ConfigError;
use crate::redact;

/// Done.
pub const OK: u8 = 0;
/// Something failed; the message says what. Starting again may help.
pub const ERROR: u8 = 1;
/// The command line or the configuration is wrong. Starting again does not help.
pub const USAGE: u8 = 2;
/// `relay --until-empty`: another relay leads this outbox.
pub const NOT_LEADER: u8 = 3;
/// A guarantee is in danger; read the message and decide before starting again.
pub const DANGER: u8 = 4;

/// The text of `--help` about exit codes.
pub const HELP: &str = "\
Exit codes:
  0  done
  1  an error; the message says what (doctor: at least one FAIL; demo: the audit found a mismatch;
     reconcile: something is missing or extra)
  2  the command line or the configuration is wrong
  3  relay --until-empty: another relay leads this outbox
  4  a guarantee is in danger: read the message before starting again";

/// Why a command did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// [`USAGE`].
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// [`USAGE`]: a library refuses its configuration.
    #[error("{0}")]
    Usage(String),
    /// [`NOT_LEADER`].
    #[error("another relay leads this outbox: nothing done")]
    NotLeader,
    /// [`DANGER`].
    #[error("stopped, a guarantee is in danger: {0}")]
    Danger(String),
    /// [`ERROR`].
    #[error("{0}")]
    Error(String),
    /// [`ERROR`], and everything was said already.
    #[error("failed")]
    Said,
}

impl Failure {
    /// A general failure with `text`.
    pub fn error(text: impl std::fmt::Display) -> Self {
        Self::Error(text.to_string())
    }

    /// The exit code of this failure.
    pub fn code(&self) -> u8 {
        match self {
            Self::Config(_) | Self::Usage(_) => USAGE,
            Self::NotLeader => NOT_LEADER,
            Self::Danger(_) => DANGER,
            Self::Error(_) | Self::Said => ERROR,
        }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::Error(format!("{error:#}"))
    }
}

impl From<oncebox_relay::Error> for Failure {
    fn from(error: oncebox_relay::Error) -> Self {
        let text = with_sources(&error);
        match error {
            _ if error.is_stop() => Self::Danger(text),
            oncebox_relay::Error::Config(_) => Self::Usage(text),
            _ => Self::Error(text),
        }
    }
}

/// An error and its sources in one line, without repeating what a text already contains.
pub fn with_sources(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let words = inner.to_string();
        if !text.contains(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        source = inner.source();
    }
    text
}

/// Says why on standard error, without secrets, and gives the exit code.
pub(crate) fn report(outcome: Result<(), Failure>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::from(OK),
        Err(failure) => {
            if !matches!(failure, Failure::Said) {
                eprintln!("oncebox: {}", redact::scrub(&failure.to_string()));
            }
            ExitCode::from(failure.code())
        }
    }
}
