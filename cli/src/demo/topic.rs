//! The topic as anybody sees it: reading all of it, and copying records into it a second time.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bytes::Bytes;
use oncebox_kafka::{
    Consumer, ConsumerEvent, Envelope, Message, ProducerOptions, Record, SourceTag, Transaction,
    TransactionalProducer, envelope,
};

use super::audit::Seen;
use super::shop::{OrderPlaced, Wiring};

/// The header that marks a copy which the demo injected, so that the audit does not take it for the relay's.
pub(super) const COPY: &str = "demo-copy";

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
    Ok(Seen {
        partition: message.partition,
        offset: message.offset,
        key: String::from_utf8_lossy(key).into_owned(),
        order: order.into(),
        message_id: decoded.message_id,
        outbox_id: decoded.outbox_id,
        copy: message.headers.iter().any(|(name, _)| name == COPY),
    })
}

/// Publishes records a second time with the same envelope, as a producer that retries without transactions would.
/// Returns how many.
pub(super) async fn publish_again(
    wiring: &Wiring,
    run: &str,
    messages: &[Message],
) -> anyhow::Result<usize> {
    let mut records = Vec::new();
    let mut source = None;
    for message in messages {
        let decoded = envelope::decode(&message.headers)?.context("no Oncebox envelope")?;
        records.push(Record {
            topic: message.topic.clone(),
            key: message.key.clone(),
            payload: message.payload.clone(),
            headers: stored_headers(&message.headers)?,
            envelope: Some(Envelope {
                message_id: decoded.message_id,
                outbox_id: decoded.outbox_id,
                created_at_micros: decoded.created_at_micros,
            }),
        });
        source = Some(SourceTag {
            source: decoded.source.into(),
            epoch: decoded.source_epoch,
        });
    }
    let copies = records.len();
    // Not the relay's transactional.id, which would fence it.
    let id = format!("oncebox-demo-copies.{run}");
    let producer =
        TransactionalProducer::open(&wiring.kafka, &id, ProducerOptions::default()).await?;
    producer
        .transact(Transaction {
            source,
            records,
            offsets: None,
            ..Transaction::default()
        })
        .await?;
    producer.close().await;
    Ok(copies)
}

/// The headers that stood in the outbox, and the copy's mark: what the envelope adds is taken away.
fn stored_headers(headers: &oncebox_kafka::Headers) -> anyhow::Result<Bytes> {
    const ENVELOPE: [&str; 6] = [
        "oncebox-v",
        "oncebox-id",
        "oncebox-source",
        "oncebox-epoch",
        "oncebox-outbox-id",
        "oncebox-created-at",
    ];
    let stored = headers.iter().filter(|(name, _)| !ENVELOPE.contains(name));
    let all = stored.chain([(COPY, Some(&b"1"[..]))]);
    Ok(oncebox_migrations::headers::encode(all)?.into())
}
