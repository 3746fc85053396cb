//! A pool for an operator's command, and what its failures mean.

use std::str::FromStr;
use std::time::Duration;

use sqlx::pool::PoolOptions;
use sqlx::postgres::PgConnectOptions;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{PgPool, SqlitePool};

use crate::config::{ConfigError, DatabaseUrl};
use crate::exit::{Failure, with_sources};

/// How long to wait for a connection.
const PATIENCE: Duration = Duration::from_secs(10);

/// Runs `$work` with a pool of the database that the URL names.
macro_rules! with_pool {
    ($url:expr, $pool:ident => $work:expr) => {
        match $url.backend() {
            $crate::config::Backend::Postgres => {
                let $pool = $crate::commands::connect::postgres($url)?;
                $work
            }
            $crate::config::Backend::Sqlite => {
                let $pool = $crate::commands::connect::sqlite($url)?;
                $work
            }
        }
    };
}
pub(crate) use with_pool;

pub(crate) fn postgres(url: &DatabaseUrl) -> Result<PgPool, ConfigError> {
    let options: PgConnectOptions = parsed(url)?;
    Ok(PoolOptions::new()
        .acquire_timeout(PATIENCE)
        .connect_lazy_with(options))
}

pub(crate) fn sqlite(url: &DatabaseUrl) -> Result<SqlitePool, ConfigError> {
    let options: SqliteConnectOptions = parsed(url)?;
    Ok(PoolOptions::new()
        .acquire_timeout(PATIENCE)
        .connect_lazy_with(options))
}

fn parsed<O: FromStr<Err = sqlx::Error>>(url: &DatabaseUrl) -> Result<O, ConfigError> {
    url.expose()
        .parse()
        .map_err(|e| ConfigError::Value(format!("the database URL does not parse: {e}")))
}

/// The exit code and the words of an error of the inbox.
pub(crate) fn failure(error: &oncebox_inbox::Error) -> Failure {
    let text = with_sources(error);
    if error.is_stop() {
        Failure::Danger(text)
    } else if error.is_config() {
        Failure::Usage(text)
    } else {
        Failure::Error(text)
    }
}
