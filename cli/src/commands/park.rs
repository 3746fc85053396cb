//! `oncebox relay park`, `oncebox relay pause` and `oncebox relay resume --topic`.

use std::fmt::Write as _;

use oncebox_relay::park::{self, Parked};
use oncebox_relay::{Cause, Filter, Request};
use serde_json::{Value, json};

use super::bytes::{SHOWN, key as key_text, text, value};
use super::print;
use crate::args::{
    CauseName, ParkChoice, ParkCommand, ParkFilter, ParkList, ParkShow, RelayPause, RelayResume,
};
use crate::config::{ConfigError, Settings};
use crate::exit::Failure;

/// Most messages that one command asks something for.
const MOST: usize = 10_000;

pub(crate) async fn run(command: &ParkCommand, settings: &Settings) -> Result<(), Failure> {
    match command {
        ParkCommand::List(args) => list(args, settings).await,
        ParkCommand::Show(args) => show(args, settings).await,
        ParkCommand::Requeue(args) => request(args, Request::Requeue, settings).await,
        ParkCommand::Skip(args) => request(args, Request::Skip, settings).await,
    }
}

pub(crate) async fn pause(args: &RelayPause, settings: &Settings) -> Result<(), Failure> {
    let key = args.key.bytes()?;
    let config = settings.relay_database()?;
    let new = park::pause(&config, &args.topic, key.as_deref(), &args.reason).await?;
    let what = name(&args.topic, key.as_deref());
    print(&match new {
        true => format!(
            "{what} is paused; its messages are parked until `oncebox relay resume --topic {}`\n",
            args.topic
        ),
        false => format!("{what} was paused already; the reason is written\n"),
    })
}

pub(crate) async fn resume(args: &RelayResume, settings: &Settings) -> Result<(), Failure> {
    let key = args.key.bytes()?;
    let topic = args.topic.as_deref().unwrap_or_default();
    let config = settings.relay_database()?;
    let what = name(topic, key.as_deref());
    if park::resume(&config, topic, key.as_deref()).await? {
        print(&format!(
            "{what} is published to again; what was parked for it comes first\n"
        ))
    } else {
        Err(Failure::error(format!(
            "{what} is not paused; `oncebox relay park list` shows what is"
        )))
    }
}

fn name(topic: &str, key: Option<&[u8]>) -> String {
    match key {
        None => format!("topic {topic:?}"),
        Some(key) => format!("key {} of topic {topic:?}", text(key)),
    }
}

impl ParkFilter {
    fn filter(&self, ids: &[i64]) -> Result<Filter, ConfigError> {
        Ok(Filter {
            ids: ids.to_vec(),
            topic: self.topic.clone(),
            key: self.key.bytes()?.map(Into::into),
            cause: self.cause.map(|cause| match cause {
                CauseName::Refused => Cause::Refused,
                CauseName::Key => Cause::Key,
                CauseName::Topic => Cause::Topic,
            }),
        })
    }
}

async fn list(args: &ParkList, settings: &Settings) -> Result<(), Failure> {
    let config = settings.relay_database()?;
    let filter = args.filter.filter(&[])?;
    let messages = park::list(&config, &filter, args.limit).await?;
    let mut out = String::new();
    if args.json {
        for message in &messages {
            let _ = writeln!(out, "{}", summary(message));
        }
        return print(&out);
    }
    let overview = park::overview(&config).await?;
    for paused in &overview.paused {
        let _ = writeln!(out, "paused    {paused}");
    }
    for (topic, count) in &overview.parked {
        let _ = writeln!(out, "parked    {topic}: {count}");
    }
    for message in &messages {
        let _ = writeln!(out, "{}", line(message));
    }
    let more = overview.parked.iter().map(|(_, n)| n).sum::<i64>() > messages.len() as i64;
    if more && messages.len() == args.limit {
        let _ = writeln!(out, "… and more: --limit, --topic, --key, --cause choose");
    }
    if out.is_empty() {
        out.push_str("no message is parked, no topic is paused\n");
    }
    print(&out)
}

async fn show(args: &ParkShow, settings: &Settings) -> Result<(), Failure> {
    let config = settings.relay_database()?;
    let only = Filter {
        ids: vec![args.id],
        ..Filter::default()
    };
    let Some(message) = park::list(&config, &only, 1).await?.pop() else {
        return Err(Failure::error(format!(
            "outbox row {} is not parked; `oncebox relay park list` shows what is",
            args.id
        )));
    };
    if args.json {
        let mut all = summary(&message);
        all["payload"] = value(message.payload.as_deref());
        let headers = message.headers.iter();
        all["headers"] = headers
            .map(|(name, content)| json!({ "name": name, "value": value(content.as_deref()) }))
            .collect();
        return print(&format!("{all}\n"));
    }
    let mut out = line(&message) + "\n";
    let _ = writeln!(out, "message id {}", message.message_id);
    let _ = writeln!(
        out,
        "enqueued   {}, parked {}, refused {} times",
        humantime::format_rfc3339_millis(message.created_at),
        humantime::format_rfc3339_millis(message.parked_at),
        message.attempts
    );
    for (name, content) in &message.headers {
        let content = content.as_deref().map_or("(null)".to_owned(), text);
        let _ = writeln!(out, "header     {name}: {content}");
    }
    match &message.payload {
        None => out.push_str("payload    none (a tombstone)\n"),
        Some(payload) => {
            let shown = &payload[..payload.len().min(SHOWN)];
            let _ = writeln!(
                out,
                "payload    {} bytes{}",
                payload.len(),
                if shown.len() < payload.len() {
                    ", the first:"
                } else {
                    ":"
                }
            );
            let _ = writeln!(out, "{}", text(shown));
        }
    }
    print(&out)
}

async fn request(args: &ParkChoice, request: Request, settings: &Settings) -> Result<(), Failure> {
    let config = settings.relay_database()?;
    let filter = args.filter.filter(&args.ids)?;
    let mut messages = park::list(&config, &filter, MOST).await?;
    if args.ids.is_empty() && args.filter.cause.is_none() {
        // What waits behind others follows by itself.
        messages.retain(|message| message.cause == Cause::Refused);
    }
    let known: Vec<i64> = messages.iter().map(|message| message.id).collect();
    if let Some(unknown) = args.ids.iter().find(|id| !known.contains(id)) {
        return Err(Failure::error(format!(
            "outbox row {unknown} is not parked (or not of that topic, key and cause); nothing was changed"
        )));
    }
    if known.is_empty() {
        return Err(Failure::error(
            "no parked message was meant; nothing was changed",
        ));
    }
    let mut out = String::new();
    for message in &messages {
        let _ = writeln!(out, "{}", line(message));
    }
    let what = match request {
        Request::Requeue => "published again",
        Request::Skip => "dropped for good",
    };
    if args.apply {
        let count = park::request(&config, &known, request).await?;
        let _ = writeln!(
            out,
            "{count} will be {what} by the leading relay within a second or two; what waits behind follows"
        );
    } else {
        let _ = writeln!(
            out,
            "{} would be {what}; nothing was changed; add --apply to do it",
            known.len()
        );
    }
    print(&out)
}

fn line(message: &Parked) -> String {
    let key = key_text(message.key.as_deref());
    let request = message
        .request
        .map_or(String::new(), |request| format!(" ({request} asked for)"));
    format!(
        "{:<9} {} {} {key}: {}{request}",
        message.cause.as_str(),
        message.id,
        message.topic,
        message.reason
    )
}

fn summary(message: &Parked) -> Value {
    json!({
        "id": message.id,
        "message_id": message.message_id.to_string(),
        "topic": message.topic,
        "key": value(message.key.as_deref()),
        "cause": message.cause.as_str(),
        "reason": message.reason,
        "attempts": message.attempts,
        "request": message.request.map(Request::as_str),
        "created_at": humantime::format_rfc3339_millis(message.created_at).to_string(),
        "parked_at": humantime::format_rfc3339_millis(message.parked_at).to_string(),
    })
}
