//! What other producers write into the topic: copies of records, and old news.

use anyhow::Context;
use bytes::Bytes;
use oncebox_kafka::{
    Envelope, Headers, Message, ProducerOptions, Record, SourceTag, Transaction,
    TransactionalProducer, envelope,
};
use uuid::Uuid;

use super::audit::Notice;
use super::shop::{NOTICE, OrderPlaced, State, Wiring};
use super::topic;

/// The header that marks a copy, so that the audit does not take it for the relay's.
pub(super) const COPY: &str = "demo-copy";
/// Another producer, with ids of its own.
const STRANGER: &str = "oncebox-demo-stranger";

/// How many records are copied into the topic a second time.
const COPIES: usize = 100;
/// How many late messages come.
const LATE: usize = 50;

/// What was injected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Injected {
    pub(super) copies: usize,
    pub(super) late: usize,
}

/// Publishes the first records a second time with the same envelope, as a producer that retries without transactions
/// would. Then messages with new ids that say of the first orders what was true before them: no dedup mark knows them.
pub(super) async fn inject(
    wiring: &Wiring,
    run: &str,
    messages: &[Message],
) -> anyhow::Result<Injected> {
    let first = messages.first().context("nothing was published so far")?;
    let original = envelope::decode(&first.headers)?.context("no Oncebox envelope")?;
    let copied = &messages[..messages.len().min(COPIES)];
    let copies: Vec<Record> = copied.iter().map(copy).collect::<Result<_, _>>()?;
    let mut late = Vec::new();
    for message in messages {
        let seen = topic::seen(message)?;
        if late.len() < LATE && seen.notice == Notice::First {
            late.push(old_news(message)?);
        }
    }
    let injected = Injected {
        copies: copies.len(),
        late: late.len(),
    };
    let source = (original.source, original.source_epoch);
    publish(wiring, run, copies, source).await?;
    publish(wiring, run, late, (STRANGER, 1)).await?;
    Ok(injected)
}

fn copy(message: &Message) -> anyhow::Result<Record> {
    let decoded = envelope::decode(&message.headers)?.context("no Oncebox envelope")?;
    Ok(Record {
        topic: message.topic.clone(),
        key: message.key.clone(),
        payload: message.payload.clone(),
        headers: stored_headers(&message.headers, (COPY, "1"))?,
        envelope: Some(Envelope {
            message_id: decoded.message_id,
            outbox_id: decoded.outbox_id,
            created_at_micros: decoded.created_at_micros,
        }),
    })
}

/// Of the same key, so that it lies behind the news that it is older than.
fn old_news(message: &Message) -> anyhow::Result<Record> {
    let payload = message.payload.as_deref().context("no payload")?;
    let placed: OrderPlaced = serde_json::from_slice(payload)?;
    let pending = OrderPlaced {
        state: State::Pending,
        ..placed
    };
    let mut record = copy(message)?;
    record.payload = Some(serde_json::to_vec(&pending)?.into());
    record.headers = stored_headers(&message.headers, (NOTICE, Notice::Late.name()))?;
    if let Some(envelope) = &mut record.envelope {
        envelope.message_id = Uuid::now_v7();
    }
    Ok(record)
}

async fn publish(
    wiring: &Wiring,
    run: &str,
    records: Vec<Record>,
    (source, epoch): (&str, i64),
) -> anyhow::Result<()> {
    // Not the relay's transactional.id, which would fence it.
    let id = format!("oncebox-demo-injected.{run}");
    let producer =
        TransactionalProducer::open(&wiring.kafka, &id, ProducerOptions::default()).await?;
    producer
        .transact(Transaction {
            source: Some(SourceTag {
                source: source.into(),
                epoch,
            }),
            records,
            offsets: None,
            ..Transaction::default()
        })
        .await?;
    producer.close().await;
    Ok(())
}

/// The headers that stood in the outbox, with one more or with another value: what the envelope adds is taken away.
fn stored_headers(headers: &Headers, (mark, value): (&str, &str)) -> anyhow::Result<Bytes> {
    let stored = headers
        .iter()
        .filter(|(name, _)| *name != mark && !envelope::NAMES.contains(name));
    let all = stored.chain([(mark, Some(value.as_bytes()))]);
    Ok(oncebox_migrations::headers::encode(all)?.into())
}
