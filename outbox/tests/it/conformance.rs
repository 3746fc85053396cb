//! What every database must do. One suite, run by each of them.

use oncebox_migrations::{headers, postgres, sqlite};
use oncebox_outbox::{Config, Dialect, Error, Message, MessageId, Names, Outbox};
use sqlx::postgres::PgPoolOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{Connection as _, PgPool, Postgres, Sqlite, SqlitePool, Transaction};
use tempfile::TempDir;
use uuid::Uuid;

use crate::database;

/// A row of the outbox, as the relay reads it.
#[derive(Debug, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Stored {
    pub(crate) id: i64,
    pub(crate) message_id: Uuid,
    pub(crate) topic: String,
    pub(crate) key: Option<Vec<u8>>,
    pub(crate) payload: Option<Vec<u8>>,
    pub(crate) headers: Vec<u8>,
}

const ROWS: &str =
    "SELECT id, message_id, topic, key, payload, headers FROM shop_outbox ORDER BY id";

/// A database with tables in it.
pub(crate) trait Store: Sync {
    type Db: Dialect;
    fn begin(&self) -> impl Future<Output = Transaction<'static, Self::Db>> + Send;
    fn rows(&self) -> impl Future<Output = Vec<Stored>> + Send;
    fn run(
        &self,
        tx: &mut Transaction<'static, Self::Db>,
        sql: &'static str,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;
}

pub(crate) fn names() -> Names {
    Names::new("public", "shop_").unwrap()
}

pub(crate) fn outbox() -> Outbox {
    Outbox::new(Config {
        names: names(),
        ..Config::default()
    })
}

pub(crate) struct OnPostgres(pub(crate) PgPool);

impl OnPostgres {
    pub(crate) async fn new(db: &database::Database) -> Self {
        postgres::migrate(&mut db.connect().await, &names())
            .await
            .unwrap();
        let pool = PgPoolOptions::new().max_connections(20);
        Self(pool.connect_with(db.options()).await.unwrap())
    }
}

impl Store for OnPostgres {
    type Db = Postgres;
    async fn begin(&self) -> Transaction<'static, Postgres> {
        self.0.begin().await.unwrap()
    }
    async fn rows(&self) -> Vec<Stored> {
        sqlx::query_as(ROWS).fetch_all(&self.0).await.unwrap()
    }
    async fn run(
        &self,
        tx: &mut Transaction<'static, Postgres>,
        sql: &'static str,
    ) -> sqlx::Result<()> {
        sqlx::raw_sql(sql).execute(&mut **tx).await.map(drop)
    }
}

pub(crate) struct OnSqlite(
    pub(crate) SqlitePool,
    #[expect(dead_code, reason = "kept until the end")] TempDir,
);

impl OnSqlite {
    pub(crate) async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options = SqliteConnectOptions::new()
            .filename(dir.path().join("shop.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal);
        let pool = SqlitePoolOptions::new().max_connections(4);
        let pool = pool.connect_with(options).await.unwrap();
        sqlite::migrate(&mut pool.acquire().await.unwrap(), &names())
            .await
            .unwrap();
        Self(pool, dir)
    }
}

impl Store for OnSqlite {
    type Db = Sqlite;
    async fn begin(&self) -> Transaction<'static, Sqlite> {
        self.0.begin_with("BEGIN IMMEDIATE").await.unwrap()
    }
    async fn rows(&self) -> Vec<Stored> {
        sqlx::query_as(ROWS).fetch_all(&self.0).await.unwrap()
    }
    async fn run(
        &self,
        tx: &mut Transaction<'static, Sqlite>,
        sql: &'static str,
    ) -> sqlx::Result<()> {
        sqlx::raw_sql(sql).execute(&mut **tx).await.map(drop)
    }
}

#[derive(serde::Serialize)]
struct OrderPaid {
    id: i64,
    amount: i64,
}

/// The README's first use.
async fn a_committed_message_is_stored_as_documented(store: &impl Store) {
    let (id, amount) = (17, 250);
    let mut tx = store.begin().await;
    store
        .run(
            &mut tx,
            "CREATE TABLE orders (id bigint, paid boolean); INSERT INTO orders VALUES (17, true)",
        )
        .await
        .unwrap();
    let message = Message::json("orders", id, &OrderPaid { id, amount })
        .unwrap()
        .header("tenant", "42")
        .null_header("flag")
        .header("tenant", "")
        .kind("order.paid")
        .tracestate("vendor=1")
        .traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
    let message_id = outbox().enqueue(&mut tx, message).await.unwrap();
    tx.commit().await.unwrap();

    let rows = store.rows().await;
    let [row] = rows.as_slice() else {
        panic!("one row, not {rows:?}");
    };
    assert_eq!(row.message_id, Uuid::from(message_id));
    assert_eq!(row.message_id.get_version_num(), 7);
    assert_eq!(row.topic, "orders");
    assert_eq!(row.key.as_deref(), Some(&b"17"[..]));
    assert_eq!(
        row.payload.as_deref(),
        Some(&br#"{"id":17,"amount":250}"#[..])
    );
    assert_eq!(
        headers::decode(&row.headers)
            .collect::<Result<Vec<_>, _>>()
            .unwrap(),
        [
            ("oncebox-type", Some(&b"order.paid"[..])),
            (
                "traceparent",
                Some(&b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"[..])
            ),
            ("tracestate", Some(&b"vendor=1"[..])),
            ("tenant", Some(&b"42"[..])),
            ("flag", None),
            ("tenant", Some(&b""[..])),
        ]
    );
}

async fn a_rollback_leaves_nothing(store: &impl Store) {
    let outbox = outbox();
    let mut tx = store.begin().await;
    outbox.enqueue(&mut tx, plain("a")).await.unwrap();
    outbox
        .enqueue_all(&mut tx, vec![plain("b"), plain("c")])
        .await
        .unwrap();
    outbox.enqueue_ordered(&mut tx, plain("d")).await.unwrap();
    tx.rollback().await.unwrap();
    assert_eq!(store.rows().await, []);

    let mut tx = store.begin().await;
    outbox.enqueue(&mut tx, plain("a")).await.unwrap();
    drop(tx);
    assert_eq!(store.rows().await, []);
}

async fn a_rolled_back_savepoint_takes_its_messages_along(store: &impl Store) {
    let outbox = outbox();
    let mut tx = store.begin().await;
    outbox.enqueue(&mut tx, plain("kept")).await.unwrap();
    let mut savepoint = tx.begin().await.unwrap();
    outbox.enqueue(&mut savepoint, plain("gone")).await.unwrap();
    outbox
        .enqueue_all(&mut savepoint, vec![plain("gone"), plain("gone")])
        .await
        .unwrap();
    savepoint.rollback().await.unwrap();
    outbox
        .enqueue_all(&mut tx, vec![plain("kept too")])
        .await
        .unwrap();
    tx.commit().await.unwrap();
    assert_eq!(keys(&store.rows().await), ["kept", "kept too"]);
}

async fn a_tombstone_is_not_an_empty_payload(store: &impl Store) {
    let tombstone = || Message::new("t").key("k").tombstone();
    let empty = || Message::new("t").payload("");
    let outbox = outbox();
    let mut tx = store.begin().await;
    outbox.enqueue(&mut tx, tombstone()).await.unwrap();
    outbox.enqueue(&mut tx, empty()).await.unwrap();
    outbox
        .enqueue_all(&mut tx, vec![tombstone(), empty(), empty().key("")])
        .await
        .unwrap();
    tx.commit().await.unwrap();
    let rows = store.rows().await;
    let stored: Vec<_> = rows
        .iter()
        .map(|row| (row.key.as_deref(), row.payload.as_deref()))
        .collect();
    let (key, nothing) = (Some(&b"k"[..]), Some(&b""[..]));
    assert_eq!(
        stored,
        [
            (key, None),
            (None, nothing),
            (key, None),
            (None, nothing),
            (nothing, nothing)
        ]
    );
}

async fn a_batch_keeps_its_order_in_the_ids(store: &impl Store) {
    // Neither the keys nor the payloads are in order themselves.
    let messages: Vec<_> = (0..1000)
        .map(|n| {
            Message::new("t")
                .key(format!("{}", n * 7919 % 1000))
                .payload(vec![b'x'; n % 13])
        })
        .collect();
    let mut tx = store.begin().await;
    let ids = outbox()
        .enqueue_all(&mut tx, messages.clone())
        .await
        .unwrap();
    tx.commit().await.unwrap();
    let rows = store.rows().await;
    assert_eq!(rows.len(), 1000);
    let first = rows[0].id;
    for (n, row) in rows.iter().enumerate() {
        assert_eq!(row.id, first + n as i64);
        assert_eq!(MessageId::as_uuid(&ids[n]), row.message_id);
        assert_eq!(
            row.key.as_deref(),
            Some(format!("{}", n * 7919 % 1000).as_bytes())
        );
        assert_eq!(row.payload.as_ref().map(Vec::len), Some(n % 13));
    }
}

async fn an_empty_batch_is_nothing(store: &impl Store) {
    let mut tx = store.begin().await;
    assert_eq!(outbox().enqueue_all(&mut tx, vec![]).await.unwrap(), []);
    tx.commit().await.unwrap();
    assert_eq!(store.rows().await, []);
}

async fn one_bad_message_keeps_the_whole_batch_out(store: &impl Store) {
    let outbox = outbox();
    let mut tx = store.begin().await;
    let error = outbox
        .enqueue_all(
            &mut tx,
            vec![plain("a"), plain("b"), Message::new("no/topic").payload("")],
        )
        .await
        .unwrap_err();
    assert!(matches!(error, Error::InBatch { index: 2, .. }));
    assert!(
        error
            .to_string()
            .starts_with("message 2 of the batch: topic \"no/topic\""),
        "{error}"
    );
    // Nothing went to the database: the transaction goes on.
    outbox.enqueue(&mut tx, plain("c")).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(keys(&store.rows().await), ["c"]);
}

async fn a_message_that_breaks_a_limit_leaves_the_transaction_usable(store: &impl Store) {
    let outbox = Outbox::new(Config {
        names: names(),
        max_record_bytes: 1_000,
    });
    let mut tx = store.begin().await;
    let error = outbox
        .enqueue(&mut tx, Message::new("t").payload(vec![0; 1_000]))
        .await
        .unwrap_err();
    assert!(error.is_invalid_message() && !error.is_retriable());
    assert!(error.to_string().contains("the limit is 1000"), "{error}");
    let error = outbox
        .enqueue_ordered(&mut tx, Message::new("t").payload(""))
        .await
        .unwrap_err();
    assert!(
        matches!(error, Error::Missing { field: "key", .. }),
        "{error}"
    );
    outbox.enqueue(&mut tx, plain("a")).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(keys(&store.rows().await), ["a"]);
}

async fn missing_tables_name_the_command(store: &impl Store) {
    let outbox = Outbox::new(Config {
        names: Names::new("elsewhere", "other_").unwrap(),
        ..Config::default()
    });
    let mut tx = store.begin().await;
    let error = outbox.enqueue(&mut tx, plain("a")).await.unwrap_err();
    assert!(error.to_string().contains("oncebox migrate"), "{error}");
    assert!(!error.is_invalid_message() && !error.is_retriable());
}

/// Enqueue is called from tasks.
async fn the_futures_are_send(store: &impl Store) {
    fn send<T: Send>(future: T) -> T {
        future
    }
    let outbox = outbox();
    let mut tx = store.begin().await;
    send(outbox.enqueue(&mut tx, plain("a"))).await.unwrap();
    send(outbox.enqueue_all(&mut tx, vec![plain("b")]))
        .await
        .unwrap();
    send(outbox.enqueue_ordered(&mut tx, plain("c")))
        .await
        .unwrap();
}

pub(crate) fn plain(key: &str) -> Message {
    Message::new("t").key(key).payload("p")
}

pub(crate) fn keys(rows: &[Stored]) -> Vec<&str> {
    rows.iter()
        .map(|row| std::str::from_utf8(row.key.as_deref().unwrap()).unwrap())
        .collect()
}

macro_rules! suite {
    ($($test:ident),* $(,)?) => {
        mod on_postgres {
            $(#[tokio::test]
            async fn $test() {
                super::database::run(async |db| super::$test(&super::OnPostgres::new(&db).await).await).await;
            })*
        }
        mod on_sqlite {
            $(#[tokio::test]
            async fn $test() {
                super::$test(&super::OnSqlite::new().await).await;
            })*
        }
    };
}

suite!(
    a_committed_message_is_stored_as_documented,
    a_rollback_leaves_nothing,
    a_rolled_back_savepoint_takes_its_messages_along,
    a_tombstone_is_not_an_empty_payload,
    a_batch_keeps_its_order_in_the_ids,
    an_empty_batch_is_nothing,
    one_bad_message_keeps_the_whole_batch_out,
    a_message_that_breaks_a_limit_leaves_the_transaction_usable,
    missing_tables_name_the_command,
    the_futures_are_send,
);
