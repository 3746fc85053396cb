//! Configuration: defaults, then a file, then `ONCEBOX_…` variables, then flags.
//!
//! Only the binary reads files and variables; the libraries take plain structs. Every error names
//! where the bad value came from: the file and its key, the variable, or the flag. Unknown keys
//! and unknown `ONCEBOX_…` variables are errors, because a misspelt time-out is worse than none.
//!
//! ```toml
//! database_url = "postgres://relay@db/shop"
//! source = "orders"                  # the name of this outbox; never change it
//! schema = "public"
//! prefix = "oncebox_"
//! log = "text"                       # or "json"
//!
//! [kafka]
//! bootstrap = "kafka-1:9092,kafka-2:9092"
//!
//! [kafka.properties]                 # any librdkafka property
//! security.protocol = "SASL_SSL"
//! sasl.username = "relay"            # the password: ONCEBOX_KAFKA_SASL_PASSWORD
//!
//! [relay]
//! http = "127.0.0.1:9464"
//! lease = "3s"
//! ```

mod layers;
mod load;
mod types;

use std::net::SocketAddr;
use std::time::Duration;

use serde::Deserialize;

pub use layers::{Flags, kafka_variable};
pub use load::{ConfigError, load};
pub use types::{Backend, DatabaseUrl, Identifier, LogFormat, Properties, SourceName};
use types::{duration, parsed, parsed_option};

/// Everything that can be configured.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The database with the outbox or inbox. `--database-url`, `ONCEBOX_DATABASE_URL`. No default.
    #[serde(default, deserialize_with = "parsed_option")]
    pub database_url: Option<DatabaseUrl>,
    /// The database with the outbox, for `reconcile`. `--outbox-url`, `ONCEBOX_OUTBOX_URL`. Defaults to `database_url`.
    #[serde(default, deserialize_with = "parsed_option")]
    pub outbox_url: Option<DatabaseUrl>,
    /// The consumer's database, for `reconcile`. `--inbox-url`, `ONCEBOX_INBOX_URL`. Defaults to `database_url`.
    #[serde(default, deserialize_with = "parsed_option")]
    pub inbox_url: Option<DatabaseUrl>,
    /// The name of the outbox. `--source`, `ONCEBOX_SOURCE`. No default.
    #[serde(default, deserialize_with = "parsed_option")]
    pub source: Option<SourceName>,
    /// The PostgreSQL schema of Oncebox's tables. `--schema`, `ONCEBOX_SCHEMA`. Defaults to `public`.
    #[serde(deserialize_with = "parsed")]
    pub schema: Identifier,
    /// The prefix of Oncebox's tables. `--prefix`, `ONCEBOX_PREFIX`. Defaults to `oncebox_`.
    #[serde(deserialize_with = "parsed")]
    pub prefix: Identifier,
    /// The form of the log. `--log`, `ONCEBOX_LOG`. Defaults to `text`.
    #[serde(deserialize_with = "parsed")]
    pub log: LogFormat,
    /// How to reach Kafka.
    #[serde(default)]
    pub kafka: Kafka,
    /// The relay's own settings.
    pub relay: Relay,
}

/// How to reach Kafka.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kafka {
    /// `host:port` of one or more brokers. `--kafka`, `ONCEBOX_KAFKA`. No default.
    #[serde(default, deserialize_with = "parsed_option")]
    pub bootstrap: Option<String>,
    /// librdkafka properties. `--kafka-property key=value`,
    /// `ONCEBOX_KAFKA_SASL_PASSWORD` for `sasl.password` and so on. Defaults to none.
    #[serde(default)]
    pub properties: Properties,
}

/// The relay's settings; `--lease` is `ONCEBOX_RELAY_LEASE`, and so on.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Relay {
    /// Where `/live`, `/ready` and `/metrics` are served. No default: not served.
    #[serde(default, deserialize_with = "parsed_option")]
    pub http: Option<SocketAddr>,
    /// `/ready` fails when nothing moved for this long. Defaults to 15 s.
    #[serde(deserialize_with = "duration")]
    pub ready_within: Duration,
    /// How long a silent leader keeps the lead. Defaults to 3 s.
    #[serde(deserialize_with = "duration")]
    pub lease: Duration,
    /// How long published rows are kept. Defaults to 24 h.
    #[serde(deserialize_with = "duration")]
    pub retention: Duration,
    /// The most rows of one Kafka transaction. Defaults to 20 000.
    #[serde(deserialize_with = "parsed")]
    pub max_batch_rows: usize,
    /// The most bytes of one Kafka transaction. Defaults to 32 MiB.
    #[serde(deserialize_with = "parsed")]
    pub max_batch_bytes: usize,
    /// Kafka's `transaction.timeout.ms`. Defaults to 30 s.
    #[serde(deserialize_with = "duration")]
    pub transaction_timeout: Duration,
    /// The longest time between two marks in the database. Defaults to 250 ms.
    #[serde(deserialize_with = "duration")]
    pub mark_interval: Duration,
    /// How often an idle relay renews its checkpoint. Defaults to 1 h.
    #[serde(deserialize_with = "duration")]
    pub heartbeat: Duration,
    /// The shortest pause between two reads of an idle outbox. Defaults to 2 ms.
    #[serde(deserialize_with = "duration")]
    pub poll_min: Duration,
    /// The longest pause between two reads of an idle outbox. Defaults to 50 ms.
    #[serde(deserialize_with = "duration")]
    pub poll_max: Duration,
    /// The topic that the checkpoint is committed for. Defaults to `oncebox.checkpoints`.
    pub checkpoint_topic: String,
    /// The most bytes of a checkpoint: the brokers' `offset.metadata.max.bytes`. Defaults to 4096.
    #[serde(deserialize_with = "parsed")]
    pub checkpoint_bytes: usize,
}

impl Settings {
    /// The database.
    ///
    /// # Errors
    /// Nobody named one.
    pub fn database_url(&self) -> Result<&DatabaseUrl, ConfigError> {
        self.database_url.as_ref().ok_or(ConfigError::Missing {
            what: "a database",
            flag: "--database-url postgres://…",
            variable: "ONCEBOX_DATABASE_URL",
            key: "database_url",
        })
    }

    /// The source name.
    ///
    /// # Errors
    /// Nobody named one.
    pub fn source(&self) -> Result<&SourceName, ConfigError> {
        self.source.as_ref().ok_or(ConfigError::Missing {
            what: "a source name",
            flag: "--source orders",
            variable: "ONCEBOX_SOURCE",
            key: "source",
        })
    }

    /// The Kafka client's configuration.
    ///
    /// # Errors
    /// Nobody named a broker.
    pub fn kafka(&self) -> Result<oncebox_kafka::Config, ConfigError> {
        let bootstrap = self.kafka.bootstrap.as_ref().ok_or(ConfigError::Missing {
            what: "a Kafka broker",
            flag: "--kafka host:9092",
            variable: "ONCEBOX_KAFKA",
            key: "kafka.bootstrap",
        })?;
        let mut config = oncebox_kafka::Config::new(bootstrap.clone());
        for (name, value) in self.kafka.properties.expose() {
            config = config.set(name.clone(), value.clone());
        }
        Ok(config)
    }

    /// The relay's configuration.
    ///
    /// # Errors
    /// Database, source or broker is missing, or the database URL does not parse.
    pub fn relay(&self) -> Result<oncebox_relay::Config, ConfigError> {
        let mut config = self.relay_database()?;
        config.source = self.source()?.as_str().to_owned();
        config.kafka = self.kafka()?;
        let relay = &self.relay;
        config.lease = relay.lease;
        config.retention = relay.retention;
        config.max_batch_rows = relay.max_batch_rows;
        config.max_batch_bytes = relay.max_batch_bytes;
        config.transaction_timeout = relay.transaction_timeout;
        config.mark_interval = relay.mark_interval;
        config.heartbeat = relay.heartbeat;
        config.poll_min = relay.poll_min;
        config.poll_max = relay.poll_max;
        config.checkpoint_topic.clone_from(&relay.checkpoint_topic);
        config.checkpoint_bytes = relay.checkpoint_bytes;
        Ok(config)
    }

    /// What commands need that work on the relay's tables alone.
    ///
    /// # Errors
    /// The database is missing, or its URL does not parse.
    pub fn relay_database(&self) -> Result<oncebox_relay::Config, ConfigError> {
        let database = oncebox_relay::Database::parse(self.database_url()?.expose())
            .map_err(|e| ConfigError::Value(e.to_string()))?;
        let nowhere = oncebox_kafka::Config::new("");
        let source = self.source.as_ref().map_or("", |source| source.as_str());
        let mut config = oncebox_relay::Config::new(source, database, nowhere);
        config.names = self.names()?;
        Ok(config)
    }

    /// The names of Oncebox's tables.
    ///
    /// # Errors
    /// The migrations refuse them; schema and prefix were checked one by one before.
    pub fn names(&self) -> Result<oncebox_migrations::Names, ConfigError> {
        oncebox_migrations::Names::new(self.schema.as_str(), self.prefix.as_str())
            .map_err(|e| ConfigError::Value(e.to_string()))
    }
}

/// The defaults, in the form of a configuration file.
const DEFAULTS: &str = r#"
schema = "public"
prefix = "oncebox_"
log = "text"

[relay]
ready_within = "15s"
lease = "3s"
retention = "24h"
max_batch_rows = 20000
max_batch_bytes = 33554432
transaction_timeout = "30s"
mark_interval = "250ms"
heartbeat = "1h"
poll_min = "2ms"
poll_max = "50ms"
checkpoint_topic = "oncebox.checkpoints"
checkpoint_bytes = 4096
"#;
