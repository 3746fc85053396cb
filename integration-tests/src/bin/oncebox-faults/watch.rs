//! What is seen of relays and consumers from outside: by one connection to each database, made again when it breaks.

use anyhow::{Context as _, Result};
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{Connection as _, FromRow, Postgres};
use tokio::sync::Mutex;

/// Looks at both databases.
pub(crate) struct Watch {
    outbox: Eye,
    inventory: Eye,
}

impl Watch {
    pub(crate) fn new(outbox: PgConnectOptions, inventory: PgConnectOptions) -> Self {
        Self {
            outbox: Eye::new(outbox),
            inventory: Eye::new(inventory),
        }
    }

    /// The acknowledged transactions, by the mark: grows while relays get on.
    pub(crate) async fn seq(&self) -> Result<i64> {
        let (seq,) = self.outbox.see("SELECT seq FROM oncebox_mark").await?;
        Ok(seq)
    }

    /// The number of the last effect: grows while consumers get on.
    pub(crate) async fn effects(&self) -> Result<i64> {
        let last = "SELECT coalesce(max(n), 0) FROM effects";
        let (last,) = self.inventory.see(last).await?;
        Ok(last)
    }

    /// Per partition, the highest offset that has its effect.
    pub(crate) async fn highest(&self) -> Result<Vec<(i32, i64)>> {
        // A look at the index for each partition, however many effects there are.
        let highest = "SELECT array_agg((SELECT max(at) FROM effects WHERE place = p) ORDER BY p) \
                       FROM generate_series(0, (SELECT max(place) FROM effects)) AS p";
        let (offsets,): (Option<Vec<Option<i64>>>,) = self.inventory.see(highest).await?;
        let offsets = offsets.unwrap_or_default();
        Ok((0..)
            .zip(offsets)
            .filter_map(|(place, offset)| Some((place, offset?)))
            .collect())
    }

    /// How many rows are parked: all, and those that were refused themselves.
    pub(crate) async fn parked(&self) -> Result<(i64, i64)> {
        let counts =
            "SELECT count(*), count(*) FILTER (WHERE cause = 'refused') FROM oncebox_parked";
        self.outbox.see(counts).await
    }

    /// The process in the lease: `host/pid/…`.
    pub(crate) async fn owner(&self) -> Result<Option<u32>> {
        let (owner,): (Option<String>,) = self.outbox.see("SELECT owner FROM oncebox_mark").await?;
        let pid = owner.as_deref().map(|owner| {
            let pid = owner.split('/').nth(1);
            pid.context("an owner without a process")?
                .parse()
                .context("an owner without a process")
        });
        pid.transpose()
    }
}

struct Eye {
    options: PgConnectOptions,
    conn: Mutex<Option<PgConnection>>,
}

impl Eye {
    fn new(options: PgConnectOptions) -> Self {
        Self {
            options,
            conn: Mutex::default(),
        }
    }

    async fn see<T>(&self, query: &'static str) -> Result<T>
    where
        T: for<'r> FromRow<'r, sqlx::postgres::PgRow> + Send + Unpin,
    {
        let mut held = self.conn.lock().await;
        let mut conn = match held.take() {
            Some(conn) => conn,
            None => PgConnection::connect_with(&self.options).await?,
        };
        let row = sqlx::query_as::<Postgres, T>(query)
            .fetch_one(&mut conn)
            .await?;
        // Only what answered is used again.
        *held = Some(conn);
        Ok(row)
    }
}
