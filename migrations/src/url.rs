//! The same by URL: for programs that have no connection yet.

use crate::{Error, Names, Report, Status};

/// Brings the schema of the database at `database_url` to the newest version this build knows.
///
/// `postgres://` and `postgresql://` URLs go to [`postgres::migrate`](crate::postgres::migrate). `sqlite:` URLs go to
/// [`sqlite::migrate`](crate::sqlite::migrate); the file is created when it is missing, and its journal mode becomes WAL
/// (a property of the file), without which readers and writers of one database block each other.
///
/// ```no_run
/// # async fn example() -> Result<(), oncebox_migrations::Error> {
/// let report = oncebox_migrations::migrate("postgres://localhost/shop", &Default::default()).await?;
/// println!("applied {:?}, now at version {}", report.applied, report.version);
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// As the two functions, [`Error::UnsupportedUrl`], and [`Error::Database`] when the connection fails. Errors never
/// contain the URL.
///
/// # Cancel safety
///
/// Dropping the future rolls back the version that is being applied.
pub async fn migrate(database_url: &str, names: &Names) -> Result<Report, Error> {
    match Target::parse(database_url)? {
        #[cfg(feature = "postgres")]
        Target::Postgres(options) => {
            let mut conn = connect(&options).await?;
            let report = crate::postgres::migrate(&mut conn, names).await;
            close(conn).await;
            report
        }
        #[cfg(feature = "sqlite")]
        Target::Sqlite(options) => {
            let mut conn = connect(&options.create_if_missing(true)).await?;
            let report = match crate::sqlite::use_wal(&mut conn).await {
                Ok(()) => crate::sqlite::migrate(&mut conn, names).await,
                Err(error) => Err(error),
            };
            close(conn).await;
            report
        }
    }
}

/// Reads the history of the database at `database_url`. Writes nothing and creates no file.
///
/// # Errors
///
/// [`Error::UnsupportedUrl`] and [`Error::Database`]: what the history means says [`Status::check`].
///
/// # Cancel safety
///
/// Cancel safe.
pub async fn status(database_url: &str, names: &Names) -> Result<Status, Error> {
    match Target::parse(database_url)? {
        #[cfg(feature = "postgres")]
        Target::Postgres(options) => {
            let mut conn = connect(&options).await?;
            let status = crate::postgres::status(&mut conn, names).await;
            close(conn).await;
            status
        }
        #[cfg(feature = "sqlite")]
        Target::Sqlite(options) => {
            let mut conn = connect(&options).await?;
            let status = crate::sqlite::status(&mut conn, names).await;
            close(conn).await;
            status
        }
    }
}

enum Target {
    #[cfg(feature = "postgres")]
    Postgres(sqlx::postgres::PgConnectOptions),
    #[cfg(feature = "sqlite")]
    Sqlite(sqlx::sqlite::SqliteConnectOptions),
}

impl Target {
    fn parse(url: &str) -> Result<Self, Error> {
        let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
        match scheme {
            #[cfg(feature = "postgres")]
            "postgres" | "postgresql" => url
                .parse()
                .map(Self::Postgres)
                .map_err(Error::database("understand the database URL")),
            #[cfg(feature = "sqlite")]
            "sqlite" => url
                .parse()
                .map(Self::Sqlite)
                .map_err(Error::database("understand the database URL")),
            _ => Err(Error::UnsupportedUrl {
                scheme: scheme.to_owned(),
            }),
        }
    }
}

async fn connect<O>(options: &O) -> Result<O::Connection, Error>
where
    O: sqlx::ConnectOptions<Connection: Sized>,
{
    options
        .connect()
        .await
        .map_err(Error::database("connect to the database"))
}

/// Says goodbye. The work is committed: an error here changes nothing.
async fn close<C: sqlx::Connection>(conn: C) {
    let _ = conn.close().await;
}
