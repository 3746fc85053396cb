//! The consuming side: marks, records, letters, attempts, positions.

use std::collections::{HashMap, HashSet};

use oncebox_migrations::Names;
use sqlx::Pool;
use uuid::Uuid;

use super::Request;
use super::outbox::push_topics;
use super::report::{Breaker, Letters, Quiet, Stuck};
use crate::error::Error;
use crate::operator::{Columns, OperatorStore, Sql, Value, tables};

const POSITIONS: &str = "SELECT DISTINCT consumer, topic FROM {position} ORDER BY consumer, topic";
const MARKS: &str = "SELECT message_id FROM {inbox} WHERE ";
const RECORDS: &str = "SELECT message_id FROM {record} WHERE ";
const LETTERS: &str = "SELECT message_id FROM {dead_letter} WHERE ";
const ATTEMPTS: &str = "SELECT message_id FROM {attempt} WHERE ";
const MARKS_PAGE: &str = "SELECT message_id, {seen_at} FROM {inbox} WHERE ";
const RECORDS_PAGE: &str = "SELECT message_id, {settled_at} FROM {record} WHERE ";
const TOPICS: &str = "SELECT DISTINCT message_id, topic FROM {record} WHERE ";
const GROUPS: &str = "SELECT topic, count(*) FILTER (WHERE NOT parked AND NOT delayed), count(*) FILTER (WHERE parked), \
    count(*) FILTER (WHERE replay_at < {late}), {oldest} FROM {dead_letter} WHERE (NOT delayed OR replay_at < {late}) AND ";
const QUIET: &str = "SELECT topic, partition, next, {updated_at} FROM {position} WHERE ";
const BREAKERS: &str = "SELECT topic, failures, error, {tripped_at} FROM {breaker} WHERE ";

/// Where the ids of what was consumed are read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The dedup marks: complete, but they do not name their topic.
    Marks,
    /// The record, of these topics.
    Records(Vec<String>),
    /// Nothing can be compared.
    Nothing,
}

/// What is known of some messages.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// Those that the source names.
    pub(super) in_source: HashSet<Uuid>,
    /// Those that are settled, by whatever evidence.
    pub(super) settled: HashSet<Uuid>,
    /// Those that failed and will be tried again.
    pub(super) retrying: HashSet<Uuid>,
}

/// The consumer and what is known of it at the beginning.
#[derive(Debug)]
pub(super) struct Consumed<B: OperatorStore> {
    pool: Pool<B>,
    names: Names,
    page: i64,
    consumer: String,
    /// The topics that are compared.
    pub(super) topics: Vec<String>,
}

impl<B: OperatorStore> Consumed<B> {
    pub(super) async fn new<A: OperatorStore>(request: &Request<A, B>) -> Result<Self, Error> {
        let mut consumed = Self {
            pool: request.inbox.clone(),
            names: request.inbox_names.clone(),
            page: i64::try_from(request.page).unwrap_or(i64::MAX),
            consumer: request.consumer.clone(),
            topics: Vec::new(),
        };
        let failed = |e| Error::database("look for the consumer", e);
        let mut others = Vec::new();
        let rows = consumed
            .rows(consumed.sql(POSITIONS))
            .await
            .map_err(failed)?;
        for row in rows {
            let mut columns = Columns::<B>::new(&row);
            let (consumer, topic) = (
                columns.text().map_err(failed)?,
                columns.text().map_err(failed)?,
            );
            if consumer == consumed.consumer {
                consumed.topics.push(topic);
            } else if others.last() != Some(&consumer) {
                others.push(consumer);
            }
        }
        if consumed.topics.is_empty() {
            return Err(Error::config(
                "consumer",
                format!(
                    "{:?} has no position in this database; those that have one: {}",
                    consumed.consumer,
                    listed(&others)
                ),
            ));
        }
        if let Some(topic) = &request.topic {
            if !consumed.topics.contains(topic) {
                return Err(Error::config(
                    "topic",
                    format!(
                        "the consumer has no position of {topic:?}; it has of: {}",
                        listed(&consumed.topics)
                    ),
                ));
            }
            consumed.topics = vec![topic.clone()];
        }
        Ok(consumed)
    }

    fn sql(&self, text: &str) -> Sql {
        let mut text = tables::<B>(text, &self.names);
        for (name, column) in [
            ("{seen_at}", "seen_at"),
            ("{settled_at}", "min(settled_at)"),
            ("{oldest}", "min(failed_at)"),
            ("{updated_at}", "updated_at"),
            ("{tripped_at}", "tripped_at"),
        ] {
            text = text.replace(name, &B::micros(column));
        }
        Sql::new(text)
    }

    async fn rows(&self, sql: Sql) -> Result<Vec<B::Row>, sqlx::Error> {
        let mut tx = self.pool.begin_with(B::BEGIN_READ).await?;
        let rows = B::rows(&mut tx, sql).await?;
        tx.rollback().await?;
        Ok(rows)
    }

    /// Marks are complete but do not name their topic: they serve when all that the consumer consumes can come from this outbox.
    pub(super) async fn source(
        &self,
        here: &[String],
        one_topic: bool,
    ) -> Result<Source, sqlx::Error> {
        if here.is_empty() {
            return Ok(Source::Nothing);
        }
        let all_from_here = here.len() == self.topics.len();
        let marks = self.any(MARKS).await?;
        let records = self.any(RECORDS).await?;
        Ok(match (marks, records) {
            (true, _) if all_from_here && !one_topic => Source::Marks,
            (_, true) => Source::Records(here.to_vec()),
            _ => Source::Nothing,
        })
    }

    async fn any(&self, text: &str) -> Result<bool, sqlx::Error> {
        let mut sql = self.sql(text);
        sql.push_with("consumer = ? LIMIT 1", Value::Text(self.consumer.clone()));
        Ok(!self.rows(sql).await?.is_empty())
    }

    /// What is known of these messages. Each kind of evidence is asked only for what the one before did not know.
    pub(super) async fn known(&self, ids: &[Uuid], source: &Source) -> Result<Known, sqlx::Error> {
        let mut known = Known {
            settled: self.which(MARKS, ids, &[]).await?,
            ..Known::default()
        };
        let mut rest = without(ids, &known.settled);
        match source {
            Source::Marks => known.in_source.clone_from(&known.settled),
            Source::Records(topics) => {
                known.in_source = self.which(RECORDS, ids, topics).await?;
                known.settled.extend(&known.in_source);
                rest = without(&rest, &known.settled);
            }
            Source::Nothing => {}
        }
        for text in [RECORDS, LETTERS] {
            let more = self.which(text, &rest, &[]).await?;
            rest = without(&rest, &more);
            known.settled.extend(more);
        }
        known.retrying = self.which(ATTEMPTS, &rest, &[]).await?;
        Ok(known)
    }

    async fn which(
        &self,
        text: &str,
        ids: &[Uuid],
        topics: &[String],
    ) -> Result<HashSet<Uuid>, sqlx::Error> {
        if ids.is_empty() {
            return Ok(HashSet::new());
        }
        let mut sql = self.sql(text);
        sql.push_with("consumer = ? AND ", Value::Text(self.consumer.clone()));
        sql.push_in::<B>("message_id", ids.iter().copied().map(Value::Uuid).collect());
        if !topics.is_empty() {
            push_topics(&mut sql, topics);
        }
        let rows = self.rows(sql).await?;
        rows.iter()
            .map(|row| Columns::<B>::new(row).uuid())
            .collect()
    }

    /// The next page of ids in this range, ascending, each once, and when it was consumed.
    pub(super) async fn page(
        &self,
        source: &Source,
        after: Option<Uuid>,
        from: Uuid,
        until: Uuid,
    ) -> Result<Vec<(Uuid, i64)>, sqlx::Error> {
        let mut sql = match source {
            Source::Nothing => return Ok(Vec::new()),
            Source::Marks => self.sql(MARKS_PAGE),
            Source::Records(_) => self.sql(RECORDS_PAGE),
        };
        sql.push_with("consumer = ?", Value::Text(self.consumer.clone()));
        match after {
            Some(after) => sql.push_with(" AND message_id > ?", Value::Uuid(after)),
            None => sql.push_with(" AND message_id >= ?", Value::Uuid(from)),
        };
        sql.push_with(" AND message_id < ?", Value::Uuid(until));
        if let Source::Records(topics) = source {
            push_topics(&mut sql, topics);
            sql.push(" GROUP BY message_id");
        }
        sql.push_with(" ORDER BY message_id LIMIT ?", Value::Int(self.page));
        let rows = self.rows(sql).await?;
        let rows = rows.iter().map(|row| {
            let mut columns = Columns::<B>::new(row);
            Ok((columns.uuid()?, columns.int()?))
        });
        rows.collect()
    }

    /// The topics that the record knows these messages by.
    pub(super) async fn topics_of(
        &self,
        ids: &[Uuid],
    ) -> Result<HashMap<Uuid, String>, sqlx::Error> {
        if ids.is_empty() {
            return Ok(HashMap::new());
        }
        let mut sql = self.sql(TOPICS);
        sql.push_with("consumer = ? AND ", Value::Text(self.consumer.clone()));
        sql.push_in::<B>("message_id", ids.iter().copied().map(Value::Uuid).collect());
        let rows = self.rows(sql).await?;
        let rows = rows.iter().map(|row| {
            let mut columns = Columns::<B>::new(row);
            Ok((columns.uuid()?, columns.text()?))
        });
        rows.collect()
    }

    /// Letters, orders that nobody carries out, positions that do not move, breakers.
    pub(super) async fn stuck(
        &self,
        grace: i64,
        quiet: i64,
        stuck: &mut Stuck,
    ) -> Result<(), sqlx::Error> {
        let ago = |micros: i64| B::TIME.replace('?', &format!("({} - {micros})", B::NOW));
        let of = |sql: &mut Sql| {
            sql.push_with("consumer = ?", Value::Text(self.consumer.clone()));
            push_topics(sql, &self.topics);
        };
        let mut sql = self.sql(&GROUPS.replace("{late}", &ago(grace)));
        of(&mut sql);
        sql.push(" GROUP BY topic ORDER BY topic");
        for row in self.rows(sql).await? {
            let mut columns = Columns::<B>::new(&row);
            stuck.letters.push(Letters {
                topic: columns.text()?,
                dead: columns.count()?,
                parked: columns.count()?,
                overdue: columns.count()?,
                oldest: columns.time()?,
            });
        }
        let mut sql = self.sql(QUIET);
        of(&mut sql);
        sql.push(&format!(
            " AND updated_at < {} ORDER BY topic, partition",
            ago(quiet)
        ));
        for row in self.rows(sql).await? {
            let mut columns = Columns::<B>::new(&row);
            stuck.quiet.push(Quiet {
                topic: columns.text()?,
                partition: columns.small()?,
                next: columns.int()?,
                updated_at: columns.time()?,
            });
        }
        let mut sql = self.sql(BREAKERS);
        of(&mut sql);
        for row in self.rows(sql).await? {
            let mut columns = Columns::<B>::new(&row);
            stuck.breakers.push(Breaker {
                topic: columns.text()?,
                failures: columns.count()?,
                error: columns.text()?,
                tripped_at: columns.time()?,
            });
        }
        Ok(())
    }
}

fn without(ids: &[Uuid], known: &HashSet<Uuid>) -> Vec<Uuid> {
    let rest = ids.iter().filter(|id| !known.contains(id));
    rest.copied().collect()
}

fn listed(names: &[String]) -> String {
    if names.is_empty() {
        return "none".to_owned();
    }
    names.join(", ")
}
