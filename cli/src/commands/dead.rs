//! `oncebox dead`.

use std::fmt::{Display, Write as _};

use oncebox_inbox::dead::{
    Direction, DiscardPlan, Filter, Group, Kind, Letter, Letters, Listed, Replay, ReplayPlan, Share,
};
use oncebox_inbox::operator::OperatorStore;
use serde_json::{Value, json};

use super::connect::{failure, with_pool};
use super::{bytes, print, when};
use crate::args::{DeadChoice, DeadCommand, DeadFilter, DeadList, DeadReplay, DeadShow, KindName};
use crate::config::{ConfigError, Settings};
use crate::exit::Failure;

pub(crate) async fn run(command: &DeadCommand, settings: &Settings) -> Result<(), Failure> {
    let names = settings.names()?;
    let url = settings.database_url()?;
    with_pool!(url, pool => work(command, &Letters::new(pool).names(names)).await)
}

async fn work<D: OperatorStore>(
    command: &DeadCommand,
    letters: &Letters<D>,
) -> Result<(), Failure> {
    match command {
        DeadCommand::List(args) => list(args, letters).await,
        DeadCommand::Show(args) => show(args, letters).await,
        DeadCommand::Replay(args) => replay(args, letters).await,
        DeadCommand::Cancel(args) => cancel(args, letters).await,
        DeadCommand::Discard(args) => discard(args, letters).await,
    }
}

impl DeadFilter {
    fn filter(&self, ids: &[i64]) -> Result<Filter, ConfigError> {
        Ok(Filter {
            ids: ids.to_vec(),
            consumer: self.consumer.clone(),
            topic: self.topic.clone(),
            partition: self.partition,
            key: self.key.bytes()?,
            message_id: self.message_id,
            error: self.error.clone(),
            since: when::time("--since", self.since.as_deref())?,
            until: when::time("--until", self.until.as_deref())?,
            kind: self.kind.map(|kind| match kind {
                KindName::Dead => Kind::Dead,
                KindName::Parked => Kind::Parked,
                KindName::Delayed => Kind::Delayed,
            }),
            ordered: None,
        })
    }
}

async fn list<D: OperatorStore>(args: &DeadList, letters: &Letters<D>) -> Result<(), Failure> {
    let mut filter = args.filter.filter(&[])?;
    filter.ordered = args.ordered.then_some(true);
    let mut out = String::new();
    if args.count || !args.json {
        let groups = letters.groups(&filter).await.map_err(|e| failure(&e))?;
        for group in &groups {
            let _ = match args.json {
                true => writeln!(out, "{}", count(group)),
                false => writeln!(out, "{}", count_line(group)),
            };
        }
        if groups.is_empty() && !args.json {
            out.push_str("no message is dead, parked or delayed, of those that were asked for\n");
        }
    }
    if args.count {
        return print(&out);
    }
    let direction = match args.oldest {
        true => Direction::Oldest,
        false => Direction::Newest,
    };
    let page = letters
        .list(&filter, direction, args.after, args.limit)
        .await
        .map_err(|e| failure(&e))?;
    for letter in &page.letters {
        let _ = match args.json {
            true => writeln!(out, "{}", summary(letter)),
            false => writeln!(out, "{}", line(letter)),
        };
    }
    if let (Some(next), false) = (page.next, args.json) {
        let _ = writeln!(out, "… and more: --after {next}");
    }
    print(&out)
}

async fn show<D: OperatorStore>(args: &DeadShow, letters: &Letters<D>) -> Result<(), Failure> {
    let found = letters.show(args.id).await.map_err(|e| failure(&e))?;
    let Some(letter) = found else {
        return Err(Failure::error(format!(
            "there is no letter {} (any more: it may have been replayed); `oncebox dead list` shows what there is",
            args.id
        )));
    };
    if args.json {
        let mut all = summary(&letter.listed);
        all["payload"] = bytes::value(letter.payload.as_deref());
        all["headers"] = headers(&letter);
        all["headers_damaged"] = json!(letter.headers_damaged);
        return print(&format!("{all}\n"));
    }
    print(&full(&letter))
}

fn headers(letter: &Letter) -> Value {
    let headers = letter.headers.iter();
    headers
        .map(|(name, content)| json!({ "name": name, "value": bytes::value(content.as_deref()) }))
        .collect()
}

fn full(letter: &Letter) -> String {
    let listed = &letter.listed;
    let mut out = line(listed) + "\n";
    let _ = writeln!(out, "message id {}", listed.message_id);
    if listed.error.lines().nth(1).is_some() {
        let _ = writeln!(out, "error      {}", bytes::text(listed.error.as_bytes()));
    }
    let first = listed.first_failed_at.unwrap_or(listed.failed_at);
    let _ = writeln!(
        out,
        "failed     first {}, last {}, after {} attempts",
        when::text(first),
        when::text(listed.failed_at),
        listed.attempts
    );
    if let Some(at) = listed.record_timestamp {
        let _ = writeln!(out, "record     written {}", when::text(at));
    }
    let order = listed.replay_at.map_or("not ordered".to_owned(), |at| {
        format!("ordered for {}", when::text(at))
    });
    let _ = writeln!(out, "replay     {order}, {} times in vain", listed.replays);
    for (name, content) in &letter.headers {
        let content = content.as_deref().map_or("(null)".to_owned(), bytes::text);
        let _ = writeln!(out, "header     {name}: {content}");
    }
    if let Some(problem) = &letter.headers_damaged {
        let _ = writeln!(out, "header     the rest cannot be read: {problem}");
    }
    match &letter.payload {
        None => out.push_str("payload    none (a tombstone)\n"),
        Some(payload) => {
            let shown = &payload[..payload.len().min(bytes::SHOWN)];
            let cut = if shown.len() < payload.len() {
                ", the first:"
            } else {
                ":"
            };
            let _ = writeln!(out, "payload    {} bytes{cut}", payload.len());
            let pretty = serde_json::from_slice::<Value>(payload)
                .ok()
                .filter(|_| shown.len() == payload.len())
                .and_then(|json| serde_json::to_string_pretty(&json).ok());
            let _ = writeln!(out, "{}", pretty.unwrap_or_else(|| bytes::text(shown)));
        }
    }
    out
}

async fn replay<D: OperatorStore>(args: &DeadReplay, letters: &Letters<D>) -> Result<(), Failure> {
    let choice = &args.choice;
    let filter = choice.filter.filter(&choice.ids)?;
    let replay = Replay {
        rate: args.rate,
        force: args.force,
    };
    let plan = if choice.apply {
        letters.replay(&filter, &replay).await
    } else {
        letters.plan_replay(&filter, &replay).await
    }
    .map_err(|e| failure(&e))?;
    let meant = plan.letters.len() as u64 + plan.ordered_before + plan.refused + plan.busy;
    meant_something(meant)?;
    if choice.json {
        return print(&format!("{}\n", replay_json(&plan)));
    }
    print(&format!(
        "{plan}{}",
        end(
            choice.apply,
            "the running consumer replays them, from the ordered time on"
        )
    ))
}

fn replay_json(plan: &ReplayPlan) -> Value {
    json!({
        "applied": plan.applied,
        "letters": plan.letters,
        "shares": shares(&plan.shares),
        "ordered_before": plan.ordered_before,
        "refused": plan.refused,
        "busy": plan.busy,
        "rate": plan.rate.map(|rate| rate.to_string()),
        "takes_seconds": plan.takes().as_secs_f64(),
    })
}

async fn cancel<D: OperatorStore>(args: &DeadChoice, letters: &Letters<D>) -> Result<(), Failure> {
    let filter = args.filter.filter(&args.ids)?;
    let plan = if args.apply {
        letters.cancel(&filter).await
    } else {
        letters.plan_cancel(&filter).await
    }
    .map_err(|e| failure(&e))?;
    if args.json {
        let json = json!({
            "applied": plan.applied,
            "letters": plan.letters,
            "shares": shares(&plan.shares),
            "busy": plan.busy,
        });
        return print(&format!("{json}\n"));
    }
    print(&format!("{plan}{}", end(args.apply, "taken back")))
}

async fn discard<D: OperatorStore>(args: &DeadChoice, letters: &Letters<D>) -> Result<(), Failure> {
    let filter = args.filter.filter(&args.ids)?;
    let plan = if args.apply {
        letters.discard(&filter).await
    } else {
        letters.plan_discard(&filter).await
    }
    .map_err(|e| failure(&e))?;
    meant_something((plan.dead.len() + plan.parked.len()) as u64)?;
    if args.json {
        return print(&format!("{}\n", discard_json(&plan)));
    }
    print(&format!("{plan}{}", end(args.apply, "done")))
}

fn discard_json(plan: &DiscardPlan) -> Value {
    json!({
        "applied": plan.applied,
        "dead": plan.dead,
        "parked": plan.parked,
        "deleted": plan.deleted,
        "unblocked_keys": plan.unblocked,
        "still_blocked_keys": plan.still_blocked,
        "busy": plan.busy,
    })
}

fn meant_something(letters: u64) -> Result<(), Failure> {
    if letters > 0 {
        return Ok(());
    }
    Err(Failure::error(
        "no dead or parked message was meant; nothing was changed; `oncebox dead list` shows what there is",
    ))
}

fn end(applied: bool, done: impl Display) -> String {
    match applied {
        true => format!("{done}\n"),
        false => "nothing was changed; add --apply to do it\n".to_owned(),
    }
}

fn shares(shares: &[Share]) -> Value {
    let shares = shares.iter().map(|share| {
        json!({
            "consumer": share.consumer,
            "topic": share.topic,
            "letters": share.letters,
            "blocked_keys": share.keys,
            "drawn_in": share.drawn_in,
        })
    });
    shares.collect()
}

fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::Dead => "dead",
        Kind::Parked => "parked",
        Kind::Delayed => "delayed",
    }
}

fn count_line(group: &Group) -> String {
    format!(
        "{} {}: {} dead, {} parked behind {} keys, {} delayed, {} ordered, the oldest failed {} ago",
        group.consumer,
        group.topic,
        group.dead,
        group.parked,
        group.keys,
        group.delayed,
        group.ordered,
        humantime::format_duration(std::time::Duration::from_secs(group.oldest_age.as_secs()))
    )
}

fn count(group: &Group) -> Value {
    json!({
        "consumer": group.consumer,
        "topic": group.topic,
        "dead": group.dead,
        "parked": group.parked,
        "blocked_keys": group.keys,
        "delayed": group.delayed,
        "ordered": group.ordered,
        "oldest": when::value(Some(group.oldest)),
        "oldest_age_seconds": group.oldest_age.as_secs(),
    })
}

fn line(letter: &Listed) -> String {
    let what = match letter.kind {
        Kind::Delayed => "next attempt at",
        Kind::Dead | Kind::Parked => "replay ordered for",
    };
    let order = letter
        .replay_at
        .map_or(String::new(), |at| format!(" ({what} {})", when::text(at)));
    format!(
        "{:<7} {} {} {}[{}]@{} {} {}: {}{order}",
        word(letter.kind),
        letter.id,
        letter.consumer,
        letter.topic,
        letter.partition,
        letter.offset,
        bytes::key(letter.key.as_deref()),
        when::text(letter.failed_at),
        bytes::one_line(&letter.error)
    )
}

fn summary(letter: &Listed) -> Value {
    json!({
        "id": letter.id,
        "kind": word(letter.kind),
        "consumer": letter.consumer,
        "message_id": letter.message_id.to_string(),
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "key": bytes::value(letter.key.as_deref()),
        "error": letter.error,
        "attempts": letter.attempts,
        "first_failed_at": when::value(letter.first_failed_at),
        "failed_at": when::value(Some(letter.failed_at)),
        "record_timestamp": when::value(letter.record_timestamp),
        "replay_at": when::value(letter.replay_at),
        "replays": letter.replays,
        "payload_bytes": letter.payload_bytes,
    })
}
