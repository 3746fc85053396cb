//! What is enqueued.

use std::fmt;

use serde::Serialize;
use uuid::Uuid;

use crate::Error;

/// A message for Kafka: topic, key, payload or tombstone, headers, type and trace context.
///
/// Nothing is checked while it is built; [`enqueue`](crate::Outbox::enqueue) checks everything ([`limits`](crate::limits)).
/// A message needs a topic, and a payload or a tombstone. Messages with the same topic and key are kept in order.
///
/// ```
/// use oncebox_outbox::Message;
///
/// let message = Message::new("orders")
///     .key("order-17")
///     .payload(r#"{"paid":true}"#)
///     .kind("order.paid")
///     .header("tenant", "42");
/// # let _ = message;
/// ```
#[derive(Clone, PartialEq, Eq)]
#[must_use = "a message does nothing until it is enqueued"]
pub struct Message {
    pub(crate) topic: String,
    pub(crate) key: Option<Vec<u8>>,
    pub(crate) body: Body,
    pub(crate) kind: Option<String>,
    pub(crate) traceparent: Option<String>,
    pub(crate) tracestate: Option<String>,
    pub(crate) headers: Vec<(String, Option<Vec<u8>>)>,
}

/// What the record's value will be. An empty payload is a value of its own and no tombstone.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Body {
    Unset,
    Tombstone,
    Payload(Vec<u8>),
}

impl Message {
    /// A message for `topic`, without key, payload and headers.
    pub fn new(topic: impl Into<String>) -> Self {
        Self {
            topic: topic.into(),
            key: None,
            body: Body::Unset,
            kind: None,
            traceparent: None,
            tracestate: None,
            headers: Vec::new(),
        }
    }

    /// A message whose payload is `payload` as JSON. The key is the text that `key` displays.
    ///
    /// ```
    /// # use oncebox_outbox::Message;
    /// #[derive(serde::Serialize)]
    /// struct OrderPaid { order: u64, amount: u64 }
    ///
    /// let message = Message::json("orders", 17, &OrderPaid { order: 17, amount: 250 })?;
    /// # let _ = message;
    /// # Ok::<(), oncebox_outbox::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Json`] when the value cannot be serialised.
    pub fn json<T: Serialize + ?Sized>(
        topic: impl Into<String>,
        key: impl fmt::Display,
        payload: &T,
    ) -> Result<Self, Error> {
        let payload = serde_json::to_vec(payload).map_err(Error::Json)?;
        Ok(Self::new(topic).key(key.to_string()).payload(payload))
    }

    /// The record's key: decides the partition, and is the unit of order. An empty key is a key.
    pub fn key(mut self, key: impl Into<Vec<u8>>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// The record's value. May be empty; an empty value is no tombstone.
    pub fn payload(mut self, payload: impl Into<Vec<u8>>) -> Self {
        self.body = Body::Payload(payload.into());
        self
    }

    /// The record's value is null: in a compacted topic, "the key is deleted". Needs a key.
    pub fn tombstone(mut self) -> Self {
        self.body = Body::Tombstone;
        self
    }

    /// Appends a header. Names may repeat, as in Kafka; those that start with `oncebox-` are Oncebox's own.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<Vec<u8>>) -> Self {
        self.headers.push((name.into(), Some(value.into())));
        self
    }

    /// Appends a header whose value is null.
    pub fn null_header(mut self, name: impl Into<String>) -> Self {
        self.headers.push((name.into(), None));
        self
    }

    /// The message's type, for example `order.paid` (header `oncebox-type`).
    pub fn kind(mut self, kind: impl Into<String>) -> Self {
        self.kind = Some(kind.into());
        self
    }

    /// The W3C trace context of the business transaction: 55 characters, version-traceid-spanid-flags.
    pub fn traceparent(mut self, traceparent: impl Into<String>) -> Self {
        self.traceparent = Some(traceparent.into());
        self
    }

    /// The vendor part of the W3C trace context. Needs a [`traceparent`](Self::traceparent).
    pub fn tracestate(mut self, tracestate: impl Into<String>) -> Self {
        self.tracestate = Some(tracestate.into());
        self
    }
}

/// Sizes instead of contents: key, payload and headers are the user's data and stay out of logs.
impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let payload_bytes = match &self.body {
            Body::Payload(payload) => Some(payload.len()),
            Body::Tombstone | Body::Unset => None,
        };
        f.debug_struct("Message")
            .field("topic", &self.topic)
            .field("kind", &self.kind)
            .field("key_bytes", &self.key.as_ref().map(Vec::len))
            .field("payload_bytes", &payload_bytes)
            .field("headers", &self.headers.len())
            .finish_non_exhaustive()
    }
}

/// The identity of a message, a UUIDv7 made at enqueue. It never changes, however often the message is published, and is
/// what a consumer deduplicates by. Ids grow with time within one process; no order between processes follows from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MessageId(Uuid);

impl MessageId {
    pub(crate) fn new() -> Self {
        Self(Uuid::now_v7())
    }

    /// The id as a UUID.
    #[must_use]
    pub fn as_uuid(&self) -> Uuid {
        self.0
    }
}

impl From<MessageId> for Uuid {
    fn from(id: MessageId) -> Self {
        id.0
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
