//! What every database must do with the statements of [`Store`]. A database without a call of [`conforms`] does not exist.

use std::time::Duration;

use oncebox_migrations::Names;
use sqlx::Pool;
use uuid::Uuid;

use super::DeadLetter;
use crate::InboxStore;
use crate::position::{Key, Known, Row};

fn key(consumer: &str, partition: i32) -> Key {
    Key {
        consumer: consumer.into(),
        topic: "orders".into(),
        partition,
    }
}

/// The whole contract, in one database with fresh tables.
async fn conforms<D: InboxStore>(pool: &Pool<D>) {
    let statements = &D::statements(&Names::default(), Duration::from_secs(60));
    let mut conn = pool.acquire().await.unwrap();
    D::check(&mut conn, &Names::default()).await.unwrap();
    drop(conn);
    marks(pool, statements).await;
    positions(pool, statements).await;
    resumes(pool, statements).await;
    letters(pool, statements).await;
}

async fn marks<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let id = Uuid::now_v7();
    let mut tx = D::begin(pool, statements).await.unwrap();
    assert!(D::mark(&mut tx, statements, "a", id).await.unwrap());
    tx.rollback().await.unwrap();
    let mut tx = D::begin(pool, statements).await.unwrap();
    assert!(
        D::mark(&mut tx, statements, "a", id).await.unwrap(),
        "a rolled-back mark is no mark"
    );
    assert!(
        !D::mark(&mut tx, statements, "a", id).await.unwrap(),
        "the second one is a duplicate"
    );
    assert!(
        D::mark(&mut tx, statements, "b", id).await.unwrap(),
        "each consumer has its own"
    );
    tx.commit().await.unwrap();
    let mut tx = D::begin(pool, statements).await.unwrap();
    assert!(!D::mark(&mut tx, statements, "a", id).await.unwrap());
    tx.rollback().await.unwrap();
}

async fn positions<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let (here, there) = (key("a", 0), key("a", 1));
    let (first, second) = (Uuid::new_v4(), Uuid::new_v4());
    let id = Uuid::now_v7();
    let mut tx = D::begin_brief(pool, statements).await.unwrap();
    assert_eq!(
        D::take(&mut tx, statements, &here, first).await.unwrap(),
        None
    );
    let row = Row {
        topic_id: "id".into(),
        next: 5,
        seq: 0,
        owner: first,
    };
    assert!(D::create(&mut tx, statements, &here, &row).await.unwrap());
    assert!(
        !D::create(&mut tx, statements, &here, &row).await.unwrap(),
        "it is there"
    );
    assert!(D::create(&mut tx, statements, &there, &row).await.unwrap());
    assert_eq!(
        D::read(&mut tx, statements, &here).await.unwrap(),
        Some(row.clone())
    );
    assert_eq!(
        D::read(&mut tx, statements, &key("b", 0)).await.unwrap(),
        None
    );

    let taken = D::take(&mut tx, statements, &here, second)
        .await
        .unwrap()
        .unwrap();
    let expected = Row {
        seq: 1,
        owner: second,
        ..row.clone()
    };
    assert_eq!(
        taken, expected,
        "taking changes owner and seq, and nothing else"
    );

    let known = taken.known();
    let to = known.after(8);
    assert_eq!((to.next, to.seq), (9, 2));
    let unmarked = D::advance(&mut tx, statements, &here, &known, &to, id)
        .await
        .unwrap();
    assert!(!unmarked, "no position without the mark of its message");
    assert!(D::mark(&mut tx, statements, "b", id).await.unwrap());
    let foreign = D::advance(&mut tx, statements, &here, &known, &to, id)
        .await
        .unwrap();
    assert!(!foreign, "another consumer's mark is none");
    assert!(D::mark(&mut tx, statements, "a", id).await.unwrap());
    for wrong in [
        Known {
            owner: first,
            ..known
        },
        Known { next: 6, ..known },
        Known { seq: 0, ..known },
    ] {
        let moved = D::advance(&mut tx, statements, &here, &wrong, &to, id)
            .await
            .unwrap();
        assert!(!moved, "{wrong:?}");
    }
    assert!(
        D::advance(&mut tx, statements, &here, &known, &to, id)
            .await
            .unwrap()
    );
    assert!(
        !D::advance(&mut tx, statements, &here, &known, &to, id)
            .await
            .unwrap(),
        "once"
    );
    let moved = D::read(&mut tx, statements, &here).await.unwrap().unwrap();
    assert_eq!(moved.known(), to);
    assert_eq!(
        D::read(&mut tx, statements, &there).await.unwrap(),
        Some(row),
        "the other partition stays"
    );
    tx.commit().await.unwrap();
}

async fn resumes<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let key = key("resumed", 0);
    let mut tx = D::begin(pool, statements).await.unwrap();
    let mut row = Row {
        topic_id: "old".into(),
        next: 100,
        seq: 0,
        owner: Uuid::new_v4(),
    };
    D::put(&mut tx, statements, &key, &row).await.unwrap();
    assert_eq!(
        D::read(&mut tx, statements, &key).await.unwrap(),
        Some(row.clone())
    );
    row.topic_id = "new".into();
    row.next = 3;
    row.owner = Uuid::new_v4();
    D::put(&mut tx, statements, &key, &row).await.unwrap();
    row.seq = 1;
    assert_eq!(
        D::read(&mut tx, statements, &key).await.unwrap(),
        Some(row),
        "seq only grows"
    );
    tx.commit().await.unwrap();
}

async fn letters<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let key = key("a", 0);
    let mut letter = DeadLetter {
        message_id: Uuid::now_v7(),
        offset: 8,
        key: None,
        payload: Some(b"payload"),
        headers: &[],
        error: "no",
        attempts: 3,
    };
    let mut tx = D::begin(pool, statements).await.unwrap();
    assert_eq!(D::buried(&mut tx, statements, &key, 8).await.unwrap(), None);
    assert!(D::bury(&mut tx, statements, &key, &letter).await.unwrap());
    let first = letter.message_id;
    letter.message_id = Uuid::now_v7();
    assert!(
        !D::bury(&mut tx, statements, &key, &letter).await.unwrap(),
        "the place is taken"
    );
    assert_eq!(
        D::buried(&mut tx, statements, &key, 8).await.unwrap(),
        Some(first)
    );
    letter.offset = 9;
    assert!(D::bury(&mut tx, statements, &key, &letter).await.unwrap());
    tx.commit().await.unwrap();
}

#[cfg(feature = "sqlite")]
#[tokio::test]
async fn sqlite_conforms() {
    let dir = tempfile::tempdir().unwrap();
    let options = sqlx::sqlite::SqliteConnectOptions::new()
        .filename(dir.path().join("test.db"))
        .create_if_missing(true);
    let pool = sqlx::SqlitePool::connect_with(options).await.unwrap();
    let mut conn = pool.acquire().await.unwrap();
    oncebox_migrations::sqlite::migrate(&mut conn, &Names::default())
        .await
        .unwrap();
    drop(conn);
    conforms(&pool).await;
}

#[cfg(feature = "postgres")]
mod postgres {
    use sqlx::PgPool;

    use super::*;
    use crate::store::Store;

    /// A database of its own; `None` without a server.
    async fn database() -> Option<PgPool> {
        let url = std::env::var("ONCEBOX_TEST_POSTGRES_URL")
            .ok()
            .filter(|v| !v.is_empty());
        let Some(url) = url else {
            println!("skipped: ONCEBOX_TEST_POSTGRES_URL is not set");
            return None;
        };
        let name = format!("inbox_store_{}", Uuid::now_v7().simple());
        let admin = PgPool::connect(&url).await.unwrap();
        let create = sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"));
        sqlx::query(create).execute(&admin).await.unwrap();
        // Whatever the database prefers, the inbox works with READ COMMITTED.
        let alter = sqlx::AssertSqlSafe(format!(
            "ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'"
        ));
        sqlx::query(alter).execute(&admin).await.unwrap();
        let (server, _) = url.rsplit_once('/').unwrap();
        let pool = PgPool::connect(&format!("{server}/{name}")).await.unwrap();
        let mut conn = pool.acquire().await.unwrap();
        oncebox_migrations::postgres::migrate(&mut conn, &Names::default())
            .await
            .unwrap();
        drop(conn);
        Some(pool)
    }

    #[tokio::test]
    async fn postgres_conforms() {
        let Some(pool) = database().await else { return };
        conforms(&pool).await;
    }

    #[tokio::test]
    async fn postgres_waits_for_the_other_transaction_and_then_knows() {
        let Some(pool) = database().await else { return };
        let statements = sqlx::Postgres::statements(&Names::default(), Duration::from_secs(60));
        for commit in [true, false] {
            let id = Uuid::now_v7();
            let mut first = sqlx::Postgres::begin(&pool, &statements).await.unwrap();
            assert!(
                sqlx::Postgres::mark(&mut first, &statements, "a", id)
                    .await
                    .unwrap()
            );
            let (pool, sql) = (pool.clone(), statements.clone());
            let second = tokio::spawn(async move {
                let mut tx = sqlx::Postgres::begin(&pool, &sql).await.unwrap();
                sqlx::Postgres::mark(&mut tx, &sql, "a", id).await.unwrap()
            });
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert!(!second.is_finished(), "it waits");
            if commit {
                first.commit().await.unwrap();
            } else {
                first.rollback().await.unwrap();
            }
            assert_eq!(second.await.unwrap(), !commit, "a duplicate, or its turn");
        }
    }

    #[tokio::test]
    async fn postgres_ends_a_session_that_stands_still_in_a_transaction() {
        let Some(pool) = database().await else { return };
        let statements = sqlx::Postgres::statements(&Names::default(), Duration::from_millis(300));
        let id = Uuid::now_v7();
        let mut still = sqlx::Postgres::begin(&pool, &statements).await.unwrap();
        assert!(
            sqlx::Postgres::mark(&mut still, &statements, "a", id)
                .await
                .unwrap()
        );
        let mut next = sqlx::Postgres::begin(&pool, &statements).await.unwrap();
        assert!(
            sqlx::Postgres::mark(&mut next, &statements, "a", id)
                .await
                .unwrap()
        );
        next.commit().await.unwrap();
        assert!(still.commit().await.is_err());
    }
}
