//! What the runner promises, on PostgreSQL.

use std::borrow::Cow;

use oncebox_migrations::{Dialect, Error, LATEST, Names, grants, postgres, sql};
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection, SqlSafeStr as _};

use crate::database::{execute, run};

async fn scalar<T>(conn: &mut PgConnection, sql: &str) -> T
where
    T: Send + Unpin + for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    sqlx::query_scalar(AssertSqlSafe(sql.to_owned()))
        .fetch_one(conn)
        .await
        .unwrap_or_else(|error| panic!("{sql}: {error}"))
}

fn all_versions() -> Vec<i64> {
    (1..=LATEST).collect()
}

#[tokio::test]
async fn the_first_run_applies_everything_and_the_second_nothing() {
    run(async |db| {
        let mut conn = db.connect().await;
        let names = Names::default();
        let before = postgres::status(&mut conn, &names).await.unwrap();
        assert_eq!(before.version, 0);
        assert!(matches!(
            before.check(),
            Err(Error::Behind { version: 0, .. })
        ));

        let report = postgres::migrate(&mut conn, &names).await.unwrap();
        assert_eq!((report.applied, report.version), (all_versions(), LATEST));
        let report = oncebox_migrations::migrate(&db.url(), &names)
            .await
            .unwrap();
        assert_eq!((report.applied, report.version), (vec![], LATEST));

        let after = oncebox_migrations::status(&db.url(), &names).await.unwrap();
        after.check().unwrap();
        assert_eq!(after.applied.len() as i64, LATEST);
        assert_eq!(after.applied[0].name, "outbox");
    })
    .await;
}

#[tokio::test]
async fn eight_concurrent_starts_succeed() {
    run(async |db| {
        let mut admin = db.connect().await;
        // The worst default for whoever waits for a lock and then reads.
        let sql = format!(
            "ALTER DATABASE {} SET default_transaction_isolation = 'serializable'",
            db.name
        );
        execute(&mut admin, &sql).await;
        let names = Names::new("shop", "ob_").unwrap();
        let start = std::sync::Arc::new(tokio::sync::Barrier::new(8));
        let starts = (0..8).map(|_| {
            let (db, names, start) = (db.clone(), names.clone(), start.clone());
            tokio::spawn(async move {
                let mut conn = db.connect().await;
                start.wait().await;
                postgres::migrate(&mut conn, &names).await
            })
        });
        let mut applied = Vec::new();
        for start in starts.collect::<Vec<_>>() {
            let report = start.await.unwrap().unwrap();
            assert_eq!(report.version, LATEST);
            applied.extend(report.applied);
        }
        applied.sort_unstable();
        assert_eq!(applied, all_versions(), "every version is applied once");
        let marks: i64 = scalar(&mut admin, "SELECT count(*) FROM shop.ob_mark").await;
        assert_eq!(marks, 1);
    })
    .await;
}

#[tokio::test]
async fn a_schema_that_does_not_exist_is_created_and_sets_of_tables_do_not_meet() {
    run(async |db| {
        let mut conn = db.connect().await;
        for names in [
            Names::default(),
            Names::new("shop", "oncebox_").unwrap(),
            Names::new("shop", "second_").unwrap(),
            // Reserved words of SQL.
            Names::new("user", "order").unwrap(),
        ] {
            let report = postgres::migrate(&mut conn, &names).await.unwrap();
            assert_eq!(report.applied, all_versions(), "{names:?}");
        }
        let ids: i64 = scalar(
            &mut conn,
            r#"SELECT count(DISTINCT source_id) FROM (SELECT source_id FROM oncebox_mark
               UNION ALL SELECT source_id FROM shop.oncebox_mark UNION ALL SELECT source_id FROM shop.second_mark
               UNION ALL SELECT source_id FROM "user".ordermark) m"#,
        )
        .await;
        assert_eq!(ids, 4, "every outbox has an identity of its own");
    })
    .await;
}

#[tokio::test]
async fn the_longest_names_are_not_cut() {
    run(async |db| {
        let mut conn = db.connect().await;
        let names = Names::new("s".repeat(63), "p".repeat(40)).unwrap();
        postgres::migrate(&mut conn, &names).await.unwrap();
        let index: bool = scalar(
            &mut conn,
            &format!(
                "SELECT to_regclass('\"{}\".\"{}inbox_seen_at\"') IS NOT NULL AND to_regclass('\"{0}\".\"{1}outbox_id_seq\"') IS NOT NULL",
                names.schema(),
                names.prefix()
            ),
        )
        .await;
        assert!(index);
    })
    .await;
}

#[tokio::test]
async fn an_edited_migration_is_a_clear_error() {
    run(async |db| {
        let mut conn = db.connect().await;
        let names = Names::default();
        postgres::migrate(&mut conn, &names).await.unwrap();
        execute(
            &mut conn,
            "UPDATE oncebox_migrations SET checksum = 'feed' WHERE version = 1",
        )
        .await;
        let error = postgres::migrate(&mut conn, &names).await.unwrap_err();
        assert!(matches!(error, Error::Edited { version: 1, .. }));
        let text = error.to_string();
        assert!(
            text.contains("was edited")
                && text.contains("feed")
                && text.contains("oncebox_migrations"),
            "{text}"
        );
    })
    .await;
}

#[tokio::test]
async fn an_old_library_on_a_newer_schema_says_so() {
    run(async |db| {
        let mut conn = db.connect().await;
        let names = Names::default();
        postgres::migrate(&mut conn, &names).await.unwrap();
        execute(
            &mut conn,
            "INSERT INTO oncebox_migrations (version, name, checksum, library) VALUES (77, 'later', 'cafe', '7.0.0')",
        )
        .await;
        let error = postgres::migrate(&mut conn, &names).await.unwrap_err();
        assert!(matches!(error, Error::NewerSchema { version: 77, .. }));
        let text = error.to_string();
        assert!(text.contains("7.0.0") && text.contains("upgrade"), "{text}");
    })
    .await;
}

#[tokio::test]
async fn a_version_that_fails_leaves_nothing_behind() {
    run(async |db| {
        let mut conn = db.connect().await;
        let names = Names::default();
        // The last statement of version 2 fails.
        execute(&mut conn, "CREATE TABLE oncebox_dead_letter (mine int)").await;
        let error = postgres::migrate(&mut conn, &names).await.unwrap_err();
        assert!(error.to_string().contains("already exists"), "{error}");
        let status = postgres::status(&mut conn, &names).await.unwrap();
        assert_eq!(status.version, 1);
        let rest: bool = scalar(&mut conn, "SELECT to_regclass('oncebox_inbox') IS NOT NULL").await;
        assert!(!rest);

        execute(&mut conn, "DROP TABLE oncebox_dead_letter").await;
        let report = postgres::migrate(&mut conn, &names).await.unwrap();
        assert_eq!(report.applied, (2..=LATEST).collect::<Vec<_>>());
    })
    .await;
}

#[tokio::test]
async fn the_applications_own_migrations_may_have_the_same_versions() {
    run(async |db| {
        let mut conn = db.connect().await;
        let app = || {
            let table = |version, sql: &'static str| {
                Migration::new(
                    version,
                    Cow::Borrowed("app"),
                    MigrationType::Simple,
                    sql.into_sql_str(),
                    false,
                )
            };
            Migrator::with_migrations(vec![
                table(1, "CREATE TABLE orders (id bigint PRIMARY KEY)"),
                table(2, "CREATE TABLE customers (id bigint PRIMARY KEY)"),
            ])
        };
        let names = Names::default();
        app().run_direct(None, &mut conn, false).await.unwrap();
        postgres::migrate(&mut conn, &names).await.unwrap();
        app().run_direct(None, &mut conn, false).await.unwrap();
        postgres::migrate(&mut conn, &names).await.unwrap();
        let apps: i64 = scalar(&mut conn, "SELECT count(*) FROM _sqlx_migrations").await;
        let ours: i64 = scalar(&mut conn, "SELECT count(*) FROM oncebox_migrations").await;
        assert_eq!((apps, ours), (2, LATEST));
    })
    .await;
}

#[tokio::test]
async fn printed_sql_that_the_application_ran_is_recognised() {
    run(async |db| {
        let mut conn = db.connect().await;
        let names = Names::new("shop", "oncebox_").unwrap();
        for version in 1..=LATEST {
            let mut tx = conn.begin().await.unwrap();
            execute(
                &mut tx,
                &sql(Dialect::Postgres, &names, version - 1, version),
            )
            .await;
            tx.commit().await.unwrap();
        }
        postgres::status(&mut conn, &names)
            .await
            .unwrap()
            .check()
            .unwrap();
        let report = postgres::migrate(&mut conn, &names).await.unwrap();
        assert_eq!(report.applied, [0; 0]);
    })
    .await;
}

#[tokio::test]
async fn an_open_transaction_is_refused_and_left_alone() {
    run(async |db| {
        let mut conn = db.connect().await;
        let mut tx = conn.begin().await.unwrap();
        execute(&mut tx, "CREATE TABLE mine (id int)").await;
        let error = postgres::migrate(&mut tx, &Names::default())
            .await
            .unwrap_err();
        assert!(matches!(error, Error::InTransaction), "{error}");
        tx.commit().await.unwrap();
        let kept: bool = scalar(&mut conn, "SELECT to_regclass('mine') IS NOT NULL").await;
        assert!(kept);
    })
    .await;
}

#[tokio::test]
async fn a_current_schema_needs_no_right_to_create() {
    run(async |db| {
        let names = Names::default();
        let mut conn = db.connect().await;
        postgres::migrate(&mut conn, &names).await.unwrap();
        let role = db.create_role("relay").await;
        execute(&mut conn, &grants(&names, &role, &role, &role)).await;
        let mut conn = db.options_of(&role).connect().await.unwrap();
        let report = postgres::migrate(&mut conn, &names).await.unwrap();
        assert_eq!(report.applied, [0; 0]);
    })
    .await;
}

#[tokio::test]
async fn the_tables_have_the_shape_that_the_guarantees_need() {
    run(async |db| {
        let mut conn = db.connect().await;
        postgres::migrate(&mut conn, &Names::default()).await.unwrap();
        // G4: cached ids would break the order of a key.
        let cache: i64 = scalar(
            &mut conn,
            "SELECT cache_size FROM pg_sequences WHERE sequencename = 'oncebox_outbox_id_seq'",
        )
        .await;
        assert_eq!(cache, 1);
        // Drawing the id outside of the INSERT takes no lock that the relay sees: the identity refuses it.
        let drawn = sqlx::query(
            "INSERT INTO oncebox_outbox (id, message_id, topic, headers) VALUES (1, gen_random_uuid(), 't', '')",
        )
        .execute(&mut conn)
        .await;
        assert!(drawn.is_err());
        let indexes: i64 =
            scalar(&mut conn, "SELECT count(*) FROM pg_indexes WHERE tablename = 'oncebox_outbox'").await;
        assert_eq!(indexes, 1);
        let second = sqlx::query("INSERT INTO oncebox_mark (source_id) VALUES (gen_random_uuid())")
            .execute(&mut conn)
            .await;
        assert!(second.is_err(), "the mark is one row");
        let no = sqlx::query(
            "INSERT INTO oncebox_mark (singleton, source_id) VALUES (false, gen_random_uuid())",
        )
        .execute(&mut conn)
        .await;
        assert!(no.is_err(), "the mark is one row");
    })
    .await;
}
