//! The suite on PostgreSQL, and what two open transactions do to each other.

use std::time::Duration;

use oncebox_guard::{
    self as guard, Error, Inserted, Locked, Sequenced, StateMachine, Taken, Transition, Versioned,
    key,
};
use sqlx::postgres::PgPoolOptions;
use sqlx::types::time::OffsetDateTime;
use sqlx::{PgPool, Postgres, Transaction};

use self::lock_row::Account;
use crate::database;
use crate::tables::TABLES;

#[path = "suite/insert_once.rs"]
mod insert_once;
#[path = "suite/lock_row.rs"]
mod lock_row;
#[path = "suite/names_and_keys.rs"]
mod names_and_keys;
#[path = "suite/state_machine.rs"]
mod state_machine;
#[path = "suite/stock.rs"]
mod stock;
#[path = "suite/versioned.rs"]
mod versioned;

type Db = Postgres;

/// A database with the tables in it. A clone is another handle to it.
#[derive(Clone)]
struct Shop(PgPool);

impl Shop {
    /// Runs a test in a database of its own.
    async fn run<Fut>(test: impl FnOnce(Self) -> Fut)
    where
        Fut: Future<Output = ()> + Send + 'static,
    {
        database::run(|db| {
            let pool = PgPoolOptions::new().max_connections(20);
            let shop = Self(pool.connect_lazy_with(db.options()));
            let test = test(shop.clone());
            async move {
                shop.sql(TABLES).await;
                test.await;
            }
        })
        .await;
    }

    /// A transaction that may write.
    async fn begin(&self) -> Transaction<'static, Postgres> {
        self.0.begin().await.unwrap()
    }

    /// Runs statements outside of any transaction.
    async fn sql(&self, sql: &'static str) {
        sqlx::raw_sql(sql).execute(&self.0).await.unwrap();
    }

    async fn number(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.0).await.unwrap()
    }

    async fn text(&self, sql: &'static str) -> String {
        sqlx::query_scalar(sql).fetch_one(&self.0).await.unwrap()
    }

    /// Until a transaction waits for a lock of another one.
    async fn somebody_waits(&self) {
        const WAITING: &str = "SELECT count(*) FROM pg_stat_activity \
                               WHERE datname = current_database() AND wait_event_type = 'Lock'";
        tokio::time::timeout(Duration::from_secs(60), async {
            while self.number(WAITING).await == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .expect("somebody waits for a lock");
    }
}

/// Two deliveries at once, on PostgreSQL, where both transactions are open: the second waits for the first's end.
async fn second_of_two(first_commits: bool) {
    Shop::run(async move |store| {
        let mut first = store.begin().await;
        let _ = guard::insert_once(&mut first, "orders", insert_once::order("a"))
            .await
            .unwrap();
        let mut second = store.begin().await;
        let waiting = tokio::spawn(async move {
            let found = guard::insert_once(&mut second, "orders", insert_once::order("a")).await;
            let then = guard::insert_once(&mut second, "orders", insert_once::order("b")).await;
            second.commit().await.unwrap();
            (found, then)
        });
        store.somebody_waits().await;
        let expected = if first_commits {
            first.commit().await.unwrap();
            Inserted::Duplicate
        } else {
            first.rollback().await.unwrap();
            Inserted::Applied
        };
        let (found, then) = waiting.await.unwrap();
        assert!(
            matches!(found, Ok(found) if found == expected),
            "the second is {expected:?}: {found:?}"
        );
        assert!(matches!(then, Ok(Inserted::Applied)), "{then:?}");
        assert_eq!(store.number(insert_once::ORDERS).await, 2);
    })
    .await;
}

#[tokio::test]
async fn a24_an_insert_waits_for_the_same_key_and_is_the_duplicate() {
    second_of_two(true).await;
}

#[tokio::test]
async fn a24_an_insert_waits_for_the_same_key_and_is_the_first_after_a_rollback() {
    second_of_two(false).await;
}

#[tokio::test]
async fn a2_a_locked_row_stays_as_it_was_read_on_postgres() {
    Shop::run(async |store| {
        let mut tx = store.begin().await;
        let found: Locked<Account> = guard::lock_row(&mut tx, "account", key("id", 1_i64))
            .await
            .unwrap();
        assert!(matches!(found, Locked::Row(Account { balance: 100, .. })));

        let mut other = store.begin().await;
        let change = "SET LOCAL lock_timeout = '50ms'; UPDATE account SET balance = 0 WHERE id = 1";
        let changed = sqlx::raw_sql(change).execute(&mut *other).await;
        let code = changed
            .as_ref()
            .err()
            .and_then(|e| e.as_database_error()?.code());
        assert_eq!(code.as_deref(), Some("55P03"), "nobody else changes it");
    })
    .await;
}

#[tokio::test]
async fn a7_who_waited_for_the_row_looks_at_the_stock_again() {
    Shop::run(async |store| {
        let mut first = store.begin().await;
        let found = guard::take(&mut first, "stock", key("sku", "apple"), "quantity", 6)
            .await
            .unwrap();
        assert_eq!(found, Taken::Applied { left: 4 });
        let second = {
            let store = store.clone();
            tokio::spawn(async move { stock::take(&store, "apple", 6).await.unwrap() })
        };
        store.somebody_waits().await;
        first.commit().await.unwrap();
        assert_eq!(second.await.unwrap(), Taken::Insufficient { left: 4 });
        assert_eq!(store.number(stock::APPLES).await, 4);
    })
    .await;
}

/// The row was too low for the UPDATE, and is high enough for the look that follows.
#[tokio::test]
async fn a7_what_is_given_between_two_statements_is_taken() {
    Shop::run(async |store| {
        // Another transaction gives, and commits after the taker's UPDATE and before its look.
        let mut giver = store.begin().await;
        let _ = guard::give(&mut giver, "stock", key("sku", "apple"), "quantity", 1)
            .await
            .unwrap();
        // 10 are visible: the UPDATE's condition is false for that version, so it does not wait for the row's lock.
        let taker = {
            let store = store.clone();
            tokio::spawn(async move { stock::take(&store, "apple", 11).await.unwrap() })
        };
        store.somebody_waits().await; // in the look
        giver.commit().await.unwrap();
        assert_eq!(taker.await.unwrap(), Taken::Applied { left: 0 });
    })
    .await;
}

#[tokio::test]
async fn a7_a_row_that_a_trigger_keeps_is_not_reported_as_taken() {
    Shop::run(async |store| {
        store
            .sql(
                "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
                 CREATE TRIGGER keep BEFORE UPDATE ON stock FOR EACH ROW EXECUTE FUNCTION keep()",
            )
            .await;
        let found = stock::take(&store, "apple", 1).await;
        assert!(matches!(found, Err(Error::Suppressed { table: "stock" })), "{found:?}");
        assert_eq!(store.number(stock::APPLES).await, 10);
    })
    .await;
}

/// Two transitions of one row at once: who waited looks at the state again.
#[tokio::test]
async fn a24_of_two_ways_at_once_one_is_taken() {
    Shop::run(async |store| {
        state_machine::order(&store).await;
        let mut first = store.begin().await;
        let found = state_machine::ORDER
            .transition(&mut first, key("order_no", "a"), "cancelled")
            .await
            .unwrap();
        assert_eq!(found, Transition::Applied);
        let second = {
            let store = store.clone();
            tokio::spawn(async move { state_machine::goes(&store, "paid").await.unwrap() })
        };
        store.somebody_waits().await;
        first.commit().await.unwrap();
        assert_eq!(second.await.unwrap(), state_machine::illegal("cancelled"));
        assert_eq!(store.text(state_machine::STATUS).await, "cancelled");
    })
    .await;
}

/// The state was wrong for the UPDATE, and is right for the look that follows.
#[tokio::test]
async fn a5_a_way_that_opens_between_two_statements_is_taken() {
    Shop::run(async |store| {
        state_machine::order(&store).await;
        let mut payment = store.begin().await;
        let _ = state_machine::ORDER
            .transition(&mut payment, key("order_no", "a"), "paid")
            .await
            .unwrap();
        let shipping = {
            let store = store.clone();
            tokio::spawn(async move { state_machine::goes(&store, "shipped").await.unwrap() })
        };
        store.somebody_waits().await;
        payment.commit().await.unwrap();
        assert_eq!(shipping.await.unwrap(), Transition::Applied);
    })
    .await;
}

#[tokio::test]
async fn a5_postgres_enums_and_times_can_be_states_and_sequences() {
    const PARCEL: Sequenced = StateMachine::new(
        "public.parcel",
        "state",
        &[("sent", &["there"]), ("there", &[])],
    )
    .sequence("updated_at");
    Shop::run(async |store| {
        store
            .sql(
                "CREATE TYPE parcel_state AS ENUM ('sent', 'there');
                 CREATE TABLE parcel (id UUID PRIMARY KEY, state parcel_state NOT NULL, updated_at TIMESTAMPTZ);
                 INSERT INTO parcel VALUES ('00000000-0000-0000-0000-000000000001', 'sent', '2026-01-02T00:00:00.5Z')",
            )
            .await;
        let id = uuid::Uuid::from_u128(1);
        let at = |nanos: i128| OffsetDateTime::from_unix_timestamp_nanos(nanos).unwrap();
        let new_year = 1_767_225_600_000_000_000;
        let mut tx = store.begin().await;
        let found = PARCEL.transition(&mut tx, key("id", id), "there", at(new_year)).await.unwrap();
        assert_eq!(found, Transition::Stale);
        let later = at(new_year + 86_400_500_000_000);
        let found = PARCEL.transition(&mut tx, key("id", id), "there", later).await.unwrap();
        assert_eq!(found, Transition::Applied, "of the same time");
        let found = PARCEL.transition(&mut tx, key("id", id), "there", later).await.unwrap();
        assert_eq!(found, Transition::AlreadyThere);
    })
    .await;
}

/// Both have read version 7 before either wrote.
#[tokio::test]
async fn a6_of_two_writers_of_one_version_the_second_conflicts() {
    Shop::run(async |store| {
        let mut first = store.begin().await;
        let row = key("id", 1_i64).set("balance", 110_i64);
        let found = guard::versioned(&mut first, "account", row, "version", 7).await;
        assert!(matches!(found, Ok(Versioned::Applied { version: 8 })));
        let mut second = store.begin().await;
        let waiting = tokio::spawn(async move {
            let row = key("id", 1_i64).set("balance", 120_i64);
            guard::versioned(&mut second, "account", row, "version", 7).await
        });
        store.somebody_waits().await;
        first.commit().await.unwrap();
        let found = waiting.await.unwrap();
        assert!(
            matches!(&found, Err(error) if error.is_conflict()),
            "the first update is lost: {found:?}"
        );
    })
    .await;
}
