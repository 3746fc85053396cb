//! The dedup window: marks that are older go, in chunks that never hold anybody up.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::InboxStore;
use crate::process::Processor;

/// Between two passes over the table.
const PASS: Duration = Duration::from_secs(600);
/// Between two chunks.
const PAUSE: Duration = Duration::from_millis(50);

impl<D: InboxStore> Processor<D> {
    /// Deletes marks that are older than the window, until the shutdown. Several processes may do that at once.
    pub(crate) async fn sweep_marks(
        self: Arc<Self>,
        consumer: Arc<str>,
        window: Duration,
        stop: CancellationToken,
    ) {
        // Not all processes of a deployment at the same moment, and not while they start.
        let mut wait = Duration::from_secs(10).mul_f64(1.0 + rand::random::<f64>());
        let mut chunk = 0;
        let mut deleted = 0;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(wait) => {}
            }
            wait = PASS;
            match self.sweep_chunk(&consumer, window, chunk).await {
                Ok((rows, next)) => {
                    deleted += rows;
                    chunk = next.unwrap_or(0);
                    if next.is_some() {
                        wait = PAUSE;
                    } else {
                        tracing::debug!(%consumer, deleted, "marks behind the window are gone");
                        deleted = 0;
                    }
                }
                Err(e) => tracing::warn!(error = %e, "marks not cleaned up, will be tried again"),
            }
        }
    }

    /// One chunk, in a transaction of its own.
    pub(crate) async fn sweep_chunk(
        &self,
        consumer: &str,
        window: Duration,
        chunk: i64,
    ) -> Result<(u64, Option<i64>), sqlx::Error> {
        let sweep = async {
            let mut conn = self.pool.acquire().await?;
            D::sweep(&mut conn, &self.statements, consumer, window, chunk).await
        };
        self.limited(sweep).await
    }
}
