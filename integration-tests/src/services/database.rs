//! A fresh database for one test.

use anyhow::Result;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};

use super::Postgres;

/// A database with a random name; dropped with its sessions when the value goes.
#[derive(Debug)]
pub struct Database {
    name: String,
    server: PgConnectOptions,
    url: String,
}

impl Database {
    /// A fresh database on the shared server.
    ///
    /// # Panics
    /// The shared server cannot be started, or refuses.
    pub async fn create() -> Self {
        let postgres = super::postgres().await;
        match Self::create_on(postgres).await {
            Ok(database) => database,
            Err(refused) => panic!("cannot create a database: {refused:#}"),
        }
    }

    /// A fresh database on this server.
    ///
    /// # Errors
    /// The server refuses.
    pub async fn create_on(postgres: &Postgres) -> Result<Self> {
        let server: PgConnectOptions = postgres.url().parse()?;
        let name = format!("t_{}", uuid::Uuid::new_v4().simple());
        let mut conn = PgConnection::connect_with(&server).await?;
        sqlx::query(AssertSqlSafe(format!("CREATE DATABASE {name}")))
            .execute(&mut conn)
            .await?;
        conn.close().await?;
        let url = with_database(postgres.url(), &name);
        Ok(Self { name, server, url })
    }

    /// The database of the same name on another server: a promoted standby, or a restored dump.
    ///
    /// # Errors
    /// The server's URL does not parse.
    pub fn on(&self, other: &Postgres) -> Result<Self> {
        Ok(Self {
            name: self.name.clone(),
            server: other.url().parse()?,
            url: with_database(other.url(), &self.name),
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its URL, as the administrator.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its URL for another role.
    pub fn url_as(&self, role: &str, password: &str) -> String {
        let host = format!("{}:{}", self.server.get_host(), self.server.get_port());
        format!("postgres://{role}:{password}@{host}/{}", self.name)
    }

    /// Connection options, as the administrator.
    pub fn options(&self) -> PgConnectOptions {
        self.server.clone().database(&self.name)
    }

    /// One connection.
    ///
    /// # Panics
    /// The server refuses it.
    pub async fn connect(&self) -> PgConnection {
        match PgConnection::connect_with(&self.options()).await {
            Ok(conn) => conn,
            Err(refused) => panic!("cannot connect to {}: {refused}", self.name),
        }
    }

    /// A pool of at most `connections`.
    ///
    /// # Panics
    /// The server refuses the first connection.
    pub async fn pool(&self, connections: u32) -> PgPool {
        match PgPoolOptions::new()
            .max_connections(connections)
            .connect_with(self.options())
            .await
        {
            Ok(pool) => pool,
            Err(refused) => panic!("cannot connect to {}: {refused}", self.name),
        }
    }
}

impl Drop for Database {
    /// On a thread of its own: a destructor cannot wait in the runtime it runs on.
    fn drop(&mut self) {
        let server = self.server.clone();
        let statement = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name);
        let dropping = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            runtime.block_on(async {
                let mut conn = PgConnection::connect_with(&server).await?;
                sqlx::query(AssertSqlSafe(statement))
                    .execute(&mut conn)
                    .await?;
                conn.close().await?;
                Ok::<(), anyhow::Error>(())
            })
        });
        let _ = dropping.join();
    }
}

pub(super) fn with_database(url: &str, database: &str) -> String {
    let (url, query) = url
        .split_once('?')
        .map_or((url, None), |(u, q)| (u, Some(q)));
    let scheme = url.find("://").map_or(0, |at| at + 3);
    let base = url[scheme..]
        .find('/')
        .map_or(url, |at| &url[..scheme + at]);
    match query {
        Some(query) => format!("{base}/{database}?{query}"),
        None => format!("{base}/{database}"),
    }
}

#[cfg(test)]
mod tests {
    use super::with_database;

    #[test]
    fn the_url_keeps_everything_but_the_database() {
        assert_eq!(
            with_database("postgres://a:b@h:5/x", "t"),
            "postgres://a:b@h:5/t"
        );
        assert_eq!(with_database("postgres://h", "t"), "postgres://h/t");
        assert_eq!(
            with_database("postgres://h/x?sslmode=disable", "t"),
            "postgres://h/t?sslmode=disable"
        );
    }
}
