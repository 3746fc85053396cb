//! `oncebox demo`: orders reach the inventory exactly once, whatever happens on the way.
//!
//! An order service writes orders and messages, an inventory service handles them. At the end the [`audit`] compares
//! both databases and the topic. In between:
//!
//! | fault | how it comes | what answers it |
//! |---|---|---|
//! | crash of the relay | SIGKILL at named points of its transaction | the position in the Kafka transaction |
//! | rolled-back and slow transactions | one order in ten; on PostgreSQL one after the other stays open with a low outbox id | the outbox, the gaps of the relay |
//! | producer retry | records are copied into the topic with the same envelope | the dedup mark |
//! | lost ack | the inventory service is sent back to the first record | the dedup mark |
//! | rebalance mid-batch | a second instance of the inventory service joins the group and leaves it | the owner in the position row |
//! | TTL too short | the hint forgets within a second, the duplicates come later | the dedup mark behind it |
//! | select-then-write race | one order in ten is announced by two messages with ids and keys of their own; on PostgreSQL they are handled at the same time | `insert_once` |
//! | state regression | messages with new ids say that placed orders are pending | `StateMachine` |
//! | partial coverage | the handler fails between the stock and the points | one transaction for all effects |
//!
//! | file | what |
//! |---|---|
//! | `shop.rs`, `postgres.rs`, `sqlite.rs` | both services, for both databases |
//! | `clerks.rs` | who orders, how fast, and what rolls back |
//! | `relays.rs` | processes and kill points |
//! | `handler.rs`, `books.rs` | what the inventory service does with a message, and what it wrote |
//! | `inventory.rs`, `faults.rs` | its instances, and what fails inside them |
//! | `topic.rs`, `inject.rs` | the topic as anybody sees it, and what others write into it |
//! | `stage.rs` | where it all happens: directories, schemas, topics, and their removal |
//! | `audit/`, `report.rs`, `progress.rs` | the verdict, the numbers, the living line |

pub mod audit;
mod books;
mod clerks;
mod faults;
mod handler;
mod inject;
mod inventory;
mod postgres;
mod progress;
mod relays;
mod report;
mod shop;
mod sqlite;
mod stage;
mod topic;

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use anyhow::{Context, bail};
use clap::Args;
use oncebox_kafka::Message;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use self::audit::Seen;
use self::clerks::{Numbers, Pace};
use self::inject::Injected;
use self::inventory::Inventory;
use self::progress::{Board, Counted};
use self::relays::{POINTS, Relays};
use self::report::Summary;
use self::shop::Shop;
use self::stage::Stage;
use crate::config::Settings;
use crate::exit::Failure;
use crate::signals;

/// How often a relay publishes what there is, so that the second instance of the inventory service gets something to do.
const ROUNDS: usize = 5;

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
    injected: Injected,
    delivered_again: usize,
    second: Counted,
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
            injected: Injected::default(),
            delivered_again: 0,
            second: Counted::default(),
        }
    }

    /// One relay after the other lives until its kill; in between the consuming side has its faults.
    async fn kills(&mut self, kills: usize) -> anyhow::Result<()> {
        let half = kills.div_ceil(2);
        for k in 0..kills {
            if k == half / 2 {
                self.join();
            }
            let at = relays::kill(k);
            self.planned[k % POINTS.len()] += 1;
            self.relays.run_until_killed(at).await?;
            self.board.kills[k % POINTS.len()].fetch_add(1, SeqCst);
            self.board.say(&format!("relay {} killed at {at}", k + 1));
            self.pace.kill_done();
            if k + 1 == half {
                self.inject().await?;
            }
        }
        if kills == 0 {
            self.join();
            self.inject().await?;
        }
        Ok(())
    }

    fn join(&mut self) {
        self.inventory.join();
        let joins = "second instance of the inventory service joins the group; each loses what the other takes";
        self.board.say(joins);
    }

    /// The second instance leaves in the middle of its work, if it got some.
    async fn leave(&mut self) -> anyhow::Result<()> {
        for _ in 0..ROUNDS {
            if self.inventory.second_is_idle() {
                self.relays.run_until_empty().await?;
            }
        }
        let Some(counted) = self.inventory.leave().await? else {
            return Ok(());
        };
        self.second = counted;
        self.board.say(&format!(
            "second instance left: it took partitions {} times and settled {} messages",
            self.second.ownership,
            self.second.effects + self.second.duplicates
        ));
        Ok(())
    }

    /// Writes duplicates and late messages into the topic, and sends the inventory service back to the beginning.
    async fn inject(&mut self) -> anyhow::Result<()> {
        // Not the last relay's end: a killed relay may have left a transaction open, behind which nobody can read.
        self.relays.run_until_empty().await?;
        self.leave().await?;
        let messages = self.read("first", 1).await?;
        self.injected = inject::inject(self.wiring, self.id, &messages).await?;
        let Injected { copies, late } = self.injected;
        self.board.say(&format!(
            "{copies} records published a second time with the same envelope, {late} late messages with new ids"
        ));
        self.inventory.settle(&topic::ends(&messages)).await?;
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
        let Injected { copies, late } = self.injected;
        let twice = orders.iter().filter(|order| order.is_announced_twice());
        let expected = orders.len() + twice.count() + copies + late;
        let messages = self.read("audit", expected).await?;
        self.inventory.settle(&topic::ends(&messages)).await?;
        self.inventory.stop().await?;
        let seen: Vec<Seen> = messages.iter().map(topic::seen).collect::<Result<_, _>>()?;
        let books = self.shop.books().await?;
        let process = self.inventory.process();
        Ok(Summary {
            audit: audit::audit(&orders, &seen, &books),
            rolled_back: self.board.rolled_back.load(SeqCst),
            slow: slow.map(|slow| (slow.len(), topic::overtaken(&slow, &seen))),
            counted: self.board.counted(),
            kills: std::array::from_fn(|i| self.board.kills[i].load(SeqCst)),
            planned: self.planned,
            injected: self.injected,
            delivered_again: self.delivered_again,
            second: self.second,
            forgotten: process.hint.forgotten(),
            half_way: process.half_way.failures(),
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
