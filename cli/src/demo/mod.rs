//! `oncebox demo`: orders reach the inventory exactly once while the relay is being killed.
//!
//! An order service writes orders and messages; some transactions roll back, and on PostgreSQL one
//! after the other stays open with a low outbox id. Relays are processes of their own and die by
//! SIGKILL at named points. Records are copied into the topic a second time, and the inventory
//! service is sent back to the beginning. At the end the [`audit`] compares both databases and the
//! topic.
//!
//! | file | what |
//! |---|---|
//! | `shop.rs`, `postgres.rs`, `sqlite.rs` | both services, for both databases |
//! | `clerks.rs` | who orders, how fast, and what rolls back |
//! | `relays.rs` | processes and kill points |
//! | `inventory.rs`, `topic.rs` | the consuming side, and the topic as anybody sees it |
//! | `stage.rs` | where it all happens: directories, schemas, topics, and their removal |
//! | `audit.rs`, `report.rs`, `progress.rs` | the verdict, the numbers, the living line |

pub mod audit;
mod clerks;
mod inventory;
mod postgres;
mod progress;
mod relays;
mod report;
mod shop;
mod sqlite;
mod stage;
mod topic;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use anyhow::{Context, bail};
use clap::Args;
use oncebox_kafka::Message;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use self::audit::Seen;
use self::clerks::{Numbers, Pace};
use self::inventory::Inventory;
use self::progress::Board;
use self::relays::{POINTS, Relays};
use self::report::Summary;
use self::shop::Shop;
use self::stage::Stage;
use crate::config::Settings;
use crate::exit::Failure;
use crate::signals;

/// How many records are copied into the topic a second time.
const COPIES: usize = 100;

/// `oncebox demo`
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// How many orders to commit; a few more when the kills need traffic.
    #[arg(long, value_name = "N", default_value_t = 2000)]
    pub orders: usize,
    /// How many relays to kill, at five points in turn.
    #[arg(long, value_name = "N", default_value_t = 15)]
    pub kills: usize,
    /// Keep databases and topics, and say where they are.
    #[arg(long)]
    pub keep: bool,
}

/// Runs the demo where the settings say: SQLite and an in-process broker unless `--database-url` and `--kafka` name others.
pub(crate) async fn run(options: &Options, settings: &Settings) -> Result<(), Failure> {
    let interrupted = signals::shutdown().map_err(Failure::error)?;
    let mut stage = Stage::set(settings, options.keep).await?;
    let outcome = tokio::select! {
        outcome = stage.play(options) => outcome,
        () = interrupted.cancelled() => Err(anyhow::anyhow!("interrupted")),
    };
    // Also after a failure: nothing of a demo stays in somebody's database or Kafka.
    let cleaned = stage.strike().await;
    let clean = outcome?;
    cleaned?;
    if clean { Ok(()) } else { Err(Failure::Said) }
}

/// One run, on any database: returns whether the audit found everything in order.
async fn play<S: Shop>(
    shop: S,
    relays: Relays,
    run: &str,
    wiring: &shop::Wiring,
    options: &Options,
) -> anyhow::Result<bool> {
    let board = Arc::new(Board::new(options.orders, options.kills));
    let show = board.show();
    let acts = async {
        let mut run = Run::start(shop, relays, run, wiring, options, Arc::clone(&board));
        run.kills(options.kills).await?;
        run.finish().await
    };
    let summary = tokio::select! {
        summary = acts => summary?,
        () = show => bail!("unreachable: the display never ends"),
    };
    board.say("\nAudit");
    board.say(summary.text().trim_end());
    Ok(summary.objections().is_empty())
}

/// The run's parts.
struct Run<'a, S> {
    shop: S,
    relays: Relays,
    id: &'a str,
    wiring: &'a shop::Wiring,
    board: Arc<Board>,
    pace: Arc<Pace>,
    clerks: Vec<AbortOnDropHandle<anyhow::Result<()>>>,
    slow: Option<AbortOnDropHandle<anyhow::Result<Vec<i64>>>>,
    slow_stop: CancellationToken,
    inventory: Inventory<S>,
    planned: [usize; POINTS.len()],
    copies: usize,
    delivered_again: usize,
}

impl<'a, S: Shop> Run<'a, S> {
    /// Opens the shop: clerks and inventory work from here on.
    fn start(
        shop: S,
        relays: Relays,
        id: &'a str,
        wiring: &'a shop::Wiring,
        options: &Options,
        board: Arc<Board>,
    ) -> Self {
        let count = if S::MANY_WRITERS { 8 } else { 2 };
        let pace = Arc::new(Pace::new(options.orders, count, options.kills));
        let numbers = Arc::new(Numbers::default());
        let clerks = (0..count)
            .map(|_| {
                clerks::clerk(
                    shop.clone(),
                    Arc::clone(&pace),
                    Arc::clone(&numbers),
                    Arc::clone(&board),
                )
            })
            .collect();
        let slow_stop = CancellationToken::new();
        let slow = S::MANY_WRITERS.then(|| {
            clerks::slow_customer(shop.clone(), numbers, Arc::clone(&board), slow_stop.clone())
        });
        let inventory = Inventory::start(shop.clone(), Arc::clone(&board));
        Self {
            shop,
            relays,
            id,
            wiring,
            board,
            pace,
            clerks,
            slow,
            slow_stop,
            inventory,
            planned: [0; POINTS.len()],
            copies: 0,
            delivered_again: 0,
        }
    }

    /// One relay after the other lives until its kill; in between, duplicates are injected.
    async fn kills(&mut self, kills: usize) -> anyhow::Result<()> {
        for k in 0..kills {
            let at = relays::kill(k);
            self.planned[k % POINTS.len()] += 1;
            self.relays.run_until_killed(at).await?;
            self.board.kills[k % POINTS.len()].fetch_add(1, SeqCst);
            self.board.say(&format!("relay {} killed at {at}", k + 1));
            self.pace.kill_done();
            if k + 1 == kills.div_ceil(2) {
                self.inject_duplicates().await?;
            }
        }
        if kills == 0 {
            self.relays.run_until_empty().await?;
            self.inject_duplicates().await?;
        }
        Ok(())
    }

    /// Copies the first records into the topic again, and sends the inventory service back to the beginning.
    async fn inject_duplicates(&mut self) -> anyhow::Result<()> {
        // Not the last relay's end: a killed relay may have left a transaction open, behind which nobody can read.
        self.relays.run_until_empty().await?;
        let messages = self.read("first", 1).await?;
        if messages.is_empty() {
            bail!("nothing was published so far");
        }
        let first = &messages[..messages.len().min(COPIES)];
        let copies = topic::publish_again(self.wiring, self.id, first).await?;
        self.copies += copies;
        self.board.say(&format!(
            "{copies} records published a second time with the same envelope"
        ));
        self.inventory.settle(&ends(&messages)).await?;
        self.inventory.deliver_again().await?;
        self.delivered_again += messages.len();
        let again = messages.len();
        self.board.say(&format!(
            "inventory service stopped and sent back to the first record: {again} delivered again"
        ));
        Ok(())
    }

    /// Closes the shop, publishes what is left, and audits.
    async fn finish(mut self) -> anyhow::Result<Summary> {
        for clerk in std::mem::take(&mut self.clerks) {
            clerk.await??;
        }
        self.slow_stop.cancel();
        let slow = match self.slow.take() {
            Some(slow) => Some(slow.await??),
            None => None,
        };
        self.relays.run_until_empty().await?;
        let orders = self.shop.committed().await?;
        let messages = self.read("audit", orders.len() + self.copies).await?;
        self.inventory.settle(&ends(&messages)).await?;
        self.inventory.stop().await?;
        let seen: Vec<Seen> = messages.iter().map(topic::seen).collect::<Result<_, _>>()?;
        let effects = self.shop.effects().await?;
        let balances = self.shop.balances().await?;
        Ok(Summary {
            audit: audit::audit(&orders, &seen, &effects, &balances),
            rolled_back: self.board.rolled_back.load(SeqCst),
            slow: slow.map(|slow| (slow.len(), overtaken(&slow, &seen))),
            counted: self.board.counted(),
            kills: std::array::from_fn(|i| self.board.kills[i].load(SeqCst)),
            planned: self.planned,
            copies: self.copies,
            delivered_again: self.delivered_again,
            seconds: self.board.elapsed().as_secs_f64(),
        })
    }

    async fn read(&self, purpose: &str, expected: usize) -> anyhow::Result<Vec<Message>> {
        let group = format!("oncebox-demo-{}-{purpose}", self.id);
        topic::read_all(self.wiring, group, expected)
            .await
            .context("cannot read the topic")
    }
}

/// The offset after the last record of each partition.
fn ends(messages: &[Message]) -> BTreeMap<i32, i64> {
    let mut ends = BTreeMap::new();
    for message in messages {
        let end = ends.entry(message.partition).or_insert(0);
        *end = (message.offset + 1).max(*end);
    }
    ends
}

/// How many of these orders were published after a record with a higher outbox id.
fn overtaken(slow: &[i64], seen: &[Seen]) -> usize {
    let late = |order: &i64| {
        seen.iter()
            .find(|s| s.order.id == *order && !s.copy)
            .is_some_and(|mine| {
                seen.iter().any(|s| {
                    !s.copy
                        && s.partition == mine.partition
                        && s.offset < mine.offset
                        && s.outbox_id > mine.outbox_id
                })
            })
    };
    slow.iter().filter(|order| late(order)).count()
}
