//! The shop: an order service with its own database, and an inventory service with another one.
//!
//! The order service writes the order and its messages in one transaction. What the inventory service does with a
//! message is in `handler.rs`.

use std::collections::BTreeMap;
use std::future::Future;
use std::time::Duration;

use oncebox_inbox::{Delivery, HandlerError, Inbox, InboxStore, Stats};
use oncebox_migrations::Names;
use oncebox_outbox::{Message, Outbox};
use rand::RngExt;
use serde::{Deserialize, Serialize};
use sqlx::Pool;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::audit::{Books, Notice, Order};
use super::faults::Process;

/// What can be ordered.
pub(super) const SKUS: [&str; 5] = ["tea", "cup", "pot", "spoon", "tray"];
/// How many pieces of each there are at the beginning: enough for every order of a long run.
pub(super) const INITIAL_STOCK: i64 = 10_000_000;
/// How many customers order; each is a key of the topic.
const CUSTOMERS: u32 = 40;

/// The message's type.
const KIND: &str = "order.placed";
/// The header that says which message about the order it is; for the audit, the handler does not look at it.
pub(super) const NOTICE: &str = "demo-notice";
/// How soon a member of the group hears of a rebalance. librdkafka's 3 s would be a long wait in a short run.
const HEARTBEAT_MS: &str = "500";

/// What the message says of the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    Pending,
    Placed,
}

/// The payload: the order as the inventory service needs to know it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct OrderPlaced {
    pub(super) order: i64,
    pub(super) customer: String,
    pub(super) seq: i64,
    pub(super) sku: String,
    pub(super) quantity: i64,
    pub(super) points: i64,
    pub(super) state: State,
}

impl From<&Order> for OrderPlaced {
    fn from(order: &Order) -> Self {
        Self {
            order: order.id,
            customer: order.customer.clone(),
            seq: order.seq,
            sku: order.sku.clone(),
            quantity: order.quantity,
            points: order.points,
            state: State::Placed,
        }
    }
}

impl From<OrderPlaced> for Order {
    fn from(placed: OrderPlaced) -> Self {
        Self {
            id: placed.order,
            customer: placed.customer,
            seq: placed.seq,
            sku: placed.sku,
            quantity: placed.quantity,
            points: placed.points,
        }
    }
}

/// The order service's messages about an order: one, or two where it is announced twice.
pub(super) fn messages(order: &Order, topic: &str) -> anyhow::Result<Vec<Message>> {
    let payload = OrderPlaced::from(order);
    let message = |key: &str, notice: Notice| -> anyhow::Result<Message> {
        let message = Message::json(topic, key, &payload)?;
        Ok(message.kind(KIND).header(NOTICE, notice.name()))
    };
    let mut messages = vec![message(&order.customer, Notice::First)?];
    if order.is_announced_twice() {
        messages.push(message(&order.second_key(), Notice::Second)?);
    }
    Ok(messages)
}

/// The payloads of a batch.
pub(super) fn parse(deliveries: &[Delivery]) -> Result<Vec<OrderPlaced>, HandlerError> {
    deliveries.iter().map(Delivery::json).collect()
}

/// The inventory service without its handler: the complete combination, on any database.
pub(super) fn inventory<D: InboxStore>(
    pool: Pool<D>,
    names: &Names,
    wiring: &Wiring,
    process: &Process,
) -> Inbox<D> {
    let kafka = wiring.kafka.clone();
    let kafka = kafka.set("heartbeat.interval.ms", HEARTBEAT_MS);
    let outbox = Outbox::new(oncebox_outbox::Config {
        names: names.clone(),
        ..Default::default()
    });
    let dead_letters = format!("{}-dead", wiring.topic);
    Inbox::new(pool, kafka)
        .names(names.clone())
        .consumer(&wiring.consumer)
        .topic(&wiring.topic)
        .complete(process.hint.clone(), outbox, dead_letters, |delivery| {
            let placed: OrderPlaced = delivery.json().ok()?;
            Some(placed.order.to_string())
        })
}

/// An order that is about to be placed.
#[derive(Clone, Debug)]
pub(super) struct Basket {
    pub(super) id: i64,
    pub(super) customer: String,
    pub(super) sku: &'static str,
    pub(super) quantity: i64,
    pub(super) points: i64,
}

impl Basket {
    /// A random basket of one of the shop's customers.
    pub(super) fn random(id: i64) -> Self {
        let customer = rand::rng().random_range(0..CUSTOMERS);
        Self::of(id, format!("customer-{customer:02}"))
    }

    /// A random basket of this customer.
    pub(super) fn of(id: i64, customer: String) -> Self {
        let mut random = rand::rng();
        let quantity = random.random_range(1..=3);
        Self {
            id,
            customer,
            sku: SKUS[random.random_range(0..SKUS.len())],
            quantity,
            points: 10 * quantity,
        }
    }

    /// The order, once its number within the customer is known.
    pub(super) fn order(&self, seq: i64) -> Order {
        Order {
            id: self.id,
            customer: self.customer.clone(),
            seq,
            sku: self.sku.to_owned(),
            quantity: self.quantity,
            points: self.points,
        }
    }
}

/// How the transaction of an order ends, after its messages were enqueued in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Commit,
    RollBack,
    /// The transaction stays open this long with its outbox id, while others go past.
    Hold {
        pause: Duration,
        commit: bool,
    },
}

impl Ending {
    pub(super) fn commits(self) -> bool {
        matches!(self, Self::Commit | Self::Hold { commit: true, .. })
    }

    pub(super) fn pause(self) -> Duration {
        match self {
            Self::Hold { pause, .. } => pause,
            Self::Commit | Self::RollBack => Duration::ZERO,
        }
    }
}

/// A running inventory service; dropped = told to stop.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) stats: Stats,
    pub(super) task: JoinHandle<Result<(), oncebox_inbox::Error>>,
    pub(super) shutdown: CancellationToken,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

/// Both services on one kind of database; `postgres.rs` and `sqlite.rs` hold the same functions.
pub(super) trait Shop: Clone + Send + Sync + 'static {
    /// Whether several transactions can write at once, so that ids can commit out of order.
    const MANY_WRITERS: bool;

    /// Places an order: locks the customer, writes the order, enqueues its messages, ends as told.
    fn place(
        &self,
        basket: Basket,
        ending: Ending,
    ) -> impl Future<Output = anyhow::Result<Order>> + Send;

    /// The orders that committed.
    fn committed(&self) -> impl Future<Output = anyhow::Result<Vec<Order>>> + Send;

    /// Starts an instance of the inventory service.
    fn inventory(&self, process: &Process) -> Running;

    /// Sends the stopped inventory service back to the first record (`oncebox inbox resume --from earliest`).
    fn rewind(&self) -> impl Future<Output = anyhow::Result<()>> + Send;

    /// What the inventory service wrote.
    fn books(&self) -> impl Future<Output = anyhow::Result<Books>> + Send;

    /// Up to which offset (exclusive) each partition is settled, as the inventory's database knows it.
    fn settled(&self) -> impl Future<Output = anyhow::Result<BTreeMap<i32, i64>>> + Send;

    /// Takes away what was created in a database that is not ours.
    fn clean_up(&self) -> impl Future<Output = anyhow::Result<()>> + Send;
}

/// How both kinds of shop reach Kafka.
#[derive(Clone, Debug)]
pub(super) struct Wiring {
    pub(super) kafka: oncebox_kafka::Config,
    pub(super) topic: String,
    pub(super) consumer: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_carries_the_whole_order() {
        let order = Basket::random(7).order(3);
        let payload = serde_json::to_vec(&OrderPlaced::from(&order)).unwrap();
        let back: OrderPlaced = serde_json::from_slice(&payload).unwrap();
        assert_eq!(Order::from(back), order);
    }

    #[test]
    fn an_order_is_announced_once_or_twice_with_two_keys() {
        let count = |id| {
            messages(&Basket::random(id).order(1), "orders")
                .unwrap()
                .len()
        };
        assert_eq!((count(9), count(10)), (1, 2));
    }
}
