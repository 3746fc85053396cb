//! PostgreSQL.

use std::time::Duration;

use oncebox_migrations::{Dialect, Names};
use sqlx::{Postgres, Row as _};
use uuid::Uuid;

use super::rows::position_row;
use super::shared::{implement_statements, keyed, sql};
use super::statements::Templates;
use super::{ENDED, Recorded, Statements, Store};
use crate::position::{Key, Known};

const SQL: Templates = Templates {
    mark: "INSERT INTO {inbox} (consumer, message_id) SELECT $1, unnest($2::uuid[]) ON CONFLICT DO NOTHING RETURNING message_id",
    // The setting is that of the transaction that we began: a handler that ended it by itself moves no position.
    advance_marked: "UPDATE {position} SET next = $7, seq = $8, updated_at = now(), hole_since = CASE WHEN $9 THEN least(hole_since, now()) END \
              WHERE consumer = $1 AND topic = $2 AND partition = $3 AND owner = $4 AND next = $5 AND seq = $6 \
              AND current_setting('oncebox.transaction', true) = 'open' \
              AND EXISTS (SELECT 1 FROM {inbox} WHERE consumer = $1 AND message_id = $10)",
    advance: "UPDATE {position} SET next = $7, seq = $8, updated_at = now(), hole_since = CASE WHEN $9 THEN least(hole_since, now()) END \
              WHERE consumer = $1 AND topic = $2 AND partition = $3 AND owner = $4 AND next = $5 AND seq = $6 \
              AND current_setting('oncebox.transaction', true) = 'open'",
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
           (consumer, message_id, topic, partition, record_offset, key, payload, headers, error, attempts, parked, \
           record_timestamp, first_failed_at, delayed, replay_at) \
           VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, 'epoch'::timestamptz + $13 * interval '1 microsecond', \
           $14::bigint IS NOT NULL, clock_timestamp() + $14 * interval '1 microsecond') \
           ON CONFLICT DO NOTHING",
    buried: "SELECT message_id FROM {dead_letter} \
             WHERE consumer = $1 AND topic = $2 AND partition = $3 AND record_offset = $4",
    // DO UPDATE locks a row that is there, and inserts again when a release has just deleted it; DO NOTHING would not wait.
    block: "INSERT INTO {blocked_key} AS b (consumer, topic, key, reason) VALUES ($1, $2, $3, $4) \
            ON CONFLICT (consumer, topic, key) DO UPDATE SET reason = b.reason",
    // In the order of the keys: two batches that lock several keys must not wait for each other.
    blocked: "SELECT key FROM {blocked_key} WHERE consumer = $1 AND topic = $2 AND key = ANY($3) ORDER BY key FOR UPDATE",
    any_blocked: "SELECT 1 FROM {blocked_key} WHERE consumer = $1 LIMIT 1",
    note: "INSERT INTO {attempt} AS a \
           (consumer, topic, partition, record_offset, message_id, attempts, error, first_at, due_at) \
           VALUES ($1, $2, $3, $4, $5, $6, $7, 'epoch'::timestamptz + $8 * interval '1 microsecond', \
           clock_timestamp() + $9 * interval '1 microsecond') \
           ON CONFLICT (consumer, topic, partition, record_offset) DO UPDATE SET message_id = excluded.message_id, \
           attempts = excluded.attempts, error = excluded.error, first_at = excluded.first_at, due_at = excluded.due_at",
    forget_below: "DELETE FROM {attempt} WHERE consumer = $1 AND topic = $2 AND partition = $3 AND record_offset < $4",
    forget: "DELETE FROM {attempt} WHERE consumer = $1 AND topic = $2 AND partition = $3 AND record_offset = $4",
    attempts: "SELECT record_offset, message_id, attempts, error, (extract(epoch FROM first_at) * 1000000)::bigint, \
               (extract(epoch FROM greatest(due_at - clock_timestamp(), interval '0')) * 1000000)::bigint \
               FROM {attempt} WHERE consumer = $1 AND topic = $2 AND partition = $3 AND record_offset >= $4",
    record: "INSERT INTO {record} (consumer, topic, partition, record_offset, message_id, business_id, status, attempts, \
             first_at, duration_us, error) \
             SELECT $1, $2, $3, o, m, b, s, a, 'epoch'::timestamptz + f * interval '1 microsecond', d, e \
             FROM unnest($4::bigint[], $5::uuid[], $6::text[], $7::text[], $8::int[], $9::bigint[], $10::bigint[], $11::text[]) \
             AS r (o, m, b, s, a, f, d, e)",
    known: "SELECT topic_id, next, seq, owner, \
            ARRAY(SELECT message_id FROM {inbox} WHERE consumer = $1 AND message_id = ANY($4)) \
            FROM {position} WHERE consumer = $1 AND topic = $2 AND partition = $3",
    trip: "INSERT INTO {breaker} (consumer, topic, failures, error) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING",
    tripped: "SELECT topic, failures, error FROM {breaker} WHERE consumer = $1 ORDER BY topic",
    accept: "DELETE FROM {breaker} WHERE consumer = $1",
    pause: "INSERT INTO {inbox_paused} (consumer, topic, reason) VALUES ($1, $2, $3) \
            ON CONFLICT (consumer, topic) DO UPDATE SET reason = excluded.reason",
    unpause: "DELETE FROM {inbox_paused} WHERE consumer = $1 AND topic = $2",
    paused: "SELECT topic, reason, (extract(epoch FROM paused_at) * 1000000)::bigint FROM {inbox_paused} WHERE consumer = $1 ORDER BY topic",
    due_letter: "SELECT id, message_id, topic, partition, record_offset, key, payload, headers, attempts, parked, \
                 record_timestamp, delayed, error, (extract(epoch FROM first_failed_at) * 1000000)::bigint, replays \
                 FROM {dead_letter} AS d WHERE consumer = $1 AND replay_at <= clock_timestamp() \
                 AND NOT (delayed AND EXISTS (SELECT 1 FROM {inbox_paused} AS p WHERE p.consumer = d.consumer AND p.topic = d.topic)) \
                 AND NOT (parked AND EXISTS (SELECT 1 FROM {dead_letter} AS e WHERE e.consumer = d.consumer AND e.topic = d.topic \
                 AND e.key = d.key AND e.parked AND (e.partition, e.record_offset) < (d.partition, d.record_offset))) \
                 ORDER BY replay_at, id LIMIT 1 FOR UPDATE SKIP LOCKED",
    depths: "SELECT topic, CASE WHEN parked THEN 'parked' WHEN delayed THEN 'delayed' ELSE 'dead' END AS kind, count(*), \
             greatest(0, (extract(epoch FROM clock_timestamp() - min(failed_at)) * 1000000)::bigint) \
             FROM {dead_letter} WHERE consumer = $1 GROUP BY topic, kind ORDER BY topic, kind",
    count_replay: "UPDATE {dead_letter} SET replays = replays + 1 WHERE id = $1 AND replays = $2 AND replay_at IS NOT NULL",
    take_letter: "DELETE FROM {dead_letter} WHERE id = $1 AND replay_at IS NOT NULL",
    first_parked: "SELECT id FROM {dead_letter} WHERE consumer = $1 AND topic = $2 AND key = $3 AND parked \
                   ORDER BY partition, record_offset LIMIT 1",
    release_next: "UPDATE {dead_letter} SET replay_at = coalesce(replay_at, clock_timestamp()) WHERE id = \
                   (SELECT id FROM {dead_letter} WHERE consumer = $1 AND topic = $2 AND key = $3 AND parked \
                   ORDER BY partition, record_offset LIMIT 1)",
    unblock: "DELETE FROM {blocked_key} WHERE consumer = $1 AND topic = $2 AND key = $3",
    refuse_letter: "UPDATE {dead_letter} SET replay_at = NULL, error = $2, attempts = attempts + 1 \
                    WHERE id = $1 AND replay_at IS NOT NULL",
    delay_again: "UPDATE {dead_letter} SET replay_at = clock_timestamp() + $2 * interval '1 microsecond', error = $3, \
                  attempts = attempts + 1 WHERE id = $1 AND delayed",
    give_up: "UPDATE {dead_letter} SET replay_at = NULL, delayed = false, error = $2, attempts = attempts + 1 WHERE id = $1 AND delayed",
    refuse_key: "UPDATE {dead_letter} SET replay_at = NULL WHERE consumer = $1 AND topic = $2 AND key = $3 AND parked",
    // Through the table by its pages: no index, no scan that begins at deleted rows, and each chunk costs the same.
    // A mark stays beyond the window above a position that has a hole, and for as long as there is a letter of its message.
    sweep: "WITH gone AS (DELETE FROM {inbox} AS m WHERE ctid >= format('(%s,0)', $3)::tid AND ctid < format('(%s,0)', $3 + 256)::tid \
            AND consumer = $1 AND seen_at < least(clock_timestamp() - $2 * interval '1 second', \
            (SELECT min(hole_since) FROM {position} WHERE consumer = $1)) \
            AND NOT EXISTS (SELECT 1 FROM {dead_letter} AS d WHERE d.consumer = $1 AND d.message_id = m.message_id) RETURNING 1) \
            SELECT count(*), pg_relation_size('{inbox}') / current_setting('block_size')::bigint FROM gone",
};

/// Pages of 8 KiB that are swept at a time: some 20 000 marks.
const CHUNK: i64 = 256;

impl Store for Postgres {
    const IN_PROCESS: bool = false;

    fn statements(names: &Names, idle_limit: Duration) -> Statements {
        // READ COMMITTED, whatever the database's default: a stricter level answers 40001 where this one waits for the
        // other transaction and then sees its mark. The limit ends a stopped process that holds a lock (G6). One
        // simple query, one round trip.
        let begin = format!(
            "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = {}; \
             SET LOCAL oncebox.transaction = 'open'",
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

    async fn guard(_conn: &mut Self::Connection) -> Result<(), sqlx::Error> {
        // BEGIN has set it for the whole transaction.
        Ok(())
    }

    async fn intact(conn: &mut Self::Connection) -> Result<(), sqlx::Error> {
        let open: Option<bool> =
            sqlx::query_scalar("SELECT current_setting('oncebox.transaction', true) = 'open'")
                .fetch_one(conn)
                .await?;
        match open {
            Some(true) => Ok(()),
            _ => Err(sqlx::Error::Protocol(ENDED.to_owned())),
        }
    }

    async fn epoch(conn: &mut Self::Connection) -> Result<String, sqlx::Error> {
        // The database's oid and the timeline: a restored dump has another oid, a promoted standby another timeline.
        sqlx::query_scalar(
            "SELECT oid::text || '.' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) \
             FROM pg_database WHERE datname = current_database()",
        )
        .fetch_one(conn)
        .await
    }

    async fn mark(
        conn: &mut Self::Connection,
        statements: &Statements,
        consumer: &str,
        ids: &[Uuid],
    ) -> Result<Vec<Uuid>, sqlx::Error> {
        let rows = sql::<Self>(&statements.mark)
            .bind(consumer)
            .bind(ids)
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
        let rows = sql::<Self>(&statements.blocked)
            .bind(&*key.consumer)
            .bind(&*key.topic)
            .bind(keys)
            .fetch_all(conn)
            .await?;
        rows.iter().map(|row| row.try_get(0)).collect()
    }

    async fn record(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        records: &[Recorded<'_>],
    ) -> Result<(), sqlx::Error> {
        let column = |pick: fn(&Recorded<'_>) -> i64| records.iter().map(pick).collect::<Vec<_>>();
        let ids: Vec<Uuid> = records.iter().map(|r| r.message_id).collect();
        let business: Vec<Option<&str>> =
            records.iter().map(|r| r.business_id.as_deref()).collect();
        let statuses: Vec<&str> = records.iter().map(|r| r.status).collect();
        let attempts: Vec<i32> = records.iter().map(|r| r.attempts).collect();
        let errors: Vec<Option<&str>> = records.iter().map(|r| r.error).collect();
        keyed::<Self>(&statements.record, key)
            .bind(column(|r| r.offset))
            .bind(ids)
            .bind(business)
            .bind(statuses)
            .bind(attempts)
            .bind(column(|r| r.first_at))
            .bind(column(|r| r.duration_us))
            .bind(errors)
            .execute(conn)
            .await
            .map(drop)
    }

    async fn sweep(
        conn: &mut Self::Connection,
        statements: &Statements,
        consumer: &str,
        window: Duration,
        chunk: i64,
    ) -> Result<(u64, Option<i64>), sqlx::Error> {
        let row = sql::<Self>(&statements.sweep)
            .bind(consumer)
            .bind(i64::try_from(window.as_secs()).unwrap_or(i64::MAX))
            .bind(chunk * CHUNK)
            .fetch_one(conn)
            .await?;
        let (deleted, pages): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
        let next = (chunk + 1) * CHUNK < pages;
        Ok((
            u64::try_from(deleted).unwrap_or_default(),
            next.then_some(chunk + 1),
        ))
    }

    async fn known(
        conn: &mut Self::Connection,
        statements: &Statements,
        key: &Key,
        ids: &[Uuid],
    ) -> Result<Option<(Known, Vec<Uuid>)>, sqlx::Error> {
        let row = keyed::<Self>(&statements.known, key)
            .bind(ids)
            .fetch_optional(conn)
            .await?;
        row.map(|row| Ok((position_row(&row)?.known(), row.try_get(4)?)))
            .transpose()
    }

    implement_statements!(Postgres);
}
