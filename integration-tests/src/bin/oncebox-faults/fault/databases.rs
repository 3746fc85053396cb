//! Database servers: cut off, full, read-only, replaced.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use oncebox_integration_tests::history::{Entry, History};
use oncebox_integration_tests::services::{Database, Kafka, Postgres};
use oncebox_migrations::Names;
use rand::RngExt as _;
use rand::rngs::StdRng;
use sqlx::{Connection as _, PgConnection};

use super::PATIENCE;
use crate::crew;
use crate::scene::{self, Scene};
use crate::workload;

/// Ends every other session of a database.
pub(super) async fn cut(database: &Database) -> Result<bool> {
    let mut conn = PgConnection::connect_with(&database.options()).await?;
    let ended: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM (SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
         WHERE datname = current_database() AND pid <> pg_backend_pid()) AS ended",
    )
    .fetch_one(&mut conn)
    .await?;
    Ok(ended > 0)
}

impl Scene {
    pub(super) async fn read_only(&self, rng: &mut StdRng) -> Result<bool> {
        let mut admin = PgConnection::connect_with(&self.database.options()).await?;
        set_read_only(&mut admin, "on").await?;
        let hit = self.stands_still(rng).await;
        set_read_only(&mut admin, "off").await?;
        hit
    }

    /// Takes every connection that the server gives, ends all others, and keeps the place of those too.
    pub(super) async fn no_connections(&self, rng: &mut StdRng) -> Result<bool> {
        let options = self.database.options().application_name(TAKEN);
        let mut held = Vec::new();
        let mut end = Instant::now() + PATIENCE;
        let mut hit = false;
        while Instant::now() < end {
            match PgConnection::connect_with(&options).await {
                Ok(conn) => held.push(conn),
                Err(_) if !hit => {
                    let first = held.first_mut().context("no connection at all")?;
                    let others = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                         WHERE backend_type = 'client backend' AND application_name <> $1";
                    let ended: i64 = sqlx::query_scalar(others)
                        .bind(TAKEN)
                        .fetch_one(first)
                        .await?;
                    hit = ended > 0;
                    end = Instant::now() + self.within_a_transaction(rng);
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
        Ok(hit)
    }

    /// Hits when writers, relays and consumers stand still.
    pub(super) async fn disk_full(&self, rng: &mut StdRng) -> Result<bool> {
        self.postgres.fill_disk().await?;
        let deadline = Instant::now() + PATIENCE;
        let mut still = 0;
        let mut before = None;
        // What is left in allocated files is used up first.
        while still < 5 && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let effects = self.watch.effects().await.ok();
            still = if effects.is_none() || effects == before {
                still + 1
            } else {
                0
            };
            before = effects;
        }
        tokio::time::sleep(self.within_a_transaction(rng)).await;
        self.postgres.free_disk().await?;
        Ok(still >= 5)
    }

    pub(super) async fn switchover(&mut self) -> Result<bool> {
        let standby = self.postgres.standby().await?;
        standby.caught_up(&self.postgres).await?;
        // An orderly stop sends everything to the standby before it ends.
        self.postgres.stop().await?;
        standby.promote().await?;
        let databases = (self.database.on(&standby)?, self.inventory.on(&standby)?);
        let server = scene::address(&databases.0);
        self.cables.iter().chain([&self.cable]).for_each(|cable| {
            cable.redirect(server);
        });
        (self.database, self.inventory) = databases;
        self.postgres = standby;
        Ok(true)
    }

    /// On an outbox of its own: an operator has to say how it goes on.
    pub(super) async fn lossy_failover(&mut self, rng: &mut StdRng) -> Result<bool> {
        let primary = match self.spare.take() {
            Some(server) => server,
            None => Postgres::start(Default::default()).await?,
        };
        let mut shop = Shop::open(&primary, &self.kafka, self.log("failover.log")).await?;
        shop.commit(rng.random_range(1..20)).await?;
        shop.until_empty().await?;
        let standby = primary.standby().await?;
        standby.caught_up(&primary).await?;
        standby.stop().await?;
        // Published, and known to the lost primary alone.
        shop.commit(rng.random_range(1..20)).await?;
        shop.until_empty().await?;
        primary.crash().await?;
        standby.start_again().await?;
        standby.promote().await?;
        shop.database = shop.database.on(&standby)?;
        // Their ids are issued a second time.
        shop.commit(rng.random_range(0..20)).await?;
        let before = scene::published(&self.kafka, &shop.topic).await?;
        let end = shop.relay(&["--until-empty"]).await;
        let hit = end.is_err_and(|error| error.to_string().contains(STOPPED));
        let after = scene::published(&self.kafka, &shop.topic).await?;
        ensure!(before == after, "it published although rows were missing");
        shop.operator("resume", &["--from", "mark", "--apply"])
            .await?;
        shop.until_empty().await?;
        shop.commit(1).await?;
        // And it does not stop again.
        shop.until_empty().await?;
        self.apart.push(History {
            published: scene::published(&self.kafka, &shop.topic).await?,
            committed: shop.committed,
            ..History::default()
        });
        self.spare = Some(standby);
        Ok(hit)
    }
}

/// The name of the sessions that only take place.
const TAKEN: &str = "taken";

/// How [`crew::run`] reports the exit code of a relay that sees a promise in danger.
const STOPPED: &str = "exit status: 4";

async fn set_read_only(admin: &mut PgConnection, on: &str) -> Result<()> {
    for statement in [
        "SET default_transaction_read_only = off",
        &format!("ALTER SYSTEM SET default_transaction_read_only = {on}"),
        "SELECT pg_reload_conf()",
    ] {
        sqlx::query(sqlx::AssertSqlSafe(statement))
            .execute(&mut *admin)
            .await?;
    }
    Ok(())
}

/// An outbox apart from the scene's, without a workload.
struct Shop {
    database: Database,
    kafka: String,
    topic: String,
    source: String,
    log: std::path::PathBuf,
    committed: Vec<Entry>,
}

impl Shop {
    async fn open(server: &Postgres, kafka: &Kafka, log: std::path::PathBuf) -> Result<Self> {
        let database = Database::create_on(server).await?;
        oncebox_migrations::migrate(database.url(), &Names::default()).await?;
        Ok(Self {
            source: database.name().replace('_', "-"),
            topic: kafka.create_topic("failover", 1).await,
            kafka: kafka.bootstrap().to_owned(),
            database,
            log,
            committed: Vec::new(),
        })
    }

    async fn commit(&mut self, messages: usize) -> Result<()> {
        let next = self.committed.len() + 1;
        let new = workload::commit(&self.database, &self.topic, next, messages).await?;
        self.committed.extend(new);
        Ok(())
    }

    async fn until_empty(&self) -> Result<()> {
        self.relay(&["--until-empty"]).await
    }

    async fn relay(&self, more: &[&str]) -> Result<()> {
        self.run("relay", more).await
    }

    async fn operator(&self, command: &str, more: &[&str]) -> Result<()> {
        self.run(&format!("relay {command}"), more).await
    }

    async fn run(&self, command: &str, more: &[&str]) -> Result<()> {
        let options = [
            ("--database-url", self.database.url()),
            ("--kafka", &self.kafka),
            ("--source", &self.source),
        ];
        let mut all = scene::words(command, &options);
        all.extend(more.iter().map(|&word| word.to_owned()));
        crew::run(&all, &self.log).await
    }
}
