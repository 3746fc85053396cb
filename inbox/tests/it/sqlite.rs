//! The same consumer on SQLite and real Kafka: the handler of the README, written once per database type.

use oncebox_inbox::Inbox;
use oncebox_migrations::Names;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};

use crate::scene::{Running, Scene, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sqlite_consumer_has_each_effect_once() {
    let Some(scene) = Scene::new(2).await else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let options = SqliteConnectOptions::new()
        .filename(dir.path().join("points.db"))
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal);
    let pool = SqlitePoolOptions::new()
        .connect_with(options)
        .await
        .unwrap();
    let mut conn = pool.acquire().await.unwrap();
    oncebox_migrations::sqlite::migrate(&mut conn, &Names::default())
        .await
        .unwrap();
    drop(conn);
    sqlx::query("CREATE TABLE effect (payload TEXT)")
        .execute(&pool)
        .await
        .unwrap();
    scene.publish_numbers(0..100).await;
    scene.publish_foreign("foreign").await;
    let running = Running::new(
        Inbox::new(pool.clone(), scene.kafka.clone())
            .consumer(&scene.consumer)
            .topic(&scene.topic)
            .handle(|tx, delivery| {
                Box::pin(async move {
                    let payload = delivery.payload.unwrap_or_default();
                    sqlx::query("INSERT INTO effect VALUES ($1)")
                        .bind(String::from_utf8_lossy(&payload))
                        .execute(&mut **tx)
                        .await?;
                    Ok(())
                })
            }),
    );
    until(async || running.stats.effects() == 101).await;
    running.stop().await.unwrap();
    let distinct: i64 = sqlx::query_scalar("SELECT count(DISTINCT payload) FROM effect")
        .fetch_one(&pool)
        .await
        .unwrap();
    let all: i64 = sqlx::query_scalar("SELECT count(*) FROM effect")
        .fetch_one(&pool)
        .await
        .unwrap();
    assert_eq!((distinct, all), (101, 101));
}
