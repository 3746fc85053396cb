//! Fresh databases, and rows as the consumer leaves them, for the conformance suites.

use oncebox_migrations::Names;
use sqlx::Pool;
use uuid::Uuid;

use super::{Ask, OperatorStore, Sql, Value, tables};

/// A SQLite file with the tables, and what keeps it there.
#[cfg(feature = "sqlite")]
pub(crate) async fn sqlite() -> (tempfile::TempDir, sqlx::SqlitePool) {
    let dir = tempfile::tempdir().unwrap();
    let options = sqlx::sqlite::SqliteConnectOptions::new()
        .filename(dir.path().join("test.db"))
        .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)
        .create_if_missing(true);
    let pool = sqlx::SqlitePool::connect_with(options).await.unwrap();
    let mut conn = pool.acquire().await.unwrap();
    oncebox_migrations::sqlite::migrate(&mut conn, &Names::default())
        .await
        .unwrap();
    drop(conn);
    (dir, pool)
}

/// A PostgreSQL database of its own with the tables; `None` without a server.
#[cfg(feature = "postgres")]
pub(crate) async fn postgres() -> Option<sqlx::PgPool> {
    let url = std::env::var("ONCEBOX_TEST_POSTGRES_URL")
        .ok()
        .filter(|v| !v.is_empty());
    let Some(url) = url else {
        println!("skipped: ONCEBOX_TEST_POSTGRES_URL is not set");
        return None;
    };
    let name = format!("inbox_{}", Uuid::now_v7().simple());
    let admin = sqlx::PgPool::connect(&url).await.unwrap();
    let create = sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"));
    sqlx::query(create).execute(&admin).await.unwrap();
    // Whatever the database prefers, consumers and operators work with READ COMMITTED.
    let alter = sqlx::AssertSqlSafe(format!(
        "ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'"
    ));
    sqlx::query(alter).execute(&admin).await.unwrap();
    admin.close().await;
    let (server, _) = url.rsplit_once('/').unwrap();
    let pool = sqlx::PgPool::connect(&format!("{server}/{name}"))
        .await
        .unwrap();
    let mut conn = pool.acquire().await.unwrap();
    oncebox_migrations::postgres::migrate(&mut conn, &Names::default())
        .await
        .unwrap();
    drop(conn);
    Some(pool)
}

/// Runs one statement; `?` are the values in order, `{table}` the tables.
pub(crate) async fn run<D: OperatorStore>(pool: &Pool<D>, text: &str, values: Vec<Value>) -> u64 {
    let mut conn = pool.acquire().await.unwrap();
    D::change(&mut conn, statement::<D>(text, values))
        .await
        .unwrap()
}

/// One number.
pub(crate) async fn number<D: OperatorStore>(
    pool: &Pool<D>,
    text: &str,
    values: Vec<Value>,
) -> i64 {
    let mut conn = pool.acquire().await.unwrap();
    let rows = D::rows(&mut conn, statement::<D>(text, values))
        .await
        .unwrap();
    D::int(&rows[0], 0).unwrap().unwrap()
}

fn statement<D: Ask>(text: &str, values: Vec<Value>) -> Sql {
    let text = tables::<D>(text, &Names::default());
    let mut parts = text.split('?');
    let mut sql = Sql::new(parts.next().unwrap());
    for (part, value) in parts.zip(values) {
        let name = sql.bind(value);
        sql.push(&name).push(part);
    }
    sql
}

/// A letter of consumer `inventory`, topic `orders`, as the consumer writes it. Returns its id.
pub(crate) async fn letter<D: OperatorStore>(
    pool: &Pool<D>,
    partition: i64,
    offset: i64,
    key: Option<&str>,
    parked: bool,
) -> i64 {
    let key = key.map_or("NULL".to_owned(), |key| hex_literal::<D>(key.as_bytes()));
    let parked = match (parked, D::DIALECT) {
        (parked, oncebox_migrations::Dialect::Postgres) => parked.to_string(),
        (parked, oncebox_migrations::Dialect::Sqlite) => i32::from(parked).to_string(),
    };
    let headers = oncebox_migrations::headers::encode([
        ("tenant", Some(&b"42"[..])),
        ("raw", Some(&[0xff, 0][..])),
        ("flag", None),
    ])
    .unwrap();
    number(
        pool,
        &format!(
            "INSERT INTO {{dead_letter}} (consumer, message_id, topic, partition, record_offset, key, payload, headers, error, \
             attempts, parked) VALUES ('inventory', ?, 'orders', ?, ?, {key}, ?, ?, ?, 3, {parked}) RETURNING id"
        ),
        vec![
            Value::Uuid(Uuid::now_v7()),
            Value::Int(partition),
            Value::Int(offset),
            Value::Bytes(format!("{{\"order\":{offset}}}").into_bytes()),
            Value::Bytes(headers),
            Value::Text(format!("stock of {offset} is missing")),
        ],
    )
    .await
}

/// Blocks a key, as the consumer does when it parks the first message of it.
pub(crate) async fn block<D: OperatorStore>(pool: &Pool<D>, key: &str) {
    run(
        pool,
        "INSERT INTO {blocked_key} (consumer, topic, key, reason) VALUES ('inventory', 'orders', ?, 'poison')",
        vec![Value::Bytes(key.as_bytes().to_vec())],
    )
    .await;
}

fn hex_literal<D: Ask>(bytes: &[u8]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    match D::DIALECT {
        oncebox_migrations::Dialect::Postgres => format!("'\\x{digits}'::bytea"),
        oncebox_migrations::Dialect::Sqlite => format!("x'{digits}'"),
    }
}

/// A test for each database out of a function over a pool.
macro_rules! on_both {
    ($($name:ident),* $(,)?) => { $(
        mod $name {
            #[cfg(feature = "sqlite")]
            #[tokio::test]
            async fn sqlite() {
                let (_dir, pool) = $crate::operator::testing::sqlite().await;
                super::$name(&pool).await;
            }

            #[cfg(feature = "postgres")]
            #[tokio::test]
            async fn postgres() {
                let Some(pool) = $crate::operator::testing::postgres().await else { return };
                super::$name(&pool).await;
            }
        }
    )* };
}
pub(crate) use on_both;
