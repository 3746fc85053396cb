//! Rows of the record as they are shown.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use time::OffsetDateTime;
use uuid::Uuid;

use super::{Status, Texts};
use crate::operator::{Columns, Sql, Value, micros, time};

/// What became of one message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Row {
    /// The consumer.
    pub consumer: String,
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: i32,
    /// The offset.
    pub offset: i64,
    /// The message's id.
    pub message_id: Uuid,
    /// What the service calls it.
    pub business_id: Option<String>,
    /// How it was settled.
    pub status: Status,
    /// How often the handler was called.
    pub attempts: i32,
    /// When it was tried first.
    pub first_at: OffsetDateTime,
    /// When it was settled.
    pub settled_at: OffsetDateTime,
    /// How long the handler's last call took.
    pub duration: Duration,
    /// Why it failed.
    pub error: Option<String>,
}

impl Row {
    /// The place of this row in the order of a list.
    #[must_use]
    pub fn cursor(&self) -> Cursor {
        Cursor {
            settled_at: micros(self.settled_at),
            partition: self.partition,
            offset: self.offset,
            consumer: self.consumer.clone(),
            topic: self.topic.clone(),
        }
    }
}

/// A page of rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Page {
    /// The rows.
    pub rows: Vec<Row>,
    /// Where the next page begins; `None`: there is none.
    pub next: Option<Cursor>,
}

/// A place in the order of a list. Its text goes from one call of a command to the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor {
    settled_at: i64,
    partition: i32,
    offset: i64,
    consumer: String,
    topic: String,
}

impl Cursor {
    /// Appends the condition that a row lies beyond this place.
    pub(super) fn push<D: Texts>(&self, sql: &mut Sql, sign: &str) {
        let at = sql.bind(Value::Int(self.settled_at));
        let at = D::TIME.replace('?', &at);
        let consumer = sql.bind(Value::Text(self.consumer.clone()));
        let topic = sql.bind(Value::Text(self.topic.clone()));
        let partition = sql.bind(Value::Int(self.partition.into()));
        let offset = sql.bind(Value::Int(self.offset));
        // The first half is what the server leaves whole partitions out by.
        sql.push(&format!(
            " AND settled_at {sign}= {at} AND (settled_at, consumer, topic, partition, record_offset) \
             {sign} ({at}, {consumer}, {topic}, {partition}, {offset})"
        ));
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            settled_at,
            partition,
            offset,
            consumer,
            topic,
        } = self;
        write!(f, "{settled_at}/{partition}/{offset}/{consumer}/{topic}")
    }
}

/// The text is no place in a list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no place in the record: take it from the end of the page before")]
pub struct UnknownCursor {
    text: String,
}

impl FromStr for Cursor {
    type Err = UnknownCursor;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut words = text.splitn(5, '/');
        let mut parse = || {
            Some(Self {
                settled_at: words.next()?.parse().ok()?,
                partition: words.next()?.parse().ok()?,
                offset: words.next()?.parse().ok()?,
                consumer: words.next()?.to_owned(),
                topic: words.next()?.to_owned(),
            })
        };
        parse().ok_or_else(|| UnknownCursor {
            text: text.to_owned(),
        })
    }
}

/// The rows of one consumer, topic and status.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Group {
    /// The consumer.
    pub consumer: String,
    /// The topic.
    pub topic: String,
    /// How they were settled.
    pub status: Status,
    /// How many.
    pub count: u64,
    /// Those that needed more than one attempt.
    pub retried: u64,
    /// The handler's last call, on average.
    pub average: Duration,
    /// The handler's last call, the longest one.
    pub longest: Duration,
    /// When the first was settled.
    pub first: OffsetDateTime,
    /// When the last was settled.
    pub last: OffsetDateTime,
}

fn duration(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

fn status(word: &str) -> Result<Status, sqlx::Error> {
    word.parse()
        .map_err(|e: super::UnknownStatus| sqlx::Error::Decode(e.into()))
}

pub(super) fn row<D: Texts>(row: &D::Row) -> Result<Row, sqlx::Error> {
    let mut columns = Columns::<D>::new(row);
    Ok(Row {
        consumer: columns.text()?,
        topic: columns.text()?,
        partition: columns.small()?,
        offset: columns.int()?,
        message_id: columns.uuid()?,
        business_id: columns.text_or_none()?,
        status: status(&columns.text()?)?,
        attempts: columns.small()?,
        first_at: columns.time()?,
        settled_at: columns.time()?,
        duration: duration(columns.int()?),
        error: columns.text_or_none()?,
    })
}

pub(super) fn group<D: Texts>(row: &D::Row) -> Result<Group, sqlx::Error> {
    let mut columns = Columns::<D>::new(row);
    Ok(Group {
        consumer: columns.text()?,
        topic: columns.text()?,
        status: status(&columns.text()?)?,
        count: columns.count()?,
        retried: columns.count()?,
        average: duration(columns.int()?),
        longest: duration(columns.int()?),
        first: time(columns.int()?)?,
        last: time(columns.int()?)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_in_the_list_survives_its_text() {
        let cursor = Cursor {
            settled_at: 1_795_983_713_123_456,
            partition: 3,
            offset: 42,
            consumer: "inventory".into(),
            topic: "orders".into(),
        };
        assert_eq!(cursor.to_string().parse(), Ok(cursor));
        for text in ["", "1/2/3", "x/1/2/a/b"] {
            assert!(text.parse::<Cursor>().is_err(), "{text}");
        }
    }
}
