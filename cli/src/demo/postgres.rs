//! The shop on PostgreSQL: two schemas, one per service.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Context;
use oncebox_inbox::resume::{self, From, Request};
use oncebox_migrations::{Dialect, Names};
use oncebox_outbox::Outbox;
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor, PgConnection};
use tokio_util::sync::CancellationToken;

use super::audit::{Books, Order};
use super::books;
use super::faults::Process;
use super::handler::{self, Work};
use super::shop::{self, Basket, Ending, INITIAL_STOCK, Running, SKUS, Shop, Wiring};

/// The pools set `search_path`, so that this text needs no schema.
const ORDERS_TABLES: &str = "
CREATE TABLE customers (name text PRIMARY KEY, orders bigint NOT NULL);
CREATE TABLE orders (id bigint PRIMARY KEY, customer text NOT NULL, seq bigint NOT NULL, sku text NOT NULL,
                     quantity bigint NOT NULL, points bigint NOT NULL);
";

/// G4: takes the customer's row lock before the message is enqueued, and keeps it until commit.
const NEXT_OF_CUSTOMER: &str = "INSERT INTO customers (name, orders) VALUES ($1, 1)
    ON CONFLICT (name) DO UPDATE SET orders = customers.orders + 1 RETURNING orders";
const INSERT_ORDER: &str =
    "INSERT INTO orders (id, customer, seq, sku, quantity, points) VALUES ($1, $2, $3, $4, $5, $6)";
const ALL_ORDERS: &str = "SELECT id, customer, seq, sku, quantity, points FROM orders";

/// See the module.
#[derive(Clone)]
pub(super) struct PgShop {
    options: PgConnectOptions,
    orders: PgPool,
    inventory: PgPool,
    outbox: Outbox,
    orders_names: Names,
    inventory_names: Names,
    wiring: Wiring,
}

impl PgShop {
    /// Creates both schemas, with Oncebox's tables and the shop's. When it fails, nothing stays.
    pub(super) async fn create(
        options: &PgConnectOptions,
        orders_names: Names,
        inventory_names: Names,
        wiring: Wiring,
    ) -> anyhow::Result<Self> {
        let pool = |names: &Names, size| {
            let options = options.clone().options([("search_path", names.schema())]);
            PgPoolOptions::new()
                .max_connections(size)
                .connect_lazy_with(options)
        };
        let shop = Self {
            options: options.clone(),
            orders: pool(&orders_names, 16),
            inventory: pool(&inventory_names, 8),
            outbox: Outbox::new(oncebox_outbox::Config {
                names: orders_names.clone(),
                ..Default::default()
            }),
            orders_names,
            inventory_names,
            wiring,
        };
        let mut conn = options
            .connect()
            .await
            .context("cannot connect to the database")?;
        if let Err(error) = shop.create_schemas(&mut conn).await {
            let _ = shop.clean_up().await;
            return Err(error);
        }
        conn.close().await?;
        Ok(shop)
    }

    async fn create_schemas(&self, conn: &mut PgConnection) -> anyhow::Result<()> {
        for (names, tables) in [
            (&self.orders_names, ORDERS_TABLES),
            (&self.inventory_names, handler::TABLES),
        ] {
            let schema = names.schema();
            // Our own names, checked by `Names`.
            conn.execute(AssertSqlSafe(format!("CREATE SCHEMA \"{schema}\""))).await.with_context(|| {
                format!("cannot create schema {schema}: the demo's user needs CREATE on the database")
            })?;
            oncebox_migrations::postgres::migrate(conn, names).await?;
            conn.execute(AssertSqlSafe(format!("SET search_path TO \"{schema}\"")))
                .await?;
            conn.execute(tables).await?;
        }
        for sku in SKUS {
            sqlx::query(handler::STOCK_UP)
                .bind(sku)
                .bind(INITIAL_STOCK)
                .execute(&mut *conn)
                .await?;
        }
        Ok(())
    }
}

impl Shop for PgShop {
    const MANY_WRITERS: bool = true;

    async fn place(&self, basket: Basket, ending: Ending) -> anyhow::Result<Order> {
        let mut tx = self.orders.begin().await?;
        let seq: i64 = sqlx::query_scalar(NEXT_OF_CUSTOMER)
            .bind(&basket.customer)
            .fetch_one(&mut *tx)
            .await?;
        let order = basket.order(seq);
        sqlx::query(INSERT_ORDER)
            .bind(order.id)
            .bind(&order.customer)
            .bind(seq)
            .bind(&order.sku)
            .bind(order.quantity)
            .bind(order.points)
            .execute(&mut *tx)
            .await?;
        for message in shop::messages(&order, &self.wiring.topic)? {
            self.outbox.enqueue(&mut tx, message).await?;
        }
        tokio::time::sleep(ending.pause()).await;
        if ending.commits() {
            tx.commit().await?;
        } else {
            tx.rollback().await?;
        }
        Ok(order)
    }

    async fn committed(&self) -> anyhow::Result<Vec<Order>> {
        let rows: Vec<(i64, String, i64, String, i64, i64)> =
            sqlx::query_as(ALL_ORDERS).fetch_all(&self.orders).await?;
        Ok(rows
            .into_iter()
            .map(|(id, customer, seq, sku, quantity, points)| Order {
                id,
                customer,
                seq,
                sku,
                quantity,
                points,
            })
            .collect())
    }

    fn inventory(&self, process: &Process) -> Running {
        let inbox = shop::inventory(
            self.inventory.clone(),
            &self.inventory_names,
            &self.wiring,
            process,
        );
        let half_way = Arc::clone(&process.half_way);
        let inbox = inbox.handle_batch(move |tx, deliveries| {
            let half_way = Arc::clone(&half_way);
            Box::pin(async move {
                let half_way = &*half_way;
                Work { tx, half_way }.apply(shop::parse(deliveries)?).await
            })
        });
        let stats = inbox.stats();
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(inbox.run(shutdown.clone()));
        Running {
            stats,
            task,
            shutdown,
        }
    }

    async fn rewind(&self) -> anyhow::Result<()> {
        let request = Request::new(self.inventory.clone(), self.wiring.kafka.clone())
            .names(self.inventory_names.clone())
            .consumer(&self.wiring.consumer)
            .topic(&self.wiring.topic);
        resume::apply(&request, From::Earliest).await?;
        Ok(())
    }

    async fn books(&self) -> anyhow::Result<Books> {
        books::read(&self.inventory).await
    }

    async fn settled(&self) -> anyhow::Result<BTreeMap<i32, i64>> {
        let table = self.inventory_names.position(Dialect::Postgres);
        let sql = format!("SELECT partition, next FROM {table} WHERE consumer = $1 AND topic = $2");
        let rows: Vec<(i32, i64)> = sqlx::query_as(AssertSqlSafe(sql))
            .bind(&self.wiring.consumer)
            .bind(&self.wiring.topic)
            .fetch_all(&self.inventory)
            .await?;
        Ok(rows.into_iter().collect())
    }

    async fn clean_up(&self) -> anyhow::Result<()> {
        self.orders.close().await;
        self.inventory.close().await;
        let mut conn = self.options.connect().await?;
        for names in [&self.orders_names, &self.inventory_names] {
            conn.execute(AssertSqlSafe(format!(
                "DROP SCHEMA IF EXISTS \"{}\" CASCADE",
                names.schema()
            )))
            .await?;
        }
        conn.close().await?;
        Ok(())
    }
}
