//! The two snippets of the README, run: an order paid in one service's database reaches the stock in another's, once.

use std::time::{Duration, Instant};

use oncebox_inbox::Inbox;
use oncebox_integration_tests::services::Database;
use oncebox_integration_tests::source::Source;
use oncebox_migrations::Names;
use oncebox_outbox::{Config, Message, Outbox};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use crate::relays::relay;

#[derive(Serialize, Deserialize)]
struct OrderPaid {
    id: i64,
    sku: String,
    quantity: i32,
}

/// The producing service.
async fn pay(pool: &PgPool, topic: &str, id: i64) -> Result<(), Box<dyn std::error::Error>> {
    let outbox = Outbox::new(Config::default());
    let mut tx = pool.begin().await?;
    sqlx::query("UPDATE orders SET paid = true WHERE id = $1")
        .bind(id)
        .execute(&mut *tx)
        .await?;
    let order = OrderPaid {
        id,
        sku: "pen".to_owned(),
        quantity: 2,
    };
    outbox
        .enqueue(&mut tx, Message::json(topic, id, &order)?)
        .await?;
    tx.commit().await?;
    Ok(())
}

/// The consuming service.
async fn take_from_stock(
    pool: PgPool,
    kafka: oncebox_kafka::Config,
    consumer: String,
    topic: String,
    shutdown: CancellationToken,
) -> Result<(), oncebox_inbox::Error> {
    Inbox::new(pool, kafka)
        .consumer(consumer)
        .topic(topic)
        .handle(|tx, delivery| {
            Box::pin(async move {
                let order: OrderPaid = delivery.json()?;
                sqlx::query("UPDATE stock SET quantity = quantity - $1 WHERE sku = $2")
                    .bind(order.quantity)
                    .bind(order.sku)
                    .execute(&mut **tx)
                    .await?;
                Ok(())
            })
        })
        .run(shutdown)
        .await
}

async fn stock(pool: &PgPool) -> i32 {
    sqlx::query_scalar("SELECT quantity FROM stock")
        .fetch_one(pool)
        .await
        .unwrap()
}

#[tokio::test]
async fn g5_an_order_paid_here_leaves_the_stock_there_once() {
    let source = Source::create().await;
    let shop = source.database.pool(3).await;
    sqlx::query("CREATE TABLE orders AS SELECT n::bigint AS id, false AS paid FROM generate_series(1, 10) n").execute(&shop).await.unwrap();
    let inventory = Database::create().await;
    let warehouse = inventory.pool(5).await;
    oncebox_migrations::migrate(inventory.url(), &Names::default())
        .await
        .unwrap();
    sqlx::query("CREATE TABLE stock AS SELECT 'pen' AS sku, 100 AS quantity")
        .execute(&warehouse)
        .await
        .unwrap();

    let _relay = relay(&source);
    let kafka = oncebox_kafka::Config::new(&source.bootstrap);
    let consumer = format!("inventory-{}", uuid::Uuid::new_v4().simple());
    let start = || {
        let shutdown = CancellationToken::new();
        let work = take_from_stock(
            warehouse.clone(),
            kafka.clone(),
            consumer.clone(),
            source.topic.clone(),
            shutdown.clone(),
        );
        (tokio::spawn(work), shutdown)
    };
    let (mut service, mut shutdown) = start();
    for id in 1..=10 {
        pay(&shop, &source.topic, id).await.unwrap();
        if id % 4 == 0 {
            // A deploy in the middle of it.
            shutdown.cancel();
            service.await.unwrap().unwrap();
            (service, shutdown) = start();
        }
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    while stock(&warehouse).await != 80 {
        assert!(
            Instant::now() < deadline,
            "stock is {}",
            stock(&warehouse).await
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(stock(&warehouse).await, 80);
    shutdown.cancel();
    service.await.unwrap().unwrap();
    let marks: i64 = sqlx::query_scalar("SELECT count(*) FROM oncebox_inbox")
        .fetch_one(&warehouse)
        .await
        .unwrap();
    assert_eq!(marks, 10);
}
