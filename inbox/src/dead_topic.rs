//! Dead letters as messages: for whoever watches a topic and not a table.

use oncebox_outbox::{Message, Outbox};
use sqlx::Transaction;

use crate::InboxStore;
use crate::delivery::Delivery;

/// Most bytes of the error that goes along.
const ERROR: usize = 1_000;

/// The topic, and the way to it.
#[derive(Clone, Debug)]
pub(crate) struct DeadTopic {
    pub(crate) outbox: Outbox,
    pub(crate) name: String,
}

/// Why a message is a dead letter.
pub(crate) struct Cause<'a> {
    pub(crate) consumer: &'a str,
    pub(crate) attempts: u32,
    pub(crate) error: &'a str,
}

impl DeadTopic {
    /// Enqueues the message of a letter, in its transaction. One that the outbox refuses (what is added makes it too large, or
    /// Kafka allowed more than the outbox does) goes without its content: the letter itself has that.
    pub(crate) async fn publish<D: InboxStore>(
        &self,
        tx: &mut Transaction<'static, D>,
        delivery: &Delivery,
        cause: &Cause<'_>,
    ) -> Result<(), oncebox_outbox::Error> {
        let whole = with_content(self.message(delivery, cause), delivery);
        match self.outbox.enqueue(tx, whole).await {
            Err(e) if e.is_invalid_message() => {
                let short = self.message(delivery, cause).payload("");
                let short = short.header("dead-shortened", e.to_string());
                self.outbox.enqueue(tx, short).await.map(drop)
            }
            done => done.map(drop),
        }
    }

    /// Where it comes from and why it is dead.
    fn message(&self, delivery: &Delivery, cause: &Cause<'_>) -> Message {
        let end = cause.error.floor_char_boundary(ERROR);
        Message::new(&self.name)
            .header("dead-consumer", cause.consumer)
            .header("dead-topic", &*delivery.topic)
            .header("dead-partition", delivery.partition.to_string())
            .header("dead-offset", delivery.offset.to_string())
            .header("dead-message-id", delivery.message_id.to_string())
            .header("dead-attempts", cause.attempts.to_string())
            .header("dead-error", &cause.error[..end])
    }
}

/// Key, payload, type and headers as they came. Oncebox's own get `dead-` before their names: the new message has its own.
fn with_content(mut message: Message, delivery: &Delivery) -> Message {
    if let Some(key) = &delivery.key {
        message = message.key(key.to_vec());
    }
    message = match &delivery.payload {
        Some(payload) => message.payload(payload.to_vec()),
        None => message.tombstone(),
    };
    if let Some(kind) = delivery.kind() {
        message = message.kind(kind);
    }
    for (name, value) in &delivery.headers {
        let name = if name.starts_with("oncebox-") {
            format!("dead-{name}")
        } else {
            name.to_owned()
        };
        message = match value {
            Some(value) => message.header(name, value.to_vec()),
            None => message.null_header(name),
        };
    }
    message
}
