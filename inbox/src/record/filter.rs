//! Which rows of the record are meant.

use std::fmt;
use std::str::FromStr;

use time::OffsetDateTime;
use uuid::Uuid;

use super::Texts;
use crate::operator::{Sql, Value};

/// Which rows are meant: all conditions that are set hold. The default means all rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Rows of this message (indexed).
    pub message_id: Option<Uuid>,
    /// Rows with this business id (indexed).
    pub business_id: Option<String>,
    /// Rows of this consumer.
    pub consumer: Option<String>,
    /// Rows of this topic.
    pub topic: Option<String>,
    /// Rows of this partition.
    pub partition: Option<i32>,
    /// How the message was settled.
    pub status: Option<Status>,
    /// Settled at this time or later.
    pub since: Option<OffsetDateTime>,
    /// Settled before this time.
    pub until: Option<OffsetDateTime>,
}

/// How a message was settled. `FromStr` reads `effect`, `dead` and `parked`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// The handler's effect was committed.
    Effect,
    /// It became a dead letter.
    Dead,
    /// It was parked behind a blocked key.
    Parked,
}

impl Status {
    /// The word for it in the table and in what is printed.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Effect => "effect",
            Self::Dead => "dead",
            Self::Parked => "parked",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The text names no status.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is none of effect, dead, parked")]
pub struct UnknownStatus {
    text: String,
}

impl FromStr for Status {
    type Err = UnknownStatus;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let all = [Self::Effect, Self::Dead, Self::Parked];
        all.into_iter()
            .find(|status| status.as_str() == text)
            .ok_or_else(|| UnknownStatus {
                text: text.to_owned(),
            })
    }
}

impl Filter {
    /// Appends the conditions.
    pub(super) fn push<D: Texts>(&self, sql: &mut Sql) {
        // Something must stand there.
        sql.push("1 = 1");
        let text = |text: &Option<String>| text.clone().map(Value::Text);
        let number = |number: i32| Value::Int(number.into());
        let status = |status: Status| Value::Text(status.to_string());
        sql.push_if(" AND message_id = ?", self.message_id.map(Value::Uuid))
            .push_if(" AND business_id = ?", text(&self.business_id))
            .push_if(" AND consumer = ?", text(&self.consumer))
            .push_if(" AND topic = ?", text(&self.topic))
            .push_if(" AND partition = ?", self.partition.map(number))
            .push_if(" AND status = ?", self.status.map(status))
            // The bare column: that is how the server leaves the other days' partitions alone.
            .push_if(
                &format!(" AND settled_at >= {}", D::TIME),
                self.since.map(Value::from),
            )
            .push_if(
                &format!(" AND settled_at < {}", D::TIME),
                self.until.map(Value::from),
            );
    }
}
