//! The order service's clerks: they place orders, roll some back, and hold one open for a while.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use anyhow::Context;
use rand::RngExt;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::progress::Board;
use super::shop::{Basket, Ending, Shop};

/// One order in this many is rolled back after its message was enqueued.
const ROLLED_BACK: u32 = 10;
/// Roughly how long a relay lives until its kill; spreads the orders over all kills.
const SECONDS_PER_KILL: f64 = 2.0;
/// How long a slow transaction stays open: several batches, and often a kill, happen meanwhile.
const SLOW: Duration = Duration::from_millis(1500);

/// How fast orders may come: spread evenly over the kills that are still to happen, then at full speed.
#[derive(Debug)]
pub(super) struct Pace {
    orders: usize,
    clerks: usize,
    claimed: AtomicUsize,
    kills_left: AtomicUsize,
}

impl Pace {
    pub(super) fn new(orders: usize, clerks: usize, kills: usize) -> Self {
        Self {
            orders,
            clerks,
            claimed: AtomicUsize::new(0),
            kills_left: AtomicUsize::new(kills),
        }
    }

    pub(super) fn kill_done(&self) {
        self.kills_left.fetch_sub(1, SeqCst);
    }

    /// Claims an order and says how long to wait before it; `None` when there is nothing left to do.
    ///
    /// While kills are left there are always orders: a relay without work reaches no point to be killed at.
    fn claim(&self) -> Option<Duration> {
        let claimed = self.claimed.fetch_add(1, SeqCst);
        let kills = self.kills_left.load(SeqCst);
        match (claimed >= self.orders, kills) {
            (true, 0) => {
                self.claimed.fetch_sub(1, SeqCst);
                None
            }
            (true, _) => Some(Duration::from_millis(100)),
            (false, 0) => Some(Duration::ZERO),
            (false, _) => {
                #[allow(clippy::cast_precision_loss, reason = "a pace, not an account")]
                let (left, clerks, shares) = (
                    (self.orders - claimed) as f64,
                    self.clerks as f64,
                    (kills + 1) as f64,
                );
                Some(Duration::from_secs_f64(
                    (clerks * shares * SECONDS_PER_KILL / left).min(0.25),
                ))
            }
        }
    }

    fn not_placed(&self) {
        self.claimed.fetch_sub(1, SeqCst);
    }
}

/// Order numbers: every attempt has its own, so that a phantom can be told from an order.
#[derive(Debug, Default)]
pub(super) struct Numbers(AtomicI64);

impl Numbers {
    pub(super) fn next(&self) -> i64 {
        self.0.fetch_add(1, SeqCst) + 1
    }
}

/// Starts a clerk; it ends when the orders are placed and the kills are done.
pub(super) fn clerk<S: Shop>(
    shop: S,
    pace: Arc<Pace>,
    numbers: Arc<Numbers>,
    board: Arc<Board>,
) -> AbortOnDropHandle<anyhow::Result<()>> {
    AbortOnDropHandle::new(tokio::spawn(async move {
        while let Some(wait) = pace.claim() {
            tokio::time::sleep(wait).await;
            let roll_back = rand::rng().random_range(0..ROLLED_BACK) == 0;
            let ending = if roll_back {
                Ending::RollBack
            } else {
                Ending::Commit
            };
            shop.place(Basket::random(numbers.next()), ending)
                .await
                .context("an order could not be placed")?;
            if roll_back {
                pace.not_placed();
                board.rolled_back.fetch_add(1, SeqCst);
            } else {
                board.committed.fetch_add(1, SeqCst);
            }
        }
        Ok(())
    }))
}

/// Holds one transaction after the other open with its low outbox id, until told to stop. Every fourth rolls back,
/// so that its gap is burnt late. Returns the orders that committed.
pub(super) fn slow_customer<S: Shop>(
    shop: S,
    numbers: Arc<Numbers>,
    board: Arc<Board>,
    stop: CancellationToken,
) -> AbortOnDropHandle<anyhow::Result<Vec<i64>>> {
    AbortOnDropHandle::new(tokio::spawn(async move {
        let mut slow = Vec::new();
        for round in 1_u32.. {
            if stop.is_cancelled() {
                break;
            }
            // A customer of its own: its row lock must not hold the other customers.
            let basket = Basket::of(numbers.next(), "customer-slow".to_owned());
            let ending = Ending::Hold {
                pause: SLOW,
                commit: round % 4 != 0,
            };
            let order = shop
                .place(basket, ending)
                .await
                .context("a slow order could not be placed")?;
            if ending.commits() {
                slow.push(order.id);
                board.committed.fetch_add(1, SeqCst);
                board.slow.fetch_add(1, SeqCst);
            } else {
                board.rolled_back.fetch_add(1, SeqCst);
            }
        }
        Ok(slow)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_spreads_orders_over_kills_and_then_runs() {
        let pace = Pace::new(100, 2, 4);
        let first = pace.claim().unwrap();
        // 100 orders in 5 shares of 2 s, by two clerks: one order of a clerk every 0.2 s.
        assert!((first.as_secs_f64() - 0.2).abs() < 1e-9, "{first:?}");
        for _ in 0..4 {
            pace.kill_done();
        }
        assert_eq!(pace.claim(), Some(Duration::ZERO));
    }

    #[test]
    fn orders_do_not_run_out_before_the_kills_do() {
        let pace = Pace::new(1, 1, 1);
        assert!(pace.claim().is_some());
        assert_eq!(pace.claim(), Some(Duration::from_millis(100)));
        pace.kill_done();
        assert_eq!(pace.claim(), None);
    }

    #[test]
    fn a_rolled_back_order_is_placed_again() {
        let pace = Pace::new(1, 1, 0);
        assert!(pace.claim().is_some());
        pace.not_placed();
        assert!(pace.claim().is_some());
        assert!(pace.claim().is_none());
    }
}
