//! The checks of [`limits`](crate::limits). Pure: a message in, an encoded row or an error out.

use oncebox_migrations::headers;

use crate::limits::{
    HEADER_NAME_BYTES, HEADER_VALUE_BYTES, HEADERS, KEY_BYTES, KIND_BYTES, TOPIC_BYTES,
    TRACEPARENT_BYTES, TRACESTATE_BYTES,
};
use crate::message::Body;
use crate::{Error, Message, MessageId};

/// Names of headers that only Oncebox writes.
const RESERVED: &str = "oncebox-";
const KIND: &str = "oncebox-type";
const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";

/// Topics of Kafka's own: a broker refuses records for them.
const INTERNAL_TOPICS: [&str; 4] = [
    "__consumer_offsets",
    "__transaction_state",
    "__share_group_state",
    "__cluster_metadata",
];

/// Upper bound of what the relay and the record format add to a record that is alone in its batch: the batch header (61),
/// the record's own fields (36), and the six headers `oncebox-v`, `-id`, `-source`, `-epoch`, `-outbox-id`,
/// `-created-at` (81 bytes of names, 1 + 36 + 100 + 19 + 19 + 27 of values, 10 of lengths each).
const ADDED_BYTES: usize = 61 + 36 + 81 + 202 + 6 * HEADER_LENGTHS;
/// Upper bound of the two length fields of a header in a record (varints of 32 bits).
const HEADER_LENGTHS: usize = 10;

/// A checked message, as the outbox stores it.
#[derive(Debug)]
pub struct Row {
    pub(crate) id: MessageId,
    pub(crate) topic: String,
    pub(crate) key: Option<Vec<u8>>,
    /// `None` is a tombstone.
    pub(crate) payload: Option<Vec<u8>>,
    pub(crate) headers: Vec<u8>,
}

/// Checks a message and encodes its headers.
pub(crate) fn row(message: Message, max_record_bytes: usize) -> Result<Row, Error> {
    check_topic(&message.topic)?;
    if let Some(key) = &message.key {
        check_len("key", key.len(), KEY_BYTES)?;
    }
    let headers = encode_headers(&message)?;
    let payload = match message.body {
        Body::Payload(payload) => Some(payload),
        Body::Tombstone if message.key.is_some() => None,
        Body::Tombstone => {
            return Err(Error::Missing {
                field: "key",
                rule: "a tombstone deletes a key; call .key(…)",
            });
        }
        Body::Unset => {
            return Err(Error::Missing {
                field: "payload",
                rule: "call .payload(…), or .tombstone() to delete the key in a compacted topic",
            });
        }
    };
    let record = ADDED_BYTES
        + message.key.as_ref().map_or(0, Vec::len)
        + payload.as_ref().map_or(0, Vec::len)
        + headers.record_bytes;
    check_len("encoded record", record, max_record_bytes)?;
    Ok(Row {
        id: MessageId::new(),
        topic: message.topic,
        key: message.key,
        payload,
        headers: headers.list,
    })
}

/// Kafka's rules for topic names (`org.apache.kafka.common.internals.Topic.validate`).
fn check_topic(topic: &str) -> Result<(), Error> {
    check_len("topic", topic.len(), TOPIC_BYTES)?;
    let rule = if topic.is_empty() {
        "it must not be empty"
    } else if topic == "." || topic == ".." {
        "a topic is not called . or .."
    } else if !topic
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
    {
        "a topic has only a-z, A-Z, 0-9, '.', '_' and '-'"
    } else if INTERNAL_TOPICS.contains(&topic) {
        "the topic is Kafka's own"
    } else {
        return Ok(());
    };
    Err(invalid("topic", topic, rule))
}

struct Headers {
    list: Vec<u8>,
    /// Upper bound of their share of the record.
    record_bytes: usize,
}

/// The stored list: type, trace context, then the caller's headers in their order.
fn encode_headers(message: &Message) -> Result<Headers, Error> {
    let mut headers = Headers {
        list: Vec::new(),
        record_bytes: 0,
    };
    if let Some(kind) = &message.kind {
        check_len("type", kind.len(), KIND_BYTES)?;
        if kind.is_empty() || kind.chars().any(char::is_control) {
            return Err(invalid(
                "type",
                kind,
                "it must not be empty or contain control characters",
            ));
        }
        push(&mut headers, KIND, Some(kind.as_bytes()))?;
    }
    if let Some(traceparent) = &message.traceparent {
        check_traceparent(traceparent)?;
        push(&mut headers, TRACEPARENT, Some(traceparent.as_bytes()))?;
    }
    if let Some(tracestate) = &message.tracestate {
        check_len("tracestate", tracestate.len(), TRACESTATE_BYTES)?;
        if tracestate.is_empty() || !tracestate.bytes().all(|b| matches!(b, b' '..=b'~')) {
            return Err(invalid(
                "tracestate",
                tracestate,
                "it is printable ASCII and not empty",
            ));
        }
        if message.traceparent.is_none() {
            return Err(Error::Missing {
                field: "traceparent",
                rule: "a tracestate means nothing without it; call .traceparent(…)",
            });
        }
        push(&mut headers, TRACESTATE, Some(tracestate.as_bytes()))?;
    }
    if message.headers.len() > HEADERS {
        return Err(limit("headers", "entries", HEADERS, message.headers.len()));
    }
    for (name, value) in &message.headers {
        check_header_name(name)?;
        if let Some(value) = value {
            check_len(
                format!("value of header {name:?}"),
                value.len(),
                HEADER_VALUE_BYTES,
            )?;
        }
        push(&mut headers, name, value.as_deref())?;
    }
    Ok(headers)
}

fn check_header_name(name: &str) -> Result<(), Error> {
    check_len("header name", name.len(), HEADER_NAME_BYTES)?;
    let rule = if name.is_empty() {
        "it must not be empty"
    } else if name.chars().any(char::is_control) {
        "it must not contain control characters"
    } else if name.starts_with(RESERVED) {
        "names that start with oncebox- are Oncebox's own"
    } else if name == TRACEPARENT || name == TRACESTATE {
        "call .traceparent(…) and .tracestate(…)"
    } else {
        return Ok(());
    };
    Err(invalid("header name", name, rule))
}

/// W3C Trace Context, section 3.2: `version-traceid-spanid-flags`, lower-case hex, version not `ff`, ids not all zero.
fn check_traceparent(value: &str) -> Result<(), Error> {
    let bytes = value.as_bytes();
    let zero = |range: std::ops::Range<usize>| bytes[range].iter().all(|b| *b == b'0');
    let rule = if bytes.len() != TRACEPARENT_BYTES {
        "a traceparent has 55 characters"
    } else if !bytes.iter().enumerate().all(|(i, b)| match i {
        2 | 35 | 52 => *b == b'-',
        _ => matches!(b, b'0'..=b'9' | b'a'..=b'f'),
    }) {
        "a traceparent is lower-case hex: version-traceid-spanid-flags"
    } else if value.starts_with("ff") {
        "version ff does not exist"
    } else if zero(3..35) {
        "the trace id must not be all zero"
    } else if zero(36..52) {
        "the span id must not be all zero"
    } else {
        return Ok(());
    };
    Err(invalid("traceparent", value, rule))
}

fn push(headers: &mut Headers, name: &str, value: Option<&[u8]>) -> Result<(), Error> {
    headers.record_bytes += HEADER_LENGTHS + name.len() + value.map_or(0, <[u8]>::len);
    // The limits are below what the format can hold.
    headers::push(&mut headers.list, name, value)
        .map_err(|_| invalid("header", name, "it does not fit the format"))
}

fn check_len(field: impl Into<String>, actual: usize, most: usize) -> Result<(), Error> {
    if actual > most {
        return Err(limit(field, "bytes", most, actual));
    }
    Ok(())
}

fn limit(field: impl Into<String>, unit: &'static str, limit: usize, actual: usize) -> Error {
    Error::Limit {
        field: field.into(),
        unit,
        limit,
        actual,
    }
}

fn invalid(field: &str, value: &str, rule: &'static str) -> Error {
    Error::Invalid {
        field: field.into(),
        value: value.chars().take(100).collect(),
        rule,
    }
}
