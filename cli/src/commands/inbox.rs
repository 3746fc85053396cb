//! `oncebox inbox`.

use std::fmt::Write as _;

use oncebox_inbox::InboxStore;
use oncebox_inbox::pause;
use oncebox_inbox::resume::{self, From, Request};
use serde_json::{Value, json};
use sqlx::Pool;

use super::connect::{failure, with_pool};
use super::{print, when};
use crate::args::{InboxPause, InboxPaused, InboxResume, InboxTopic};
use crate::config::{ConfigError, Settings};
use crate::exit::Failure;

pub(crate) async fn resume(args: &InboxResume, settings: &Settings) -> Result<(), Failure> {
    if args.accept_failures {
        let url = settings.database_url()?;
        return with_pool!(url, pool => accept_in(pool, args, settings).await);
    }
    let from: From = args
        .from
        .as_deref()
        .unwrap_or_default()
        .parse()
        .map_err(|e: resume::UnknownFrom| ConfigError::Value(format!("flag --from: {e}")))?;
    let url = settings.database_url()?;
    with_pool!(url, pool => resume_in(pool, args, from, settings).await)
}

async fn resume_in<D: InboxStore>(
    pool: Pool<D>,
    args: &InboxResume,
    from: From,
    settings: &Settings,
) -> Result<(), Failure> {
    let mut request = Request::new(pool, settings.kafka()?)
        .names(settings.names()?)
        .consumer(&args.consumer)
        .topic(args.topic.as_deref().unwrap_or_default());
    if let Some(partition) = args.partition {
        request = request.partition(partition);
    }
    let outcome = if args.apply {
        resume::apply(&request, from).await
    } else {
        resume::plan(&request, from).await
    };
    let plan = outcome.map_err(|e| failure(&e))?;
    let end = if args.apply {
        "written; a running consumer notices and goes on from here"
    } else {
        "nothing was changed; add --apply to do it"
    };
    print(&format!("{plan}{end}\n"))
}

async fn accept_in<D: InboxStore>(
    pool: Pool<D>,
    args: &InboxResume,
    settings: &Settings,
) -> Result<(), Failure> {
    let names = settings.names()?;
    let stops = if args.apply {
        resume::accept_failures(&pool, &names, &args.consumer).await
    } else {
        resume::failures(&pool, &names, &args.consumer).await
    };
    let stops = stops.map_err(|e| failure(&e))?;
    let mut text = String::new();
    for stop in &stops {
        text.push_str(&format!("{stop}\n"));
    }
    text.push_str(match (stops.is_empty(), args.apply) {
        (true, _) => "nothing to accept: this consumer did not stop because of failures\n",
        (false, true) => "accepted; the consumer may start again\n",
        (false, false) => "nothing was changed; add --apply to do it\n",
    });
    print(&text)
}

pub(crate) async fn pause(args: &InboxPause, settings: &Settings) -> Result<(), Failure> {
    let (url, names) = (settings.database_url()?, settings.names()?);
    let InboxTopic { consumer, topic } = &args.of;
    with_pool!(url, pool => {
        let paused = pause::pause(&pool, &names, consumer, topic, &args.reason).await;
        paused.map_err(|e| failure(&e))
    })?;
    print(&format!(
        "{consumer} leaves {topic:?} alone from about a second on, until `oncebox inbox unpause --consumer {consumer} --topic {topic}`\n"
    ))
}

pub(crate) async fn unpause(args: &InboxTopic, settings: &Settings) -> Result<(), Failure> {
    let (url, names) = (settings.database_url()?, settings.names()?);
    let InboxTopic { consumer, topic } = args;
    let was = with_pool!(url, pool => {
        let was = pause::unpause(&pool, &names, consumer, topic).await;
        was.map_err(|e| failure(&e))
    })?;
    if was {
        return print(&format!("{consumer} goes on with {topic:?} where it was\n"));
    }
    Err(Failure::error(format!(
        "topic {topic:?} is not paused for {consumer}; `oncebox inbox paused --consumer {consumer}` shows what is"
    )))
}

pub(crate) async fn paused(args: &InboxPaused, settings: &Settings) -> Result<(), Failure> {
    let (url, names) = (settings.database_url()?, settings.names()?);
    let paused = with_pool!(url, pool => {
        let paused = pause::list(&pool, &names, &args.consumer).await;
        paused.map_err(|e| failure(&e))
    })?;
    if args.json {
        let rows = paused.iter().map(|p| {
            json!({ "topic": p.topic, "since": when::value(Some(p.since)), "reason": p.reason })
        });
        return print(&format!("{}\n", Value::from_iter(rows)));
    }
    let mut text = String::new();
    for p in &paused {
        let _ = writeln!(
            text,
            "{}  since {}  {}",
            p.topic,
            when::text(p.since),
            p.reason
        );
    }
    if paused.is_empty() {
        text.push_str("nothing is paused\n");
    }
    print(&text)
}
