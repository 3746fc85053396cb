//! Where the demo happens: embedded by default, or a real PostgreSQL and a real Kafka. And its removal.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, bail};
use oncebox_kafka::TopicSpec;
use oncebox_migrations::Names;
use sqlx::postgres::PgConnectOptions;

use super::postgres::PgShop;
use super::relays::Relays;
use super::shop::{Shop, Wiring};
use super::sqlite::{self, SqliteShop};
use super::{Options, play};
use crate::config::{Backend, Settings};

/// Partitions of the demo's topic.
const PARTITIONS: i32 = 3;

/// One run's surroundings. Every name in it carries the run's id, so that runs do not meet.
pub(super) struct Stage {
    run: String,
    keep: bool,
    place: Place,
    shop: AnyShop,
    relays: Relays,
    wiring: Wiring,
    #[cfg(feature = "embedded")]
    broker: Option<crate::embedded::Embedded>,
}

enum AnyShop {
    Postgres(Box<PgShop>),
    Sqlite(Box<SqliteShop>),
}

/// The run's directory: databases of SQLite, the relays' log.
enum Place {
    Temporary(tempfile::TempDir),
    Kept(PathBuf),
}

impl Place {
    fn path(&self) -> &std::path::Path {
        match self {
            Self::Temporary(dir) => dir.path(),
            Self::Kept(path) => path,
        }
    }
}

impl Stage {
    /// Creates directory, broker, topic, databases and tables.
    pub(super) async fn set(settings: &Settings, keep: bool) -> anyhow::Result<Self> {
        let run = format!("{:08x}", rand::random::<u32>());
        let directory = tempfile::Builder::new()
            .prefix(&format!("oncebox-demo-{run}-"))
            .tempdir()?;
        let place = if keep {
            Place::Kept(directory.keep())
        } else {
            Place::Temporary(directory)
        };

        let mut settings = settings.clone();
        settings.source = Some(
            format!("oncebox-demo-{run}")
                .parse()
                .map_err(anyhow::Error::msg)?,
        );
        #[cfg(feature = "embedded")]
        let broker = match settings.kafka.bootstrap {
            Some(_) => None,
            None => {
                let broker = crate::embedded::Embedded::start()
                    .await
                    .context("cannot start the embedded broker")?;
                settings.kafka.bootstrap = Some(broker.bootstrap());
                settings.kafka.properties = Default::default();
                Some(broker)
            }
        };
        #[cfg(not(feature = "embedded"))]
        if settings.kafka.bootstrap.is_none() {
            bail!(
                "this build has no embedded broker: give --kafka host:9092, or build with the default features"
            );
        }
        let wiring = Wiring {
            kafka: settings.kafka()?,
            topic: format!("oncebox-demo-{run}-orders"),
            consumer: format!("oncebox-demo-{run}-inventory"),
        };
        let spec = TopicSpec {
            partitions: PARTITIONS,
            replication: None,
            properties: BTreeMap::new(),
        };

        let url = settings.database_url.as_ref();
        let shop = match url.map(|url| url.backend()) {
            Some(Backend::Postgres) => {
                let options: PgConnectOptions = settings
                    .database_url()?
                    .expose()
                    .parse()
                    .context("the database URL does not parse")?;
                let names = |service: &str| {
                    Names::new(
                        format!("oncebox_demo_{run}_{service}"),
                        settings.prefix.as_str(),
                    )
                };
                let orders = names("orders")?;
                settings.schema = orders.schema().parse().map_err(anyhow::Error::msg)?;
                AnyShop::Postgres(Box::new(
                    PgShop::create(&options, orders, names("inventory")?, wiring.clone()).await?,
                ))
            }
            Some(Backend::Sqlite) => bail!(
                "the demo makes SQLite databases of its own: leave --database-url out, or name a PostgreSQL database"
            ),
            None => {
                let file = |service: &str| place.path().join(format!("{service}.db"));
                settings.database_url = Some(
                    sqlite::url(&file("orders"))
                        .parse()
                        .map_err(anyhow::Error::msg)?,
                );
                let names = settings.names()?;
                AnyShop::Sqlite(Box::new(
                    SqliteShop::create(&file("orders"), &file("inventory"), names, wiring.clone())
                        .await?,
                ))
            }
        };
        let relays = Relays::new(&settings, place.path().join("relays.log"))?;
        let stage = Self {
            run,
            keep,
            place,
            shop,
            relays,
            wiring,
            #[cfg(feature = "embedded")]
            broker,
        };
        if let Err(error) =
            oncebox_kafka::ensure_topic(&stage.wiring.kafka, &stage.wiring.topic, &spec).await
        {
            let _ = stage.drop_databases().await;
            return Err(error.into());
        }
        stage.describe(&settings)?;
        Ok(stage)
    }

    fn describe(&self, settings: &Settings) -> anyhow::Result<()> {
        let database = match &self.shop {
            AnyShop::Postgres(_) => {
                format!(
                    "PostgreSQL {}, schemas oncebox_demo_{}_orders and …_inventory",
                    settings.database_url()?,
                    self.run
                )
            }
            AnyShop::Sqlite(_) => format!("SQLite, two files in {}", self.place.path().display()),
        };
        #[cfg(feature = "embedded")]
        let embedded = self.broker.is_some();
        #[cfg(not(feature = "embedded"))]
        let embedded = false;
        let kind = if embedded {
            "in-process broker"
        } else {
            "Kafka"
        };
        crate::commands::print(&format!(
            "database  {database}\nkafka     {kind} at {}, topic {}\nrelays    log in {}\n\n",
            self.wiring.kafka.bootstrap,
            self.wiring.topic,
            self.place.path().join("relays.log").display(),
        ))
        .map_err(anyhow::Error::new)
    }

    /// Plays the demo; whether the audit is clean.
    pub(super) async fn play(&mut self, options: &Options) -> anyhow::Result<bool> {
        let relays = self.relays.clone();
        match &self.shop {
            AnyShop::Postgres(shop) => {
                play(
                    shop.as_ref().clone(),
                    relays,
                    &self.run,
                    &self.wiring,
                    options,
                )
                .await
            }
            AnyShop::Sqlite(shop) => {
                play(
                    shop.as_ref().clone(),
                    relays,
                    &self.run,
                    &self.wiring,
                    options,
                )
                .await
            }
        }
    }

    /// Removes everything, unless it is to be kept.
    pub(super) async fn strike(self) -> anyhow::Result<()> {
        if self.keep {
            return Ok(());
        }
        let databases = self
            .drop_databases()
            .await
            .context("cannot remove the demo's schemas");
        let topic = self
            .drop_topic()
            .await
            .context("cannot remove the demo's topic");
        if let Place::Temporary(directory) = self.place {
            directory
                .close()
                .context("cannot remove the demo's directory")?;
        }
        databases.and(topic)
    }

    async fn drop_databases(&self) -> anyhow::Result<()> {
        match &self.shop {
            AnyShop::Postgres(shop) => shop.clean_up().await,
            AnyShop::Sqlite(shop) => shop.clean_up().await,
        }
    }

    async fn drop_topic(&self) -> anyhow::Result<()> {
        #[cfg(feature = "embedded")]
        if self.broker.is_some() {
            // It goes with the process.
            return Ok(());
        }
        oncebox_kafka::delete_topic(&self.wiring.kafka, &self.wiring.topic).await?;
        Ok(())
    }
}
