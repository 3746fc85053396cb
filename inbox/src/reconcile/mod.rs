//! Whether what was published was consumed, and the other way round (`oncebox reconcile`): the outbox of one database against one
//! consumer in another.
//!
//! | found | means |
//! |---|---|
//! | [`Report::missing`] | published, and the consumer's database knows nothing of it: neither a mark, nor a record, nor a letter, nor a failed attempt. The consumer is behind, or the message is lost |
//! | [`Report::extra`] | consumed, and the outbox that should have published it has no such row: somebody else wrote into the topic, or the outbox lost rows |
//! | [`Report::unpublished`] | not published yet, by the relay's confirmed position, or parked there: not the consumer's fault |
//! | [`Report::stuck`] | what waits for somebody on either side |
//!
//! Nothing is said about what one side no longer keeps: [`Report::covers`] and [`Report::extra_covers`] say from when to when the
//! comparison reaches. Only topics that the consumer has a position of count. The outbox must be the only publisher of these topics, or
//! the messages of the others are reported as extra.
//!
//! Both sides are read in pages of [`Request::page`] rows and nothing is held but a page, a few thousand counters and the findings that
//! are shown. How the extra ones are found: message ids are UUIDv7, so that a range of ids is a range of time. Every message that is on
//! both sides is counted in its interval of time, and so is every message of the consumer; only where the two counts differ are the ids
//! looked for in the outbox, which has no index on them.
//!
//! ```no_run
//! use oncebox_inbox::reconcile::{Request, reconcile};
//! # async fn example(orders: sqlx::PgPool, stock: sqlx::SqlitePool) -> Result<(), oncebox_inbox::Error> {
//! let report = reconcile(&Request::new(orders, stock).consumer("inventory").topic("orders")).await?;
//! println!("{report}");
//! assert!(report.complete());
//! # Ok(()) }
//! ```

mod buckets;
mod confirmed;
#[cfg(test)]
#[cfg(all(feature = "postgres", feature = "sqlite"))]
mod conformance;
mod extra;
mod inbox;
mod missing;
mod outbox;
mod report;

use std::time::Duration;

use oncebox_migrations::Names;
use sqlx::Pool;
use time::OffsetDateTime;

use crate::error::Error;
use crate::inbox::check_consumer;
use crate::operator::{self, OperatorStore, micros};

use inbox::Consumed;
use outbox::Published;
pub use report::{
    Breaker, Extra, Letters, Missing, ParkedRows, Quiet, Range, Report, Stuck, Unpublished,
};

/// What is compared.
#[derive(Clone, Debug)]
pub struct Request<A: OperatorStore, B: OperatorStore> {
    outbox: Pool<A>,
    inbox: Pool<B>,
    outbox_names: Names,
    inbox_names: Names,
    consumer: String,
    topic: Option<String>,
    since: Option<OffsetDateTime>,
    until: Option<OffsetDateTime>,
    grace: Duration,
    quiet: Duration,
    page: usize,
    shown: usize,
}

impl<A: OperatorStore, B: OperatorStore> Request<A, B> {
    /// The outbox of the first database against a consumer in the second; both may be the same.
    #[must_use]
    pub fn new(outbox: Pool<A>, inbox: Pool<B>) -> Self {
        Self {
            outbox,
            inbox,
            outbox_names: Names::default(),
            inbox_names: Names::default(),
            consumer: String::new(),
            topic: None,
            since: None,
            until: None,
            grace: Duration::from_secs(60),
            quiet: Duration::from_secs(600),
            page: 1_000,
            shown: 1_000,
        }
    }

    /// Schema and prefix of the outbox. Defaults to `public` and `oncebox_`.
    #[must_use]
    pub fn outbox_names(mut self, names: Names) -> Self {
        self.outbox_names = names;
        self
    }

    /// Schema and prefix of the consumer's tables. Defaults to `public` and `oncebox_`.
    #[must_use]
    pub fn inbox_names(mut self, names: Names) -> Self {
        self.inbox_names = names;
        self
    }

    /// The consumer. Required.
    #[must_use]
    pub fn consumer(mut self, name: impl Into<String>) -> Self {
        self.consumer = name.into();
        self
    }

    /// One topic. Defaults to all topics that the consumer has a position of.
    #[must_use]
    pub fn topic(mut self, topic: impl Into<String>) -> Self {
        self.topic = Some(topic.into());
        self
    }

    /// Messages that were enqueued at this time or later. Defaults to all that the outbox still holds.
    #[must_use]
    pub fn since(mut self, at: OffsetDateTime) -> Self {
        self.since = Some(at);
        self
    }

    /// Messages that were enqueued before this time. Defaults to now minus [`Request::grace`], and is never later.
    #[must_use]
    pub fn until(mut self, at: OffsetDateTime) -> Self {
        self.until = Some(at);
        self
    }

    /// What is younger than this is on its way. Also how far the clocks of producers and database may be apart. Defaults to 60 s.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// A position that did not move for longer than this is mentioned. Defaults to 10 min.
    #[must_use]
    pub fn quiet(mut self, quiet: Duration) -> Self {
        self.quiet = quiet;
        self
    }

    /// Rows that are read, and ids that are asked for, at once; 1 to 10 000. Defaults to 1 000.
    #[must_use]
    pub fn page(mut self, rows: usize) -> Self {
        self.page = rows.clamp(1, 10_000);
        self
    }

    /// Missing and extra messages that the report names; the others are counted. Defaults to 1 000.
    #[must_use]
    pub fn shown(mut self, messages: usize) -> Self {
        self.shown = messages;
        self
    }
}

/// Compares both sides.
///
/// # Errors
///
/// [`Error::Config`] when the consumer has no position in its database, or none of the topic, or when the relay's position is in a
/// format that this build does not know; [`Error::Schema`], [`Error::Database`].
///
/// # Cancel safety
///
/// Reads only, in many short transactions.
pub async fn reconcile<A: OperatorStore, B: OperatorStore>(
    request: &Request<A, B>,
) -> Result<Report, Error> {
    check_consumer(&request.consumer)?;
    operator::check(&request.outbox, &request.outbox_names).await?;
    operator::check(&request.inbox, &request.inbox_names).await?;
    let consumed = Consumed::new(request).await?;
    let published = Published::new(request).await?;
    let failed = |e| Error::database("look at the topics of the outbox", e);
    let here = published.topics(&consumed.topics).await.map_err(failed)?;

    let until = published.now - micros_of(request.grace);
    let until = request.until.map_or(until, |at| micros(at).min(until));
    let since = request.since.map(micros);
    let mut report = Report::new(request, &consumed.topics, since, until)?;

    // Before the rows are read: what is settled here was published before.
    let oldest = published.oldest().await.map_err(failed)?;
    let source = consumed
        .source(&here, request.topic.is_some())
        .await
        .map_err(|e| Error::database("look at the consumer's marks", e))?;
    let mut extra = extra::Search::new(request, source, oldest, since, until);
    report.covers.from = oldest.map_or(Ok(None), |at| range_begin(since, at))?;
    missing::search(
        request,
        &published,
        &consumed,
        (since, until),
        &mut extra,
        &mut report,
    )
    .await?;
    extra.finish(&published, &consumed, &mut report).await?;
    stuck(request, &published, &consumed, &mut report).await?;
    Ok(report)
}

fn range_begin(since: Option<i64>, oldest: i64) -> Result<Option<OffsetDateTime>, Error> {
    let begin = since.map_or(oldest, |since| since.max(oldest));
    operator::time(begin)
        .map(Some)
        .map_err(|e| Error::database("read a time", e))
}

async fn stuck<A: OperatorStore, B: OperatorStore>(
    request: &Request<A, B>,
    published: &Published<A>,
    consumed: &Consumed<B>,
    report: &mut Report,
) -> Result<(), Error> {
    let failed = |e| Error::database("look for what is stuck", e);
    report.stuck.parked_rows = published
        .parked_rows(&consumed.topics)
        .await
        .map_err(failed)?;
    consumed
        .stuck(
            micros_of(request.grace),
            micros_of(request.quiet),
            &mut report.stuck,
        )
        .await
        .map_err(failed)
}

fn micros_of(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX / 4)
}
