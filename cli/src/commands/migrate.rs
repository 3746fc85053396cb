//! `oncebox migrate`: run the migrations, or print them for another tool.

use oncebox_migrations::Dialect;

use super::print;
use crate::args::{DialectName, Migrate};
use crate::config::{Backend, ConfigError, Settings};
use crate::exit::{Failure, with_sources};

pub(crate) async fn run(args: &Migrate, settings: &Settings) -> Result<(), Failure> {
    let names = settings.names()?;
    if args.grants {
        let sql = oncebox_migrations::grants(&names, &args.producer, &args.relay, &args.consumer);
        return print(&sql);
    }
    if args.print {
        return print(&printed(args, settings)?);
    }
    let url = settings.database_url()?;
    let report = oncebox_migrations::migrate(url.expose(), &names)
        .await
        .map_err(|e| Failure::error(format!("{url}: {}", with_sources(&e))))?;
    let done = match report.applied.as_slice() {
        [] => "nothing to do".to_owned(),
        applied => format!(
            "applied {}",
            applied
                .iter()
                .map(i64::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        ),
    };
    print(&format!(
        "{url}: schema version {}, {done}\n",
        report.version
    ))
}

fn printed(args: &Migrate, settings: &Settings) -> Result<String, Failure> {
    let latest = oncebox_migrations::LATEST;
    let to = args.to.unwrap_or(latest);
    if args.from < 0 || args.from > to || to > latest {
        return Err(ConfigError::Value(format!(
            "flags --from {} --to {to}: expected 0 <= from <= to <= {latest}, the newest version",
            args.from
        ))
        .into());
    }
    let backend = settings.database_url.as_ref().map(|url| url.backend());
    let dialect = match (args.dialect, backend) {
        (Some(DialectName::Sqlite), _) | (None, Some(Backend::Sqlite)) => Dialect::Sqlite,
        _ => Dialect::Postgres,
    };
    Ok(oncebox_migrations::sql(
        dialect,
        &settings.names()?,
        args.from,
        to,
    ))
}
