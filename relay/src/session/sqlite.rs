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

use super::{
    Facts, Limit, Look, MARK_COLUMNS, Mark, Probe, Rewrite, Row, Server, Session, Written,
    cannot_connect, no_mark, raw_mark,
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
    chunk: String,
    delete: String,
    delete_mark: String,
    rewrite: String,
}

const NOW: &str = "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)";

impl Sql {
    fn new(config: &Config) -> Self {
        let outbox = config.names.outbox(Dialect::Sqlite);
        let mark = config.names.mark(Dialect::Sqlite);
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
            chunk: format!(
                "SELECT id, created_at < {NOW} - ?4 FROM {outbox} WHERE id > ?1 AND id <= ?2 AND id <> ?3 ORDER BY id LIMIT ?5"
            ),
            delete: format!("DELETE FROM {outbox} WHERE id > ?1 AND id <= ?2 AND id <> ?3"),
            delete_mark: format!(
                "UPDATE {mark} SET low_water = ?1, deleted_count = deleted_count + ?2, deleted_fingerprint = ?3"
            ),
            rewrite: format!(
                "UPDATE {mark} SET seq = ?2, epoch = ?3, position = ?4, cluster_id = ?5, source_epoch = ?6, owner = NULL, \
                   renewal = renewal + 1, updated_at = {NOW} WHERE epoch = ?1"
            ),
        }
    }
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

    async fn mark(&mut self) -> Result<Mark, Error> {
        let row = sqlx::query(AssertSqlSafe(&*self.sql.mark))
            .fetch_optional(&mut self.conn)
            .await?;
        raw_mark!(row.ok_or_else(no_mark)?).decode()
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

    async fn last_visible(&mut self) -> Result<i64, Error> {
        Ok(sqlx::query_scalar(AssertSqlSafe(&*self.sql.last_visible))
            .fetch_one(&mut self.conn)
            .await?)
    }

    async fn row_at_or_below(&mut self, id: i64) -> Result<Option<(i64, Uuid)>, Error> {
        let query = sqlx::query_as(AssertSqlSafe(&*self.sql.row_at_or_below)).bind(id);
        Ok(query.fetch_optional(&mut self.conn).await?)
    }

    async fn facts(&mut self, gaps: &Gaps, high: i64) -> Result<Facts, Error> {
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
        tx.rollback().await?;
        Ok(Facts {
            mark,
            high_message_id,
            rows_below_low_water,
            rows,
        })
    }

    async fn take(
        &mut self,
        seen: &Mark,
        epoch: i64,
        source: &str,
        owner: &str,
    ) -> Result<bool, Error> {
        let query = sqlx::query(AssertSqlSafe(&*self.sql.take));
        let query = query
            .bind(epoch)
            .bind(source)
            .bind(owner)
            .bind(seen.epoch)
            .bind(seen.renewal);
        Ok(query.execute(&mut self.conn).await?.rows_affected() == 1)
    }

    async fn renew(&mut self, epoch: i64) -> Result<Written, Error> {
        let done = sqlx::query(AssertSqlSafe(&*self.sql.renew))
            .bind(epoch)
            .execute(&mut self.conn)
            .await?;
        self.written(done.rows_affected(), epoch, 0).await
    }

    async fn confirm(
        &mut self,
        epoch: i64,
        checkpoint: &Checkpoint,
        cluster_id: &str,
    ) -> Result<Written, Error> {
        let query = sqlx::query(AssertSqlSafe(&*self.sql.confirm));
        let query = query
            .bind(epoch)
            .bind(checkpoint.seq)
            .bind(checkpoint.encode())
            .bind(cluster_id);
        let done = query.execute(&mut self.conn).await?;
        self.written(done.rows_affected(), epoch, checkpoint.seq)
            .await
    }

    async fn release(&mut self, epoch: i64) -> Result<Written, Error> {
        let done = sqlx::query(AssertSqlSafe(&*self.sql.release))
            .bind(epoch)
            .execute(&mut self.conn)
            .await?;
        self.written(done.rows_affected(), epoch, 0).await
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

    async fn rewrite(&mut self, epoch: i64, rewrite: &Rewrite) -> Result<Written, Error> {
        let stored = &rewrite.checkpoint;
        let query = sqlx::query(AssertSqlSafe(&*self.sql.rewrite));
        let query = query
            .bind(epoch)
            .bind(stored.seq)
            .bind(stored.epoch)
            .bind(stored.encode());
        let query = query.bind(&*rewrite.cluster_id).bind(rewrite.source_epoch);
        let done = query.execute(&mut self.conn).await?;
        self.written(done.rows_affected(), epoch, i64::MAX).await
    }
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
