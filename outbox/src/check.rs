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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::DEFAULT_RECORD_BYTES;

    fn check(message: Message) -> Result<Row, String> {
        row(message, DEFAULT_RECORD_BYTES).map_err(|error| error.to_string())
    }

    fn message() -> Message {
        Message::new("t").payload("p")
    }

    fn refused(message: Message, text: &str) {
        let error = check(message).unwrap_err();
        assert!(error.contains(text), "{error:?} does not say {text:?}");
    }

    #[test]
    fn topic_names_follow_kafkas_rules() {
        let topic = |topic: &str| Message::new(topic).payload("p");
        for good in ["a", "...", "A.b_c-9", "__mine", &"t".repeat(249)] {
            assert!(check(topic(good)).is_ok(), "{good}");
        }
        for bad in [
            "",
            ".",
            "..",
            "a b",
            "a/b",
            "ä",
            "a\n",
            "__consumer_offsets",
        ] {
            refused(topic(bad), "topic");
        }
        refused(
            topic(&"t".repeat(250)),
            "topic: 250 bytes, the limit is 249",
        );
    }

    #[test]
    fn keys_have_a_limit() {
        assert!(check(message().key("")).is_ok());
        assert!(check(message().key(vec![0; 2_048])).is_ok());
        refused(
            message().key(vec![0; 2_049]),
            "key: 2049 bytes, the limit is 2048",
        );
    }

    #[test]
    fn headers_have_rules_and_limits() {
        assert!(check(message().header("Any name: ü", vec![0xff]).null_header("x")).is_ok());
        refused(message().header("", "v"), "header name");
        refused(message().header("a\0", "v"), "control");
        refused(message().header("oncebox-id", "v"), "Oncebox's own");
        refused(message().header("traceparent", "v"), ".traceparent(");
        refused(
            message().header("n".repeat(256), "v"),
            "header name: 256 bytes, the limit is 255",
        );
        refused(
            message().header("tenant", vec![0; 32_769]),
            "value of header \"tenant\": 32769 bytes, the limit is 32768",
        );
        let many = |n| (0..n).fold(message(), |message, _| message.header("n", "v"));
        assert!(check(many(128)).is_ok());
        refused(many(129), "headers: 129 entries, the limit is 128");
    }

    #[test]
    fn a_type_is_readable() {
        refused(message().kind(""), "type");
        refused(message().kind("a\nb"), "type");
        refused(
            message().kind("k".repeat(256)),
            "type: 256 bytes, the limit is 255",
        );
    }

    #[test]
    fn a_trace_context_is_what_w3c_says() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert!(check(message().traceparent(good).tracestate("a=b,c=d")).is_ok());
        for bad in [
            "",
            &good[1..],
            &format!("{good}0"),
            &good.to_uppercase(),
            &good.replace('-', "_"),
            &good.replace("4bf92f", "4bg92f"),
            &good.replacen("00", "ff", 1),
            &good.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            &good.replace("00f067aa0ba902b7", &"0".repeat(16)),
            &good.replace("01", "é"),
        ] {
            refused(message().traceparent(bad), "traceparent");
        }
        refused(message().tracestate("a=b"), "no traceparent");
        let message = || message().traceparent(good);
        refused(message().tracestate(""), "tracestate");
        refused(message().tracestate("a=ü"), "tracestate");
        refused(
            message().tracestate("a".repeat(513)),
            "tracestate: 513 bytes, the limit is 512",
        );
    }

    #[test]
    fn a_payload_or_a_tombstone_is_needed() {
        refused(Message::new("t").key("k"), "no payload");
        refused(Message::new("t").tombstone(), "no key");
        assert_eq!(
            check(Message::new("t").key("k").tombstone())
                .unwrap()
                .payload,
            None
        );
        assert_eq!(check(message().payload("")).unwrap().payload, Some(vec![]));
    }

    #[test]
    fn the_record_is_measured_as_it_goes_over_the_wire() {
        let message = |payload: usize| {
            Message::new("t")
                .key("key")
                .payload(vec![0; payload])
                .header("name", "value")
                .null_header("n")
        };
        let rest = ADDED_BYTES + 3 + (4 + 5 + HEADER_LENGTHS) + (1 + HEADER_LENGTHS);
        assert!(row(message(5_000 - rest), 5_000).is_ok());
        let error = row(message(5_001 - rest), 5_000).unwrap_err().to_string();
        assert_eq!(error, "encoded record: 5001 bytes, the limit is 5000");
    }

    #[test]
    fn the_envelope_fits_its_allowance() {
        let names = [
            "oncebox-v",
            "oncebox-id",
            "oncebox-source",
            "oncebox-epoch",
            "oncebox-outbox-id",
            "oncebox-created-at",
        ];
        assert_eq!(names.iter().map(|name| name.len()).sum::<usize>(), 81);
        let values =
            1 + 36 + 100 + 2 * i64::MAX.to_string().len() + "2026-11-29T20:21:53.123456Z".len();
        assert_eq!(values, 202);
    }

    #[test]
    fn contents_stay_out_of_debug_output() {
        let message = message()
            .key("secret-key")
            .payload("secret")
            .header("secret-name", "secret");
        let text = format!("{message:?}");
        assert!(
            !text.contains("secret") && text.contains("payload_bytes: Some(6)"),
            "{text}"
        );
    }
}
