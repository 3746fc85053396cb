//! Which letters are meant.

use time::OffsetDateTime;
use uuid::Uuid;

use super::Texts;
use crate::operator::{Sql, Value};

/// Which letters are meant: all conditions that are set hold. The default means all letters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// These letters. Empty: no condition.
    pub ids: Vec<i64>,
    /// Letters of this consumer.
    pub consumer: Option<String>,
    /// Letters of this topic.
    pub topic: Option<String>,
    /// Letters of this partition.
    pub partition: Option<i32>,
    /// Letters with this key.
    pub key: Option<Vec<u8>>,
    /// The letter of this message.
    pub message_id: Option<Uuid>,
    /// Letters whose error contains this text, upper and lower case as it is.
    pub error: Option<String>,
    /// Letters that failed last at this time or later.
    pub since: Option<OffsetDateTime>,
    /// Letters that failed last before this time.
    pub until: Option<OffsetDateTime>,
    /// Only the dead, the parked or the delayed ones.
    pub kind: Option<Kind>,
    /// Only letters that an operator has ordered to be replayed, or only the others.
    pub ordered: Option<bool>,
}

/// What became of a message that could not be handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It was given up.
    Dead,
    /// It waits, and every later message of its key waits behind it.
    Parked,
    /// It failed and has attempts left: its consumer tries it again by itself
    /// ([`Inbox::delayed_retries`](crate::Inbox::delayed_retries)).
    Delayed,
}

/// Which letters come first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direction {
    /// Those that failed last.
    #[default]
    Newest,
    /// Those that failed first.
    Oldest,
}

impl Filter {
    /// Appends the conditions.
    pub(super) fn push<D: Texts>(&self, sql: &mut Sql) {
        // Something must stand there.
        sql.push("1 = 1");
        if !self.ids.is_empty() {
            let ids = self.ids.iter().map(|id| Value::Int(*id)).collect();
            sql.push(" AND ").push_in::<D>("id", ids);
        }
        let text = |text: &Option<String>| text.clone().map(Value::Text);
        let number = |number: i32| Value::Int(number.into());
        sql.push_if(" AND consumer = ?", text(&self.consumer))
            .push_if(" AND topic = ?", text(&self.topic))
            .push_if(" AND partition = ?", self.partition.map(number))
            .push_if(" AND key = ?", self.key.clone().map(Value::Bytes))
            .push_if(" AND message_id = ?", self.message_id.map(Value::Uuid))
            .push_if(&format!(" AND {}", D::LETTERS.contains), text(&self.error))
            .push_if(
                &format!(" AND failed_at >= {}", D::TIME),
                self.since.map(Value::from),
            )
            .push_if(
                &format!(" AND failed_at < {}", D::TIME),
                self.until.map(Value::from),
            );
        match self.kind {
            Some(Kind::Dead) => sql.push(" AND NOT parked AND NOT delayed"),
            Some(Kind::Parked) => sql.push(" AND parked"),
            Some(Kind::Delayed) => sql.push(" AND delayed"),
            None => sql,
        };
        match self.ordered {
            Some(true) => sql.push(" AND replay_at IS NOT NULL AND NOT delayed"),
            Some(false) => sql.push(" AND (replay_at IS NULL OR delayed)"),
            None => sql,
        };
    }
}
