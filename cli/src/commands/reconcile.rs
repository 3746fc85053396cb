//! `oncebox reconcile`.

use oncebox_inbox::operator::OperatorStore;
use oncebox_inbox::reconcile::{self, Range, Report, Request};
use serde_json::{Value, json};
use sqlx::Pool;

use super::connect::{failure, with_pool};
use super::{print, when};
use crate::args::Reconcile;
use crate::config::{ConfigError, DatabaseUrl, Settings};
use crate::exit::Failure;

/// Compares both sides. [`Failure::Said`] when something is missing or extra.
pub(crate) async fn run(args: &Reconcile, settings: &Settings) -> Result<(), Failure> {
    let outbox = url(settings, settings.outbox_url.as_ref(), OUTBOX)?;
    let inbox = url(settings, settings.inbox_url.as_ref(), INBOX)?;
    with_pool!(outbox, a => with_pool!(inbox, b => compare(a, b, args, settings).await))
}

/// What to say when nobody named a database.
const OUTBOX: ConfigError = ConfigError::Missing {
    what: "the database with the outbox",
    flag: "--outbox-url postgres://…",
    variable: "ONCEBOX_OUTBOX_URL",
    key: "outbox_url",
};
const INBOX: ConfigError = ConfigError::Missing {
    what: "the consumer's database",
    flag: "--inbox-url postgres://…",
    variable: "ONCEBOX_INBOX_URL",
    key: "inbox_url",
};

fn url<'s>(
    settings: &'s Settings,
    own: Option<&'s DatabaseUrl>,
    missing: ConfigError,
) -> Result<&'s DatabaseUrl, ConfigError> {
    own.or(settings.database_url.as_ref()).ok_or(missing)
}

async fn compare<A: OperatorStore, B: OperatorStore>(
    outbox: Pool<A>,
    inbox: Pool<B>,
    args: &Reconcile,
    settings: &Settings,
) -> Result<(), Failure> {
    let names = settings.names()?;
    let schema = args.inbox_schema.as_deref().unwrap_or(names.schema());
    let prefix = args.inbox_prefix.as_deref().unwrap_or(names.prefix());
    let inbox_names = oncebox_migrations::Names::new(schema, prefix)
        .map_err(|e| ConfigError::Value(format!("flags --inbox-schema, --inbox-prefix: {e}")))?;
    let mut request = Request::new(outbox, inbox)
        .outbox_names(names)
        .inbox_names(inbox_names)
        .consumer(&args.consumer)
        .grace(when::duration("--grace", &args.grace)?)
        .quiet(when::duration("--quiet", &args.quiet)?)
        .shown(args.limit);
    if let Some(topic) = &args.topic {
        request = request.topic(topic);
    }
    if let Some(since) = when::time("--since", args.since.as_deref())? {
        request = request.since(since);
    }
    if let Some(until) = when::time("--until", args.until.as_deref())? {
        request = request.until(until);
    }
    let report = reconcile::reconcile(&request)
        .await
        .map_err(|e| failure(&e))?;
    print(&match args.json {
        true => format!("{}\n", value(&report)),
        false => report.to_string(),
    })?;
    match report.complete() {
        true => Ok(()),
        false => Err(Failure::Said),
    }
}

fn range(range: &Range) -> Value {
    json!({ "from": when::value(range.from), "until": when::value(Some(range.until)) })
}

fn value(report: &Report) -> Value {
    let missing = report.missing.iter().map(|m| {
        json!({
            "outbox_id": m.outbox_id,
            "message_id": m.message_id.to_string(),
            "topic": m.topic,
            "created_at": when::value(Some(m.created_at)),
            "overtaken": m.overtaken,
        })
    });
    let extra = report.extra.iter().map(|e| {
        json!({
            "message_id": e.message_id.to_string(),
            "topic": e.topic,
            "made_at": when::value(Some(e.made_at)),
            "consumed_at": when::value(Some(e.consumed_at)),
        })
    });
    json!({
        "complete": report.complete(),
        "consumer": report.consumer,
        "topics": report.topics,
        "published": {
            "covers": range(&report.covers),
            "rows": report.rows,
            "settled": report.settled,
            "retrying": report.retrying,
            "waiting": report.unpublished.waiting,
            "waiting_since": when::value(report.unpublished.oldest),
            "parked": report.unpublished.parked,
        },
        "consumed": {
            "covers": report.extra_covers.as_ref().map(range),
            "by": if report.extra_by_record { "record" } else { "marks" },
            "messages": report.consumed,
        },
        "missing_count": report.missing_count,
        "missing": missing.collect::<Vec<_>>(),
        "extra_count": report.extra_count,
        "extra": extra.collect::<Vec<_>>(),
        "stuck": stuck(report),
    })
}

fn stuck(report: &Report) -> Value {
    let stuck = &report.stuck;
    let parked = stuck.parked_rows.iter().map(|rows| {
        json!({
            "topic": rows.topic,
            "count": rows.count,
            "requested": rows.requested,
            "oldest": when::value(Some(rows.oldest)),
        })
    });
    let letters = stuck.letters.iter().map(|letters| {
        json!({
            "topic": letters.topic,
            "dead": letters.dead,
            "parked": letters.parked,
            "overdue": letters.overdue,
            "oldest": when::value(Some(letters.oldest)),
        })
    });
    let quiet = stuck.quiet.iter().map(|quiet| {
        json!({
            "topic": quiet.topic,
            "partition": quiet.partition,
            "next": quiet.next,
            "updated_at": when::value(Some(quiet.updated_at)),
        })
    });
    let breakers = stuck.breakers.iter().map(|breaker| {
        json!({
            "topic": breaker.topic,
            "failures": breaker.failures,
            "error": breaker.error,
            "tripped_at": when::value(Some(breaker.tripped_at)),
        })
    });
    json!({
        "parked_rows": parked.collect::<Vec<_>>(),
        "letters": letters.collect::<Vec<_>>(),
        "quiet": quiet.collect::<Vec<_>>(),
        "stopped": breakers.collect::<Vec<_>>(),
    })
}
