//! The log: to standard error, scrubbed of secrets.

use std::io;

use tracing_subscriber::EnvFilter;

use crate::config::LogFormat;
use crate::redact::Scrubbing;

/// Starts logging. `RUST_LOG` chooses what; without it `default` does. A second call does nothing.
pub(crate) fn start(format: LogFormat, default: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Scrubbing(io::stderr().lock()));
    // The only error is that a log exists already: the embedding program's choice stands.
    let _ = match format {
        LogFormat::Text => log.with_ansi(false).try_init(),
        LogFormat::Json => log.json().try_init(),
    };
}
