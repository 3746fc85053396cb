//! The services of the tests: real, private on request, restarted with their data, and gone with whoever started them.

use oncebox_integration_tests::reader;
use oncebox_integration_tests::services::{
    Database, Kafka, KafkaOptions, PASSWORD_ROLE, Postgres, PostgresOptions, Services,
};
use rdkafka::config::ClientConfig;
use rdkafka::producer::{FutureProducer, FutureRecord};
use std::time::Duration;

#[tokio::test]
async fn a_database_is_fresh_and_goes_with_its_value() {
    let services = Services::get().await;
    let database = Database::create().await;
    let pool = database.pool(2).await;
    let (level, prepared): (String, String) = sqlx::query_as(
        "SELECT current_setting('wal_level'), current_setting('max_prepared_transactions')",
    )
    .fetch_one(&pool)
    .await
    .unwrap();
    assert_eq!((level.as_str(), prepared.as_str()), ("logical", "10"));
    let name = database.name().to_owned();
    drop(database); // with a pool still open
    let admin = sqlx::PgPool::connect(services.postgres_url())
        .await
        .unwrap();
    let left: i64 = sqlx::query_scalar("SELECT count(*) FROM pg_database WHERE datname = $1")
        .bind(name)
        .fetch_one(&admin)
        .await
        .unwrap();
    assert_eq!(left, 0);
}

#[tokio::test]
async fn a_role_with_password_needs_it() {
    let database = Database::create().await;
    let role = format!("r_{}", uuid::Uuid::new_v4().simple());
    let create = format!("CREATE ROLE {role} LOGIN PASSWORD 'right' IN ROLE {PASSWORD_ROLE}");
    sqlx::query(sqlx::AssertSqlSafe(create))
        .execute(&mut database.connect().await)
        .await
        .unwrap();
    sqlx::PgPool::connect(&database.url_as(&role, "right"))
        .await
        .unwrap();
    let refused = sqlx::PgPool::connect(&database.url_as(&role, "wrong"))
        .await
        .unwrap_err();
    assert!(refused.to_string().contains("password"), "{refused}");
}

#[tokio::test]
async fn a_private_postgres_comes_back_with_its_data_after_a_crash() {
    let postgres = Postgres::start(PostgresOptions::default()).await.unwrap();
    let database = Database::create_on(&postgres).await.unwrap();
    let mut conn = database.connect().await;
    sqlx::query("CREATE TABLE t AS SELECT 1 AS n")
        .execute(&mut conn)
        .await
        .unwrap();
    postgres.crash().await.unwrap();
    sqlx::query("SELECT 1")
        .execute(&mut conn)
        .await
        .unwrap_err();
    postgres.start_again().await.unwrap();
    let n: i32 = sqlx::query_scalar("SELECT n FROM t")
        .fetch_one(&mut database.connect().await)
        .await
        .unwrap();
    assert_eq!(n, 1);
}

#[tokio::test]
async fn a_private_broker_comes_back_with_its_data_after_a_kill() {
    let kafka = Kafka::start(KafkaOptions::default()).await.unwrap();
    let topic = kafka.create_topic("t", 1).await;
    produce(kafka.bootstrap(), &topic).await;
    kafka.kill_broker(0).await.unwrap();
    kafka.start_broker(0).await.unwrap();
    produce(kafka.bootstrap(), &topic).await;
    assert_eq!(reader::committed(kafka.bootstrap(), &topic).await.len(), 2);
}

#[tokio::test]
async fn three_brokers_survive_the_loss_of_one() {
    let kafka = Kafka::start(KafkaOptions {
        brokers: 3,
        ..KafkaOptions::default()
    })
    .await
    .unwrap();
    let topic = kafka.create_topic("t", 3).await;
    produce(kafka.bootstrap(), &topic).await;
    kafka.kill_broker(1).await.unwrap();
    produce(kafka.bootstrap(), &topic).await;
    assert_eq!(reader::committed(kafka.bootstrap(), &topic).await.len(), 2);
}

async fn produce(bootstrap: &str, topic: &str) {
    let producer: FutureProducer = ClientConfig::new()
        .set("bootstrap.servers", bootstrap)
        .set("acks", "all")
        .create()
        .unwrap();
    let record = FutureRecord::to(topic).key("k").payload("v");
    producer
        .send(record, Duration::from_secs(30))
        .await
        .unwrap();
}
