//! The inventory service's life: started, joined by a second instance, stopped, sent back, waited for.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::faults::{MEMORY, Process, ShortMemory};
use super::progress::{Board, Counted};
use super::shop::{Running, Shop};

/// How long the inventory may take for a step forward before the run counts as broken.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long the second instance may take to its first partition before it leaves without one.
const PATIENCE_TO_OWN: Duration = Duration::from_secs(30);

/// The inventory service of a run.
#[derive(Debug)]
pub(super) struct Inventory<S> {
    shop: S,
    board: Arc<Board>,
    process: Process,
    running: Running,
    second: Option<Running>,
}

impl<S: Shop> Inventory<S> {
    pub(super) fn start(shop: S, board: Arc<Board>) -> Self {
        let process = Process {
            hint: Arc::new(ShortMemory::new()),
            half_way: Arc::default(),
        };
        let running = launch(&shop, &process, &board);
        Self {
            shop,
            board,
            process,
            running,
            second: None,
        }
    }

    /// What the first instance keeps in memory.
    pub(super) fn process(&self) -> &Process {
        &self.process
    }

    /// A second instance joins the group. On Kafka the two share the partitions; the in-process broker knows one member of
    /// a group, and there they take everything from each other.
    pub(super) fn join(&mut self) {
        let process = Process {
            hint: Arc::new(ShortMemory::new()),
            half_way: Arc::clone(&self.process.half_way),
        };
        self.second = Some(launch(&self.shop, &process, &self.board));
    }

    /// Whether the second instance is there and has settled nothing yet.
    pub(super) fn second_is_idle(&self) -> bool {
        let second = self.second.as_ref();
        second.is_some_and(|second| second.stats.effects() + second.stats.duplicates() == 0)
    }

    /// The second instance, if there is one, leaves the group once it has owned a partition. Returns what it counted.
    pub(super) async fn leave(&mut self) -> anyhow::Result<Option<Counted>> {
        let Some(mut second) = self.second.take() else {
            return Ok(None);
        };
        let joined = Instant::now();
        while second.stats.ownership() == 0
            && !second.task.is_finished()
            && joined.elapsed() < PATIENCE_TO_OWN
        {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        end(&mut second).await?;
        Ok(Some(Counted::of(&second.stats)))
    }

    /// Stops the service, sends it back to the first record, and starts it again when its hint has forgotten:
    /// everything is delivered once more.
    pub(super) async fn deliver_again(&mut self) -> anyhow::Result<()> {
        end(&mut self.running).await?;
        self.shop.rewind().await?;
        tokio::time::sleep(MEMORY).await;
        self.running = launch(&self.shop, &self.process, &self.board);
        Ok(())
    }

    /// Stops the service.
    pub(super) async fn stop(&mut self) -> anyhow::Result<()> {
        end(&mut self.running).await
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

fn launch<S: Shop>(shop: &S, process: &Process, board: &Board) -> Running {
    let running = shop.inventory(process);
    board.watch(running.stats.clone());
    running
}

async fn end(running: &mut Running) -> anyhow::Result<()> {
    running.shutdown.cancel();
    (&mut running.task)
        .await?
        .context("the inventory service failed")
}
