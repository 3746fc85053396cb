//! Threads of our own for what blocks: client calls and, above all, the destruction of clients.

use std::sync::mpsc;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::error::Error;

/// A client that takes longer than this to be destroyed is reported.
const WATCHDOG: Duration = Duration::from_secs(10);

/// Starts a named thread.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(run)
        .map(drop)
        .map_err(|error| Error::Kafka {
            operation: format!("start the thread `{name}`"),
            code: "_CRIT_SYS_RESOURCE".into(),
            reason: error.to_string(),
            retriable: true,
            fatal: false,
        })
}

/// Runs a blocking piece of work on a thread of its own. It goes on if the future is dropped, so it
/// must be bounded.
pub(crate) async fn run<T: Send + 'static>(
    operation: &'static str,
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let (reply, answer) = oneshot::channel();
    spawn("oncebox-kafka", move || {
        let _ = reply.send(work());
    })?;
    answer.await.map_err(|_| Error::closed(operation))?
}

/// Destroys a client on a thread of its own and waits, at most ten seconds: destruction joins
/// librdkafka's threads, and if one of them hangs, that must not take ours with it.
pub(crate) fn destroy(client: &str, work: impl FnOnce() + Send + 'static) {
    let (done, waiter) = mpsc::channel::<()>();
    let spawned = spawn("oncebox-kafka-drop", move || {
        work();
        drop(done);
    });
    if spawned.is_ok() && waiter.recv_timeout(WATCHDOG) == Err(mpsc::RecvTimeoutError::Timeout) {
        tracing::warn!(
            client,
            "the Kafka client has not ended after 10 s; its threads are left behind"
        );
    }
}
