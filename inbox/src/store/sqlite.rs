//! SQLite.

use std::time::Duration;

use oncebox_migrations::{Dialect, Names};
use sqlx::{Row as _, Sqlite};
use uuid::Uuid;

use super::rows::position_row;
use super::shared::{implement_statements, keyed, sql};
use super::statements::Templates;
use super::{Recorded, Statements, Store};
use crate::position::{Key, Known};

// updated_at is for people; the expression is the one of the column's default. Lists of ids come as JSON. hole_since lies a day back:
// a mark is older than the end of its transaction.
const SQL: Templates = Templates {
    mark: "INSERT INTO {inbox} (consumer, message_id) SELECT $1, unhex(value) FROM json_each($2) WHERE true \
           ON CONFLICT DO NOTHING RETURNING message_id",
    advance_marked: "UPDATE {position} SET next = $7, seq = $8, \
              updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000, \
              hole_since = CASE WHEN $9 THEN min(coalesce(hole_since, 9e18), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 - 86400000000) END \
              WHERE consumer = $1 AND topic = $2 AND partition = $3 AND owner = $4 AND next = $5 AND seq = $6 \
              AND EXISTS (SELECT 1 FROM {inbox} WHERE consumer = $1 AND message_id = $10)",
    advance: "UPDATE {position} SET next = $7, seq = $8, \
              updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000, \
              hole_since = CASE WHEN $9 THEN min(coalesce(hole_since, 9e18), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 - 86400000000) END \
              WHERE consumer = $1 AND topic = $2 AND partition = $3 AND owner = $4 AND next = $5 AND seq = $6",
    take: "UPDATE {position} SET owner = $4, seq = seq + 1, \
           updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 \
           WHERE consumer = $1 AND topic = $2 AND partition = $3 RETURNING topic_id, next, seq, owner",
    create: "INSERT INTO {position} (consumer, topic, partition, topic_id, next, seq, owner) \
             VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING",
    read: "SELECT topic_id, next, seq, owner FROM {position} WHERE consumer = $1 AND topic = $2 AND partition = $3",
    put: "INSERT INTO {position} AS p (consumer, topic, partition, topic_id, next, seq, owner) \
          VALUES ($1, $2, $3, $4, $5, $6, $7) \
          ON CONFLICT (consumer, topic, partition) DO UPDATE SET topic_id = excluded.topic_id, next = excluded.next, \
          seq = max(p.seq + 1, excluded.seq), owner = excluded.owner, \
          updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000",
    bury: "INSERT INTO {dead_letter} \
           (consumer, message_id, topic, partition, record_offset, key, payload, headers, error, attempts, parked, \
           record_timestamp, first_failed_at, delayed, replay_at) \
           VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14 IS NOT NULL, \
           CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + $14) ON CONFLICT DO NOTHING",
    buried: "SELECT message_id FROM {dead_letter} \
             WHERE consumer = $1 AND topic = $2 AND partition = $3 AND record_offset = $4",
    block: "INSERT INTO {blocked_key} AS b (consumer, topic, key, reason) VALUES ($1, $2, $3, $4) \
            ON CONFLICT (consumer, topic, key) DO UPDATE SET reason = b.reason",
    blocked: "SELECT key FROM {blocked_key} WHERE consumer = $1 AND topic = $2 AND key = $3",
    any_blocked: "SELECT 1 FROM {blocked_key} WHERE consumer = $1 LIMIT 1",
    note: "INSERT INTO {attempt} \
           (consumer, topic, partition, record_offset, message_id, attempts, error, first_at, due_at) \
           VALUES ($1, $2, $3, $4, $5, $6, $7, $8, \
           CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + $9) \
           ON CONFLICT (consumer, topic, partition, record_offset) DO UPDATE SET message_id = excluded.message_id, \
           attempts = excluded.attempts, error = excluded.error, first_at = excluded.first_at, due_at = excluded.due_at",
    forget_below: "DELETE FROM {attempt} WHERE consumer = $1 AND topic = $2 AND partition = $3 AND record_offset < $4",
    forget: "DELETE FROM {attempt} WHERE consumer = $1 AND topic = $2 AND partition = $3 AND record_offset = $4",
    attempts: "SELECT record_offset, message_id, attempts, error, first_at, \
               max(due_at - CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000, 0) \
               FROM {attempt} WHERE consumer = $1 AND topic = $2 AND partition = $3 AND record_offset >= $4",
    record: "INSERT INTO {record} (consumer, topic, partition, record_offset, message_id, business_id, status, attempts, \
             first_at, duration_us, error) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
    known: "SELECT topic_id, next, seq, owner, \
            (SELECT group_concat(hex(message_id)) FROM {inbox} WHERE consumer = $1 \
            AND message_id IN (SELECT unhex(value) FROM json_each($4))) \
            FROM {position} WHERE consumer = $1 AND topic = $2 AND partition = $3",
    trip: "INSERT INTO {breaker} (consumer, topic, failures, error) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING",
    tripped: "SELECT topic, failures, error FROM {breaker} WHERE consumer = $1 ORDER BY topic",
    accept: "DELETE FROM {breaker} WHERE consumer = $1",
    pause: "INSERT INTO {inbox_paused} (consumer, topic, reason) VALUES ($1, $2, $3) \
            ON CONFLICT (consumer, topic) DO UPDATE SET reason = excluded.reason",
    unpause: "DELETE FROM {inbox_paused} WHERE consumer = $1 AND topic = $2",
    paused: "SELECT topic, reason, paused_at FROM {inbox_paused} WHERE consumer = $1 ORDER BY topic",
    due_letter: "SELECT id, message_id, topic, partition, record_offset, key, payload, headers, attempts, parked, \
                 record_timestamp, delayed, error, first_failed_at, replays FROM {dead_letter} AS d WHERE consumer = $1 AND replay_at <= CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 \
                 AND NOT (delayed AND EXISTS (SELECT 1 FROM {inbox_paused} AS p WHERE p.consumer = d.consumer AND p.topic = d.topic)) \
                 AND NOT (parked AND EXISTS (SELECT 1 FROM {dead_letter} AS e WHERE e.consumer = d.consumer AND e.topic = d.topic \
                 AND e.key = d.key AND e.parked AND (e.partition, e.record_offset) < (d.partition, d.record_offset))) \
                 ORDER BY replay_at, id LIMIT 1",
    depths: "SELECT topic, CASE WHEN parked THEN 'parked' WHEN delayed THEN 'delayed' ELSE 'dead' END AS kind, count(*), \
             max(0, CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 - min(failed_at)) \
             FROM {dead_letter} WHERE consumer = $1 GROUP BY topic, kind ORDER BY topic, kind",
    count_replay: "UPDATE {dead_letter} SET replays = replays + 1 WHERE id = $1 AND replays = $2 AND replay_at IS NOT NULL",
    take_letter: "DELETE FROM {dead_letter} WHERE id = $1 AND replay_at IS NOT NULL",
    first_parked: "SELECT id FROM {dead_letter} WHERE consumer = $1 AND topic = $2 AND key = $3 AND parked \
                   ORDER BY partition, record_offset LIMIT 1",
    release_next: "UPDATE {dead_letter} SET replay_at = coalesce(replay_at, CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000) WHERE id = \
                   (SELECT id FROM {dead_letter} WHERE consumer = $1 AND topic = $2 AND key = $3 AND parked \
                   ORDER BY partition, record_offset LIMIT 1)",
    unblock: "DELETE FROM {blocked_key} WHERE consumer = $1 AND topic = $2 AND key = $3",
    refuse_letter: "UPDATE {dead_letter} SET replay_at = NULL, error = $2, attempts = attempts + 1 \
                    WHERE id = $1 AND replay_at IS NOT NULL",
    delay_again: "UPDATE {dead_letter} SET replay_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + $2, error = $3, \
                  attempts = attempts + 1 WHERE id = $1 AND delayed",
    give_up: "UPDATE {dead_letter} SET replay_at = NULL, delayed = false, error = $2, attempts = attempts + 1 WHERE id = $1 AND delayed",
    refuse_key: "UPDATE {dead_letter} SET replay_at = NULL WHERE consumer = $1 AND topic = $2 AND key = $3 AND parked",
    sweep: "DELETE FROM {inbox} WHERE consumer = $1 AND message_id IN (SELECT message_id FROM {inbox} AS m WHERE consumer = $1 \
            AND seen_at < min(CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 - $2 * 1000000, \
            (SELECT coalesce(min(hole_since), 9e18) FROM {position} WHERE consumer = $1)) \
            AND NOT EXISTS (SELECT 1 FROM {dead_letter} AS d WHERE d.consumer = $1 AND d.message_id = m.message_id) \
            ORDER BY seen_at LIMIT 1000)",
};

impl Store for Sqlite {
    const IN_PROCESS: bool = true;

    fn statements(names: &Names, _idle_limit: Duration) -> Statements {
        // A deferred transaction that reads before it writes fails with SQLITE_BUSY at once, whatever busy_timeout says.
        // SQLite cannot end an idle transaction: see the precondition of G6. Waiting is bounded by busy_timeout.
        const BEGIN: &str = "BEGIN IMMEDIATE";
        const GUARDED: &str = "BEGIN IMMEDIATE; SAVEPOINT oncebox";
        Statements::new(Dialect::Sqlite, names, GUARDED, BEGIN, &SQL)
    }

    async fn check(
        conn: &mut Self::Connection,
        names: &Names,
    ) -> Result<(), oncebox_migrations::Error> {
        oncebox_migrations::sqlite::status(conn, names)
            .await?
            .check()
    }

    async fn epoch(_conn: &mut Self::Connection) -> Result<String, sqlx::Error> {
        // A file cannot tell its copy; what a hint says is looked up in any case.
        Ok("sqlite".to_owned())
    }

    async fn mark(
        conn: &mut Self::Connection,
        statements: &Statements,
        consumer: &str,
        ids: &[Uuid],
    ) -> Result<Vec<Uuid>, sqlx::Error> {
        let rows = sql::<Self>(&statements.mark)
            .bind(consumer)
            .bind(json(ids))
            .fetch_all(conn)
            .await?;
        rows.iter().map(|row| row.try_get(0)).collect()
    }

    async fn blocked(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        keys: &[&[u8]],
    ) -> Result<Vec<Vec<u8>>, sqlx::Error> {
        let mut blocked = Vec::new();
        for name in keys {
            let row = sql::<Self>(&statements.blocked)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(*name)
                .fetch_optional(&mut *conn)
                .await?;
            if row.is_some() {
                blocked.push(name.to_vec());
            }
        }
        Ok(blocked)
    }

    async fn record(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        records: &[Recorded<'_>],
    ) -> Result<(), sqlx::Error> {
        for record in records {
            keyed::<Self>(&statements.record, key)
                .bind(record.offset)
                .bind(record.message_id)
                .bind(record.business_id.as_deref())
                .bind(record.status)
                .bind(record.attempts)
                .bind(record.first_at)
                .bind(record.duration_us)
                .bind(record.error)
                .execute(&mut *conn)
                .await?;
        }
        Ok(())
    }

    async fn sweep(
        conn: &mut Self::Connection,
        statements: &Statements,
        consumer: &str,
        window: Duration,
        chunk: i64,
    ) -> Result<(u64, Option<i64>), sqlx::Error> {
        let done = sql::<Self>(&statements.sweep)
            .bind(consumer)
            .bind(i64::try_from(window.as_secs()).unwrap_or(i64::MAX))
            .execute(conn)
            .await?;
        // By an index, the oldest first: behind the last one are none.
        let next = done.rows_affected() > 0;
        Ok((done.rows_affected(), next.then_some(chunk + 1)))
    }

    async fn known(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        ids: &[Uuid],
    ) -> Result<Option<(Known, Vec<Uuid>)>, sqlx::Error> {
        let row = keyed::<Self>(&statements.known, key)
            .bind(json(ids))
            .fetch_optional(conn)
            .await?;
        let Some(row) = row else { return Ok(None) };
        let found: Option<String> = row.try_get(4)?;
        let found = found.unwrap_or_default();
        let ids = found.split(',').filter(|id| !id.is_empty());
        let ids = ids.map(|id| Uuid::try_parse(id).map_err(|e| sqlx::Error::Decode(e.into())));
        Ok(Some((
            position_row(&row)?.known(),
            ids.collect::<Result<_, _>>()?,
        )))
    }

    implement_statements!(Sqlite);
}

/// `["hex",…]`, which `json_each` and `unhex` turn into ids again.
fn json(ids: &[Uuid]) -> String {
    let mut text = String::with_capacity(2 + ids.len() * 35);
    text.push('[');
    for (n, id) in ids.iter().enumerate() {
        if n > 0 {
            text.push(',');
        }
        text.push('"');
        text.push_str(id.simple().encode_lower(&mut Uuid::encode_buffer()));
        text.push('"');
    }
    text.push(']');
    text
}
