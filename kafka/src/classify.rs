//! What an error of librdkafka means: pure tables, one for transactional calls, one for delivery
//! reports, one for the words.
//!
//! Sources: `rdkafka.h` (transactional producer API), librdkafka's `INTRODUCTION.md`, and
//! measurements against its mock cluster and Apache Kafka 4.1.

use crate::error::Error;
use crate::sys::Code;

/// What librdkafka says about a failed transactional call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flags {
    pub(crate) fatal: bool,
    pub(crate) abortable: bool,
    pub(crate) retriable: bool,
}

/// What to do after a failed transactional call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Make the same call again, until the transaction's deadline.
    CallAgain,
    /// Abort; the producer can go on.
    Abort,
    /// Destroy the producer and create it anew; the checkpoint decides.
    Rebuild,
}

/// The answer to a failed transactional call. `client_is_dead`: the client has raised a fatal error
/// at some time, which is looked at before anything else.
pub(crate) fn transactional(flags: Flags, client_is_dead: bool) -> Action {
    if client_is_dead || flags.fatal {
        Action::Rebuild
    } else if flags.abortable {
        Action::Abort
    } else if flags.retriable {
        Action::CallAgain
    } else {
        // rdkafka.h: an error without any of the three flags is to be treated as fatal.
        Action::Rebuild
    }
}

/// What a delivery report says about its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// The record, or one of its batch, will never be accepted.
    Refused,
    /// The topic is missing, forbidden or unable to take such records.
    Topic,
    /// The producer is fenced.
    Fenced,
    /// The record is innocent: it shared the fate of its batch, or we purged it by aborting.
    Bystander,
    /// Time-out, connection, replicas: may succeed another time. Never a reason to park.
    Transient,
}

pub(crate) fn delivery(code: Code) -> Delivery {
    match code {
        Code::MSG_SIZE_TOO_LARGE
        | Code::RECORD_LIST_TOO_LARGE
        | Code::INVALID_MSG_SIZE
        | Code::INVALID_TIMESTAMP
        | Code::INVALID_RECORD => Delivery::Refused,
        Code::UNKNOWN_TOPIC_OR_PART
        | Code::LOCAL_UNKNOWN_TOPIC
        | Code::LOCAL_UNKNOWN_PARTITION
        | Code::TOPIC_EXCEPTION
        | Code::TOPIC_AUTHORIZATION_FAILED
        | Code::UNSUPPORTED_FOR_MESSAGE_FORMAT
        | Code::UNSUPPORTED_COMPRESSION_TYPE
        | Code::POLICY_VIOLATION => Delivery::Topic,
        Code::LOCAL_FENCED | Code::PRODUCER_FENCED | Code::INVALID_PRODUCER_EPOCH => {
            Delivery::Fenced
        }
        Code::LOCAL_PURGE_QUEUE
        | Code::LOCAL_PURGE_INFLIGHT
        | Code::LOCAL_INVALID_DIFFERENT_RECORD => Delivery::Bystander,
        _ => Delivery::Transient,
    }
}

/// Whether a refusal is about size, so that the largest record of the batch is the likely one.
pub(crate) fn is_about_size(code: Code) -> bool {
    matches!(
        code,
        Code::MSG_SIZE_TOO_LARGE | Code::RECORD_LIST_TOO_LARGE | Code::INVALID_MSG_SIZE
    )
}

/// Whether an event of the client says that the broker refuses us: credentials or TLS. Waiting does
/// not help.
pub(crate) fn is_refused_connection(code: Code) -> bool {
    matches!(
        code,
        Code::LOCAL_AUTHENTICATION
            | Code::LOCAL_SSL
            | Code::SASL_AUTHENTICATION_FAILED
            | Code::UNSUPPORTED_SASL_MECHANISM
            | Code::ILLEGAL_SASL_STATE
    )
}

/// The code of an event of the client, put right: a connection that ends during the SASL handshake is reported as a
/// refusal, with librdkafka's own error (`Local: …`) where the broker's would be.
pub(crate) fn event(code: Code, reason: &str) -> Code {
    if code == Code::LOCAL_AUTHENTICATION && reason.contains("handshake failed: Local: ") {
        Code::LOCAL_TRANSPORT
    } else {
        code
    }
}

/// The words for an error: the variant that names the remedy, or the plain one.
pub(crate) fn describe(
    operation: &str,
    code: Code,
    reason: &str,
    flags: Flags,
    bootstrap: &str,
    topic: Option<&str>,
) -> Error {
    let remedy = match code {
        Code::TOPIC_AUTHORIZATION_FAILED => Some(
            "grant this principal DESCRIBE and WRITE (relay) or READ (consumer) on the topic, and CREATE if it is to be created",
        ),
        Code::GROUP_AUTHORIZATION_FAILED => Some("grant this principal READ on the consumer group"),
        Code::TRANSACTIONAL_ID_AUTHORIZATION_FAILED => {
            Some("grant this principal DESCRIBE and WRITE on the transactional id")
        }
        Code::CLUSTER_AUTHORIZATION_FAILED => {
            Some("grant this principal the operation on the cluster")
        }
        _ => None,
    };
    let operation = match topic {
        Some(topic) if code == Code::TOPIC_AUTHORIZATION_FAILED => {
            format!("{operation} (topic {topic})")
        }
        _ => operation.to_owned(),
    };
    let reason = match code {
        Code::INCONSISTENT_GROUP_PROTOCOL => format!(
            "{reason}: the group has members with another assignment strategy than cooperative-sticky; stop those, and this one joins by itself"
        ),
        _ => reason.to_owned(),
    };
    if let Some(remedy) = remedy {
        return Error::Authorization {
            operation,
            code: code.name(),
            reason,
            remedy,
        };
    }
    if is_refused_connection(code) {
        return Error::Authentication {
            bootstrap: bootstrap.to_owned(),
            reason,
        };
    }
    match code {
        Code::LOCAL_FENCED | Code::PRODUCER_FENCED | Code::INVALID_PRODUCER_EPOCH => {
            Error::Fenced { operation, reason }
        }
        Code::LOCAL_ALL_BROKERS_DOWN | Code::LOCAL_TRANSPORT | Code::LOCAL_RESOLVE => {
            Error::Unreachable {
                bootstrap: bootstrap.to_owned(),
                reason,
            }
        }
        Code::UNKNOWN_TOPIC_OR_PART | Code::LOCAL_UNKNOWN_TOPIC | Code::LOCAL_UNKNOWN_PARTITION
            if topic.is_some() =>
        {
            Error::UnknownTopic {
                topic: topic.unwrap_or_default().to_owned(),
            }
        }
        _ => Error::Kafka {
            operation,
            code: code.name(),
            reason,
            retriable: flags.retriable || is_transient(code),
            fatal: flags.fatal || code == Code::LOCAL_FATAL,
        },
    }
}

/// Errors that go away by themselves.
fn is_transient(code: Code) -> bool {
    matches!(
        code,
        Code::LOCAL_TIMED_OUT
            | Code::LOCAL_TIMED_OUT_QUEUE
            | Code::LOCAL_MSG_TIMED_OUT
            | Code::LOCAL_WAIT_COORD
            | Code::LOCAL_MAX_POLL_EXCEEDED
            | Code::LEADER_NOT_AVAILABLE
            | Code::NOT_LEADER_FOR_PARTITION
            | Code::REQUEST_TIMED_OUT
            | Code::BROKER_NOT_AVAILABLE
            | Code::NETWORK_EXCEPTION
            | Code::COORDINATOR_LOAD_IN_PROGRESS
            | Code::COORDINATOR_NOT_AVAILABLE
            | Code::NOT_COORDINATOR
            | Code::NOT_ENOUGH_REPLICAS
            | Code::NOT_ENOUGH_REPLICAS_AFTER_APPEND
            | Code::REBALANCE_IN_PROGRESS
            | Code::ILLEGAL_GENERATION
            | Code::UNKNOWN_MEMBER_ID
            | Code::NOT_CONTROLLER
            | Code::OUT_OF_ORDER_SEQUENCE_NUMBER
            | Code::CONCURRENT_TRANSACTIONS
            | Code::UNSTABLE_OFFSET_COMMIT
            | Code::THROTTLING_QUOTA_EXCEEDED
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_of_flags_has_one_answer() {
        let table = [
            // fatal, abortable, retriable, client is dead
            ((false, false, false, false), Action::Rebuild),
            ((false, false, true, false), Action::CallAgain),
            ((false, true, false, false), Action::Abort),
            ((false, true, true, false), Action::Abort),
            ((true, false, false, false), Action::Rebuild),
            ((true, false, true, false), Action::Rebuild),
            ((true, true, false, false), Action::Rebuild),
            ((true, true, true, false), Action::Rebuild),
            ((false, false, false, true), Action::Rebuild),
            ((false, false, true, true), Action::Rebuild),
            ((false, true, false, true), Action::Rebuild),
            ((false, true, true, true), Action::Rebuild),
        ];
        for ((fatal, abortable, retriable, dead), expected) in table {
            let flags = Flags {
                fatal,
                abortable,
                retriable,
            };
            assert_eq!(
                transactional(flags, dead),
                expected,
                "{flags:?} dead={dead}"
            );
        }
    }

    #[test]
    fn only_size_and_invalid_records_are_refusals() {
        for code in [
            Code::MSG_SIZE_TOO_LARGE,
            Code::RECORD_LIST_TOO_LARGE,
            Code::INVALID_MSG_SIZE,
            Code::INVALID_RECORD,
            Code::INVALID_TIMESTAMP,
        ] {
            assert_eq!(delivery(code), Delivery::Refused, "{}", code.name());
        }
        for code in [
            Code::LOCAL_MSG_TIMED_OUT,
            Code::LOCAL_TIMED_OUT,
            Code::LOCAL_TRANSPORT,
            Code::REQUEST_TIMED_OUT,
            Code::NOT_ENOUGH_REPLICAS,
            Code::NOT_ENOUGH_REPLICAS_AFTER_APPEND,
            Code::NOT_LEADER_FOR_PARTITION,
            Code::OUT_OF_ORDER_SEQUENCE_NUMBER,
            Code::LOCAL_ALL_BROKERS_DOWN,
            Code(12_345),
            Code(-9_999),
        ] {
            assert_eq!(
                delivery(code),
                Delivery::Transient,
                "{}: a dead broker must not park a record",
                code.name()
            );
        }
        assert_eq!(delivery(Code::TOPIC_AUTHORIZATION_FAILED), Delivery::Topic);
        assert_eq!(delivery(Code::LOCAL_UNKNOWN_TOPIC), Delivery::Topic);
        assert_eq!(delivery(Code::LOCAL_PURGE_QUEUE), Delivery::Bystander);
        assert_eq!(
            delivery(Code::LOCAL_INVALID_DIFFERENT_RECORD),
            Delivery::Bystander
        );
        assert_eq!(delivery(Code::INVALID_PRODUCER_EPOCH), Delivery::Fenced);
    }

    #[test]
    fn errors_name_their_remedy() {
        let say = |code| {
            describe(
                "op",
                code,
                "because",
                Flags::default(),
                "b:9092",
                Some("orders"),
            )
            .to_string()
        };
        assert!(say(Code::TOPIC_AUTHORIZATION_FAILED).contains("on the topic"));
        assert!(say(Code::GROUP_AUTHORIZATION_FAILED).contains("READ on the consumer group"));
        assert!(
            say(Code::TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
                .contains("WRITE on the transactional id")
        );
        assert!(say(Code::LOCAL_AUTHENTICATION).contains("kafka.sasl"));
        assert!(say(Code::LOCAL_ALL_BROKERS_DOWN).contains("b:9092"));
        assert!(say(Code::UNKNOWN_TOPIC_OR_PART).contains("--create --topic orders"));
        let fenced = describe("op", Code::LOCAL_FENCED, "x", Flags::default(), "b", None);
        assert!(fenced.is_fenced() && fenced.is_fatal() && !fenced.is_retriable());
        let timeout = describe(
            "op",
            Code::LOCAL_TIMED_OUT,
            "x",
            Flags::default(),
            "b",
            None,
        );
        assert!(timeout.is_retriable() && !timeout.is_fatal());
    }
}
