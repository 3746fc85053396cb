//! Rows of the tables, as they are written and read.

use std::time::Duration;

use uuid::Uuid;

use crate::partition::Attempt;
use crate::position::Row;

/// A row of the dead-letter table.
#[derive(Clone, Debug)]
pub struct DeadLetter<'a> {
    /// The message's id.
    pub message_id: Uuid,
    /// Offset of the record.
    pub offset: i64,
    /// Key.
    pub key: Option<&'a [u8]>,
    /// Payload.
    pub payload: Option<&'a [u8]>,
    /// Encoded header list.
    pub headers: &'a [u8],
    /// Why it failed, without NUL.
    pub error: &'a str,
    /// How often it was tried.
    pub attempts: i32,
    /// It waits, and blocks its key, instead of being given up.
    pub parked: bool,
    /// Kafka's timestamp of the record, milliseconds.
    pub timestamp_ms: Option<i64>,
    /// Microseconds since the Unix epoch.
    pub first_failed_at: Option<i64>,
    /// It is tried again after so many microseconds, instead of being given up.
    pub delay_micros: Option<i64>,
}

/// A letter as it is read for another attempt.
#[derive(Clone, Debug)]
pub struct Letter {
    /// Its row.
    pub id: i64,
    /// The message's id.
    pub message_id: Uuid,
    /// Topic.
    pub topic: String,
    /// Partition of the topic.
    pub partition: i32,
    /// Offset of the record.
    pub offset: i64,
    /// Key.
    pub key: Option<Vec<u8>>,
    /// Payload.
    pub payload: Option<Vec<u8>>,
    /// Encoded header list.
    pub headers: Vec<u8>,
    /// How often it was tried.
    pub attempts: i32,
    /// It waits for its key.
    pub parked: bool,
    /// Kafka's timestamp of the record, milliseconds.
    pub timestamp_ms: Option<i64>,
    /// Its consumer tries it again by itself, until no attempt is left.
    pub delayed: bool,
    /// Why it failed last.
    pub error: String,
    /// Microseconds since the Unix epoch.
    pub first_failed_at: Option<i64>,
    /// How often that has begun.
    pub replays: i32,
}

/// A row of the record of what was consumed.
#[derive(Clone, Debug)]
pub struct Recorded<'a> {
    /// Offset of the record.
    pub offset: i64,
    /// The message's id.
    pub message_id: Uuid,
    /// What the business calls it.
    pub business_id: Option<String>,
    /// `effect`, `dead` or `parked`.
    pub status: &'static str,
    /// Calls of the handler.
    pub attempts: i32,
    /// Of the first attempt, microseconds since the Unix epoch.
    pub first_at: i64,
    /// Of the handler's last call, microseconds.
    pub duration_us: i64,
    /// Why it failed.
    pub error: Option<&'a str>,
}

/// A duration as the statements take it.
pub(crate) fn whole_micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// Reads `record_offset, message_id, attempts, error, first_at, wait` (both in microseconds).
pub(super) fn attempt_row<'r, R>(row: &'r R) -> Result<(i64, Attempt), sqlx::Error>
where
    R: sqlx::Row,
    usize: sqlx::ColumnIndex<R>,
    String: sqlx::Decode<'r, R::Database> + sqlx::Type<R::Database>,
    i32: sqlx::Decode<'r, R::Database> + sqlx::Type<R::Database>,
    i64: sqlx::Decode<'r, R::Database> + sqlx::Type<R::Database>,
    Uuid: sqlx::Decode<'r, R::Database> + sqlx::Type<R::Database>,
{
    let attempts: i32 = row.try_get(2)?;
    let wait: i64 = row.try_get(5)?;
    let attempt = Attempt {
        message_id: row.try_get(1)?,
        attempts: u32::try_from(attempts).unwrap_or_default(),
        error: row.try_get(3)?,
        first_failed_at: row.try_get(4)?,
        wait: Duration::from_micros(u64::try_from(wait).unwrap_or_default()),
    };
    Ok((row.try_get(0)?, attempt))
}

/// Reads `topic_id, next, seq, owner`.
pub(super) fn position_row<'r, R>(row: &'r R) -> Result<Row, sqlx::Error>
where
    R: sqlx::Row,
    usize: sqlx::ColumnIndex<R>,
    String: sqlx::Decode<'r, R::Database> + sqlx::Type<R::Database>,
    i64: sqlx::Decode<'r, R::Database> + sqlx::Type<R::Database>,
    Uuid: sqlx::Decode<'r, R::Database> + sqlx::Type<R::Database>,
{
    Ok(Row {
        topic_id: row.try_get(0)?,
        next: row.try_get(1)?,
        seq: row.try_get(2)?,
        owner: row.try_get(3)?,
    })
}
