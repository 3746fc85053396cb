//! `oncebox record`.

use std::fmt::Write as _;
use std::time::Duration;

use oncebox_inbox::dead::Direction;
use oncebox_inbox::operator::OperatorStore;
use oncebox_inbox::record::{Filter, Group, Records, Row};
use serde_json::{Value, json};
use time::OffsetDateTime;

use super::connect::{failure, with_pool};
use super::{bytes, print, when};
use crate::args::{
    RecordClean, RecordCommand, RecordFilter, RecordList, RecordPartitions, RecordSummary,
};
use crate::config::{ConfigError, Settings};
use crate::exit::Failure;

/// Without an id and without --since, this much.
const RECENT: Duration = Duration::from_secs(86_400);

pub(crate) async fn run(command: &RecordCommand, settings: &Settings) -> Result<(), Failure> {
    let names = settings.names()?;
    let url = settings.database_url()?;
    with_pool!(url, pool => work(command, &Records::new(pool).names(names)).await)
}

async fn work<D: OperatorStore>(
    command: &RecordCommand,
    records: &Records<D>,
) -> Result<(), Failure> {
    match command {
        RecordCommand::List(args) => list(args, records).await,
        RecordCommand::Summary(args) => summary(args, records).await,
        RecordCommand::Partitions(args) => partitions(args, records).await,
        RecordCommand::Clean(args) => clean(args, records).await,
    }
}

impl RecordFilter {
    fn filter(&self) -> Result<Filter, ConfigError> {
        let by_id = self.message_id.is_some() || self.business_id.is_some();
        let since = when::time("--since", self.since.as_deref())?;
        let recent = (!by_id).then(|| OffsetDateTime::now_utc() - RECENT);
        Ok(Filter {
            message_id: self.message_id,
            business_id: self.business_id.clone(),
            consumer: self.consumer.clone(),
            topic: self.topic.clone(),
            partition: self.partition,
            status: self.status,
            since: since.or(recent),
            until: when::time("--until", self.until.as_deref())?,
        })
    }
}

async fn list<D: OperatorStore>(args: &RecordList, records: &Records<D>) -> Result<(), Failure> {
    let direction = match args.oldest {
        true => Direction::Oldest,
        false => Direction::Newest,
    };
    let page = records
        .list(
            &args.filter.filter()?,
            direction,
            args.after.as_ref(),
            args.limit,
        )
        .await
        .map_err(|e| failure(&e))?;
    let mut out = String::new();
    for row in &page.rows {
        let _ = match args.json {
            true => writeln!(out, "{}", value(row)),
            false => writeln!(out, "{}", line(row)),
        };
    }
    if !args.json {
        if page.rows.is_empty() {
            out.push_str("nothing was settled, of what was asked for (--since defaults to 1d)\n");
        }
        if let Some(next) = page.next {
            let _ = writeln!(out, "… and more: --after {next}");
        }
    }
    print(&out)
}

async fn summary<D: OperatorStore>(
    args: &RecordSummary,
    records: &Records<D>,
) -> Result<(), Failure> {
    let groups = records
        .summary(&args.filter.filter()?)
        .await
        .map_err(|e| failure(&e))?;
    let mut out = String::new();
    for group in &groups {
        let _ = match args.json {
            true => writeln!(out, "{}", group_value(group)),
            false => writeln!(out, "{}", group_line(group)),
        };
    }
    if groups.is_empty() && !args.json {
        out.push_str("nothing was settled, of what was asked for (--since defaults to 1d)\n");
    }
    print(&out)
}

async fn partitions<D: OperatorStore>(
    args: &RecordPartitions,
    records: &Records<D>,
) -> Result<(), Failure> {
    if args.apply {
        let ahead = records
            .partitions_ahead(args.days)
            .await
            .map_err(|e| failure(&e))?;
        if args.json {
            let left = ahead.left.iter();
            let left =
                left.map(|(day, why)| json!({ "day": day.to_string(), "why": why.to_string() }));
            let json = json!({
                "applied": true,
                "partitioned": ahead.partitioned,
                "made": days(&ahead.made),
                "there": days(&ahead.there),
                "left": left.collect::<Vec<_>>(),
            });
            return print(&format!("{json}\n"));
        }
        return print(&ahead.to_string());
    }
    let missing = records
        .missing_partitions(args.days)
        .await
        .map_err(|e| failure(&e))?;
    if args.json {
        let json = json!({ "applied": false, "missing": days(&missing) });
        return print(&format!("{json}\n"));
    }
    let mut out = String::new();
    for day in &missing {
        let _ = writeln!(out, "{day}  to make");
    }
    let _ = writeln!(
        out,
        "{} partitions to make; nothing was changed; add --apply to do it",
        missing.len()
    );
    print(&out)
}

async fn clean<D: OperatorStore>(args: &RecordClean, records: &Records<D>) -> Result<(), Failure> {
    let plan = if args.apply {
        records.clean(args.keep).await
    } else {
        records.plan_clean(args.keep).await
    }
    .map_err(|e| failure(&e))?;
    if args.json {
        let json = json!({
            "applied": plan.applied,
            "before": when::value(Some(plan.before)),
            "partitions": days(&plan.days),
            "busy": days(&plan.busy),
            "rows": plan.rows,
        });
        return print(&format!("{json}\n"));
    }
    let end = match args.apply {
        true => "",
        false => "nothing was changed; add --apply to do it\n",
    };
    print(&format!("{plan}{end}"))
}

fn days(days: &[time::Date]) -> Vec<String> {
    days.iter().map(ToString::to_string).collect()
}

fn line(row: &Row) -> String {
    let business = row.business_id.as_deref().unwrap_or("-");
    let error = row
        .error
        .as_deref()
        .map_or(String::new(), |e| format!(": {}", bytes::one_line(e)));
    format!(
        "{:<6} {} {} {}[{}]@{} {} {business} {} attempts, {:.1?}{error}",
        row.status.as_str(),
        when::text(row.settled_at),
        row.consumer,
        row.topic,
        row.partition,
        row.offset,
        row.message_id,
        row.attempts,
        row.duration
    )
}

fn value(row: &Row) -> Value {
    json!({
        "status": row.status.as_str(),
        "consumer": row.consumer,
        "topic": row.topic,
        "partition": row.partition,
        "offset": row.offset,
        "message_id": row.message_id.to_string(),
        "business_id": row.business_id,
        "attempts": row.attempts,
        "first_at": when::value(Some(row.first_at)),
        "settled_at": when::value(Some(row.settled_at)),
        "duration_us": u64::try_from(row.duration.as_micros()).unwrap_or(u64::MAX),
        "error": row.error,
        "place": row.cursor().to_string(),
    })
}

fn group_line(group: &Group) -> String {
    format!(
        "{} {} {:<6} {}, {} of them retried; handler {:.1?} on average, {:.1?} at most; {} to {}",
        group.consumer,
        group.topic,
        group.status.as_str(),
        group.count,
        group.retried,
        group.average,
        group.longest,
        when::text(group.first),
        when::text(group.last)
    )
}

fn group_value(group: &Group) -> Value {
    json!({
        "consumer": group.consumer,
        "topic": group.topic,
        "status": group.status.as_str(),
        "count": group.count,
        "retried": group.retried,
        "average_us": u64::try_from(group.average.as_micros()).unwrap_or(u64::MAX),
        "longest_us": u64::try_from(group.longest.as_micros()).unwrap_or(u64::MAX),
        "first": when::value(Some(group.first)),
        "last": when::value(Some(group.last)),
    })
}
