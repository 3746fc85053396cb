//! What goes into one transaction.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use uuid::Uuid;

/// One record to publish.
#[derive(Clone, Debug)]
pub struct Record {
    /// Kafka topic.
    pub topic: Arc<str>,
    /// Key; decides the partition as Java's default partitioner does. Without one the record goes
    /// anywhere.
    pub key: Option<Bytes>,
    /// Payload; `None` is a tombstone.
    pub payload: Option<Bytes>,
    /// Headers as stored in the outbox: the list encoded by `oncebox_migrations::headers`. Empty =
    /// none.
    pub headers: Bytes,
    /// The envelope's fields; `None` publishes without the `oncebox-` headers. Needs
    /// [`Transaction::source`].
    pub envelope: Option<Envelope>,
}

/// The fields of envelope v1 that differ from record to record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The message's id, given by the producer of the message.
    pub message_id: Uuid,
    /// Id of the outbox row.
    pub outbox_id: i64,
    /// When the row was written, in microseconds since the Unix epoch.
    pub created_at_micros: i64,
}

/// The fields of envelope v1 that are the same for a whole relay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTag {
    /// Name of the source (the relay's `--source`).
    pub source: Arc<str>,
    /// Epoch of the source: raised when outbox ids may be issued twice.
    pub epoch: i64,
}

/// A group offset that is committed by the transaction: the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offsets {
    /// Synthetic consumer group, which has no members.
    pub group: String,
    /// Topic; it must exist.
    pub topic: String,
    /// Partition of the topic.
    pub partition: i32,
    /// Any number ≥ 0; the broker does not compare it with the log.
    pub offset: i64,
    /// Free text, by default at most 4 096 bytes (the broker's `offset.metadata.max.bytes`).
    pub metadata: String,
}

/// Stands for the place of [`Transaction::anchor`] in [`Offsets::metadata`].
pub const ANCHOR: &str = "{anchor}";

/// One Kafka transaction: the records and the checkpoint become visible together or not at all
/// (G3).
#[derive(Clone, Debug, Default)]
pub struct Transaction {
    /// The relay's part of the envelope.
    pub source: Option<SourceTag>,
    /// Records, produced in this order.
    pub records: Vec<Record>,
    /// The checkpoint. With no records this is an offsets-only transaction.
    pub offsets: Option<Offsets>,
    /// Written and acknowledged before anything else; its `partition:offset` takes the place of [`ANCHOR`] in the checkpoint's
    /// metadata. For what does not fit into the metadata. Defaults to none.
    pub anchor: Option<Record>,
    /// Waits for the acknowledgements after so many records, so that no batch on the wire has more: a topic may refuse a
    /// batch for its size although it takes each record. Defaults to none: librdkafka's `batch.size` decides.
    pub records_per_batch: Option<NonZeroUsize>,
    /// Its deadline, if it is to be shorter than the producer's (four fifths of the transaction time-out). Defaults to none.
    pub timeout: Option<Duration>,
    /// Aborts instead of committing once every record is acknowledged: shows what the brokers think of the records, and
    /// no `read_committed` reader sees any. Defaults to no.
    pub rehearsal: bool,
}
