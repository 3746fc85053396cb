//! The shop on SQLite: two files, one per service. One writer at a time, so ids commit in order.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use oncebox_inbox::resume::{self, From, Request};
use oncebox_migrations::{Dialect, Names};
use oncebox_outbox::Outbox;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{AssertSqlSafe, Executor};
use tokio_util::sync::CancellationToken;

use super::audit::{Books, Order};
use super::books;
use super::faults::Process;
use super::handler::{self, Work};
use super::shop::{self, Basket, Ending, INITIAL_STOCK, Running, SKUS, Shop, Wiring};

const ORDERS_TABLES: &str = "
CREATE TABLE customers (name TEXT PRIMARY KEY, orders INTEGER NOT NULL);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT NOT NULL, seq INTEGER NOT NULL, sku TEXT NOT NULL,
                     quantity INTEGER NOT NULL, points INTEGER NOT NULL);
";

const NEXT_OF_CUSTOMER: &str = "INSERT INTO customers (name, orders) VALUES (?1, 1)
    ON CONFLICT (name) DO UPDATE SET orders = orders + 1 RETURNING orders";
const INSERT_ORDER: &str =
    "INSERT INTO orders (id, customer, seq, sku, quantity, points) VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
const ALL_ORDERS: &str = "SELECT id, customer, seq, sku, quantity, points FROM orders";

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct SqliteShop {
    orders: SqlitePool,
    inventory: SqlitePool,
    outbox: Outbox,
    names: Names,
    wiring: Wiring,
}

impl SqliteShop {
    /// Creates both files, with Oncebox's tables and the shop's.
    pub(super) async fn create(
        orders: &Path,
        inventory: &Path,
        names: Names,
        wiring: Wiring,
    ) -> anyhow::Result<Self> {
        let orders = database(orders, &names, ORDERS_TABLES).await?;
        let inventory = database(inventory, &names, handler::TABLES).await?;
        for sku in SKUS {
            sqlx::query(handler::STOCK_UP)
                .bind(sku)
                .bind(INITIAL_STOCK)
                .execute(&inventory)
                .await?;
        }
        let outbox = Outbox::new(oncebox_outbox::Config {
            names: names.clone(),
            ..Default::default()
        });
        Ok(Self {
            orders,
            inventory,
            outbox,
            names,
            wiring,
        })
    }
}

/// The URL of a database file.
pub(super) fn url(file: &Path) -> String {
    format!("sqlite:{}", file.display())
}

async fn database(file: &Path, names: &Names, tables: &str) -> anyhow::Result<SqlitePool> {
    oncebox_migrations::migrate(&url(file), names).await?;
    // G2: `synchronous=FULL`, an answered COMMIT is on the disk.
    let options = SqliteConnectOptions::new()
        .filename(file)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .busy_timeout(Duration::from_secs(20));
    let pool = SqlitePoolOptions::new()
        .max_connections(4)
        .connect_with(options)
        .await?;
    // Our own constants.
    pool.execute(AssertSqlSafe(tables)).await?;
    Ok(pool)
}

impl Shop for SqliteShop {
    const MANY_WRITERS: bool = false;

    async fn place(&self, basket: Basket, ending: Ending) -> anyhow::Result<Order> {
        // IMMEDIATE: takes the write lock now and waits for it; a deferred BEGIN would fail at its first write.
        let mut tx = self.orders.begin_with("BEGIN IMMEDIATE").await?;
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
        let inbox = shop::inventory(self.inventory.clone(), &self.names, &self.wiring, process);
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
            .names(self.names.clone())
            .consumer(&self.wiring.consumer)
            .topic(&self.wiring.topic);
        resume::apply(&request, From::Earliest).await?;
        Ok(())
    }

    async fn books(&self) -> anyhow::Result<Books> {
        books::read(&self.inventory).await
    }

    async fn settled(&self) -> anyhow::Result<BTreeMap<i32, i64>> {
        let table = self.names.position(Dialect::Sqlite);
        let sql = format!("SELECT partition, next FROM {table} WHERE consumer = ?1 AND topic = ?2");
        let rows: Vec<(i32, i64)> = sqlx::query_as(AssertSqlSafe(sql))
            .bind(&self.wiring.consumer)
            .bind(&self.wiring.topic)
            .fetch_all(&self.inventory)
            .await?;
        Ok(rows.into_iter().collect())
    }

    async fn clean_up(&self) -> anyhow::Result<()> {
        // The files go with their directory.
        self.orders.close().await;
        self.inventory.close().await;
        Ok(())
    }
}
