//! What the databases say about rows that cannot be published now.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use uuid::Uuid;

use super::Row;
use crate::error::{Error, Stop};

/// Why a row is parked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// Kafka refuses the row itself: its size or its content. Waits for somebody's decision.
    Refused,
    /// An earlier row of its key is parked, or its key is paused. Follows by itself.
    Key,
    /// Its topic is paused. Follows by itself.
    Topic,
}

/// What an operator wants done with a parked row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Request {
    /// Publish it again, then what waits behind it.
    Requeue,
    /// Never publish it; go on with what waits behind it.
    Skip,
}

macro_rules! words {
    ($type:ident $what:literal: $($variant:ident $word:literal),*) => {
        impl $type {
            /// The word for it in the table and in what is printed.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word),* }
            }
        }
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
        impl FromStr for $type {
            type Err = Error;
            fn from_str(word: &str) -> Result<Self, Error> {
                match word {
                    $($word => Ok(Self::$variant),)*
                    _ => Err(Stop::BadRow(format!("a parked row has the unknown {} {word:?}", $what)).into()),
                }
            }
        }
    };
}
words!(Cause "cause": Refused "refused", Key "key", Topic "topic");
words!(Request "request": Requeue "requeue", Skip "skip");

/// A row to park.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parking {
    pub(crate) id: i64,
    pub(crate) cause: Cause,
    pub(crate) reason: String,
}

/// A parked row.
#[derive(Debug, Clone)]
pub(crate) struct ParkedRow {
    pub(crate) row: Row,
    pub(crate) cause: Cause,
    pub(crate) reason: String,
    pub(crate) attempts: i32,
    pub(crate) request: Option<Request>,
    pub(crate) parked_at_micros: i64,
}

/// A topic, or a key of it, that is not published to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paused {
    /// The topic.
    pub topic: String,
    /// The key; `None` = the whole topic.
    pub key: Option<Bytes>,
    /// By the relay itself, which tries again by itself; else by an operator.
    pub by_relay: bool,
    /// Why.
    pub reason: String,
}

impl From<(String, Option<Vec<u8>>, bool, String)> for Paused {
    fn from((topic, key, by_relay, reason): (String, Option<Vec<u8>>, bool, String)) -> Self {
        Self {
            topic,
            key: key.map(Bytes::from),
            by_relay,
            reason,
        }
    }
}

impl fmt::Display for Paused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.topic)?;
        if let Some(key) = &self.key {
            write!(f, " key {:?}", String::from_utf8_lossy(key))?;
        }
        let by = if self.by_relay {
            "the relay"
        } else {
            "an operator"
        };
        write!(f, ": paused by {by}: {}", self.reason)
    }
}

/// A look at everything that is parked and paused.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Overview {
    /// Parked rows by topic.
    pub parked: Vec<(String, i64)>,
    /// An operator has asked for something that is not done yet.
    pub requests: bool,
    /// What is paused.
    pub paused: Vec<Paused>,
}

/// What is parked already among, and before, the rows of a batch.
#[derive(Debug, Clone, Default)]
pub(crate) struct Among {
    /// Rows with an id of the batch.
    pub(crate) ids: HashMap<i64, Uuid>,
    /// The first parked row of each key of the batch that has one.
    pub(crate) first: HashMap<(Arc<str>, Bytes), i64>,
}

/// The topics and keys of some rows, each pair once.
pub(crate) fn keys_of(rows: &[Row]) -> Vec<(Arc<str>, Bytes)> {
    let keyed = rows.iter().filter_map(|row| {
        let key = row.record.key.clone()?;
        Some((Arc::clone(&row.record.topic), key))
    });
    let mut keys: Vec<_> = keyed.collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

/// Parked rows until they have so many bytes, but one at least.
pub(crate) async fn collect<R>(
    mut rows: impl Stream<Item = Result<R, sqlx::Error>> + Unpin,
    limit: usize,
    decode: impl Fn(R) -> Result<ParkedRow, Error>,
) -> Result<Vec<ParkedRow>, Error> {
    let (mut parked, mut bytes) = (Vec::new(), 0);
    while let Some(row) = rows.next().await {
        let row = decode(row?)?;
        bytes += row.row.bytes();
        if bytes > limit && !parked.is_empty() {
            break;
        }
        parked.push(row);
    }
    Ok(parked)
}
