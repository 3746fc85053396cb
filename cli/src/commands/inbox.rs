//! `oncebox inbox resume`.

use std::time::Duration;

use oncebox_inbox::InboxStore;
use oncebox_inbox::resume::{self, From, Request};
use sqlx::pool::PoolOptions;
use sqlx::postgres::PgConnectOptions;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{Pool, Postgres, Sqlite};

use super::print;
use crate::args::InboxResume;
use crate::config::{Backend, ConfigError, DatabaseUrl, Settings};
use crate::exit::{Failure, with_sources};

/// How long to wait for a connection.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) async fn resume(args: &InboxResume, settings: &Settings) -> Result<(), Failure> {
    let from: From = args
        .from
        .parse()
        .map_err(|e: resume::UnknownFrom| ConfigError::Value(format!("flag --from: {e}")))?;
    let url = settings.database_url()?;
    match url.backend() {
        Backend::Postgres => {
            let options: PgConnectOptions = parsed(url)?;
            let pool: Pool<Postgres> = PoolOptions::new()
                .acquire_timeout(PATIENCE)
                .connect_lazy_with(options);
            resume_in(pool, args, from, settings).await
        }
        Backend::Sqlite => {
            let options: SqliteConnectOptions = parsed(url)?;
            let pool: Pool<Sqlite> = PoolOptions::new()
                .acquire_timeout(PATIENCE)
                .connect_lazy_with(options);
            resume_in(pool, args, from, settings).await
        }
    }
}

fn parsed<O: std::str::FromStr<Err = sqlx::Error>>(url: &DatabaseUrl) -> Result<O, ConfigError> {
    url.expose()
        .parse()
        .map_err(|e| ConfigError::Value(format!("the database URL does not parse: {e}")))
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
        .topic(&args.topic);
    if let Some(partition) = args.partition {
        request = request.partition(partition);
    }
    let outcome = if args.apply {
        resume::apply(&request, from).await
    } else {
        resume::plan(&request, from).await
    };
    let plan = outcome.map_err(|e| {
        let text = with_sources(&e);
        if e.is_stop() {
            Failure::Danger(text)
        } else if e.is_config() {
            Failure::Usage(text)
        } else {
            Failure::Error(text)
        }
    })?;
    let end = if args.apply {
        "written; a running consumer notices and goes on from here"
    } else {
        "nothing was changed; add --apply to do it"
    };
    print(&format!("{plan}{end}\n"))
}
