//! The inventory service's life: started, stopped, sent back, waited for.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::progress::Board;
use super::shop::{Running, Shop};

/// How long the inventory may take for a step forward before the run counts as broken.
const PATIENCE: Duration = Duration::from_secs(60);

/// The inventory service of a run.
#[derive(Debug)]
pub(super) struct Inventory<S> {
    shop: S,
    board: Arc<Board>,
    running: Running,
}

impl<S: Shop> Inventory<S> {
    pub(super) fn start(shop: S, board: Arc<Board>) -> Self {
        let running = shop.inventory();
        board.watch(running.stats.clone());
        Self {
            shop,
            board,
            running,
        }
    }

    /// Stops the service, sends it back to the first record, and starts it again: everything is delivered once more.
    pub(super) async fn deliver_again(&mut self) -> anyhow::Result<()> {
        self.end().await?;
        self.shop.rewind().await?;
        self.running = self.shop.inventory();
        self.board.watch(self.running.stats.clone());
        Ok(())
    }

    async fn end(&mut self) -> anyhow::Result<()> {
        self.running.shutdown.cancel();
        (&mut self.running.task)
            .await?
            .context("the inventory service failed")
    }

    /// Stops the service.
    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        self.end().await
    }

    /// Waits until every partition is settled up to this offset (exclusive).
    pub(super) async fn settle(&self, ends: &BTreeMap<i32, i64>) -> anyhow::Result<()> {
        let mut last = self.shop.settled().await?;
        let mut moved = Instant::now();
        loop {
            if ends
                .iter()
                .all(|(partition, end)| last.get(partition).is_some_and(|next| next >= end))
            {
                return Ok(());
            }
            if self.running.task.is_finished() {
                bail!("the inventory service ended early");
            }
            if moved.elapsed() > PATIENCE {
                bail!("the inventory stands still at {last:?}, the topic ends at {ends:?}");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            let now = self.shop.settled().await?;
            if now != last {
                (last, moved) = (now, Instant::now());
            }
        }
    }
}
