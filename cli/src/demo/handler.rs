//! The business of the inventory service: its tables, and what a message does. The same text on both databases.
//!
//! Stock, points and ledger are not idempotent, and the ledger has no unique key: an effect that happened twice would
//! show. What keeps it from happening twice is the dedup mark for a message that comes again, and the guards here for
//! another message about the same order.

use oncebox_inbox::HandlerError;
use oncebox_inbox::guard::{self, Dialect, Inserted, StateMachine, Taken, Transition, key};
use sqlx::{Encode, Executor, IntoArguments, Transaction, Type};

use super::audit::{Notice, PLACED};
use super::faults::HalfWay;
use super::shop::{OrderPlaced, State};

pub(super) const TABLES: &str = "
CREATE TABLE stock (sku text PRIMARY KEY, initial bigint NOT NULL, quantity bigint NOT NULL CHECK (quantity >= 0));
CREATE TABLE points (customer text PRIMARY KEY, points bigint NOT NULL);
CREATE TABLE ledger (order_id bigint NOT NULL, sku text NOT NULL, quantity bigint NOT NULL, customer text NOT NULL,
                     points bigint NOT NULL);
CREATE TABLE order_state (order_id bigint PRIMARY KEY, state text NOT NULL);
CREATE TABLE refused (order_id bigint NOT NULL, notice text NOT NULL);
";
pub(super) const STOCK_UP: &str = "INSERT INTO stock (sku, initial, quantity) VALUES ($1, $2, $2)";
const GRANT_POINTS: &str = "INSERT INTO points (customer, points) VALUES ($1, $2)
    ON CONFLICT (customer) DO UPDATE SET points = points.points + excluded.points";
const WRITE_LEDGER: &str =
    "INSERT INTO ledger (order_id, sku, quantity, customer, points) VALUES ($1, $2, $3, $4, $5)";
const REFUSE: &str = "INSERT INTO refused (order_id, notice) VALUES ($1, $2)";

const PENDING: &str = "pending";
const ORDER: StateMachine = StateMachine::new(
    "order_state",
    "state",
    &[(PENDING, &[PLACED]), (PLACED, &[])],
);

/// The messages of a batch, in the transaction that also holds their dedup marks (G5).
pub(super) struct Work<'a, 'c, D: Dialect> {
    pub(super) tx: &'a mut Transaction<'c, D>,
    pub(super) half_way: &'a HalfWay,
}

impl<D> Work<'_, '_, D>
where
    D: Dialect,
    D::Arguments: IntoArguments<D>,
    for<'t> &'t mut D::Connection: Executor<'t, Database = D>,
    for<'v> i64: Encode<'v, D> + Type<D>,
    for<'v> &'v str: Encode<'v, D> + Type<D>,
{
    /// Stock, points, ledger and state of each message: all of them or none.
    ///
    /// The rows are taken in one order, orders before skus before customers, each sorted: batches that take them as the
    /// messages come wait for each other in a circle, and PostgreSQL needs a second to notice.
    pub(super) async fn apply(
        mut self,
        mut messages: Vec<OrderPlaced>,
    ) -> Result<(), HandlerError> {
        messages.sort_by_key(|message| message.order);
        let mut placed = Vec::new();
        for message in messages {
            if self.is_new(&message).await? {
                placed.push(message);
            }
        }
        placed.sort_by(|a, b| a.sku.cmp(&b.sku));
        for message in &placed {
            self.take(message).await?;
        }
        for message in &placed {
            self.half_way.fail_once(message.order)?;
        }
        placed.sort_by(|a, b| a.customer.cmp(&b.customer));
        for message in &placed {
            self.grant(message).await?;
        }
        for message in &placed {
            self.close(message).await?;
        }
        Ok(())
    }

    /// Whether the order is placed by this message. If not, the refusal is written into the same transaction: those that
    /// count are counted, and only once.
    async fn is_new(&mut self, message: &OrderPlaced) -> Result<bool, HandlerError> {
        let order = key("order_id", message.order);
        let refused = match message.state {
            // Two announcements of one order race: the row decides, not a look at it.
            State::Placed => {
                let row = order.set("state", PENDING);
                match guard::insert_once(self.tx, "order_state", row).await? {
                    Inserted::Applied => return Ok(true),
                    Inserted::Duplicate => Notice::Second,
                }
            }
            State::Pending => match ORDER.transition(self.tx, order, PENDING).await? {
                Transition::Applied => return Ok(false),
                Transition::Missing => {
                    return Err(HandlerError::retriable("the order is not here yet"));
                }
                Transition::AlreadyThere | Transition::Illegal { .. } | Transition::Stale => {
                    Notice::Late
                }
            },
        };
        sqlx::query(REFUSE)
            .bind(message.order)
            .bind(refused.name())
            .execute(&mut **self.tx)
            .await?;
        Ok(false)
    }

    async fn take(&mut self, message: &OrderPlaced) -> Result<(), HandlerError> {
        let sku = key("sku", message.sku.as_str());
        match guard::take(self.tx, "stock", sku, "quantity", message.quantity).await? {
            Taken::Applied { .. } => Ok(()),
            Taken::Insufficient { .. } | Taken::Missing => {
                let sku = &message.sku;
                Err(HandlerError::fatal(format!("out of stock: {sku}")))
            }
        }
    }

    async fn grant(&mut self, message: &OrderPlaced) -> Result<(), HandlerError> {
        sqlx::query(GRANT_POINTS)
            .bind(message.customer.as_str())
            .bind(message.points)
            .execute(&mut **self.tx)
            .await?;
        Ok(())
    }

    async fn close(&mut self, message: &OrderPlaced) -> Result<(), HandlerError> {
        sqlx::query(WRITE_LEDGER)
            .bind(message.order)
            .bind(message.sku.as_str())
            .bind(message.quantity)
            .bind(message.customer.as_str())
            .bind(message.points)
            .execute(&mut **self.tx)
            .await?;
        let order = key("order_id", message.order);
        match ORDER.transition(self.tx, order, PLACED).await? {
            Transition::Applied => Ok(()),
            other => Err(HandlerError::fatal(format!("cannot be placed: {other:?}"))),
        }
    }
}
