//! Letters as they are shown.

use std::time::Duration;

use oncebox_migrations::headers;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{Kind, Texts};
use crate::operator::Columns;

/// A letter without its payload and headers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listed {
    /// Its number.
    pub id: i64,
    /// The consumer that could not handle it.
    pub consumer: String,
    /// The message's id.
    pub message_id: Uuid,
    /// Where the record was: topic.
    pub topic: String,
    /// Where the record was: partition.
    pub partition: i32,
    /// Where the record was: offset.
    pub offset: i64,
    /// Its key.
    pub key: Option<Vec<u8>>,
    /// Dead, parked or delayed.
    pub kind: Kind,
    /// Why it failed last, or what it waits for.
    pub error: String,
    /// How often the handler was called.
    pub attempts: i32,
    /// When it failed first, where that is known.
    pub first_failed_at: Option<OffsetDateTime>,
    /// When it failed last.
    pub failed_at: OffsetDateTime,
    /// Kafka's timestamp of the record.
    pub record_timestamp: Option<OffsetDateTime>,
    /// The order, or the next attempt of a delayed letter: the consumer handles it at this time or later.
    pub replay_at: Option<OffsetDateTime>,
    /// How often it was replayed, or tried outside its lane, in vain.
    pub replays: i32,
    /// Length of the payload in bytes; `None` is a tombstone.
    pub payload_bytes: Option<u64>,
}

/// A letter in full.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Letter {
    /// All but payload and headers.
    pub listed: Listed,
    /// The payload; `None` is a tombstone.
    pub payload: Option<Vec<u8>>,
    /// The record's headers in their order.
    pub headers: Vec<(String, Option<Vec<u8>>)>,
    /// Why the rest of the headers cannot be read.
    pub headers_damaged: Option<String>,
}

/// A page of letters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Page {
    /// The letters.
    pub letters: Vec<Listed>,
    /// Where the next page begins; `None`: there is none.
    pub next: Option<i64>,
}

/// The letters of one consumer and topic.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Group {
    /// The consumer.
    pub consumer: String,
    /// The topic.
    pub topic: String,
    /// Given up.
    pub dead: u64,
    /// Waiting behind a blocked key.
    pub parked: u64,
    /// Keys with parked letters.
    pub keys: u64,
    /// Tried again by the consumer itself.
    pub delayed: u64,
    /// Ordered to be replayed by an operator, and not replayed yet.
    pub ordered: u64,
    /// When the first of them failed (last).
    pub oldest: OffsetDateTime,
    /// How long ago that was, by the database's clock.
    pub oldest_age: Duration,
}

/// Reads the columns of `Templates::columns`.
fn columns<D: Texts>(columns: &mut Columns<'_, D>) -> Result<Listed, sqlx::Error> {
    Ok(Listed {
        id: columns.int()?,
        consumer: columns.text()?,
        message_id: columns.uuid()?,
        topic: columns.text()?,
        partition: columns.small()?,
        offset: columns.int()?,
        key: columns.bytes_or_none()?,
        kind: match (columns.flag()?, columns.flag()?) {
            (true, _) => Kind::Parked,
            (false, true) => Kind::Delayed,
            (false, false) => Kind::Dead,
        },
        error: columns.text()?,
        attempts: columns.small()?,
        first_failed_at: columns.time_or_none()?,
        failed_at: columns.time()?,
        record_timestamp: columns
            .int_or_none()?
            .map(|millis| crate::operator::time(millis.saturating_mul(1_000)))
            .transpose()?,
        replay_at: columns.time_or_none()?,
        replays: columns.small()?,
        payload_bytes: columns.int_or_none()?.and_then(|n| u64::try_from(n).ok()),
    })
}

pub(super) fn listed<D: Texts>(row: &D::Row) -> Result<Listed, sqlx::Error> {
    columns(&mut Columns::<D>::new(row))
}

pub(super) fn letter<D: Texts>(row: &D::Row) -> Result<Letter, sqlx::Error> {
    let mut rest = Columns::<D>::new(row);
    let listed = columns(&mut rest)?;
    let payload = rest.bytes_or_none()?;
    let list = rest.bytes()?;
    let mut decoded = Vec::new();
    let mut damaged = None;
    for header in headers::decode(&list) {
        match header {
            Ok((name, value)) => decoded.push((name.to_owned(), value.map(<[u8]>::to_vec))),
            Err(problem) => damaged = Some(problem.to_string()),
        }
    }
    Ok(Letter {
        listed,
        payload,
        headers: decoded,
        headers_damaged: damaged,
    })
}

pub(super) fn group<D: Texts>(row: &D::Row) -> Result<Group, sqlx::Error> {
    let mut columns = Columns::<D>::new(row);
    Ok(Group {
        consumer: columns.text()?,
        topic: columns.text()?,
        dead: columns.count()?,
        parked: columns.count()?,
        keys: columns.count()?,
        delayed: columns.count()?,
        ordered: columns.count()?,
        oldest: columns.time()?,
        oldest_age: Duration::from_micros(u64::try_from(columns.int()?).unwrap_or(0)),
    })
}
