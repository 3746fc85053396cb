//! What operators do with messages that Kafka refuses, and with topics that are not published to.
//!
//! Every function connects to the database and writes what is wanted; the leading relay sees it within a second. No
//! function touches Kafka.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use uuid::Uuid;

use crate::config::{Config, Database};
use crate::error::{Error, Stop};
use crate::session::{
    Cause, Deadline, Filter, ParkedRow, ParkingSession as _, PostgresSession, Request,
    Session as _, SqliteSession,
};
pub use crate::session::{Overview, Paused};

/// A message that waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parked {
    /// The outbox row.
    pub id: i64,
    /// The message's id.
    pub message_id: Uuid,
    /// Its topic.
    pub topic: String,
    /// Its key.
    pub key: Option<Bytes>,
    /// Its payload; `None` is a tombstone.
    pub payload: Option<Bytes>,
    /// Its headers, as they would be published, without the envelope's.
    pub headers: Vec<(String, Option<Bytes>)>,
    /// When it was enqueued.
    pub created_at: SystemTime,
    /// When it was parked.
    pub parked_at: SystemTime,
    /// Why it waits.
    pub cause: Cause,
    /// Why, in words.
    pub reason: String,
    /// How often Kafka refused it.
    pub attempts: i32,
    /// What was asked for, and not done yet.
    pub request: Option<Request>,
}

macro_rules! on {
    ($config:expr, $session:ident => $work:expr) => {
        match &$config.database {
            Database::Postgres(_) => {
                let mut $session = Deadline::<PostgresSession>::connect($config).await?;
                $work
            }
            Database::Sqlite(_) => {
                let mut $session = Deadline::<SqliteSession>::connect($config).await?;
                $work
            }
        }
    };
}

/// Counts what waits, and says what is paused.
///
/// # Errors
/// [`Error`] of the database.
pub async fn overview(config: &Config) -> Result<Overview, Error> {
    on!(config, session => session.overview().await)
}

/// Parked messages in the order of their ids, at most `limit`.
///
/// # Errors
/// [`Error`] of the database.
pub async fn list(config: &Config, filter: &Filter, limit: usize) -> Result<Vec<Parked>, Error> {
    let rows = on!(config, session => session.list_parked(filter, limit).await?);
    rows.into_iter().map(Parked::try_from).collect()
}

/// Asks the relay to publish these messages again, or never. What waits behind them follows by itself. Returns how many of
/// the ids are parked.
///
/// # Errors
/// [`Error`] of the database.
pub async fn request(config: &Config, ids: &[i64], request: Request) -> Result<u64, Error> {
    on!(config, session => session.request(ids, request).await)
}

/// Stops publishing to a topic, or to one key of it; its messages are parked until [`resume`]. Returns `false` when it was
/// paused already; a pause of the relay's own becomes the operator's.
///
/// # Errors
/// [`Error`] of the database.
pub async fn pause(
    config: &Config,
    topic: &str,
    key: Option<&[u8]>,
    reason: &str,
) -> Result<bool, Error> {
    on!(config, session => session.pause_for_operator(topic, key, reason).await)
}

/// Publishes to it again, what was parked first. Returns `false` when it was not paused.
///
/// # Errors
/// [`Error`] of the database.
pub async fn resume(config: &Config, topic: &str, key: Option<&[u8]>) -> Result<bool, Error> {
    on!(config, session => session.resume_for_operator(topic, key).await)
}

impl TryFrom<ParkedRow> for Parked {
    type Error = Error;

    fn try_from(parked: ParkedRow) -> Result<Self, Error> {
        let row = parked.row;
        let headers = oncebox_migrations::headers::decode(&row.record.headers).map(|header| {
            let (name, value) = header
                .map_err(|e| Stop::BadRow(format!("headers of parked row {}: {e}", row.id)))?;
            Ok::<_, Error>((name.to_owned(), value.map(Bytes::copy_from_slice)))
        });
        let headers = headers.collect::<Result<_, _>>()?;
        Ok(Self {
            id: row.id,
            message_id: row.message_id,
            topic: row.record.topic.to_string(),
            key: row.record.key,
            payload: row.record.payload,
            headers,
            created_at: time(row.created_at_micros),
            parked_at: time(parked.parked_at_micros),
            cause: parked.cause,
            reason: parked.reason,
            attempts: parked.attempts,
            request: parked.request,
        })
    }
}

fn time(micros: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}
