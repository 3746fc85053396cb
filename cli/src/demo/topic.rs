//! The topic as anybody sees it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use oncebox_kafka::{Consumer, ConsumerEvent, Message, envelope};

use super::audit::{Notice, Seen};
use super::inject::COPY;
use super::shop::{NOTICE, OrderPlaced, Wiring};

/// With the expected number of records read: how long nothing more may come before the topic counts as read.
const QUIET: Duration = Duration::from_secs(2);
/// With fewer: how long to wait for the rest before they count as lost.
const LOST_AFTER: Duration = Duration::from_secs(20);

/// Reads the whole topic as a `read_committed` consumer in a group of its own.
///
/// Blocks; call it off the async threads. Returns once `expected` records were seen and nothing more comes,
/// or when nothing came for a long time.
fn read(wiring: &Wiring, group: &str, expected: usize) -> anyhow::Result<Vec<Message>> {
    let consumer = Consumer::subscribe(&wiring.kafka, group, std::slice::from_ref(&wiring.topic))?;
    let mut messages = Vec::new();
    let mut last = Instant::now();
    loop {
        let patience = if messages.len() >= expected {
            QUIET
        } else {
            LOST_AFTER
        };
        if last.elapsed() > patience {
            break;
        }
        match consumer.poll(Duration::from_millis(100)) {
            Some(ConsumerEvent::Message(message)) => {
                messages.push(message);
                last = Instant::now();
            }
            Some(ConsumerEvent::Assigned(partitions)) => {
                let from_the_start: Vec<_> =
                    partitions.into_iter().map(|(t, p)| (t, p, 0)).collect();
                consumer.start(&from_the_start)?;
                last = Instant::now();
            }
            Some(ConsumerEvent::Error(error)) if error.is_fatal() => return Err(error.into()),
            Some(ConsumerEvent::OutOfRange { .. }) => {
                bail!("the beginning of topic {} is gone", wiring.topic)
            }
            _ => {}
        }
    }
    consumer.close();
    Ok(messages)
}

/// [`read`] on a thread of its own.
pub(super) async fn read_all(
    wiring: &Wiring,
    group: String,
    expected: usize,
) -> anyhow::Result<Vec<Message>> {
    let wiring = wiring.clone();
    tokio::task::spawn_blocking(move || read(&wiring, &group, expected)).await?
}

/// What the audit needs to know of a record.
pub(super) fn seen(message: &Message) -> anyhow::Result<Seen> {
    let place = || format!("partition {} offset {}", message.partition, message.offset);
    let decoded = envelope::decode(&message.headers)
        .with_context(place)?
        .with_context(|| format!("{}: no Oncebox envelope", place()))?;
    let payload = message
        .payload
        .as_deref()
        .with_context(|| format!("{}: no payload", place()))?;
    let order: OrderPlaced = serde_json::from_slice(payload).with_context(place)?;
    let key = message.key.as_deref().unwrap_or_default();
    let notice = message.headers.get(NOTICE);
    let notice = notice
        .and_then(|name| Notice::named(std::str::from_utf8(name).ok()?))
        .with_context(|| format!("{}: no {NOTICE}", place()))?;
    Ok(Seen {
        partition: message.partition,
        offset: message.offset,
        key: String::from_utf8_lossy(key).into_owned(),
        order: order.into(),
        message_id: decoded.message_id,
        outbox_id: decoded.outbox_id,
        notice,
        copy: message.headers.get(COPY).is_some(),
    })
}

/// The offset after the last record of each partition.
pub(super) fn ends(messages: &[Message]) -> BTreeMap<i32, i64> {
    let mut ends = BTreeMap::new();
    for message in messages {
        let end = ends.entry(message.partition).or_insert(0);
        *end = (message.offset + 1).max(*end);
    }
    ends
}

/// How many of these orders were published after a record with a higher outbox id.
pub(super) fn overtaken(slow: &[i64], seen: &[Seen]) -> usize {
    let relayed: Vec<&Seen> = seen
        .iter()
        .filter(|s| !s.copy && s.notice != Notice::Late)
        .collect();
    let late = |order: &i64| {
        relayed
            .iter()
            .find(|s| s.order.id == *order)
            .is_some_and(|mine| {
                relayed.iter().any(|s| {
                    s.partition == mine.partition
                        && s.offset < mine.offset
                        && s.outbox_id > mine.outbox_id
                })
            })
    };
    slow.iter().filter(|order| late(order)).count()
}
