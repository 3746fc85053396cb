//! PostgreSQL.

use std::time::Duration;

use oncebox_migrations::{Dialect, Names};
use sqlx::Postgres;

use super::{Statements, Store, Templates, implement_statements};

const SQL: Templates = Templates {
    mark: "INSERT INTO {inbox} (consumer, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING true",
    advance: "UPDATE {position} SET next = $7, seq = $8, updated_at = now() \
              WHERE consumer = $1 AND topic = $2 AND partition = $3 AND owner = $4 AND next = $5 AND seq = $6 \
              AND EXISTS (SELECT 1 FROM {inbox} WHERE consumer = $1 AND message_id = $9)",
    take: "UPDATE {position} SET owner = $4, seq = seq + 1, updated_at = now() \
           WHERE consumer = $1 AND topic = $2 AND partition = $3 RETURNING topic_id, next, seq, owner",
    create: "INSERT INTO {position} (consumer, topic, partition, topic_id, next, seq, owner) \
             VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING",
    read: "SELECT topic_id, next, seq, owner FROM {position} WHERE consumer = $1 AND topic = $2 AND partition = $3",
    put: "INSERT INTO {position} AS p (consumer, topic, partition, topic_id, next, seq, owner) \
          VALUES ($1, $2, $3, $4, $5, $6, $7) \
          ON CONFLICT (consumer, topic, partition) DO UPDATE SET topic_id = excluded.topic_id, next = excluded.next, \
          seq = greatest(p.seq + 1, excluded.seq), owner = excluded.owner, updated_at = now()",
    bury: "INSERT INTO {dead_letter} \
           (consumer, message_id, topic, partition, record_offset, key, payload, headers, error, attempts) \
           VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) ON CONFLICT DO NOTHING",
    buried: "SELECT message_id FROM {dead_letter} \
             WHERE consumer = $1 AND topic = $2 AND partition = $3 AND record_offset = $4",
};

impl Store for Postgres {
    fn statements(names: &Names, idle_limit: Duration) -> Statements {
        // READ COMMITTED, whatever the database's default: a stricter level answers 40001 where this one waits for the
        // other transaction and then sees its mark. The limit ends a stopped process that holds a lock (G6). One
        // simple query, one round trip.
        let begin = format!(
            "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = {}",
            idle_limit.as_millis()
        );
        // Taking one partition must not keep the others waiting behind a stopped owner's lock (G9).
        let brief = format!("{begin}; SET LOCAL lock_timeout = 2000");
        Statements::new(Dialect::Postgres, names, &begin, &brief, &SQL)
    }

    async fn check(
        conn: &mut Self::Connection,
        names: &Names,
    ) -> Result<(), oncebox_migrations::Error> {
        oncebox_migrations::postgres::status(conn, names)
            .await?
            .check()
    }

    implement_statements!(Postgres);
}
