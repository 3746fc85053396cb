//! Database work on the runtime, waited for by a thread that has to keep polling.

use std::future::Future;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Instant;

use super::{Id, TICK, Worker};
use crate::InboxStore;
use crate::error::Error;
use crate::feed::Feed;
use crate::partition::PATIENCE;

/// How a piece of work ended.
pub(super) enum Ran<T> {
    Done(T),
    /// The partition was revoked, or the shutdown's grace is over: the work was given up and its transaction rolled back.
    Abandoned,
}

impl<D: InboxStore, F: Feed> Worker<D, F> {
    /// Runs database work on the runtime and waits for it; keeps polling Kafka when it takes long, so that the group does
    /// not give the partitions to somebody else (`max.poll.interval.ms`).
    pub(super) fn work<T: Send + 'static>(
        &mut self,
        id: &Id,
        job: impl Future<Output = T> + Send + 'static,
    ) -> Result<Ran<T>, Error> {
        let generation = self.partitions.get(id).map(|p| p.generation);
        let (answer, result) = sync_channel(1);
        let task = self.runtime.spawn(async move {
            let _ = answer.send(job.await);
        });
        let mut wait = PATIENCE;
        let mut deadline = None;
        loop {
            match result.recv_timeout(wait) {
                Ok(done) => return Ok(Ran::Done(done)),
                Err(RecvTimeoutError::Disconnected) => return Err(Error::Thread),
                Err(RecvTimeoutError::Timeout) => {}
            }
            wait = TICK / 2;
            self.set_paused(|_| true);
            if let Some(event) = self.feed.poll(TICK / 2)
                && let Err(e) = self.on_event(event)
            {
                task.abort();
                return Err(e);
            }
            let now = Instant::now();
            if self.shutdown.is_cancelled() {
                deadline.get_or_insert(now + self.settings.shutdown_grace);
            }
            let revoked = self.partitions.get(id).map(|p| p.generation) != generation;
            if revoked || deadline.is_some_and(|at| now >= at) {
                // Dropping the transaction rolls it back; a COMMIT that is on its way is judged by its compare-and-set.
                task.abort();
                return Ok(Ran::Abandoned);
            }
        }
    }
}
