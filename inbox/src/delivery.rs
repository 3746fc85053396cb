//! One delivered message, as the handler sees it.

use std::sync::Arc;

use bytes::Bytes;
use oncebox_kafka::Headers;
use oncebox_kafka::envelope::{self, EnvelopeError};
use serde::de::DeserializeOwned;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::error::Error;
use crate::foreign::{self, ForeignId};
use crate::handler::HandlerError;

/// One delivery of one message. Cloning is cheap: the bytes are shared.
///
/// A message can be delivered many times; its handler's effect commits once.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Delivery {
    /// Topic.
    pub topic: Arc<str>,
    /// Partition of the topic.
    pub partition: i32,
    /// Offset in the partition.
    pub offset: i64,
    /// Kafka's timestamp of the record, in milliseconds since the Unix epoch.
    pub timestamp_ms: Option<i64>,
    /// Key.
    pub key: Option<Bytes>,
    /// Payload; `None` is a tombstone.
    pub payload: Option<Bytes>,
    /// All headers of the record in their order, the envelope's included.
    pub headers: Headers,
    /// The message's identity: from the envelope, or as [`ForeignId`] says.
    pub message_id: Uuid,
    /// Epoch of the outbox it came from: raised when its ids may be issued twice.
    pub source_epoch: Option<i64>,
    /// The message's id in that outbox.
    pub outbox_id: Option<i64>,
    /// When the message was enqueued.
    pub created_at: Option<OffsetDateTime>,
    /// Which attempt at this message this is, from 1. Attempts that were written down count on after a restart or a rebalance;
    /// those that follow each other within half a second, and calls among other messages of a batch, do not count.
    pub attempt: u32,
}

impl Delivery {
    /// The payload parsed as JSON.
    ///
    /// # Errors
    ///
    /// [`HandlerError::Fatal`] when the payload is missing or does not parse: the message would never parse, so it is a dead
    /// letter and not a loop.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, HandlerError> {
        let payload = self
            .payload
            .as_deref()
            .ok_or_else(|| HandlerError::fatal("a tombstone has no payload to parse"))?;
        Ok(serde_json::from_slice(payload)?)
    }

    /// The value of the first header of this name.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        self.headers.get(name)
    }

    /// The message's type, as given to `Message::kind` when it was enqueued.
    #[must_use]
    pub fn kind(&self) -> Option<&str> {
        self.text("oncebox-type")
    }

    /// Name of the outbox it came from.
    #[must_use]
    pub fn source(&self) -> Option<&str> {
        self.text("oncebox-source")
    }

    /// W3C trace context of the transaction that enqueued it.
    #[must_use]
    pub fn traceparent(&self) -> Option<&str> {
        self.text("traceparent")
    }

    /// W3C trace state.
    #[must_use]
    pub fn tracestate(&self) -> Option<&str> {
        self.text("tracestate")
    }

    fn text(&self, name: &str) -> Option<&str> {
        std::str::from_utf8(self.header(name)?).ok()
    }
}

/// What a record turned out to be.
#[derive(Debug)]
pub(crate) enum Identified {
    /// A message with an identity.
    Known,
    /// A record that must not be handled; a dead letter, under an id made from its place.
    Unusable(String),
    /// An envelope version this build does not know ([`Error::UnknownEnvelope`]). That is a deployment in the wrong order and
    /// not a poison message: it stops the consumer, so that a whole topic does not end up in the dead-letter table.
    Stop(Box<Error>),
}

/// Gives a record its identity.
pub(crate) fn identify(
    message: oncebox_kafka::Message,
    topic_id: &str,
    policy: &ForeignId,
) -> (Delivery, Identified) {
    let mut delivery = Delivery {
        timestamp_ms: (message.timestamp_ms >= 0).then_some(message.timestamp_ms),
        message_id: Uuid::nil(),
        source_epoch: None,
        outbox_id: None,
        created_at: None,
        attempt: 1,
        topic: message.topic,
        partition: message.partition,
        offset: message.offset,
        key: message.key,
        payload: message.payload,
        headers: message.headers,
    };
    let headers = delivery.headers.clone();
    let by_place = |d: &Delivery| foreign::by_place(topic_id, d.partition, d.offset);
    let identified = match envelope::decode(&headers) {
        Ok(Some(decoded)) => {
            delivery.message_id = decoded.message_id;
            delivery.source_epoch = Some(decoded.source_epoch);
            delivery.outbox_id = Some(decoded.outbox_id);
            delivery.created_at = OffsetDateTime::from_unix_timestamp_nanos(
                i128::from(decoded.created_at_micros) * 1_000,
            )
            .ok();
            return (delivery, Identified::Known);
        }
        Ok(None) => match policy {
            ForeignId::PartitionOffset => Identified::Known,
            ForeignId::Header(name) => {
                if let Some(value) = delivery.header(name) {
                    delivery.message_id = foreign::by_header(name, value);
                    return (delivery, Identified::Known);
                }
                Identified::Unusable(format!(
                    "no Oncebox envelope and no header `{name}` to know the message by"
                ))
            }
            ForeignId::Refuse => Identified::Unusable(
                "no Oncebox envelope, and messages without one are refused here".to_owned(),
            ),
        },
        Err(problem @ EnvelopeError::UnknownVersion { .. }) => {
            Identified::Stop(Box::new(Error::UnknownEnvelope {
                topic: delivery.topic.to_string(),
                partition: delivery.partition,
                offset: delivery.offset,
                problem: problem.to_string(),
            }))
        }
        Err(problem) => Identified::Unusable(problem.to_string()),
    };
    delivery.message_id = by_place(&delivery);
    (delivery, identified)
}
