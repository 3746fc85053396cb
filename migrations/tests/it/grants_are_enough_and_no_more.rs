//! Three real roles, each with the grants of `grants()`: what each may do, and what it may not.

use futures_util::{StreamExt as _, TryStreamExt as _};
use oncebox_migrations::{Names, grants, postgres};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection};

use crate::database::{Database, execute, run};

struct Roles {
    producer: PgConnection,
    relay: PgConnection,
    consumer: PgConnection,
}

/// Tables in a schema of their own: `public` gives everybody USAGE.
async fn roles(db: &Database) -> Roles {
    let names = Names::new("ob", "oncebox_").unwrap();
    let mut owner = db.connect().await;
    postgres::migrate(&mut owner, &names).await.unwrap();
    let producer = db.create_role("producer").await;
    let relay = db.create_role("relay").await;
    let consumer = db.create_role("consumer").await;
    execute(&mut owner, &grants(&names, &producer, &relay, &consumer)).await;
    Roles {
        producer: db.options_of(&producer).connect().await.unwrap(),
        relay: db.options_of(&relay).connect().await.unwrap(),
        consumer: db.options_of(&consumer).connect().await.unwrap(),
    }
}

async fn allowed(conn: &mut PgConnection, statements: &[&str]) {
    for sql in statements {
        execute(conn, sql).await;
    }
}

/// Each must fail with SQLSTATE 42501, insufficient privilege.
async fn denied(conn: &mut PgConnection, statements: &[&str]) {
    for sql in statements {
        let error = sqlx::raw_sql(AssertSqlSafe((*sql).to_owned()))
            .execute(&mut *conn)
            .await
            .expect_err(sql);
        let code = error.as_database_error().and_then(|error| error.code());
        assert_eq!(code.as_deref(), Some("42501"), "{sql}: {error}");
    }
}

const ENQUEUE: &str = "INSERT INTO ob.oncebox_outbox (message_id, topic, headers) VALUES (gen_random_uuid(), 't', '')";

#[tokio::test]
async fn a_producer_may_insert_and_nothing_else() {
    run(async |db| {
        let mut producer = roles(&db).await.producer;
        allowed(
            &mut producer,
            &[
                ENQUEUE,
                "INSERT INTO ob.oncebox_outbox (message_id, topic, headers) \
                 SELECT * FROM unnest('{00000000-0000-7000-8000-000000000001}'::uuid[], '{t}'::text[], '{\"\"}'::bytea[])",
                "SELECT pg_advisory_xact_lock(1)",
            ],
        )
        .await;
        denied(
            &mut producer,
            &[
                "INSERT INTO ob.oncebox_outbox (message_id, topic, headers) VALUES (gen_random_uuid(), 't', '') RETURNING id",
                "SELECT id FROM ob.oncebox_outbox",
                "UPDATE ob.oncebox_outbox SET topic = 'x'",
                "DELETE FROM ob.oncebox_outbox",
                "TRUNCATE ob.oncebox_outbox",
                "SELECT nextval('ob.oncebox_outbox_id_seq')",
                "SELECT * FROM ob.oncebox_mark",
                "SELECT * FROM ob.oncebox_inbox",
                "SELECT * FROM ob.oncebox_position",
                "SELECT * FROM ob.oncebox_dead_letter",
                "SELECT * FROM ob.oncebox_migrations",
                "CREATE TABLE ob.mine (id int)",
            ],
        )
        .await;
    })
    .await;
}

#[tokio::test]
async fn a_relay_may_read_clean_up_and_keep_its_mark() {
    run(async |db| {
        let Roles { mut producer, mut relay, .. } = roles(&db).await;
        allowed(&mut producer, &[ENQUEUE, ENQUEUE]).await;
        allowed(
            &mut relay,
            &[
                "SELECT id, message_id, topic, key, payload, headers, created_at FROM ob.oncebox_outbox WHERE id > 0 ORDER BY id",
                "SELECT bit_xor(hashint8extended(id, 0)) FROM ob.oncebox_outbox",
                "BEGIN; SELECT epoch FROM ob.oncebox_mark FOR UPDATE; UPDATE ob.oncebox_mark SET renewal = renewal + 1; COMMIT",
                "DELETE FROM ob.oncebox_outbox WHERE id = 1",
                "SELECT * FROM ob.oncebox_migrations",
            ],
        )
        .await;
        let mut copy = relay
            .copy_out_raw("COPY (SELECT id FROM ob.oncebox_outbox) TO STDOUT BINARY")
            .await
            .unwrap();
        let chunks = copy.by_ref().try_fold(0, async |n, _| Ok(n + 1)).await.unwrap();
        drop(copy);
        assert!(chunks > 0);
        let last: Option<i64> = sqlx::query_scalar(
            "SELECT pg_sequence_last_value(pg_get_serial_sequence('ob.oncebox_outbox', 'id')::regclass)",
        )
        .fetch_one(&mut relay)
        .await
        .unwrap();
        assert_eq!(last, Some(2));

        // The holders of a gap: another role's open transaction is visible.
        let mut tx = producer.begin().await.unwrap();
        execute(&mut tx, ENQUEUE).await;
        let holders: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM pg_locks WHERE relation = 'ob.oncebox_outbox'::regclass AND mode = 'RowExclusiveLock' AND granted",
        )
        .fetch_one(&mut relay)
        .await
        .unwrap();
        assert_eq!(holders, 1);
        tx.rollback().await.unwrap();

        denied(
            &mut relay,
            &[
                ENQUEUE,
                "UPDATE ob.oncebox_outbox SET topic = 'x'",
                "TRUNCATE ob.oncebox_outbox",
                "SELECT nextval('ob.oncebox_outbox_id_seq')",
                "SELECT setval('ob.oncebox_outbox_id_seq', 1)",
                "INSERT INTO ob.oncebox_mark (source_id) VALUES (gen_random_uuid())",
                "DELETE FROM ob.oncebox_mark",
                "UPDATE ob.oncebox_migrations SET name = 'x'",
                "SELECT * FROM ob.oncebox_inbox",
                "SELECT * FROM ob.oncebox_position",
                "SELECT * FROM ob.oncebox_dead_letter",
                "CREATE TABLE ob.mine (id int)",
            ],
        )
        .await;
    })
    .await;
}

#[tokio::test]
async fn a_consumer_may_use_its_three_tables() {
    run(async |db| {
        let mut consumer = roles(&db).await.consumer;
        allowed(
            &mut consumer,
            &[
                "INSERT INTO ob.oncebox_inbox (consumer, message_id) VALUES ('c', gen_random_uuid()) \
                 ON CONFLICT DO NOTHING RETURNING message_id",
                "DELETE FROM ob.oncebox_inbox WHERE seen_at < now()",
                "INSERT INTO ob.oncebox_position (consumer, topic, partition, topic_id, next, seq, owner) \
                 VALUES ('c', 't', 0, '', 0, 0, gen_random_uuid()) \
                 ON CONFLICT (consumer, topic, partition) DO UPDATE SET owner = excluded.owner RETURNING next",
                "SELECT * FROM ob.oncebox_position FOR UPDATE",
                "UPDATE ob.oncebox_position SET next = 1, seq = seq + 1 WHERE next = 0",
                "INSERT INTO ob.oncebox_dead_letter (consumer, message_id, topic, partition, record_offset, headers, error, attempts) \
                 VALUES ('c', gen_random_uuid(), 't', 0, 0, '', 'boom', 1) RETURNING id",
                "DELETE FROM ob.oncebox_dead_letter RETURNING payload",
                "SELECT * FROM ob.oncebox_migrations",
            ],
        )
        .await;
        denied(
            &mut consumer,
            &[
                ENQUEUE,
                "SELECT * FROM ob.oncebox_outbox",
                "SELECT * FROM ob.oncebox_mark",
                "UPDATE ob.oncebox_inbox SET seen_at = now()",
                "TRUNCATE ob.oncebox_inbox",
                "UPDATE ob.oncebox_inbox SET consumer = ''",
                "UPDATE ob.oncebox_migrations SET name = 'x'",
                "CREATE TABLE ob.mine (id int)",
            ],
        )
        .await;
    })
    .await;
}
