//! The publishing side: outbox rows, the relay's confirmed position, parked rows.

use std::collections::HashSet;

use oncebox_migrations::Names;
use sqlx::Pool;
use uuid::Uuid;

use super::Request;
use super::confirmed::Confirmed;
use super::report::ParkedRows;
use crate::error::Error;
use crate::operator::{self, Columns, OperatorStore, Sql, Value, tables};

const POSITION: &str = "SELECT position, low_water FROM {mark}";
const LAST: &str = "SELECT coalesce(max(id), 0) FROM {outbox}";
const PAGE: &str =
    "SELECT id, message_id, topic, {created} FROM {outbox} WHERE id > {after} AND id <= {last}";
const IDS: &str = "SELECT id, message_id FROM {outbox} WHERE id > {after} AND message_id >= {low} AND message_id <= {high} ORDER BY id LIMIT {most}";
// Everything above is held: the clean-up deletes in the order of the ids.
const OLDEST: &str =
    "SELECT {created} FROM {outbox} WHERE id > (SELECT low_water FROM {mark}) ORDER BY id LIMIT 1";
const PARKED_OF: &str = "SELECT message_id FROM {parked} WHERE ";
const PARKED: &str = "SELECT topic, count(*), count(request), {parked_at} FROM {parked} WHERE ";

/// A row of the outbox.
#[derive(Clone, Debug)]
pub(super) struct OutboxRow {
    pub(super) id: i64,
    pub(super) message_id: Uuid,
    pub(super) topic: String,
    /// Microseconds.
    pub(super) created_at: i64,
}

/// The outbox and what is known of it at the beginning.
#[derive(Debug)]
pub(super) struct Published<A: OperatorStore> {
    pool: Pool<A>,
    names: Names,
    page: i64,
    confirmed: Confirmed,
    last: i64,
    /// The database's clock, microseconds.
    pub(super) now: i64,
}

impl<A: OperatorStore> Published<A> {
    pub(super) async fn new<B: OperatorStore>(request: &Request<A, B>) -> Result<Self, Error> {
        let failed = |e| Error::database("read the relay's position", e);
        let mut published = Self {
            pool: request.outbox.clone(),
            names: request.outbox_names.clone(),
            page: i64::try_from(request.page).unwrap_or(i64::MAX),
            confirmed: Confirmed::default(),
            last: 0,
            now: 0,
        };
        let mark = published
            .rows(published.sql(POSITION))
            .await
            .map_err(failed)?;
        if let Some(row) = mark.first() {
            let text = Columns::<A>::new(row).text().map_err(failed)?;
            published.confirmed =
                Confirmed::parse(&text).map_err(|problem| Error::config("outbox", problem))?;
        }
        let last = published.rows(published.sql(LAST)).await.map_err(failed)?;
        let row = last
            .first()
            .ok_or_else(|| failed(sqlx::Error::RowNotFound))?;
        published.last = Columns::<A>::new(row).int().map_err(failed)?;
        let mut tx = operator::reading(&published.pool).await?;
        published.now = operator::now::<A>(&mut tx).await.map_err(failed)?;
        tx.rollback().await.map_err(failed)?;
        Ok(published)
    }

    fn sql(&self, text: &str) -> Sql {
        let created = A::micros("created_at");
        let parked = A::micros("min(parked_at)");
        let text = text
            .replace("{created}", &created)
            .replace("{parked_at}", &parked);
        Sql::new(tables::<A>(&text, &self.names))
    }

    /// Every question has a transaction of its own: none holds back the clean-up of the database.
    async fn rows(&self, sql: Sql) -> Result<Vec<A::Row>, sqlx::Error> {
        let mut tx = self.pool.begin_with(A::BEGIN_READ).await?;
        let rows = A::rows(&mut tx, sql).await?;
        tx.rollback().await?;
        Ok(rows)
    }

    /// Whether the confirmed position says that the row was published or parked.
    pub(super) fn settles(&self, id: i64) -> bool {
        self.confirmed.settles(id)
    }

    /// When the oldest row was made of which all younger ones are still there; `None`: there is no row.
    pub(super) async fn oldest(&self) -> Result<Option<i64>, sqlx::Error> {
        let rows = self.rows(self.sql(OLDEST)).await?;
        rows.first()
            .map(|row| Columns::<A>::new(row).int())
            .transpose()
    }

    /// Which of these topics it holds rows of.
    pub(super) async fn topics(&self, of: &[String]) -> Result<Vec<String>, sqlx::Error> {
        let mut here = Vec::new();
        for topic in of {
            let mut sql = self.sql("SELECT 1 FROM {outbox} WHERE ");
            sql.push_with("topic = ? LIMIT 1", Value::Text(topic.clone()));
            if !self.rows(sql).await?.is_empty() {
                here.push(topic.clone());
            }
        }
        Ok(here)
    }

    /// The next page of rows of these topics that were made in this time.
    pub(super) async fn page(
        &self,
        after: i64,
        topics: &[String],
        since: Option<i64>,
        until: i64,
    ) -> Result<Vec<OutboxRow>, sqlx::Error> {
        let mut sql = Sql::default();
        let after = sql.bind(Value::Int(after));
        let last = sql.bind(Value::Int(self.last));
        let text = PAGE.replace("{after}", &after).replace("{last}", &last);
        let text = text.replace("{created}", &A::micros("created_at"));
        sql.push(&tables::<A>(&text, &self.names));
        push_topics(&mut sql, topics);
        if let Some(since) = since {
            sql.push(" AND created_at >= ");
            sql.push_with(A::TIME, Value::Int(since));
        }
        sql.push(" AND created_at < ");
        sql.push_with(A::TIME, Value::Int(until));
        sql.push_with(" ORDER BY id LIMIT ?", Value::Int(self.page));
        let rows = self.rows(sql).await?;
        let rows = rows.iter().map(|row| {
            let mut columns = Columns::<A>::new(row);
            Ok(OutboxRow {
                id: columns.int()?,
                message_id: columns.uuid()?,
                topic: columns.text()?,
                created_at: columns.int()?,
            })
        });
        rows.collect()
    }

    /// Those of these messages that are parked.
    pub(super) async fn parked(&self, ids: &[Uuid]) -> Result<HashSet<Uuid>, sqlx::Error> {
        if ids.is_empty() {
            return Ok(HashSet::new());
        }
        let mut sql = self.sql(PARKED_OF);
        sql.push_in::<A>("message_id", ids.iter().copied().map(Value::Uuid).collect());
        let rows = self.rows(sql).await?;
        rows.iter()
            .map(|row| Columns::<A>::new(row).uuid())
            .collect()
    }

    /// Takes out of `ids` every message that the outbox has, in one pass over it.
    pub(super) async fn remove_known(&self, ids: &mut HashSet<Uuid>) -> Result<(), sqlx::Error> {
        let (Some(low), Some(high)) = (ids.iter().min().copied(), ids.iter().max().copied()) else {
            return Ok(());
        };
        let mut after = 0;
        while !ids.is_empty() {
            let mut sql = Sql::default();
            let from = sql.bind(Value::Int(after));
            let low = sql.bind(Value::Uuid(low));
            let high = sql.bind(Value::Uuid(high));
            let most = sql.bind(Value::Int(self.page));
            let text = IDS
                .replace("{after}", &from)
                .replace("{low}", &low)
                .replace("{high}", &high)
                .replace("{most}", &most);
            sql.push(&tables::<A>(&text, &self.names));
            let rows = self.rows(sql).await?;
            if rows.is_empty() {
                break;
            }
            for row in &rows {
                let mut columns = Columns::<A>::new(row);
                after = columns.int()?;
                ids.remove(&columns.uuid()?);
            }
        }
        let page = usize::try_from(self.page).unwrap_or(usize::MAX);
        let rest: Vec<Uuid> = ids.iter().copied().collect();
        for some in rest.chunks(page) {
            for id in self.parked(some).await? {
                ids.remove(&id);
            }
        }
        Ok(())
    }

    /// What the relay could not publish, by topic.
    pub(super) async fn parked_rows(
        &self,
        topics: &[String],
    ) -> Result<Vec<ParkedRows>, sqlx::Error> {
        let mut sql = self.sql(PARKED);
        sql.push("1 = 1");
        push_topics(&mut sql, topics);
        sql.push(" GROUP BY topic ORDER BY topic");
        let rows = self.rows(sql).await?;
        let rows = rows.iter().map(|row| {
            let mut columns = Columns::<A>::new(row);
            Ok(ParkedRows {
                topic: columns.text()?,
                count: columns.count()?,
                requested: columns.count()?,
                oldest: columns.time()?,
            })
        });
        rows.collect()
    }
}

/// Appends the condition that a row is of one of these topics, of which there is one at least.
pub(super) fn push_topics(sql: &mut Sql, topics: &[String]) {
    let names: Vec<String> = topics
        .iter()
        .map(|topic| sql.bind(Value::Text(topic.clone())))
        .collect();
    sql.push(&format!(" AND topic IN ({})", names.join(", ")));
}
