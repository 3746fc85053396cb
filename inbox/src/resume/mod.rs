//! The way out when a partition stopped: write the position somebody has chosen (`oncebox inbox resume`).
//!
//! [`plan`] shows what would change and changes nothing; [`apply`] writes the rows. Each row gets a new owner token and the next
//! `seq`, so that a consumer that is running at the time notices, rolls back and starts again at the new position (G6).
//!
//! Marks stay. Going back therefore repeats nothing that was already handled within the dedup window: such messages are
//! recognised as duplicates. Going forward skips what lies between, which is why the plan counts it.
//!
//! ```no_run
//! use oncebox_inbox::resume::{self, From, Request};
//! # async fn example(pool: sqlx::PgPool, kafka: oncebox_kafka::Config) -> Result<(), oncebox_inbox::Error> {
//! let request = Request::new(pool, kafka).consumer("inventory").topic("orders");
//! println!("{}", resume::plan(&request, From::Earliest).await?);
//! resume::apply(&request, From::Earliest).await?;
//! # Ok(()) }
//! ```

mod from;
mod plan;

use std::sync::Arc;
use std::time::Duration;

use oncebox_kafka::Stability;
use oncebox_migrations::Names;
use sqlx::Pool;
use uuid::Uuid;

use crate::InboxStore;
use crate::error::Error;
use crate::position::{Key, Row};
use crate::store::connect_as;

pub use from::{From, UnknownFrom};
pub use plan::{Change, Plan};

/// Longest wait for an answer of Kafka.
const PATIENCE: Duration = Duration::from_secs(10);

/// Which positions are meant.
#[derive(Clone, Debug)]
pub struct Request<D: InboxStore> {
    pool: Pool<D>,
    kafka: oncebox_kafka::Config,
    names: Names,
    consumer: String,
    topic: String,
    partition: Option<i32>,
}

impl<D: InboxStore> Request<D> {
    /// Positions in this database, of topics in this Kafka.
    #[must_use]
    pub fn new(pool: Pool<D>, kafka: oncebox_kafka::Config) -> Self {
        Self {
            pool,
            kafka,
            names: Names::default(),
            consumer: String::new(),
            topic: String::new(),
            partition: None,
        }
    }

    /// Schema and prefix of the Oncebox tables. Defaults to `public` and `oncebox_`.
    #[must_use]
    pub fn names(mut self, names: Names) -> Self {
        self.names = names;
        self
    }

    /// The consumer. Required.
    #[must_use]
    pub fn consumer(mut self, name: impl Into<String>) -> Self {
        self.consumer = name.into();
        self
    }

    /// The topic. Required.
    #[must_use]
    pub fn topic(mut self, topic: impl Into<String>) -> Self {
        self.topic = topic.into();
        self
    }

    /// One partition. Defaults to all of the topic.
    #[must_use]
    pub fn partition(mut self, partition: i32) -> Self {
        self.partition = Some(partition);
        self
    }
}

/// A consumer that stopped because many messages failed in a row ([`Error::Breaker`]).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failures {
    /// The topic.
    pub topic: String,
    /// How many failed in a row.
    pub failures: i32,
    /// Why the last one failed.
    pub error: String,
}

impl std::fmt::Display for Failures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            topic,
            failures,
            error,
        } = self;
        write!(
            f,
            "{topic}: {failures} failed in a row, the last one with: {error}"
        )
    }
}

/// Shows what [`accept_failures`] would accept.
///
/// # Errors
///
/// [`Error::Config`] for a name that is none, [`Error::Schema`], or what the database answered.
///
/// # Cancel safety
///
/// Reads only.
pub async fn failures<D: InboxStore>(
    pool: &Pool<D>,
    names: &Names,
    consumer: &str,
) -> Result<Vec<Failures>, Error> {
    let (mut conn, statements) = connect_as(pool, names, consumer).await?;
    tripped::<D>(&mut conn, &statements, consumer).await
}

/// Lets a consumer that stopped because of failures start again, and says which these were. The messages that it did not write
/// off are delivered again; those that fail still become dead letters, until as many have failed in a row.
///
/// # Errors
///
/// As [`failures`].
///
/// # Cancel safety
///
/// One statement: it happened or it did not.
pub async fn accept_failures<D: InboxStore>(
    pool: &Pool<D>,
    names: &Names,
    consumer: &str,
) -> Result<Vec<Failures>, Error> {
    let (mut conn, statements) = connect_as(pool, names, consumer).await?;
    let stops = tripped::<D>(&mut conn, &statements, consumer).await?;
    D::accept(&mut conn, &statements, consumer)
        .await
        .map_err(|e| Error::database("accept failures", e))?;
    Ok(stops)
}

async fn tripped<D: InboxStore>(
    conn: &mut D::Connection,
    statements: &crate::store::Statements,
    consumer: &str,
) -> Result<Vec<Failures>, Error> {
    let rows = D::all_tripped(conn, statements, consumer)
        .await
        .map_err(|e| Error::database("look for a stop", e))?;
    let rows = rows.into_iter();
    Ok(rows
        .map(|(topic, failures, error)| Failures {
            topic,
            failures,
            error,
        })
        .collect())
}

/// Shows what [`apply`] would do.
///
/// # Errors
///
/// [`Error::Config`] when the request is incomplete or the chosen place does not exist, [`Error::UnknownTopic`],
/// [`Error::Schema`], or what the database or Kafka answered.
///
/// # Cancel safety
///
/// Reads only.
pub async fn plan<D: InboxStore>(request: &Request<D>, from: From) -> Result<Plan, Error> {
    let Request {
        pool,
        names,
        consumer,
        ..
    } = request;
    let (mut conn, statements) = connect_as(pool, names, consumer).await?;
    let topic = &request.topic;
    let topic_id = oncebox_kafka::topic_id(&request.kafka, topic)
        .await
        .map_err(|e| Error::kafka("look for a topic", e))?
        .ok_or_else(|| Error::UnknownTopic {
            topic: topic.clone(),
        })?;
    let mut plan = Plan {
        consumer: request.consumer.clone(),
        topic: topic.clone(),
        topic_id,
        partitions: Vec::new(),
    };
    for partition in partitions(request, from).await? {
        let key = key(request, partition);
        let row = D::read(&mut conn, &statements, &key)
            .await
            .map_err(|e| Error::database("read a position", e))?;
        let committed = oncebox_kafka::committed(
            &request.kafka,
            &request.consumer,
            topic,
            partition,
            Stability::Any,
            PATIENCE,
        )
        .await
        .map_err(|e| Error::kafka("read the group's offset", e))?
        .map(|(offset, _)| offset);
        let place = place(request, partition, from).await?;
        plan.partitions.push(Change {
            partition,
            low: place.low,
            high: place.high,
            before: row.map(|row| (row.next, row.topic_id)),
            committed,
            next: choose(partition, from, &place, committed)?,
        });
    }
    Ok(plan)
}

/// Writes the positions, all or none, and returns what was changed.
///
/// # Errors
///
/// As [`plan`].
///
/// # Cancel safety
///
/// One transaction: it happened or it did not; `plan` shows which.
pub async fn apply<D: InboxStore>(request: &Request<D>, from: From) -> Result<Plan, Error> {
    let plan = plan(request, from).await?;
    let statements = D::statements(&request.names, Duration::from_secs(60));
    let failed = |e| Error::database("write a position", e);
    let mut tx = D::begin(&request.pool, &statements).await.map_err(failed)?;
    for change in &plan.partitions {
        let row = Row {
            topic_id: plan.topic_id.clone(),
            next: change.next,
            seq: 0,
            owner: Uuid::new_v4(),
        };
        let key = key(request, change.partition);
        D::put(&mut tx, &statements, &key, &row)
            .await
            .map_err(failed)?;
    }
    tx.commit().await.map_err(failed)?;
    Ok(plan)
}

fn key<D: InboxStore>(request: &Request<D>, partition: i32) -> Key {
    Key {
        consumer: Arc::from(request.consumer.as_str()),
        topic: Arc::from(request.topic.as_str()),
        partition,
    }
}

/// What Kafka says about a partition.
#[derive(Clone, Copy, Debug)]
struct Place {
    low: i64,
    high: i64,
    /// First record at or after the chosen time, if a time was chosen.
    at_time: Option<i64>,
}

/// The partitions a request is about.
async fn partitions<D: InboxStore>(request: &Request<D>, from: From) -> Result<Vec<i32>, Error> {
    let cluster = oncebox_kafka::cluster(&request.kafka, PATIENCE)
        .await
        .map_err(|e| Error::kafka("describe the cluster", e))?;
    let topic = cluster.topics.into_iter().find(|t| t.name == request.topic);
    let count = topic.map_or(0, |t| i32::try_from(t.partitions).unwrap_or(i32::MAX));
    match request.partition {
        Some(one) if (0..count).contains(&one) => Ok(vec![one]),
        Some(one) => Err(Error::config(
            "partition",
            format!("{one} does not exist: the topic has {count} partitions, counted from 0"),
        )),
        None if matches!(from, From::Offset(_)) && count > 1 => Err(Error::config(
            "partition",
            format!("is missing: an offset belongs to one partition, and the topic has {count}"),
        )),
        None => Ok((0..count).collect()),
    }
}

async fn place<D: InboxStore>(
    request: &Request<D>,
    partition: i32,
    from: From,
) -> Result<Place, Error> {
    let Request { kafka, topic, .. } = request;
    let (low, high) = oncebox_kafka::admin::watermarks(kafka, topic, partition, PATIENCE)
        .await
        .map_err(|e| Error::kafka("read the ends of a partition", e))?;
    let at_time = match from {
        From::Time(at) => {
            let millis = i64::try_from(at.unix_timestamp_nanos() / 1_000_000)
                .map_err(|_| Error::config("from", "the time is out of range"))?;
            oncebox_kafka::admin::offset_for_time(kafka, topic, partition, millis, PATIENCE)
                .await
                .map_err(|e| Error::kafka("find the offset of a time", e))?
        }
        _ => None,
    };
    Ok(Place { low, high, at_time })
}

/// The position to write.
fn choose(partition: i32, from: From, place: &Place, committed: Option<i64>) -> Result<i64, Error> {
    let next = match from {
        From::Earliest => place.low,
        From::Latest => place.high,
        From::Offset(offset) => offset,
        // No record at or after the time: everything is older.
        From::Time(_) => place.at_time.unwrap_or(place.high),
        From::Committed => committed.ok_or_else(|| {
            Error::config(
                "from",
                format!("committed: the group has no offset for partition {partition}; choose another place for it with --partition {partition}"),
            )
        })?,
    };
    if (place.low..=place.high).contains(&next) {
        return Ok(next);
    }
    Err(Error::config(
        "from",
        format!(
            "offset {next} is outside partition {partition}, which holds {}..{}",
            place.low, place.high
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_outside_the_partition_is_refused() {
        let place = Place {
            low: 5,
            high: 10,
            at_time: None,
        };
        assert_eq!(choose(0, From::Earliest, &place, None).unwrap(), 5);
        assert_eq!(choose(0, From::Latest, &place, None).unwrap(), 10);
        assert_eq!(choose(0, From::Committed, &place, Some(7)).unwrap(), 7);
        assert_eq!(choose(0, From::Offset(10), &place, None).unwrap(), 10);
        let error = choose(3, From::Offset(11), &place, None).unwrap_err();
        assert!(error.to_string().contains("5..10"), "{error}");
        let error = choose(3, From::Committed, &place, None).unwrap_err();
        assert!(error.to_string().contains("--partition 3"), "{error}");
    }
}
