//! What a message may look like. Checked at enqueue, where the caller can still do something about it: a record that the
//! broker refuses later stops its key.

/// Longest topic name, in bytes (Kafka's `Topic.validate`).
pub const TOPIC_BYTES: usize = 249;
/// Longest key, in bytes. Kafka has no limit of its own; tables that keep keys need to index them, and PostgreSQL indexes
/// at most 2 704 bytes.
pub const KEY_BYTES: usize = 2_048;
/// Most headers of one message, besides type and trace context.
pub const HEADERS: usize = 128;
/// Longest header name, in bytes.
pub const HEADER_NAME_BYTES: usize = 255;
/// Longest header value, in bytes.
pub const HEADER_VALUE_BYTES: usize = 32_768;
/// Longest message type, in bytes.
pub const KIND_BYTES: usize = 255;
/// Length of a `traceparent`, in bytes (W3C Trace Context, section 3.2).
pub const TRACEPARENT_BYTES: usize = 55;
/// Longest `tracestate`, in bytes (W3C Trace Context, section 3.3.1.5: 512 must be carried).
pub const TRACESTATE_BYTES: usize = 512;
/// Default of [`Config::max_record_bytes`](crate::Config::max_record_bytes): librdkafka's `message.max.bytes`, below the
/// 1 048 588 of a broker.
pub const DEFAULT_RECORD_BYTES: usize = 1_000_000;
