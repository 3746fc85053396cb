//! Which record or topic made a transaction fail, from the delivery reports: pure.

use std::collections::BTreeMap;

use crate::classify::{self, Delivery};
use crate::record::Record;
use crate::sys::{CallError, Code, FailedRecord};
use crate::transact_error::{Cause, Refused};

/// A refusal or a topic's trouble, if the reports contain one.
pub(crate) fn from_reports(failures: &[FailedRecord], records: &[Record]) -> Option<Cause> {
    let refused = failures
        .iter()
        .find(|f| classify::delivery(f.code) == Delivery::Refused);
    if let Some(first) = refused {
        let mut suspects: Vec<usize> = failures
            .iter()
            .filter(|f| f.code == first.code)
            .map(|f| f.index)
            .collect();
        suspects.sort_unstable();
        suspects.dedup();
        let index = if classify::is_about_size(first.code) {
            suspects
                .iter()
                .copied()
                .max_by_key(|i| records.get(*i).map_or(0, size))
                .unwrap_or(first.index)
        } else {
            first.index
        };
        let mut reason = first.reason.clone();
        if suspects.len() > 1 && classify::is_about_size(first.code) {
            reason = format!(
                "{reason} (it came back for a batch of {} records: either this one is too large, \
                 or the topic's max.message.bytes is below `kafka.batch.size`)",
                suspects.len()
            );
        }
        return Some(Cause::Refused(Refused {
            index,
            suspects,
            topic: topic_of(records, index),
            code: first.code.name(),
            reason,
        }));
    }
    let topic = failures
        .iter()
        .find(|f| classify::delivery(f.code) == Delivery::Topic)?;
    let name = topic_of(records, topic.index);
    Some(topic_trouble(
        name.clone(),
        vec![name],
        topic.code,
        &topic.reason,
    ))
}

/// A topic's trouble that came up while its partitions were added to the transaction. librdkafka 2.12 tells the log which
/// topic it was, and the application only that there was one (rdkafka_txnmgr.c).
pub(crate) fn from_topic(why: &CallError, records: &[Record]) -> Option<Cause> {
    if classify::delivery(why.code) != Delivery::Topic
        || !why.reason.starts_with("Failed to add partition")
    {
        return None;
    }
    let mut suspects: Vec<String> = Vec::new();
    for record in records {
        if suspects.last().is_none_or(|last| **last != *record.topic) {
            suspects.push(record.topic.to_string());
        }
    }
    let first = suspects.first()?.clone();
    suspects.sort_unstable();
    suspects.dedup();
    Some(topic_trouble(first, suspects, why.code, &why.reason))
}

fn topic_trouble(topic: String, suspects: Vec<String>, code: Code, reason: &str) -> Cause {
    let remedy = match code {
        Code::TOPIC_AUTHORIZATION_FAILED => {
            "grant this principal DESCRIBE and WRITE on it".to_owned()
        }
        Code::UNKNOWN_TOPIC_OR_PART | Code::LOCAL_UNKNOWN_TOPIC | Code::LOCAL_UNKNOWN_PARTITION => {
            format!("create it, for example: kafka-topics.sh --create --topic {topic}")
        }
        _ => "see its configuration".to_owned(),
    };
    Cause::Topic {
        topic,
        suspects,
        code: code.name(),
        reason: format!("{reason}; {remedy}"),
    }
}

/// The topics of which nothing was acknowledged while all others were acknowledged in full: their brokers live, so it is
/// the topic. One bit per record, in order.
pub(crate) fn silent_topics(records: &[Record], acknowledged: &[bool]) -> Vec<String> {
    let mut topics: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for (index, record) in records.iter().enumerate() {
        let (all, acked) = topics.entry(&record.topic).or_default();
        *all += 1;
        *acked += usize::from(acknowledged.get(index).copied().unwrap_or(false));
    }
    let silent = topics.iter().filter(|(_, (_, acked))| *acked == 0);
    let silent: Vec<String> = silent.map(|(topic, _)| (*topic).to_owned()).collect();
    let others_in_full = topics
        .values()
        .filter(|(_, acked)| *acked > 0)
        .all(|(all, acked)| all == acked);
    if others_in_full && silent.len() < topics.len() {
        silent
    } else {
        Vec::new()
    }
}

pub(crate) fn topic_of(records: &[Record], index: usize) -> String {
    records
        .get(index)
        .map_or_else(String::new, |r| r.topic.to_string())
}

fn size(record: &Record) -> usize {
    record.key.as_ref().map_or(0, bytes::Bytes::len)
        + record.payload.as_ref().map_or(0, bytes::Bytes::len)
        + record.headers.len()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;

    use super::*;

    fn records(sizes: &[usize]) -> Vec<Record> {
        sizes
            .iter()
            .enumerate()
            .map(|(i, size)| Record {
                topic: Arc::from(format!("topic-{i}")),
                key: None,
                payload: Some(Bytes::from(vec![b'x'; *size])),
                headers: Bytes::new(),
                envelope: None,
            })
            .collect()
    }

    fn failed(index: usize, code: Code) -> FailedRecord {
        FailedRecord {
            index,
            code,
            reason: format!("because {index}"),
        }
    }

    fn refused(cause: Option<Cause>) -> Refused {
        match cause {
            Some(Cause::Refused(refused)) => refused,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_refusal_counts_more_than_what_it_brought_down() {
        let reports = [
            failed(0, Code::LOCAL_PURGE_QUEUE),
            failed(1, Code::LOCAL_INVALID_DIFFERENT_RECORD),
            failed(3, Code::OUT_OF_ORDER_SEQUENCE_NUMBER),
            failed(4, Code::UNKNOWN_TOPIC_OR_PART),
            failed(2, Code::INVALID_RECORD),
        ];
        let refused = refused(from_reports(&reports, &records(&[1; 5])));
        assert_eq!((refused.index, &refused.suspects[..]), (2, &[2][..]));
        assert_eq!(
            (&*refused.topic, &*refused.code),
            ("topic-2", "INVALID_RECORD")
        );
    }

    #[test]
    fn the_largest_of_a_batch_that_is_too_large_is_the_likely_one() {
        let reports = [2, 0, 1].map(|i| failed(i, Code::MSG_SIZE_TOO_LARGE));
        let refused = refused(from_reports(&reports, &records(&[10, 30, 20])));
        assert_eq!((refused.index, &refused.suspects[..]), (1, &[0, 1, 2][..]));
        assert!(
            refused.reason.contains("batch of 3 records"),
            "{}",
            refused.reason
        );
    }

    #[test]
    fn a_topics_trouble_names_the_topic_and_the_remedy() {
        let reports = [failed(1, Code::LOCAL_UNKNOWN_TOPIC)];
        let cause = from_reports(&reports, &records(&[1, 1])).unwrap();
        assert!(matches!(&cause, Cause::Topic { topic, .. } if topic == "topic-1"));
        assert!(
            cause.to_string().contains("--create --topic topic-1"),
            "{cause}"
        );
        let why = CallError {
            code: Code::TOPIC_AUTHORIZATION_FAILED,
            reason: "Failed to add partition(s) to transaction on broker 1: Broker: Topic authorization failed".into(),
            flags: classify::Flags::default(),
        };
        // Nobody knows which one it was.
        let cause = from_topic(&why, &records(&[1, 1])).unwrap();
        assert!(
            matches!(&cause, Cause::Topic { suspects, .. } if *suspects == ["topic-0", "topic-1"])
        );
        let cause = from_topic(&why, &records(&[1])).unwrap();
        assert!(matches!(&cause, Cause::Topic { suspects, .. } if *suspects == ["topic-0"]));
        // The checkpoint's topic is none of the records'.
        let why = CallError {
            reason: "Failed to commit offsets to transaction on broker 1: Broker: Topic authorization failed".into(),
            ..why
        };
        assert!(from_topic(&why, &records(&[1])).is_none());
    }

    #[test]
    fn a_dead_broker_is_nobodys_fault() {
        let reports = [
            failed(0, Code::LOCAL_MSG_TIMED_OUT),
            failed(1, Code::LOCAL_PURGE_QUEUE),
        ];
        assert!(from_reports(&reports, &records(&[1, 1])).is_none());
    }

    #[test]
    fn a_topic_is_silent_only_while_every_other_is_acknowledged_in_full() {
        let records = records(&[1, 1, 1]);
        let mut twice = records.clone();
        twice[1].topic = Arc::from("topic-0");
        let silent =
            |records: &[Record], acknowledged: &[bool]| silent_topics(records, acknowledged);
        assert_eq!(silent(&twice, &[true, true, false]), ["topic-2"]);
        assert_eq!(
            silent(&records, &[false, true, false]),
            ["topic-0", "topic-2"]
        );
        // A topic that got on at all is not the trouble, and one that was not finished shows that the brokers are slow.
        assert!(silent(&twice, &[true, false, false]).is_empty());
        assert!(silent(&twice, &[true, true, true]).is_empty());
        // A dead cluster parks nothing.
        assert!(silent(&records, &[false, false, false]).is_empty());
    }
}
