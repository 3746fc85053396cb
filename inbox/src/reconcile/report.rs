//! What a comparison found, in words.

use std::fmt;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

use super::Request;
use crate::error::Error;
use crate::operator::{self, OperatorStore};

/// From when to when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Range {
    /// The beginning; `None`: nothing is there.
    pub from: Option<OffsetDateTime>,
    /// The end, not included.
    pub until: OffsetDateTime,
}

/// What a comparison found. `Display` is the command's text.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The consumer.
    pub consumer: String,
    /// The topics that were compared.
    pub topics: Vec<String>,
    /// When the outbox rows were enqueued that were compared.
    pub covers: Range,
    /// Outbox rows that were compared.
    pub rows: u64,
    /// Of these, those that the consumer has settled: an effect or a letter.
    pub settled: u64,
    /// Of these, those that failed and will be tried again.
    pub retrying: u64,
    /// Of these, those that are not published yet.
    pub unpublished: Unpublished,
    /// Of these, those that are missing on the consumer's side.
    pub missing_count: u64,
    /// The first of them.
    pub missing: Vec<Missing>,
    /// When the messages were made that were looked for in the outbox; `None`: nothing could be.
    pub extra_covers: Option<Range>,
    /// Whether the record was compared instead of the marks, because the marks do not name their topic.
    pub extra_by_record: bool,
    /// Messages that were consumed in that time.
    pub consumed: u64,
    /// Of these, those that the outbox does not know.
    pub extra_count: u64,
    /// The first of them.
    pub extra: Vec<Extra>,
    /// What waits for somebody.
    pub stuck: Stuck,
}

/// Outbox rows that are not published yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unpublished {
    /// They wait for the relay.
    pub waiting: u64,
    /// When the oldest of them was enqueued.
    pub oldest: Option<OffsetDateTime>,
    /// The relay parked them.
    pub parked: u64,
}

/// A message that was published and is not known to the consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Missing {
    /// Its outbox row.
    pub outbox_id: i64,
    /// The message's id.
    pub message_id: Uuid,
    /// Its topic.
    pub topic: String,
    /// When it was enqueued.
    pub created_at: OffsetDateTime,
    /// The consumer has settled younger messages of the topic: it is not merely behind, unless one partition is.
    pub overtaken: bool,
}

/// A message that was consumed and is not known to the outbox.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Extra {
    /// The message's id.
    pub message_id: Uuid,
    /// Its topic, if the record has it.
    pub topic: Option<String>,
    /// When its id was made.
    pub made_at: OffsetDateTime,
    /// When it was consumed.
    pub consumed_at: OffsetDateTime,
}

/// What waits for somebody.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stuck {
    /// What the relay could not publish (`oncebox relay park list`).
    pub parked_rows: Vec<ParkedRows>,
    /// What the consumer could not handle (`oncebox dead list`).
    pub letters: Vec<Letters>,
    /// Positions that did not move for long: the topic is quiet, or nobody consumes the partition.
    pub quiet: Vec<Quiet>,
    /// Topics that the consumer stopped at because many messages failed.
    pub breakers: Vec<Breaker>,
}

/// Outbox rows of one topic that the relay could not publish.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParkedRows {
    /// The topic.
    pub topic: String,
    /// How many.
    pub count: u64,
    /// Those for which an operator has asked for something.
    pub requested: u64,
    /// When the first was parked.
    pub oldest: OffsetDateTime,
}

/// The letters of one topic.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Letters {
    /// The topic.
    pub topic: String,
    /// Given up.
    pub dead: u64,
    /// Parked behind a blocked key.
    pub parked: u64,
    /// Ordered to be replayed, or delayed, and not handled though it is time: no consumer is running, or it is behind.
    pub overdue: u64,
    /// When the first failed (last).
    pub oldest: OffsetDateTime,
}

/// A position that does not move.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quiet {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: i32,
    /// The next offset.
    pub next: i64,
    /// When it moved last.
    pub updated_at: OffsetDateTime,
}

/// A consumer that stopped at a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Breaker {
    /// The topic.
    pub topic: String,
    /// Messages that failed in a row.
    pub failures: u64,
    /// What the last one said.
    pub error: String,
    /// When.
    pub tripped_at: OffsetDateTime,
}

impl Report {
    pub(super) fn new<A: OperatorStore, B: OperatorStore>(
        request: &Request<A, B>,
        topics: &[String],
        since: Option<i64>,
        until: i64,
    ) -> Result<Self, Error> {
        let at = |micros| operator::time(micros).map_err(|e| Error::database("read a time", e));
        Ok(Self {
            consumer: request.consumer.clone(),
            topics: topics.to_vec(),
            covers: Range {
                from: since.map(at).transpose()?,
                until: at(until)?,
            },
            rows: 0,
            settled: 0,
            retrying: 0,
            unpublished: Unpublished::default(),
            missing_count: 0,
            missing: Vec::new(),
            extra_covers: None,
            extra_by_record: false,
            consumed: 0,
            extra_count: 0,
            extra: Vec::new(),
            stuck: Stuck::default(),
        })
    }

    /// Whether nothing is missing and nothing is extra.
    #[must_use]
    pub fn complete(&self) -> bool {
        self.missing_count == 0 && self.extra_count == 0
    }
}

struct At(Option<OffsetDateTime>);

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.and_then(|at| at.format(&Rfc3339).ok()) {
            Some(text) => f.write_str(&text),
            None => f.write_str("-"),
        }
    }
}

fn at(time: OffsetDateTime) -> At {
    At(Some(time))
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", At(self.from), at(self.until))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let topics = self.topics.join(", ");
        writeln!(f, "consumer {}, topics {topics}", self.consumer)?;
        writeln!(
            f,
            "published  {} outbox rows enqueued {}: {} settled, {} being retried, {} not published yet, {} parked by the relay",
            self.rows,
            self.covers,
            self.settled,
            self.retrying,
            self.unpublished.waiting,
            self.unpublished.parked
        )?;
        match &self.extra_covers {
            Some(range) => writeln!(
                f,
                "consumed   {} messages made {range}, by the {}",
                self.consumed,
                if self.extra_by_record {
                    "record"
                } else {
                    "marks"
                }
            )?,
            None => writeln!(
                f,
                "consumed   nothing to compare: the outbox holds no rows old enough of these topics, or the consumer neither marks nor records"
            )?,
        }
        for missing in &self.missing {
            writeln!(f, "{missing}")?;
        }
        more(f, "MISSING", self.missing_count, self.missing.len())?;
        for extra in &self.extra {
            writeln!(f, "{extra}")?;
        }
        more(f, "EXTRA", self.extra_count, self.extra.len())?;
        if let Some(oldest) = self.unpublished.oldest {
            writeln!(
                f,
                "waiting    {} rows for the relay, the oldest enqueued {}",
                self.unpublished.waiting,
                at(oldest)
            )?;
        }
        write!(f, "{}", self.stuck)?;
        writeln!(
            f,
            "{} missing, {} extra",
            self.missing_count, self.extra_count
        )
    }
}

fn more(f: &mut fmt::Formatter<'_>, what: &str, count: u64, shown: usize) -> fmt::Result {
    match count.saturating_sub(shown as u64) {
        0 => Ok(()),
        more => writeln!(f, "{what:<10} and {more} more"),
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = if self.overtaken {
            "younger ones of the topic are settled: lost, or its partition is behind"
        } else {
            "nothing younger is settled: the consumer is behind"
        };
        write!(
            f,
            "MISSING    {} outbox {} {} enqueued {}: {why}",
            self.message_id,
            self.outbox_id,
            self.topic,
            at(self.created_at)
        )
    }
}

impl fmt::Display for Extra {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "EXTRA      {} {} made {}, consumed {}: the outbox has no such row",
            self.message_id,
            self.topic.as_deref().unwrap_or("(topic unknown)"),
            at(self.made_at),
            at(self.consumed_at)
        )
    }
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for rows in &self.parked_rows {
            writeln!(
                f,
                "parked     {}: {} outbox rows since {}, {} requested (oncebox relay park list)",
                rows.topic,
                rows.count,
                at(rows.oldest),
                rows.requested
            )?;
        }
        for letters in &self.letters {
            writeln!(
                f,
                "letters    {}: {} dead, {} parked, {} ordered and overdue, the oldest from {} (oncebox dead list)",
                letters.topic,
                letters.dead,
                letters.parked,
                letters.overdue,
                at(letters.oldest)
            )?;
        }
        for breaker in &self.breakers {
            writeln!(
                f,
                "stopped    {}: {} messages failed in a row, {}: {}",
                breaker.topic,
                breaker.failures,
                at(breaker.tripped_at),
                breaker
                    .error
                    .split_whitespace()
                    .collect::<Vec<_>>()
                    .join(" ")
            )?;
        }
        for quiet in &self.quiet {
            writeln!(
                f,
                "quiet      {}[{}] at {} since {}",
                quiet.topic,
                quiet.partition,
                quiet.next,
                at(quiet.updated_at)
            )?;
        }
        Ok(())
    }
}
