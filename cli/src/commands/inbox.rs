//! `oncebox inbox resume`.

use oncebox_inbox::InboxStore;
use oncebox_inbox::resume::{self, From, Request};
use sqlx::Pool;

use super::connect::{failure, with_pool};
use super::print;
use crate::args::InboxResume;
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
