//! The topic of one run.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use oncebox_integration_tests::{kafka_cli, reader};
use oncebox_kafka::{Config, TopicSpec};
use serde_json::Value;

const PARTITIONS: i32 = 6;

/// A topic that exists until [`Topic::delete`].
pub(crate) struct Topic {
    bootstrap: String,
    name: String,
}

impl Topic {
    /// Creates it, empty.
    pub(crate) async fn create(bootstrap: &str, name: &str) -> Result<Self> {
        // The segments go soon after the topic: a run writes some hundred megabytes.
        let spec = TopicSpec::new(PARTITIONS).set("file.delete.delay.ms", "100");
        let created = oncebox_kafka::ensure_topic(&Config::new(bootstrap), name, &spec).await?;
        ensure!(created, "topic {name} is still there");
        Ok(Self {
            bootstrap: bootstrap.to_owned(),
            name: name.to_owned(),
        })
    }

    /// Counts what a `read_committed` consumer sees.
    pub(crate) async fn expect(&self, records: usize) -> Result<()> {
        let found = reader::count_committed(&self.bootstrap, &self.name).await?;
        ensure!(
            found == records,
            "{records} records expected in {}, a read_committed consumer finds {found}",
            self.name
        );
        Ok(())
    }

    /// Bytes of its partitions on the broker's disk, as Kafka says.
    pub(crate) async fn bytes(&self) -> Result<u64> {
        let class = "org.apache.kafka.tools.LogDirsCommand";
        let arguments = ["--describe", "--bootstrap-server", &self.bootstrap];
        let topic = ["--topic-list", &self.name];
        let printed = kafka_cli::run(class, &[&arguments[..], &topic[..]].concat()).await?;
        let json = printed.lines().find(|line| line.starts_with('{'));
        let answer: Value = serde_json::from_str(json.context("kafka-log-dirs prints no JSON")?)?;
        let list = |value: &Value, field| value[field].as_array().cloned().unwrap_or_default();
        let sizes = list(&answer, "brokers")
            .iter()
            .flat_map(|broker| list(broker, "logDirs"))
            .flat_map(|dir| list(&dir, "partitions"))
            .filter_map(|partition| partition["size"].as_u64())
            .sum();
        Ok(sizes)
    }

    /// Deletes it, and waits until a topic of this name can be created again.
    pub(crate) async fn delete(self) -> Result<()> {
        let config = Config::new(&self.bootstrap);
        oncebox_kafka::delete_topic(&config, &self.name).await?;
        while oncebox_kafka::topic_id(&config, &self.name)
            .await?
            .is_some()
        {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }
}
