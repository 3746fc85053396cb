//! `oncebox dead`, `oncebox record` and `oncebox reconcile`.

use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use oncebox_inbox::dead::Rate;
use oncebox_inbox::record::{Cursor, Status};
use uuid::Uuid;

use super::Key;
use crate::config::Flags;

/// `oncebox dead`
#[derive(Debug, Subcommand)]
pub enum DeadCommand {
    /// Which messages could not be handled and why, and which wait behind a blocked key.
    List(DeadList),
    /// One message in full: payload, headers, position, error.
    Show(DeadShow),
    /// Have the running consumer handle these messages again, each once; a blocked key as a whole, in order.
    Replay(DeadReplay),
    /// Take back replays that were ordered and not carried out yet.
    Cancel(DeadChoice),
    /// Delete these messages: their effect never happens.
    Discard(DeadChoice),
}

/// Which dead and parked messages.
#[derive(Clone, Debug, Default, Args)]
pub struct DeadFilter {
    /// Only of this consumer.
    #[arg(long, value_name = "NAME")]
    pub consumer: Option<String>,
    /// Only of this topic.
    #[arg(long)]
    pub topic: Option<String>,
    /// Only of this partition.
    #[arg(long, value_name = "N")]
    pub partition: Option<i32>,
    /// Only of this key.
    #[command(flatten)]
    pub key: Key,
    /// Only this message.
    #[arg(long, value_name = "UUID")]
    pub message_id: Option<Uuid>,
    /// Only those whose error contains this text.
    #[arg(long, value_name = "TEXT")]
    pub error: Option<String>,
    /// Only those that failed last at this time or later: 2026-11-29T20:00:00Z, or how long ago (30min, 2h, 7d).
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,
    /// Only those that failed last before this time; as --since.
    #[arg(long, value_name = "TIME")]
    pub until: Option<String>,
    /// Only these: dead (given up), parked (waiting with every later message of their key) or delayed (tried again by the consumer).
    #[arg(long, value_name = "KIND")]
    pub kind: Option<KindName>,
}

/// What became of a message that could not be handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KindName {
    /// It was given up.
    Dead,
    /// It waits, and every later message of its key waits behind it.
    Parked,
    /// It failed and has attempts left: its consumer tries it again by itself.
    Delayed,
}

/// `oncebox dead list`
#[derive(Debug, Args)]
pub struct DeadList {
    /// Which.
    #[command(flatten)]
    pub filter: DeadFilter,
    /// Only those that are ordered to be replayed.
    #[arg(long)]
    pub ordered: bool,
    /// At most so many.
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub limit: usize,
    /// The oldest first [default: the newest].
    #[arg(long)]
    pub oldest: bool,
    /// Go on after this number: the last one of the page before.
    #[arg(long, value_name = "ID")]
    pub after: Option<i64>,
    /// Only the counts by consumer and topic.
    #[arg(long)]
    pub count: bool,
    /// One JSON object per line.
    #[arg(long)]
    pub json: bool,
}

/// `oncebox dead show`
#[derive(Debug, Args)]
pub struct DeadShow {
    /// Its number, from `oncebox dead list`.
    pub id: i64,
    /// As a JSON object; bytes that are no text as {"hex": …}.
    #[arg(long)]
    pub json: bool,
}

/// Which messages a change is about.
#[derive(Clone, Debug, Args)]
#[command(group(ArgGroup::new("which").required(true).multiple(true)
    .args(["ids", "consumer", "topic", "message_id", "error", "since", "until", "kind", "all"])))]
pub struct DeadChoice {
    /// Numbers, from `oncebox dead list`.
    pub ids: Vec<i64>,
    /// Which.
    #[command(flatten)]
    pub filter: DeadFilter,
    /// All of them.
    #[arg(long)]
    pub all: bool,
    /// Do it. Without: only say which messages are meant.
    #[arg(long)]
    pub apply: bool,
    /// One JSON object, with the numbers of all messages.
    #[arg(long)]
    pub json: bool,
}

/// `oncebox dead replay`
#[derive(Debug, Args)]
pub struct DeadReplay {
    /// Which.
    #[command(flatten)]
    pub choice: DeadChoice,
    /// How fast, in offset order: 10/s, 30/m or 100/h [default: all at once].
    #[arg(long, value_name = "N/s|m|h")]
    pub rate: Option<Rate>,
    /// Also those that were replayed in vain 3 times or more.
    #[arg(long)]
    pub force: bool,
}

/// `oncebox record`
#[derive(Debug, Subcommand)]
pub enum RecordCommand {
    /// What became of which message: effect, dead or parked, when, and how long it took.
    List(RecordList),
    /// Counts and durations by consumer, topic and status.
    Summary(RecordSummary),
    /// Make the daily partitions of the coming days (PostgreSQL); as the owner of the tables.
    Partitions(RecordPartitions),
    /// Delete what is older than some days.
    Clean(RecordClean),
}

/// Which rows of the record.
#[derive(Clone, Debug, Default, Args)]
pub struct RecordFilter {
    /// Only of this message.
    #[arg(long, value_name = "UUID")]
    pub message_id: Option<Uuid>,
    /// Only with this business id.
    #[arg(long, value_name = "ID")]
    pub business_id: Option<String>,
    /// Only of this consumer.
    #[arg(long, value_name = "NAME")]
    pub consumer: Option<String>,
    /// Only of this topic.
    #[arg(long)]
    pub topic: Option<String>,
    /// Only of this partition.
    #[arg(long, value_name = "N")]
    pub partition: Option<i32>,
    /// Only settled like this: effect, dead or parked.
    #[arg(long, value_name = "STATUS")]
    pub status: Option<Status>,
    /// Settled at this time or later: 2026-11-29T20:00:00Z, or how long ago (30min, 2h, 7d) [default: 1d; with a message id or business id: all].
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,
    /// Settled before this time; as --since.
    #[arg(long, value_name = "TIME")]
    pub until: Option<String>,
}

/// `oncebox record list`
#[derive(Debug, Args)]
pub struct RecordList {
    /// Which.
    #[command(flatten)]
    pub filter: RecordFilter,
    /// At most so many.
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub limit: usize,
    /// The oldest first [default: the newest].
    #[arg(long)]
    pub oldest: bool,
    /// Go on after this place: the last one of the page before.
    #[arg(long, value_name = "PLACE")]
    pub after: Option<Cursor>,
    /// One JSON object per line.
    #[arg(long)]
    pub json: bool,
}

/// `oncebox record summary`
#[derive(Debug, Args)]
pub struct RecordSummary {
    /// Which.
    #[command(flatten)]
    pub filter: RecordFilter,
    /// One JSON object per line.
    #[arg(long)]
    pub json: bool,
}

/// `oncebox record partitions`
#[derive(Debug, Args)]
pub struct RecordPartitions {
    /// How many days ahead, besides today (UTC).
    #[arg(long, value_name = "DAYS", default_value_t = 7)]
    pub days: u16,
    /// Make them. Without: only say which are missing.
    #[arg(long)]
    pub apply: bool,
    /// One JSON object.
    #[arg(long)]
    pub json: bool,
}

/// `oncebox record clean`
#[derive(Debug, Args)]
pub struct RecordClean {
    /// How many whole days are kept, besides today (UTC).
    #[arg(long, value_name = "DAYS", default_value_t = 30)]
    pub keep: u16,
    /// Delete it. Without: only say what would go.
    #[arg(long)]
    pub apply: bool,
    /// One JSON object.
    #[arg(long)]
    pub json: bool,
}

/// `oncebox reconcile`
#[derive(Debug, Args)]
pub struct Reconcile {
    /// The database with the outbox [default: that of --database-url].
    #[arg(long, value_name = "URL")]
    pub outbox_url: Option<String>,
    /// The consumer's database [default: that of --database-url].
    #[arg(long, value_name = "URL")]
    pub inbox_url: Option<String>,
    /// The PostgreSQL schema of the consumer's tables, where it is not that of --schema.
    #[arg(long, value_name = "NAME")]
    pub inbox_schema: Option<String>,
    /// The prefix of the consumer's tables, where it is not that of --prefix.
    #[arg(long, value_name = "PREFIX")]
    pub inbox_prefix: Option<String>,
    /// The consumer's name (its group.id).
    #[arg(long, value_name = "NAME")]
    pub consumer: String,
    /// Only this topic [default: all that the consumer has a position of].
    #[arg(long)]
    pub topic: Option<String>,
    /// Messages that were enqueued at this time or later: 2026-11-29T20:00:00Z, or how long ago (30min, 2h) [default: all that the outbox holds].
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,
    /// Messages that were enqueued before this time; as --since [default: now minus --grace].
    #[arg(long, value_name = "TIME")]
    pub until: Option<String>,
    /// What is younger than this is on its way; also how far the clocks of producers and database may be apart.
    #[arg(long, value_name = "DURATION", default_value = "60s")]
    pub grace: String,
    /// Mention a position that did not move for longer than this.
    #[arg(long, value_name = "DURATION", default_value = "10min")]
    pub quiet: String,
    /// Name at most so many missing and so many extra messages; the others are counted.
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub limit: usize,
    /// One JSON object.
    #[arg(long)]
    pub json: bool,
}

impl Reconcile {
    /// Adds these options to the flags.
    pub fn flags(&self, flags: Flags) -> Flags {
        flags
            .with("outbox_url", "--outbox-url", &self.outbox_url)
            .with("inbox_url", "--inbox-url", &self.inbox_url)
    }
}
