//! SQLite: one writer at a time, so id order is commit order and no id below a visible one can still appear.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use oncebox_kafka::{Envelope, Record};
use oncebox_migrations::Dialect;
use sqlx::sqlite::{SqliteConnection, SqliteJournalMode, SqliteRow};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, Row as _};
use uuid::Uuid;

use super::same::{same_parking_methods, same_session_methods, write_as_leader};
use super::{
    Among, Facts, Filter, Limit, Look, MARK_COLUMNS, Mark, Overview, ParkedRow, Parking,
    ParkingSession, Paused, Probe, Request, Rewrite, Row, Server, Session, Written, cannot_connect,
    collect, keys_of, no_mark, parked_row, raw_mark, vanished,
};
use crate::config::{Config, Database};
use crate::error::{Error, Stop};
use crate::position::{Checkpoint, Gaps, Holders, Tally};

/// Writers queue; a relay waits this long for its turn. Nobody else can take the lease meanwhile.
const BUSY: Duration = Duration::from_secs(25);

/// One session.
pub(crate) struct SqliteSession {
    conn: SqliteConnection,
    server: Server,
    sql: Sql,
}

struct Sql {
    mark: String,
    last_id: String,
    look: String,
    last_visible: String,
    row_at_or_below: String,
    high_row: String,
    below: String,
    ids: String,
    take: String,
    renew: String,
    confirm: String,
    release: String,
    raise_format: String,
    chunk: String,
    delete: String,
    delete_mark: String,
    rewrite: String,
    parked_messages: String,
    parked_by_topic: String,
    requested: String,
    paused: String,
    parked_ids: String,
    first_of_key: String,
    park: String,
    pause: String,
    releasable: String,
    refuse: String,
    unpark: String,
    resume_topic: String,
    list_parked: String,
    request: String,
    operator_takes_over: String,
    pause_for_operator: String,
    resume_for_operator: String,
}

/// What `parked_row!` reads.
const PARKED_COLUMNS: &str = "p.id, p.message_id, p.topic, p.key, p.payload, p.headers, p.cause, p.reason, p.attempts, p.request, \
     p.created_at AS created, p.parked_at AS parked";

const NOW: &str = "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)";

impl Sql {
    fn new(config: &Config) -> Self {
        let outbox = config.names.outbox(Dialect::Sqlite);
        let mark = config.names.mark(Dialect::Sqlite);
        let parked = config.names.parked(Dialect::Sqlite);
        let paused = config.names.paused(Dialect::Sqlite);
        let table = format!("{}outbox", config.names.prefix());
        Self {
            mark: format!("SELECT {MARK_COLUMNS} FROM {mark}"),
            last_id: format!(
                "SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = '{table}'), 0)"
            ),
            look: format!(
                "SELECT id, message_id, topic, key, payload, headers, created_at FROM {outbox} WHERE id > ?1 ORDER BY id LIMIT ?2"
            ),
            last_visible: format!("SELECT coalesce(max(id), 0) FROM {outbox}"),
            row_at_or_below: format!(
                "SELECT id, message_id FROM {outbox} WHERE id <= ?1 ORDER BY id DESC LIMIT 1"
            ),
            high_row: format!("SELECT message_id FROM {outbox} WHERE id = ?1"),
            below: format!("SELECT EXISTS (SELECT 1 FROM {outbox} WHERE id <= ?1 AND id <> ?2)"),
            ids: format!("SELECT id FROM {outbox} WHERE id > ?1 AND id <= ?2"),
            take: format!(
                "UPDATE {mark} SET epoch = ?1, source = ?2, owner = ?3, renewal = renewal + 1, updated_at = {NOW} \
                 WHERE epoch = ?4 AND renewal = ?5"
            ),
            renew: format!(
                "UPDATE {mark} SET renewal = renewal + 1, updated_at = {NOW} WHERE epoch = ?1"
            ),
            confirm: format!(
                "UPDATE {mark} SET seq = ?2, position = ?3, cluster_id = ?4, renewal = renewal + 1, updated_at = {NOW} \
                 WHERE epoch = ?1 AND seq < ?2"
            ),
            release: format!(
                "UPDATE {mark} SET owner = NULL, renewal = renewal + 1 WHERE epoch = ?1"
            ),
            raise_format: format!("UPDATE {mark} SET format = ?1 WHERE format < ?1"),
            chunk: format!(
                "SELECT id, created_at < {NOW} - ?4 FROM {outbox} WHERE id > ?1 AND id <= ?2 AND id <> ?3 ORDER BY id LIMIT ?5"
            ),
            delete: format!("DELETE FROM {outbox} WHERE id > ?1 AND id <= ?2 AND id <> ?3"),
            delete_mark: format!(
                "UPDATE {mark} SET low_water = ?1, deleted_count = deleted_count + ?2, deleted_fingerprint = ?3"
            ),
            rewrite: format!(
                "UPDATE {mark} SET seq = ?2, epoch = ?3, position = ?4, cluster_id = ?5, source_epoch = ?6, source = ?7, owner = NULL, \
                   renewal = renewal + 1, updated_at = {NOW} WHERE epoch = ?1"
            ),
            parked_messages: format!("SELECT id, message_id FROM {parked} WHERE id <= ?1"),
            parked_by_topic: format!(
                "SELECT topic, count(*) FROM {parked} GROUP BY topic ORDER BY topic"
            ),
            requested: format!("SELECT EXISTS (SELECT 1 FROM {parked} WHERE request IS NOT NULL)"),
            paused: format!(
                "SELECT topic, key, by_relay, reason FROM {paused} ORDER BY topic, key NULLS FIRST"
            ),
            parked_ids: format!("SELECT id, message_id FROM {parked} WHERE id BETWEEN ?1 AND ?2"),
            first_of_key: format!("SELECT min(id) FROM {parked} WHERE topic = ?1 AND key = ?2"),
            park: format!(
                "INSERT INTO {parked} (id, message_id, topic, key, payload, headers, created_at, cause, reason, attempts) \
                 SELECT id, message_id, topic, key, payload, headers, created_at, ?2, ?3, ?2 = 'refused' FROM {outbox} WHERE id = ?1"
            ),
            pause: format!(
                "INSERT INTO {paused} (topic, by_relay, reason) VALUES (?1, 1, ?2) \
                 ON CONFLICT (topic) WHERE key IS NULL DO UPDATE SET reason = excluded.reason WHERE by_relay"
            ),
            releasable: format!(
                "SELECT {PARKED_COLUMNS} FROM {parked} p \
                 WHERE p.id <= ?1 AND (?2 IS NULL OR p.topic = ?2) AND (p.cause <> 'refused' OR p.request IS NOT NULL) \
                   AND NOT EXISTS (SELECT 1 FROM {paused} s WHERE s.topic = p.topic AND (s.key = p.key OR s.key IS NULL AND ?2 IS NULL)) \
                   AND NOT EXISTS (SELECT 1 FROM {parked} b WHERE b.topic = p.topic AND b.key = p.key AND b.id < p.id \
                                   AND b.cause = 'refused' AND b.request IS NULL) \
                 ORDER BY p.id LIMIT ?3"
            ),
            refuse: format!(
                "UPDATE {parked} SET cause = 'refused', reason = ?2, attempts = attempts + 1, request = NULL WHERE id = ?1"
            ),
            unpark: format!("DELETE FROM {parked} WHERE id BETWEEN ?1 AND ?2"),
            resume_topic: format!(
                "DELETE FROM {paused} WHERE topic = ?1 AND key IS NULL AND by_relay"
            ),
            list_parked: format!(
                "SELECT {PARKED_COLUMNS} FROM {parked} p WHERE (?1 = '[]' OR p.id IN (SELECT value FROM json_each(?1))) \
                   AND (?2 IS NULL OR p.topic = ?2) AND (?3 IS NULL OR p.key = ?3) AND (?4 IS NULL OR p.cause = ?4) \
                 ORDER BY p.id LIMIT ?5"
            ),
            request: format!(
                "UPDATE {parked} SET request = ?2 WHERE id IN (SELECT value FROM json_each(?1))"
            ),
            operator_takes_over: format!(
                "UPDATE {paused} SET by_relay = 0, reason = ?3 WHERE topic = ?1 AND key IS ?2"
            ),
            pause_for_operator: format!(
                "INSERT INTO {paused} (topic, key, by_relay, reason) VALUES (?1, ?2, 0, ?3)"
            ),
            resume_for_operator: format!("DELETE FROM {paused} WHERE topic = ?1 AND key IS ?2"),
        }
    }
}

/// A transaction that holds the only write lock, if the mark still has this epoch; it is a sign of life as well.
async fn leading<'c>(
    conn: &'c mut SqliteConnection,
    renew: &str,
    epoch: i64,
) -> Result<Option<sqlx::Transaction<'c, sqlx::Sqlite>>, Error> {
    let mut tx = conn.begin_with("BEGIN IMMEDIATE").await?;
    let query = sqlx::query(AssertSqlSafe(renew)).bind(epoch);
    let led = query.execute(&mut *tx).await?.rows_affected() == 1;
    Ok(led.then_some(tx))
}

/// Ids as a JSON array: SQLite has no arrays.
fn json(ids: &[i64]) -> String {
    let ids: Vec<_> = ids.iter().map(i64::to_string).collect();
    format!("[{}]", ids.join(","))
}

impl Session for SqliteSession {
    const GAPLESS: bool = true;

    async fn connect(config: &Config) -> Result<Self, Error> {
        let Database::Sqlite(options) = &config.database else {
            return Err(Error::Config(
                "a SQLite session needs a sqlite: URL".to_owned(),
            ));
        };
        let options = options
            .clone()
            .create_if_missing(false)
            .journal_mode(SqliteJournalMode::Wal)
            .busy_timeout(BUSY)
            .disable_statement_logging();
        let conn = options
            .connect()
            .await
            .map_err(|e| cannot_connect(config, e))?;
        let server = Server {
            system: "sqlite".to_owned(),
            timeline: 0,
            instance: options.get_filename().display().to_string(),
        };
        Ok(Self {
            conn,
            server,
            sql: Sql::new(config),
        })
    }

    fn server(&self) -> &Server {
        &self.server
    }

    /// Nobody can fill a hole: a rolled-back INSERT gives its id back, and whoever inserts later draws a higher one.
    async fn probe(&mut self) -> Result<Probe, Error> {
        let last_id = sqlx::query_scalar(AssertSqlSafe(&*self.sql.last_id))
            .fetch_one(&mut self.conn)
            .await?;
        Ok(Probe {
            holders: Holders::new(),
            last_id,
        })
    }

    async fn look(&mut self, _gaps: &Gaps, high: i64, limit: Limit) -> Result<Look, Error> {
        let rows = i64::try_from(limit.rows.saturating_add(1)).unwrap_or(i64::MAX);
        let mut collector = Look::collector(limit);
        let mut topic: Arc<str> = "".into();
        let mut stream = sqlx::query(AssertSqlSafe(&*self.sql.look))
            .bind(high)
            .bind(rows)
            .fetch(&mut self.conn);
        while let Some(row) = stream.next().await {
            collector.push(false, outbox_row(&row?, &mut topic)?)?;
        }
        Ok(collector.finish())
    }

    async fn facts(&mut self, high: i64, gaps: &Gaps, released: &Gaps) -> Result<Facts, Error> {
        // A deferred transaction keeps the snapshot of its first read.
        let mut tx = self.conn.begin().await?;
        let row = sqlx::query(AssertSqlSafe(&*self.sql.mark))
            .fetch_optional(&mut *tx)
            .await?;
        let mark = raw_mark!(row.ok_or_else(no_mark)?).decode()?;
        let high_message_id = sqlx::query_scalar(AssertSqlSafe(&*self.sql.high_row))
            .bind(high)
            .fetch_optional(&mut *tx)
            .await?;
        let below = sqlx::query_scalar(AssertSqlSafe(&*self.sql.below))
            .bind(mark.low_water)
            .bind(high);
        let rows_below_low_water = below.fetch_one(&mut *tx).await?;
        let mut rows = Tally::default();
        let mut ids = sqlx::query_scalar(AssertSqlSafe(&*self.sql.ids))
            .bind(mark.low_water)
            .bind(high)
            .fetch(&mut *tx);
        while let Some(id) = ids.next().await {
            let id: i64 = id?;
            if !gaps.contains(id) {
                rows.add(id);
            }
        }
        drop(ids);
        let mut parked = Tally::default();
        let mut messages = sqlx::query_as(AssertSqlSafe(&*self.sql.parked_messages))
            .bind(high)
            .fetch(&mut *tx);
        while let Some(message) = messages.next().await {
            let (id, message_id): (i64, Uuid) = message?;
            if !gaps.contains(id) && !released.contains(id) {
                parked.add_message(message_id);
            }
        }
        drop(messages);
        tx.rollback().await?;
        Ok(Facts {
            mark,
            high_message_id,
            rows_below_low_water,
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
        let mut tx = self.conn.begin_with("BEGIN IMMEDIATE").await?;
        let row = sqlx::query(AssertSqlSafe(&*self.sql.mark))
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
        let query = sqlx::query_as(AssertSqlSafe(&*self.sql.chunk));
        let query = query
            .bind(mark.low_water)
            .bind(bound)
            .bind(high)
            .bind(micros);
        let chunk: Vec<(i64, bool)> = query
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .fetch_all(&mut *tx)
            .await?;
        let mut gone = Tally::default();
        let old = chunk.iter().take_while(|(_, old)| *old).map(|(id, _)| *id);
        let last = old.inspect(|id| gone.add(*id)).last();
        let Some(last) = last else {
            return Ok((Written::Done, 0));
        };
        let query = sqlx::query(AssertSqlSafe(&*self.sql.delete));
        query
            .bind(mark.low_water)
            .bind(last)
            .bind(high)
            .execute(&mut *tx)
            .await?;
        let fingerprint = mark.deleted.fingerprint ^ gone.fingerprint;
        let query = sqlx::query(AssertSqlSafe(&*self.sql.delete_mark));
        query
            .bind(last)
            .bind(gone.count)
            .bind(fingerprint)
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok((Written::Done, u64::try_from(gone.count).unwrap_or_default()))
    }

    same_session_methods!();
}

impl ParkingSession for SqliteSession {
    async fn parked_among(&mut self, rows: &[Row]) -> Result<Among, Error> {
        let low = rows.iter().map(|row| row.id).min();
        let high = rows.iter().map(|row| row.id).max();
        let ids: Vec<(i64, Uuid)> = sqlx::query_as(AssertSqlSafe(&*self.sql.parked_ids))
            .bind(low)
            .bind(high)
            .fetch_all(&mut self.conn)
            .await?;
        let mut among = Among {
            ids: ids.into_iter().collect(),
            ..Among::default()
        };
        for (topic, key) in keys_of(rows) {
            let query = sqlx::query_scalar(AssertSqlSafe(&*self.sql.first_of_key));
            let query = query.bind(&*topic).bind(&*key);
            let first: Option<i64> = query.fetch_one(&mut self.conn).await?;
            among.first.extend(first.map(|id| ((topic, key), id)));
        }
        Ok(among)
    }

    async fn park(&mut self, epoch: i64, rows: &[Parking]) -> Result<Written, Error> {
        let Some(mut tx) = leading(&mut self.conn, &self.sql.renew, epoch).await? else {
            return self.written(0, epoch, i64::MAX).await;
        };
        let mut found = 0;
        for row in rows {
            let query = sqlx::query(AssertSqlSafe(&*self.sql.park));
            let query = query
                .bind(row.id)
                .bind(row.cause.as_str())
                .bind(&*row.reason);
            found += query.execute(&mut *tx).await?.rows_affected();
        }
        if found != rows.len() as u64 {
            return Err(vanished(rows.len(), found));
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
        for ids in checkpoint.released.intervals() {
            let query = sqlx::query(AssertSqlSafe(&*self.sql.unpark));
            query.bind(ids.low).bind(ids.high).execute(&mut *tx).await?;
        }
        tx.commit().await?;
        Ok(Written::Done)
    }

    async fn list_parked(
        &mut self,
        filter: &Filter,
        limit: usize,
    ) -> Result<Vec<ParkedRow>, Error> {
        let rows = sqlx::query(AssertSqlSafe(&*self.sql.list_parked))
            .bind(json(&filter.ids))
            .bind(&filter.topic)
            .bind(filter.key.as_deref())
            .bind(filter.cause.map(super::Cause::as_str))
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .fetch(&mut self.conn);
        collect(rows, usize::MAX, |row| Ok(parked_row!(row))).await
    }

    async fn request(&mut self, ids: &[i64], request: Request) -> Result<u64, Error> {
        let query = sqlx::query(AssertSqlSafe(&*self.sql.request));
        let query = query.bind(json(ids)).bind(request.as_str());
        Ok(query.execute(&mut self.conn).await?.rows_affected())
    }

    async fn pause_for_operator(
        &mut self,
        topic: &str,
        key: Option<&[u8]>,
        reason: &str,
    ) -> Result<bool, Error> {
        let mut tx = self.conn.begin_with("BEGIN IMMEDIATE").await?;
        for (sql, done) in [
            (&self.sql.operator_takes_over, false),
            (&self.sql.pause_for_operator, true),
        ] {
            let query = sqlx::query(AssertSqlSafe(&**sql)).bind(topic).bind(key);
            if query.bind(reason).execute(&mut *tx).await?.rows_affected() > 0 {
                tx.commit().await?;
                return Ok(done);
            }
        }
        Ok(false)
    }

    same_parking_methods!();
}

fn outbox_row(row: &SqliteRow, topic: &mut Arc<str>) -> Result<Row, Error> {
    let id = row.try_get(0)?;
    let message_id: Uuid = row.try_get(1)?;
    let name: &str = row.try_get(2)?;
    if **topic != *name {
        *topic = name.into();
    }
    let bytes = |index: usize| -> Result<Option<Bytes>, Error> {
        let value: Option<&[u8]> = row.try_get(index)?;
        Ok(value.map(Bytes::copy_from_slice))
    };
    let headers = bytes(5)?.ok_or_else(|| Stop::BadRow(format!("row {id} has no headers")))?;
    let created_at_micros = row.try_get(6)?;
    let envelope = Some(Envelope {
        message_id,
        outbox_id: id,
        created_at_micros,
    });
    let record = Record {
        topic: Arc::clone(topic),
        key: bytes(3)?,
        payload: bytes(4)?,
        headers,
        envelope,
    };
    Ok(Row {
        id,
        message_id,
        created_at_micros,
        record,
    })
}
