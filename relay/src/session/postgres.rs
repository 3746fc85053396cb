//! PostgreSQL: gaps are real here, and the holders of the insert lock in `pg_locks` decide about them.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use futures_util::StreamExt as _;
use oncebox_kafka::{Envelope, Record};
use oncebox_migrations::Dialect;
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, Row as _};
use uuid::Uuid;

use super::copy::{CopyError, CopyReader};
use super::same::{same_parking_methods, same_session_methods, write_as_leader};
use super::{
    Among, Facts, Filter, Limit, Look, MARK_COLUMNS, Mark, Overview, ParkedRow, Parking,
    ParkingSession, Paused, Probe, Request, Rewrite, Row, Server, Session, Written, cannot_connect,
    collect, keys_of, no_mark, parked_row, raw_mark, vanished,
};
use crate::config::{Config, Database};
use crate::error::{Error, Stop};
use crate::position::{Checkpoint, Gaps, Tally};

const SERVER: &str = "SELECT (SELECT system_identifier::text FROM pg_control_system()), \
     substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8), pg_postmaster_start_time()::text";

/// A read-only or recovering server: its locks and its position mean nothing.
const WRITABLE: &str =
    "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean";

/// Microseconds between 1970-01-01 and PostgreSQL's epoch, 2000-01-01.
const EPOCH_MICROS: i64 = 946_684_800_000_000;

/// [`Tally::message_hash`] in SQL.
const MESSAGE_HASH: &str =
    "('x' || right(replace(p.message_id::text, '-', ''), 16))::bit(64)::bigint";

/// What `parked_row!` reads.
const PARKED_COLUMNS: &str = "p.id, p.message_id, p.topic, p.key, p.payload, p.headers, p.cause, p.reason, p.attempts, p.request, \
     (extract(epoch FROM p.created_at) * 1000000)::bigint AS created, (extract(epoch FROM p.parked_at) * 1000000)::bigint AS parked";

/// One session.
pub(crate) struct PostgresSession {
    conn: PgConnection,
    server: Server,
    sql: Sql,
    topics: Topics,
}

/// Every statement, with the tables' names in it.
struct Sql {
    mark: String,
    probe: String,
    last_visible: String,
    row_at_or_below: String,
    facts: String,
    take: String,
    renew: String,
    confirm: String,
    release: String,
    raise_format: String,
    lock_mark: String,
    delete: String,
    delete_mark: String,
    rewrite: String,
    outbox: String,
    parked_by_topic: String,
    requested: String,
    paused: String,
    parked_ids: String,
    first_of_keys: String,
    park: String,
    pause: String,
    releasable: String,
    refuse: String,
    unpark: String,
    resume_topic: String,
    list_parked: String,
    request: String,
    pause_for_operator: String,
    resume_for_operator: String,
}

impl Sql {
    fn new(config: &Config) -> Self {
        let outbox = config.names.outbox(Dialect::Postgres);
        let mark = config.names.mark(Dialect::Postgres);
        let parked = config.names.parked(Dialect::Postgres);
        let paused = config.names.paused(Dialect::Postgres);
        // The names are checked identifiers; quoted once more as a literal for regclass and the sequence.
        let literal = outbox.replace('\'', "''");
        Self {
            mark: format!("SELECT {MARK_COLUMNS} FROM {mark}"),
            // An INSERT takes this lock before it draws its id and keeps it until after its commit is visible.
            // pg_sequence_last_value reads under the buffer lock; `SELECT last_value` can read 32 too far.
            probe: format!(
                "SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('{literal}', 'id')::regclass), 0), \
                   (SELECT coalesce(array_agg(virtualtransaction), '{{}}') FROM pg_locks \
                    WHERE locktype = 'relation' AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
                      AND relation = '{literal}'::regclass AND mode = 'RowExclusiveLock' AND granted)"
            ),
            last_visible: format!("SELECT coalesce(max(id), 0) FROM {outbox}"),
            row_at_or_below: format!(
                "SELECT id, message_id FROM {outbox} WHERE id <= $1 ORDER BY id DESC LIMIT 1"
            ),
            facts: format!(
                "WITH m AS (SELECT {MARK_COLUMNS} FROM {mark}) \
                 SELECT m.*, \
                   (SELECT message_id FROM {outbox} WHERE id = $1) AS high_message_id, \
                   EXISTS (SELECT 1 FROM {outbox} WHERE id <= m.low_water AND id <> $1) AS below, \
                   a.n AS all_n, a.f AS all_f, g.n AS gap_n, g.f AS gap_f, \
                   p.n AS parked_n, p.f AS parked_f, q.n AS open_n, q.f AS open_f \
                 FROM m, \
                   LATERAL (SELECT count(*) AS n, coalesce(bit_xor(hashint8extended(id, 0)), 0) AS f \
                            FROM {outbox} WHERE id > m.low_water AND id <= $1) a, \
                   LATERAL (SELECT count(o.id) AS n, coalesce(bit_xor(hashint8extended(o.id, 0)), 0) AS f \
                            FROM unnest($2::bigint[], $3::bigint[]) AS i(low, high) \
                            JOIN {outbox} o ON o.id BETWEEN i.low AND i.high AND o.id > m.low_water) g, \
                   LATERAL (SELECT count(*) AS n, coalesce(bit_xor({MESSAGE_HASH}), 0) AS f FROM {parked} p WHERE id <= $1) p, \
                   LATERAL (SELECT count(p.id) AS n, coalesce(bit_xor({MESSAGE_HASH}), 0) AS f \
                            FROM unnest($4::bigint[], $5::bigint[]) AS i(low, high) \
                            JOIN {parked} p ON p.id BETWEEN i.low AND i.high) q"
            ),
            take: format!(
                "UPDATE {mark} SET epoch = $1, source = $2, owner = $3, renewal = renewal + 1, updated_at = clock_timestamp() \
                 WHERE epoch = $4 AND renewal = $5"
            ),
            renew: format!(
                "UPDATE {mark} SET renewal = renewal + 1, updated_at = clock_timestamp() WHERE epoch = $1"
            ),
            confirm: format!(
                "UPDATE {mark} SET seq = $2, position = $3, cluster_id = $4, renewal = renewal + 1, updated_at = clock_timestamp() \
                 WHERE epoch = $1 AND seq < $2"
            ),
            release: format!(
                "UPDATE {mark} SET owner = NULL, renewal = renewal + 1 WHERE epoch = $1"
            ),
            raise_format: format!("UPDATE {mark} SET format = $1 WHERE format < $1"),
            lock_mark: format!("SELECT {MARK_COLUMNS} FROM {mark} FOR UPDATE"),
            // A contiguous prefix: it ends before the first row that is too young or is the row `high`.
            delete: format!(
                "WITH chunk AS MATERIALIZED (SELECT id, created_at FROM {outbox} WHERE id > $1 AND id <= $2 AND id <> $3 ORDER BY id LIMIT $5), \
                 young AS (SELECT min(id) AS id FROM chunk WHERE created_at >= clock_timestamp() - $4 * interval '1 microsecond'), \
                 gone AS (DELETE FROM {outbox} o USING chunk c, young y WHERE o.id = c.id AND (y.id IS NULL OR c.id < y.id) RETURNING o.id) \
                 SELECT count(*), coalesce(bit_xor(hashint8extended(id, 0)), 0), max(id) FROM gone"
            ),
            delete_mark: format!(
                "UPDATE {mark} SET low_water = $1, deleted_count = deleted_count + $2, deleted_fingerprint = deleted_fingerprint # $3"
            ),
            rewrite: format!(
                "UPDATE {mark} SET seq = $2, epoch = $3, position = $4, cluster_id = $5, source_epoch = $6, source = $7, owner = NULL, \
                   renewal = renewal + 1, updated_at = clock_timestamp() WHERE epoch = $1"
            ),
            parked_by_topic: format!(
                "SELECT topic, count(*) FROM {parked} GROUP BY topic ORDER BY topic"
            ),
            requested: format!("SELECT EXISTS (SELECT 1 FROM {parked} WHERE request IS NOT NULL)"),
            paused: format!(
                "SELECT topic, key, by_relay, reason FROM {paused} ORDER BY topic, key NULLS FIRST"
            ),
            parked_ids: format!("SELECT id, message_id FROM {parked} WHERE id BETWEEN $1 AND $2"),
            first_of_keys: format!(
                "SELECT k.n, p.id FROM unnest($1::text[], $2::bytea[]) WITH ORDINALITY AS k(topic, key, n) \
                 CROSS JOIN LATERAL (SELECT min(id) AS id FROM {parked} WHERE topic = k.topic AND key = k.key) p \
                 WHERE p.id IS NOT NULL"
            ),
            // The copy is made inside the database: what is parked is what was enqueued, and no payload travels.
            park: format!(
                "INSERT INTO {parked} (id, message_id, topic, key, payload, headers, created_at, cause, reason, attempts) \
                 SELECT o.id, o.message_id, o.topic, o.key, o.payload, o.headers, o.created_at, c.cause, c.reason, \
                   CASE c.cause WHEN 'refused' THEN 1 ELSE 0 END \
                 FROM unnest($1::bigint[], $2::text[], $3::text[]) AS c(id, cause, reason) JOIN {outbox} o ON o.id = c.id"
            ),
            pause: format!(
                "INSERT INTO {paused} (topic, by_relay, reason) VALUES ($1, true, $2) \
                 ON CONFLICT (topic) WHERE key IS NULL DO UPDATE SET reason = excluded.reason WHERE {paused}.by_relay"
            ),
            releasable: format!(
                "SELECT {PARKED_COLUMNS} FROM {parked} p \
                 WHERE p.id <= $1 AND ($2::text IS NULL OR p.topic = $2) AND (p.cause <> 'refused' OR p.request IS NOT NULL) \
                   AND NOT EXISTS (SELECT 1 FROM {paused} s WHERE s.topic = p.topic AND (s.key = p.key OR s.key IS NULL AND $2::text IS NULL)) \
                   AND NOT EXISTS (SELECT 1 FROM {parked} b WHERE b.topic = p.topic AND b.key = p.key AND b.id < p.id \
                                   AND b.cause = 'refused' AND b.request IS NULL) \
                 ORDER BY p.id LIMIT $3"
            ),
            refuse: format!(
                "UPDATE {parked} SET cause = 'refused', reason = $2, attempts = attempts + 1, request = NULL WHERE id = $1"
            ),
            unpark: format!(
                "DELETE FROM {parked} p USING unnest($1::bigint[], $2::bigint[]) AS i(low, high) WHERE p.id BETWEEN i.low AND i.high"
            ),
            resume_topic: format!(
                "DELETE FROM {paused} WHERE topic = $1 AND key IS NULL AND by_relay"
            ),
            list_parked: format!(
                "SELECT {PARKED_COLUMNS} FROM {parked} p WHERE ($1::bigint[] = '{{}}' OR p.id = ANY($1)) \
                   AND ($2::text IS NULL OR p.topic = $2) AND ($3::bytea IS NULL OR p.key = $3) AND ($4::text IS NULL OR p.cause = $4) \
                 ORDER BY p.id LIMIT $5"
            ),
            request: format!("UPDATE {parked} SET request = $2 WHERE id = ANY($1)"),
            pause_for_operator: format!(
                "WITH known AS (UPDATE {paused} SET by_relay = false, reason = $3 \
                                WHERE topic = $1 AND key IS NOT DISTINCT FROM $2 RETURNING 1), \
                 new AS (INSERT INTO {paused} (topic, key, by_relay, reason) \
                         SELECT $1, $2, false, $3 WHERE NOT EXISTS (SELECT 1 FROM known) RETURNING 1) \
                 SELECT EXISTS (SELECT 1 FROM new)"
            ),
            resume_for_operator: format!(
                "DELETE FROM {paused} WHERE topic = $1 AND key IS NOT DISTINCT FROM $2"
            ),
            outbox,
        }
    }

    /// Both halves in one statement, so in one snapshot: with two statements a late row could be overtaken (G4).
    /// COPY takes no parameters; every number is an integer formatted here.
    fn look(&self, gaps: &Gaps, high: i64, limit: Limit) -> String {
        // One more than wanted shows whether a half was cut off.
        let rows = limit.rows.saturating_add(1);
        let outbox = &self.outbox;
        let columns = "o.id, o.message_id, o.topic, o.key, o.payload, o.headers, o.created_at";
        let new = format!(
            "SELECT false, {columns} FROM {outbox} o WHERE o.id > {high} ORDER BY o.id LIMIT {rows}"
        );
        if gaps.is_empty() {
            return format!("COPY ({new}) TO STDOUT (FORMAT binary)");
        }
        let join = |bound: fn(&crate::position::Interval) -> i64| {
            gaps.intervals()
                .iter()
                .map(|i| bound(i).to_string())
                .collect::<Vec<_>>()
                .join(",")
        };
        let (lows, highs) = (join(|i| i.low), join(|i| i.high));
        // The gaps are walked in the order given, so the rows come in ascending order without a sort, and LIMIT ends
        // the walk; the collector checks it.
        format!(
            "COPY ((SELECT true, {columns} FROM unnest('{{{lows}}}'::bigint[], '{{{highs}}}'::bigint[]) AS g(low, high) \
             CROSS JOIN LATERAL (SELECT * FROM {outbox} r WHERE r.id BETWEEN g.low AND g.high ORDER BY r.id LIMIT {rows}) o \
             LIMIT {rows}) UNION ALL ({new})) TO STDOUT (FORMAT binary)"
        )
    }
}

impl Session for PostgresSession {
    const GAPLESS: bool = false;

    async fn connect(config: &Config) -> Result<Self, Error> {
        let Database::Postgres(options) = &config.database else {
            return Err(Error::Config(
                "a PostgreSQL session needs a PostgreSQL URL".to_owned(),
            ));
        };
        let options = options
            .clone()
            .application_name(&format!("oncebox relay {}", config.source))
            .statement_cache_capacity(32)
            .options([
                ("default_transaction_isolation", "read committed"),
                ("max_parallel_workers_per_gather", "0"),
                ("jit", "off"),
                ("idle_in_transaction_session_timeout", "10000"),
            ])
            .disable_statement_logging();
        let connecting = tokio::time::timeout(Duration::from_secs(10), options.connect());
        let connected = connecting.await.unwrap_or(Err(sqlx::Error::PoolTimedOut));
        let mut conn = connected.map_err(|e| cannot_connect(config, e))?;
        let closed: bool = sqlx::query_scalar(WRITABLE).fetch_one(&mut conn).await?;
        if closed {
            let message = "the server is a standby or read-only; the relay needs the primary";
            return Err(Error::Database(sqlx::Error::Protocol(message.to_owned())));
        }
        let (system, timeline, instance): (String, String, String) =
            sqlx::query_as(SERVER).fetch_one(&mut conn).await?;
        let timeline = u32::from_str_radix(&timeline, 16).unwrap_or_default();
        let server = Server {
            system,
            timeline,
            instance,
        };
        Ok(Self {
            conn,
            server,
            sql: Sql::new(config),
            topics: Topics::default(),
        })
    }

    fn server(&self) -> &Server {
        &self.server
    }

    async fn probe(&mut self) -> Result<Probe, Error> {
        let (last_id, holders): (i64, Vec<String>) =
            sqlx::query_as(AssertSqlSafe(&*self.sql.probe))
                .fetch_one(&mut self.conn)
                .await?;
        Ok(Probe {
            holders: holders.into_iter().collect(),
            last_id,
        })
    }

    async fn look(&mut self, gaps: &Gaps, high: i64, limit: Limit) -> Result<Look, Error> {
        let statement = self.sql.look(gaps, high, limit);
        let mut chunks = self.conn.copy_out_raw(&statement).await?;
        let mut reader = CopyReader::<8>::default();
        let mut collector = Look::collector(limit);
        while let Some(chunk) = chunks.next().await {
            reader.chunk(chunk?, |fields| {
                let (late, row) = self.topics.row(fields)?;
                collector.push(late, row)
            })?;
        }
        Ok(collector.finish())
    }

    async fn facts(&mut self, high: i64, gaps: &Gaps, released: &Gaps) -> Result<Facts, Error> {
        let (lows, highs) = bounds(gaps);
        let (open_lows, open_highs) = bounds(&gaps.union(released));
        let query = sqlx::query(AssertSqlSafe(&*self.sql.facts))
            .bind(high)
            .bind(lows)
            .bind(highs)
            .bind(open_lows)
            .bind(open_highs);
        let row = query
            .fetch_optional(&mut self.conn)
            .await?
            .ok_or_else(no_mark)?;
        let tally = |count: &str, fingerprint: &str| -> Result<Tally, Error> {
            Ok(Tally {
                count: row.try_get(count)?,
                fingerprint: row.try_get(fingerprint)?,
            })
        };
        let rows = tally("all_n", "all_f")?.without(tally("gap_n", "gap_f")?);
        let parked = tally("parked_n", "parked_f")?.without(tally("open_n", "open_f")?);
        Ok(Facts {
            mark: raw_mark!(row).decode()?,
            high_message_id: row.try_get("high_message_id")?,
            rows_below_low_water: row.try_get("below")?,
            rows,
            parked,
        })
    }

    async fn clean_up(
        &mut self,
        epoch: i64,
        retention: Duration,
        limit: usize,
    ) -> Result<(Written, u64), Error> {
        let mut tx = self.conn.begin().await?;
        let row = sqlx::query(AssertSqlSafe(&*self.sql.lock_mark))
            .fetch_optional(&mut *tx)
            .await?;
        let mark = raw_mark!(row.ok_or_else(no_mark)?).decode()?;
        if mark.epoch != epoch {
            return Ok((Written::Deposed(mark.epoch), 0));
        }
        let Some((bound, high)) = mark.deletable() else {
            return Ok((Written::Done, 0));
        };
        let micros = i64::try_from(retention.as_micros()).unwrap_or(i64::MAX);
        let query = sqlx::query_as(AssertSqlSafe(&*self.sql.delete));
        let query = query.bind(mark.low_water).bind(bound).bind(high);
        #[allow(
            clippy::cast_precision_loss,
            reason = "an interval is multiplied by a double"
        )]
        let query = query
            .bind(micros as f64)
            .bind(i64::try_from(limit).unwrap_or(i64::MAX));
        let (count, fingerprint, last): (i64, i64, Option<i64>) = query.fetch_one(&mut *tx).await?;
        let Some(last) = last else {
            return Ok((Written::Done, 0));
        };
        let query = sqlx::query(AssertSqlSafe(&*self.sql.delete_mark));
        query
            .bind(last)
            .bind(count)
            .bind(fingerprint)
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok((Written::Done, u64::try_from(count).unwrap_or_default()))
    }

    same_session_methods!();
}

impl ParkingSession for PostgresSession {
    async fn parked_among(&mut self, rows: &[Row]) -> Result<Among, Error> {
        let low = rows.iter().map(|row| row.id).min();
        let high = rows.iter().map(|row| row.id).max();
        let ids: Vec<(i64, Uuid)> = sqlx::query_as(AssertSqlSafe(&*self.sql.parked_ids))
            .bind(low)
            .bind(high)
            .fetch_all(&mut self.conn)
            .await?;
        let keys = keys_of(rows);
        let (topics, names): (Vec<&str>, Vec<&[u8]>) =
            keys.iter().map(|(topic, key)| (&**topic, &**key)).unzip();
        let first: Vec<(i64, i64)> = sqlx::query_as(AssertSqlSafe(&*self.sql.first_of_keys))
            .bind(topics)
            .bind(names)
            .fetch_all(&mut self.conn)
            .await?;
        let first = first.into_iter().filter_map(|(n, id)| {
            let n = usize::try_from(n - 1).ok()?;
            Some((keys.get(n)?.clone(), id))
        });
        Ok(Among {
            first: first.collect(),
            ids: ids.into_iter().collect(),
        })
    }

    async fn park(&mut self, epoch: i64, rows: &[Parking]) -> Result<Written, Error> {
        let ids: Vec<i64> = rows.iter().map(|row| row.id).collect();
        let causes: Vec<&str> = rows.iter().map(|row| row.cause.as_str()).collect();
        let reasons: Vec<&str> = rows.iter().map(|row| &*row.reason).collect();
        let Some(mut tx) = leading(&mut self.conn, &self.sql.renew, epoch).await? else {
            return self.written(0, epoch, i64::MAX).await;
        };
        let done = sqlx::query(AssertSqlSafe(&*self.sql.park))
            .bind(ids)
            .bind(causes)
            .bind(reasons)
            .execute(&mut *tx)
            .await?;
        if done.rows_affected() != rows.len() as u64 {
            return Err(vanished(rows.len(), done.rows_affected()));
        }
        tx.commit().await?;
        Ok(Written::Done)
    }

    async fn finish_release(
        &mut self,
        epoch: i64,
        checkpoint: &Checkpoint,
        cluster_id: &str,
    ) -> Result<Written, Error> {
        let (lows, highs) = bounds(&checkpoint.released);
        let Some(mut tx) = leading(&mut self.conn, &self.sql.renew, epoch).await? else {
            return self.written(0, epoch, i64::MAX).await;
        };
        // Not written again when it is there: the answer to an earlier try was lost.
        let query = sqlx::query(AssertSqlSafe(&*self.sql.confirm));
        let query = query
            .bind(epoch)
            .bind(checkpoint.seq)
            .bind(checkpoint.encode());
        query.bind(cluster_id).execute(&mut *tx).await?;
        let query = sqlx::query(AssertSqlSafe(&*self.sql.unpark));
        query.bind(lows).bind(highs).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(Written::Done)
    }

    async fn list_parked(
        &mut self,
        filter: &Filter,
        limit: usize,
    ) -> Result<Vec<ParkedRow>, Error> {
        let rows = sqlx::query(AssertSqlSafe(&*self.sql.list_parked))
            .bind(&filter.ids)
            .bind(&filter.topic)
            .bind(filter.key.as_deref())
            .bind(filter.cause.map(super::Cause::as_str))
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .fetch(&mut self.conn);
        collect(rows, usize::MAX, |row| Ok(parked_row!(row))).await
    }

    async fn request(&mut self, ids: &[i64], request: Request) -> Result<u64, Error> {
        let query = sqlx::query(AssertSqlSafe(&*self.sql.request));
        let query = query.bind(ids).bind(request.as_str());
        Ok(query.execute(&mut self.conn).await?.rows_affected())
    }

    async fn pause_for_operator(
        &mut self,
        topic: &str,
        key: Option<&[u8]>,
        reason: &str,
    ) -> Result<bool, Error> {
        let query = sqlx::query_scalar(AssertSqlSafe(&*self.sql.pause_for_operator));
        let query = query.bind(topic).bind(key).bind(reason);
        Ok(query.fetch_one(&mut self.conn).await?)
    }

    same_parking_methods!();
}

/// A transaction that holds the mark's row, if it still has this epoch; it is a sign of life as well.
async fn leading<'c>(
    conn: &'c mut PgConnection,
    renew: &str,
    epoch: i64,
) -> Result<Option<sqlx::Transaction<'c, sqlx::Postgres>>, Error> {
    let mut tx = conn.begin().await?;
    let query = sqlx::query(AssertSqlSafe(renew)).bind(epoch);
    let led = query.execute(&mut *tx).await?.rows_affected() == 1;
    Ok(led.then_some(tx))
}

fn bounds(intervals: &Gaps) -> (Vec<i64>, Vec<i64>) {
    let intervals = intervals.intervals().iter();
    intervals.map(|i| (i.low, i.high)).unzip()
}

impl From<CopyError> for Error {
    fn from(error: CopyError) -> Self {
        Stop::BadRow(error.to_string()).into()
    }
}

/// Topic names, each allocated once: neighbouring rows mostly share it.
#[derive(Debug, Default)]
struct Topics(Vec<Arc<str>>);

impl Topics {
    fn get(&mut self, name: &[u8]) -> Result<Arc<str>, Error> {
        if let Some(n) = self.0.iter().position(|known| known.as_bytes() == name) {
            // The last used one first.
            self.0.swap(0, n);
            return Ok(Arc::clone(&self.0[0]));
        }
        let text = std::str::from_utf8(name)
            .map_err(|_| Stop::BadRow("a topic is not UTF-8".to_owned()))?;
        if self.0.len() >= 1_000 {
            self.0.clear();
        }
        let topic: Arc<str> = text.into();
        self.0.push(Arc::clone(&topic));
        Ok(topic)
    }

    fn row(&mut self, fields: [Option<Bytes>; 8]) -> Result<(bool, Row), Error> {
        let bad = || {
            Error::from(Stop::BadRow(
                "a column has another type than the migrations gave it".to_owned(),
            ))
        };
        let [
            Some(late),
            Some(id),
            Some(message_id),
            Some(topic),
            key,
            payload,
            Some(headers),
            Some(created_at),
        ] = fields
        else {
            return Err(bad());
        };
        let id = (&id[..]).try_get_i64().map_err(|_| bad())?;
        let message_id = Uuid::from_slice(&message_id).map_err(|_| bad())?;
        let created_at_micros = (&created_at[..]).try_get_i64().map_err(|_| bad())? + EPOCH_MICROS;
        let envelope = Envelope {
            message_id,
            outbox_id: id,
            created_at_micros,
        };
        let topic = self.get(&topic)?;
        let record = Record {
            topic,
            key,
            payload,
            headers,
            envelope: Some(envelope),
        };
        Ok((
            late[..] == [1],
            Row {
                id,
                message_id,
                created_at_micros,
                record,
            },
        ))
    }
}
