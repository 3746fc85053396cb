//! What a relay does to its database: one trait, one file per database, one conformance suite.
//!
//! A leading relay holds two sessions of the same server: the reader's, which only looks, and the keeper's, which
//! writes the mark. Neither comes from a pool, and neither may go through a transaction pooler.

mod copy;
mod deadline;
mod parked;
mod postgres;
mod same;
mod sqlite;

#[cfg(test)]
pub(crate) mod conformance;

use std::time::Duration;

use oncebox_kafka::Record;
use uuid::Uuid;

pub(crate) use deadline::Deadline;
pub(crate) use parked::{Among, ParkedRow, Parking, collect, keys_of};
pub use parked::{Cause, Overview, Paused, Request};
pub(crate) use postgres::PostgresSession;
pub(crate) use sqlite::SqliteSession;

use crate::config::Config;
use crate::error::{Error, Stop};
use crate::position::{Checkpoint, FormatError, Gaps, Holders, Tally, newest_format};

/// Which server a session shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Server {
    /// Survives promotion, restart and restore of a physical backup; changes with pg_upgrade, dump and restore.
    pub(crate) system: String,
    /// Grows at every promotion.
    pub(crate) timeline: u32,
    /// Start of the server process: two sessions of one relay must agree on it.
    pub(crate) instance: String,
}

/// The mark row: lease, confirmed position and the janitor's fence in one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mark {
    /// What every relay of this outbox writes.
    pub(crate) format: u32,
    pub(crate) source_id: Uuid,
    pub(crate) source: Option<String>,
    pub(crate) source_epoch: i64,
    pub(crate) epoch: i64,
    pub(crate) owner: Option<String>,
    pub(crate) renewal: i64,
    pub(crate) seq: i64,
    /// The confirmed position; `None` = nothing was ever published.
    pub(crate) checkpoint: Option<Checkpoint>,
    pub(crate) cluster_id: Option<String>,
    pub(crate) low_water: i64,
    pub(crate) deleted: Tally,
}

impl Mark {
    /// The highest id that may be deleted, and the row that must stay (`high`: the identity check needs it).
    ///
    /// G2: never past an open gap, never past what is confirmed.
    pub(crate) fn deletable(&self) -> Option<(i64, i64)> {
        let position = &self.checkpoint.as_ref()?.position;
        let oldest_gap = position
            .gaps
            .intervals()
            .first()
            .map_or(i64::MAX, |gap| gap.low);
        let bound = position.high.min(oldest_gap - 1);
        (bound > self.low_water).then_some((bound, position.high))
    }
}

/// The columns of a mark row, before they are understood.
pub(crate) struct RawMark {
    pub(crate) source_id: Uuid,
    pub(crate) source: Option<String>,
    pub(crate) source_epoch: i64,
    pub(crate) format: i32,
    pub(crate) epoch: i64,
    pub(crate) owner: Option<String>,
    pub(crate) renewal: i64,
    pub(crate) position: String,
    pub(crate) seq: i64,
    pub(crate) cluster_id: Option<String>,
    pub(crate) low_water: i64,
    pub(crate) deleted: Tally,
}

impl RawMark {
    /// Understands the row, or refuses it without touching it (G10).
    pub(crate) fn decode(self) -> Result<Mark, Error> {
        let unreadable = |error| Stop::Unreadable {
            place: "mark in the database",
            error,
        };
        let format = u32::try_from(self.format).unwrap_or_default();
        if !(1..=newest_format()).contains(&format) {
            return Err(unreadable(FormatError::Unknown(format!("v{}", self.format))).into());
        }
        let checkpoint = match self.position.as_str() {
            "" => None,
            text => Some(Checkpoint::decode(text).map_err(unreadable)?),
        };
        Ok(Mark {
            format,
            source_id: self.source_id,
            source: self.source,
            source_epoch: self.source_epoch,
            epoch: self.epoch,
            owner: self.owner,
            renewal: self.renewal,
            seq: self.seq,
            checkpoint,
            cluster_id: self.cluster_id,
            low_water: self.low_water,
            deleted: self.deleted,
        })
    }
}

/// The columns of [`RawMark`], in any order.
pub(crate) const MARK_COLUMNS: &str = "source_id, source, source_epoch, format, epoch, owner, renewal, position, seq, cluster_id, \
     low_water, deleted_count, deleted_fingerprint";

/// Reads [`MARK_COLUMNS`] from a row of any database: sqlx's rows share the call, not a usable trait.
macro_rules! raw_mark {
    ($row:expr) => {{
        let row = &$row;
        $crate::session::RawMark {
            source_id: row.try_get("source_id")?,
            source: row.try_get("source")?,
            source_epoch: row.try_get("source_epoch")?,
            format: row.try_get("format")?,
            epoch: row.try_get("epoch")?,
            owner: row.try_get("owner")?,
            renewal: row.try_get("renewal")?,
            position: row.try_get("position")?,
            seq: row.try_get("seq")?,
            cluster_id: row.try_get("cluster_id")?,
            low_water: row.try_get("low_water")?,
            deleted: $crate::position::Tally {
                count: row.try_get("deleted_count")?,
                fingerprint: row.try_get("deleted_fingerprint")?,
            },
        }
    }};
}
use raw_mark;

/// Reads a parked row from a row of any database.
macro_rules! parked_row {
    ($row:expr) => {{
        let row = &$row;
        let (id, message_id, created_at_micros) = (
            row.try_get("id")?,
            row.try_get("message_id")?,
            row.try_get("created")?,
        );
        let bytes = |name: &str| -> Result<Option<bytes::Bytes>, $crate::error::Error> {
            let value: Option<Vec<u8>> = row.try_get(name)?;
            Ok(value.map(bytes::Bytes::from))
        };
        let record = oncebox_kafka::Record {
            topic: row.try_get::<String, _>("topic")?.into(),
            key: bytes("key")?,
            payload: bytes("payload")?,
            headers: bytes("headers")?.unwrap_or_default(),
            envelope: Some(oncebox_kafka::Envelope {
                message_id,
                outbox_id: id,
                created_at_micros,
            }),
        };
        let request: Option<String> = row.try_get("request")?;
        $crate::session::ParkedRow {
            row: $crate::session::Row {
                id,
                message_id,
                created_at_micros,
                record,
            },
            cause: row.try_get::<String, _>("cause")?.parse()?,
            reason: row.try_get("reason")?,
            attempts: row.try_get("attempts")?,
            request: request.map(|word| word.parse()).transpose()?,
            parked_at_micros: row.try_get("parked")?,
        }
    }};
}
use parked_row;

/// Rows of the batch are not in the outbox any more.
fn vanished(wanted: usize, found: u64) -> Error {
    let text = format!(
        "{wanted} rows were read and are to be parked, only {found} of them are still there"
    );
    Stop::BadRow(text).into()
}

fn no_mark() -> Error {
    Error::Migrations("the mark has no row".to_owned())
}

/// An error of the connect: says where, unless the server was there and refused.
fn cannot_connect(config: &Config, error: sqlx::Error) -> Error {
    match Error::from(error) {
        Error::Database(error) => Error::Unreachable(format!("{:?}", config.database), error),
        refused => refused,
    }
}

/// A row of the outbox, ready to be produced.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) id: i64,
    pub(crate) message_id: Uuid,
    pub(crate) created_at_micros: i64,
    pub(crate) record: Record,
}

impl Row {
    pub(crate) fn bytes(&self) -> usize {
        let len = |part: &Option<bytes::Bytes>| part.as_ref().map_or(0, bytes::Bytes::len);
        len(&self.record.key) + len(&self.record.payload) + self.record.headers.len() + 64
    }
}

/// How much one look may return from each half.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit {
    pub(crate) rows: usize,
    pub(crate) bytes: usize,
}

/// One look at the outbox: one snapshot.
#[derive(Debug, Default)]
pub(crate) struct Look {
    /// Rows inside the gaps, ascending.
    pub(crate) late: Vec<Row>,
    pub(crate) late_cut: bool,
    /// Rows above `high`, ascending.
    pub(crate) new: Vec<Row>,
    pub(crate) new_cut: bool,
}

impl Look {
    /// Takes rows one by one, keeps what the limit allows and notes what was cut off.
    pub(crate) fn collector(limit: Limit) -> Collector {
        Collector {
            look: Self::default(),
            limit,
            bytes: 0,
            last: (true, 0),
        }
    }
}

/// Builds a [`Look`]; checks the order that the statement promises.
#[derive(Debug)]
pub(crate) struct Collector {
    look: Look,
    limit: Limit,
    bytes: usize,
    last: (bool, i64),
}

impl Collector {
    /// Whether a row would still be kept; a source may stop reading when not.
    pub(crate) fn push(&mut self, late: bool, row: Row) -> Result<(), Error> {
        let (was_late, last) = self.last;
        if late == was_late && row.id <= last || late && !was_late {
            return Err(Stop::BadRow(format!("row {} came after row {last}", row.id)).into());
        }
        self.last = (late, row.id);
        let full = self.bytes >= self.limit.bytes;
        let (half, cut) = if late {
            (&mut self.look.late, &mut self.look.late_cut)
        } else {
            (&mut self.look.new, &mut self.look.new_cut)
        };
        if full || half.len() >= self.limit.rows {
            *cut = true;
            return Ok(());
        }
        self.bytes += row.bytes();
        half.push(row);
        Ok(())
    }

    pub(crate) fn finish(self) -> Look {
        self.look
    }
}

/// A look at who could still insert.
#[derive(Debug, Clone)]
pub(crate) struct Probe {
    /// Transactions that hold the outbox's insert lock.
    pub(crate) holders: Holders,
    /// The last id that was drawn, 0 before the first.
    pub(crate) last_id: i64,
}

/// Facts about the outbox, all of one snapshot, for the identity check.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) mark: Mark,
    /// Message id of the row at the position's `high`.
    pub(crate) high_message_id: Option<Uuid>,
    /// Whether there is a row at or below `low_water` other than `high`.
    pub(crate) rows_below_low_water: bool,
    /// The rows in (low_water, high], gaps excluded.
    pub(crate) rows: Tally,
    /// The parked rows up to high, gaps and released ids excluded, by message id.
    pub(crate) parked: Tally,
}

/// What a write of the leader met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Written {
    /// Done, now or before (the answer was lost).
    Done,
    /// The mark has another epoch: this relay leads no more.
    Deposed(i64),
}

impl Written {
    /// # Errors
    /// [`Error::Deposed`].
    pub(crate) fn led(self) -> Result<(), Error> {
        match self {
            Self::Done => Ok(()),
            Self::Deposed(epoch) => Err(Error::Deposed(epoch)),
        }
    }
}

/// Which parked rows an operator means; everything that is given must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Only these outbox ids; empty = all.
    pub ids: Vec<i64>,
    /// Only this topic.
    pub topic: Option<String>,
    /// Only this key.
    pub key: Option<bytes::Bytes>,
    /// Only this cause.
    pub cause: Option<Cause>,
}

/// A new position chosen by an operator.
#[derive(Debug, Clone)]
pub(crate) struct Rewrite {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) cluster_id: String,
    pub(crate) source_epoch: i64,
    /// The name of the source.
    pub(crate) source: String,
}

/// What a session does about rows that cannot be published now. As for [`Session`], no method is cancel safe.
pub(crate) trait ParkingSession: Session {
    /// Looks at what is parked and paused.
    fn overview(&mut self) -> impl Future<Output = Result<Overview, Error>> + Send;

    /// What is parked among these rows, and of their keys. `rows` is not empty.
    fn parked_among(&mut self, rows: &[Row]) -> impl Future<Output = Result<Among, Error>> + Send;

    /// Copies outbox rows into the table of parked rows, in one transaction.
    fn park(
        &mut self,
        epoch: i64,
        rows: &[Parking],
    ) -> impl Future<Output = Result<Written, Error>> + Send;

    /// Pauses a topic on the relay's behalf.
    fn pause(
        &mut self,
        epoch: i64,
        topic: &str,
        reason: &str,
    ) -> impl Future<Output = Result<Written, Error>> + Send;

    /// Parked rows up to `high` that nothing holds any more, in id order: their topic and key are not paused, whoever was
    /// refused has been decided upon, and so has every earlier refused row of their key. Given `probe`, of this topic, as
    /// if it were not paused.
    fn releasable(
        &mut self,
        high: i64,
        limit: Limit,
        probe: Option<&str>,
    ) -> impl Future<Output = Result<Vec<ParkedRow>, Error>> + Send;

    /// Kafka refused a parked row again: whatever it waited for, now it waits for a decision.
    fn refuse(
        &mut self,
        epoch: i64,
        id: i64,
        reason: &str,
    ) -> impl Future<Output = Result<Written, Error>> + Send;

    /// Takes the released ids of a committed checkpoint out of the table and writes the checkpoint into the mark, in one
    /// transaction. Repeating it does nothing.
    fn finish_release(
        &mut self,
        epoch: i64,
        checkpoint: &Checkpoint,
        cluster_id: &str,
    ) -> impl Future<Output = Result<Written, Error>> + Send;

    /// Ends the relay's own pause of a topic.
    fn resume_topic(
        &mut self,
        epoch: i64,
        topic: &str,
    ) -> impl Future<Output = Result<Written, Error>> + Send;

    /// What an operator reads: parked rows in id order.
    fn list_parked(
        &mut self,
        filter: &Filter,
        limit: usize,
    ) -> impl Future<Output = Result<Vec<ParkedRow>, Error>> + Send;

    /// What an operator wants done with these parked rows. Returns how many there are.
    fn request(
        &mut self,
        ids: &[i64],
        request: Request,
    ) -> impl Future<Output = Result<u64, Error>> + Send;

    /// An operator pauses a topic or a key of it. `false` = it was paused already, by an operator now.
    fn pause_for_operator(
        &mut self,
        topic: &str,
        key: Option<&[u8]>,
        reason: &str,
    ) -> impl Future<Output = Result<bool, Error>> + Send;

    /// An operator resumes it. `false` = it was not paused.
    fn resume_for_operator(
        &mut self,
        topic: &str,
        key: Option<&[u8]>,
    ) -> impl Future<Output = Result<bool, Error>> + Send;
}

/// One session with the database that holds the outbox.
///
/// No method is cancel safe: a caller that gives up drops the session.
pub(crate) trait Session: Send + Sized + 'static {
    /// One writer at a time: id order is commit order, and a hole stays a hole.
    const GAPLESS: bool;

    /// Opens a session of its own, no pool.
    fn connect(config: &Config) -> impl Future<Output = Result<Self, Error>> + Send;

    /// The server behind this session, asked at connect.
    fn server(&self) -> &Server;

    /// Reads the mark.
    fn mark(&mut self) -> impl Future<Output = Result<Mark, Error>> + Send;

    /// Looks at the holders.
    fn probe(&mut self) -> impl Future<Output = Result<Probe, Error>> + Send;

    /// Looks at the rows in the gaps and above `high`, in one snapshot.
    fn look(
        &mut self,
        gaps: &Gaps,
        high: i64,
        limit: Limit,
    ) -> impl Future<Output = Result<Look, Error>> + Send;

    /// The highest visible id, 0 when there is none.
    fn last_visible(&mut self) -> impl Future<Output = Result<i64, Error>> + Send;

    /// The highest visible id at or below `id`, with its message id.
    fn row_at_or_below(
        &mut self,
        id: i64,
    ) -> impl Future<Output = Result<Option<(i64, Uuid)>, Error>> + Send;

    /// Collects the facts for the identity check of a position.
    fn facts(
        &mut self,
        high: i64,
        gaps: &Gaps,
        released: &Gaps,
    ) -> impl Future<Output = Result<Facts, Error>> + Send;

    /// Takes the lease by compare-and-set on (epoch, renewal). `false` = somebody else was faster or alive.
    fn take(
        &mut self,
        seen: &Mark,
        epoch: i64,
        source: &str,
        owner: &str,
    ) -> impl Future<Output = Result<bool, Error>> + Send;

    /// Shows a sign of life.
    fn renew(&mut self, epoch: i64) -> impl Future<Output = Result<Written, Error>> + Send;

    /// Writes the confirmed position, only forward.
    fn confirm(
        &mut self,
        epoch: i64,
        checkpoint: &Checkpoint,
        cluster_id: &str,
    ) -> impl Future<Output = Result<Written, Error>> + Send;

    /// Gives the lease back, so that a standby need not wait.
    fn release(&mut self, epoch: i64) -> impl Future<Output = Result<Written, Error>> + Send;

    /// Deletes up to `limit` rows that are confirmed and older than `retention`. Returns how many.
    fn clean_up(
        &mut self,
        epoch: i64,
        retention: Duration,
        limit: usize,
    ) -> impl Future<Output = Result<(Written, u64), Error>> + Send;

    /// What a write that changed `rows` rows means. None: either the answer to an earlier try was lost, or somebody
    /// else leads; only the row tells. Written is what has this epoch and at least this `seq`.
    fn written(
        &mut self,
        rows: u64,
        epoch: i64,
        seq: i64,
    ) -> impl Future<Output = Result<Written, Error>> + Send {
        async move {
            if rows == 1 {
                return Ok(Written::Done);
            }
            let mark = self.mark().await?;
            let done = mark.epoch == epoch && mark.seq >= seq;
            Ok(if done {
                Written::Done
            } else {
                Written::Deposed(mark.epoch)
            })
        }
    }

    /// Makes this the format that relays write, from their next start on, if it was an older one.
    fn raise_format(&mut self, format: u32) -> impl Future<Output = Result<(), Error>> + Send;

    /// Writes an operator's position, seq and epoch included, if the epoch is still `epoch`.
    fn rewrite(
        &mut self,
        epoch: i64,
        rewrite: &Rewrite,
    ) -> impl Future<Output = Result<Written, Error>> + Send;
}
