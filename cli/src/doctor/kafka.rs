//! The doctor's questions to Kafka. Writes nothing; never uses the relay's `transactional.id`, which would fence it.

use std::collections::BTreeSet;
use std::time::Duration;

use oncebox_kafka::{
    Cluster, Config, Error, ProducerOptions, Stability, TransactionalProducer, cluster, committed,
};
use tokio::time::timeout;

use super::report::Checks;

/// How long a question may take.
const PATIENCE: Duration = Duration::from_secs(4);
/// How long the transaction coordinator may take: the first producer of a cluster creates its topic.
const TRANSACTIONS: Duration = Duration::from_secs(8);

/// What later checks need to know.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) checks: Checks,
    pub(super) cluster: Option<Cluster>,
    /// The checkpoint: `None` = not read, and a check says why.
    pub(super) checkpoint: Option<Option<(i64, String)>>,
}

/// Examines Kafka. `source` is needed for transactions and checkpoint.
pub(super) async fn examine(
    config: &Config,
    source: Option<&str>,
    checkpoint_topic: &str,
) -> Findings {
    let mut findings = Findings::default();
    let checks = &mut findings.checks;
    let cluster = match timeout(PATIENCE + Duration::from_secs(1), cluster(config, PATIENCE)).await
    {
        Ok(Ok(cluster)) => cluster,
        Ok(Err(error)) => {
            explain(checks, "kafka", &error);
            return findings;
        }
        Err(_) => {
            late(checks, "kafka", PATIENCE);
            return findings;
        }
    };
    checks.ok(
        "kafka",
        format!(
            "cluster {} at {}, {} brokers",
            cluster.cluster_id, config.bootstrap, cluster.brokers
        ),
    );
    let there = topic_of_checkpoints(checks, &cluster, checkpoint_topic);
    match source {
        None => checks.skip("transactions", "needs --source"),
        Some(source) => {
            let (transactions, checkpoint) = tokio::join!(transactions(config, source), async {
                if there {
                    Some(checkpoint(config, source, checkpoint_topic).await)
                } else {
                    None
                }
            });
            checks.extend(transactions);
            match checkpoint {
                None => findings.checkpoint = Some(None),
                Some(Ok(stored)) => findings.checkpoint = Some(stored),
                Some(Err(broken)) => checks.extend(broken),
            }
        }
    }
    findings.cluster = Some(cluster);
    findings
}

fn topic_of_checkpoints(checks: &mut Checks, cluster: &Cluster, topic: &str) -> bool {
    match cluster.topics.iter().find(|t| t.name == topic) {
        Some(found) => {
            if cluster.brokers > 1 && found.replicas < 2 {
                checks.warn(
                    "checkpoint topic",
                    format!("{topic} has one replica on {} brokers", cluster.brokers),
                    "raise its replication factor: without this topic nothing is published",
                );
            } else {
                checks.ok("checkpoint topic", format!("{topic} exists"));
            }
            true
        }
        None => {
            checks.warn(
                "checkpoint topic",
                format!("{topic} does not exist yet"),
                "the relay creates it at its first start, if it may (CREATE on the topic or the cluster)",
            );
            false
        }
    }
}

/// The doctor's own id. `/` cannot be part of a source's name, so this is never a relay's; and a rule that allows every
/// id beginning with the relay's allows this one too.
fn transactional_id(source: &str) -> String {
    format!("oncebox.{source}/doctor")
}

async fn transactions(config: &Config, source: &str) -> Checks {
    let mut checks = Checks::default();
    let id = transactional_id(source);
    match timeout(TRANSACTIONS, TransactionalProducer::open(config, &id, ProducerOptions::default())).await {
        Ok(Ok(producer)) => {
            checks.ok("transactions", format!("possible (tried as {id})"));
            let _ = timeout(Duration::from_secs(2), producer.close()).await;
        }
        Ok(Err(error)) => explain(&mut checks, "transactions", &error),
        Err(_) => checks.fail(
            "transactions",
            format!("the transaction coordinator did not answer within {} s", TRANSACTIONS.as_secs()),
            "with fewer than three brokers set transaction.state.log.replication.factor and transaction.state.log.min.isr to 1; look at the brokers' log",
        ),
    }
    checks
}

async fn checkpoint(
    config: &Config,
    source: &str,
    topic: &str,
) -> Result<Option<(i64, String)>, Checks> {
    let group = format!("oncebox.{source}");
    let mut checks = Checks::default();
    match timeout(
        PATIENCE + Duration::from_secs(1),
        committed(config, &group, topic, 0, Stability::Any, PATIENCE),
    )
    .await
    {
        Ok(Ok(stored)) => return Ok(stored),
        Ok(Err(error)) => explain(&mut checks, "checkpoint", &error),
        Err(_) => late(&mut checks, "checkpoint", PATIENCE),
    }
    Err(checks)
}

/// Every topic that messages are written for must exist, and should survive the loss of a broker.
pub(super) fn topics(checks: &mut Checks, cluster: &Cluster, wanted: &BTreeSet<String>) {
    if wanted.is_empty() {
        checks.skip("topics", "the outbox names none; name some with --topic");
    }
    for topic in wanted {
        match cluster.topics.iter().find(|t| &t.name == topic) {
            None => checks.fail(
                "topic",
                format!("{topic} does not exist, or this user may not see it"),
                format!("kafka-topics.sh --create --topic {topic} --partitions … (and WRITE, DESCRIBE for the relay)"),
            ),
            Some(found) if cluster.brokers > 1 && found.replicas < 2 => checks.warn(
                "topic",
                format!("{topic}: {} partitions, one replica on {} brokers", found.partitions, cluster.brokers),
                "raise its replication factor: a lost broker loses published messages (G2)",
            ),
            Some(found) => checks.ok(
                "topic",
                format!("{topic}: {} partitions, {} replicas", found.partitions, found.replicas),
            ),
        }
    }
}

/// Adds the line for an error of Kafka.
fn explain(checks: &mut Checks, name: &str, error: &Error) {
    let (name, remedy) = match error {
        Error::Config { .. } => (
            name,
            "correct the property it names (--kafka-property, ONCEBOX_KAFKA_…)",
        ),
        Error::Unreachable { .. } => (
            name,
            "start Kafka there, or correct --kafka and security.protocol",
        ),
        Error::Authentication { .. } => (
            "kafka credentials",
            "correct sasl.username, sasl.password (ONCEBOX_KAFKA_SASL_PASSWORD) and sasl.mechanism",
        ),
        Error::Authorization { remedy, .. } => (name, *remedy),
        _ if error.is_retriable() => (name, "try again; if it stays, look at the brokers' log"),
        _ => (name, "look at the brokers' log"),
    };
    checks.fail(name, error.to_string(), remedy);
}

fn late(checks: &mut Checks, name: &str, patience: Duration) {
    checks.fail(
        name,
        format!("no answer within {} s", patience.as_secs()),
        "start Kafka there, or correct --kafka; check that its advertised.listeners can be reached from here",
    );
}

#[cfg(test)]
mod tests {
    use oncebox_kafka::TopicInfo;

    use super::*;

    #[test]
    fn the_doctors_transactional_id_is_never_a_relays() {
        let id = transactional_id("orders");
        assert!(id.starts_with("oncebox.orders"));
        let source = id.strip_prefix("oncebox.").unwrap();
        assert!(
            source.parse::<crate::config::SourceName>().is_err(),
            "a relay with this id would need this source name"
        );
    }

    #[test]
    fn topics_are_missing_thin_or_fine() {
        let topic = |name: &str, replicas| TopicInfo {
            name: name.into(),
            partitions: 3,
            replicas,
        };
        let cluster = Cluster {
            cluster_id: "c".into(),
            brokers: 3,
            topics: vec![topic("good", 3), topic("thin", 1)],
        };
        let wanted = ["good", "thin", "gone"].map(String::from).into();
        let mut checks = Checks::default();
        topics(&mut checks, &cluster, &wanted);
        let text = checks.text();
        assert!(
            text.contains("FAIL  topic  gone") && text.contains("--create --topic gone"),
            "{text}"
        );
        assert!(
            text.contains("warn  topic  thin") && text.contains("ok    topic  good"),
            "{text}"
        );
    }
}
