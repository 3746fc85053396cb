//! SIGTERM and SIGINT: the first asks politely, the second ends the process.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that is cancelled at the first SIGTERM or SIGINT; the second signal exits at once.
///
/// # Errors
/// The operating system refuses the handler.
pub(crate) fn shutdown() -> std::io::Result<CancellationToken> {
    let token = CancellationToken::new();
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    let stop = token.clone();
    tokio::spawn(async move {
        let mut next = async || {
            tokio::select! {
                _ = term.recv() => ("SIGTERM", 143),
                _ = int.recv() => ("SIGINT", 130),
            }
        };
        let (name, _) = next().await;
        tracing::info!(
            signal = name,
            "stopping; a second signal ends the process at once"
        );
        stop.cancel();
        let (_, code) = next().await;
        std::process::exit(code);
    });
    Ok(token)
}
