//! The doctor's questions to Kafka. Writes nothing; never uses the relay's `transactional.id`, which would fence it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::future::join_all;
use oncebox_kafka::admin::{BrokerSettings, TopicSettings, broker_settings, topic_settings};
use oncebox_kafka::{
    Cluster, Config, Error, ProducerOptions, Stability, TransactionalProducer, cluster, committed,
};
use tokio::time::timeout;

use super::report::Checks;
use crate::config::Relay;

/// How long a question may take.
const PATIENCE: Duration = Duration::from_secs(4);
/// How long the transaction coordinator may take: the first producer of a cluster creates its topic.
const TRANSACTIONS: Duration = Duration::from_secs(8);
/// The most topics that are looked at one by one.
const MOST_TOPICS: usize = 50;

/// What later checks need to know.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) checks: Checks,
    pub(super) cluster: Option<Cluster>,
    /// The checkpoint: `None` = not read, and a check says why.
    pub(super) checkpoint: Option<Option<(i64, String)>>,
}

/// Examines Kafka. `source` is needed for transactions and checkpoint.
pub(super) async fn examine(config: &Config, source: Option<&str>, relay: &Relay) -> Findings {
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
    let there = topic_of_checkpoints(checks, &cluster, &relay.checkpoint_topic);
    let (brokers, transactions, checkpoint) = tokio::join!(
        brokers(config, relay),
        async {
            match source {
                Some(source) => transactions(config, source).await,
                None => {
                    let mut checks = Checks::default();
                    checks.skip("transactions", "needs --source");
                    checks
                }
            }
        },
        async {
            match source {
                Some(source) if there => checkpoint(config, source, &relay.checkpoint_topic).await,
                _ => Ok(None),
            }
        }
    );
    checks.extend(brokers);
    checks.extend(transactions);
    match checkpoint {
        Ok(stored) => findings.checkpoint = Some(stored),
        Err(broken) => checks.extend(broken),
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

/// Brokers: their version, and the limits that the relay's settings must fit into.
async fn brokers(config: &Config, relay: &Relay) -> Checks {
    let mut checks = Checks::default();
    match timeout(
        PATIENCE + Duration::from_secs(1),
        broker_settings(config, PATIENCE),
    )
    .await
    {
        Ok(Ok(settings)) => judge_brokers(&mut checks, &settings, relay),
        // Not every Kafka tells its settings; that alone is no failure.
        Ok(Err(error)) => unknown_version(&mut checks, &error.to_string()),
        Err(_) => late(&mut checks, "brokers", PATIENCE),
    }
    checks
}

fn judge_brokers(checks: &mut Checks, settings: &BrokerSettings, relay: &Relay) {
    match settings.verifies_offset_commits() {
        Some(true) => checks.ok("kafka version", "3.7 or newer"),
        Some(false) => checks.fail(
            "kafka version",
            "a broker is older than 3.7",
            "upgrade it: older brokers let a late request move the checkpoint back (G3)",
        ),
        None => unknown_version(checks, "the brokers do not show their configuration"),
    }
    let limit = |name: &str, wanted: u128| {
        let allowed = settings
            .smallest(name)
            .and_then(|n| u128::try_from(n).ok())?;
        (wanted > allowed).then_some(allowed)
    };
    if let Some(allowed) = limit(
        "transaction.max.timeout.ms",
        relay.transaction_timeout.as_millis(),
    ) {
        checks.fail(
            "brokers",
            format!(
                "transaction.max.timeout.ms is {allowed}, the relay asks for {}",
                relay.transaction_timeout.as_millis()
            ),
            "lower --transaction-timeout",
        );
    }
    if let Some(allowed) = limit("offset.metadata.max.bytes", relay.checkpoint_bytes as u128) {
        checks.fail(
            "brokers",
            format!(
                "offset.metadata.max.bytes is {allowed}, the relay's checkpoint may have {}",
                relay.checkpoint_bytes
            ),
            "lower --checkpoint-bytes",
        );
    }
    if let Some(allowed) = limit(
        "offsets.retention.minutes",
        relay.heartbeat.as_secs().div_ceil(60).into(),
    ) {
        checks.fail(
            "brokers",
            format!("offsets.retention.minutes is {allowed}: the checkpoint expires before the relay renews it"),
            "lower --heartbeat",
        );
    }
}

fn unknown_version(checks: &mut Checks, why: &str) {
    checks.warn(
        "kafka version",
        format!("not known: {why}"),
        "make sure that every broker is 3.7 or newer, or grant DESCRIBE_CONFIGS on the cluster (G3)",
    );
}

/// Every topic that messages are written for must exist, be writable, and should survive the loss of a broker.
pub(super) async fn topics(
    config: &Config,
    cluster: &Cluster,
    wanted: &BTreeSet<String>,
) -> Checks {
    let mut checks = Checks::default();
    if wanted.is_empty() {
        checks.skip("topics", "the outbox names none; name some with --topic");
    }
    if wanted.len() > MOST_TOPICS {
        checks.skip(
            "topics",
            format!(
                "{} are named, the first {MOST_TOPICS} are checked",
                wanted.len()
            ),
        );
    }
    let asked = wanted.iter().take(MOST_TOPICS).map(|topic| async move {
        (
            topic,
            timeout(PATIENCE, topic_settings(config, topic)).await,
        )
    });
    for (topic, answer) in join_all(asked).await {
        match answer {
            Ok(Ok(settings)) => judge_topic(&mut checks, cluster.brokers, topic, settings.as_ref()),
            // What the metadata said is enough to know that it is there.
            Ok(Err(_)) => judge_topic(
                &mut checks,
                cluster.brokers,
                topic,
                metadata(cluster, topic).as_ref(),
            ),
            Err(_) => late(&mut checks, "topic", PATIENCE),
        }
    }
    checks
}

/// A topic as far as the cluster's metadata tells.
fn metadata(cluster: &Cluster, topic: &str) -> Option<TopicSettings> {
    let found = cluster.topics.iter().find(|t| t.name == topic)?;
    Some(TopicSettings {
        id: String::new(),
        partitions: found.partitions,
        replication: found.replicas,
        may_write: None,
        may_read: None,
        config: BTreeMap::new(),
    })
}

fn judge_topic(checks: &mut Checks, brokers: usize, topic: &str, settings: Option<&TopicSettings>) {
    let Some(settings) = settings else {
        checks.fail(
            "topic",
            format!("{topic} does not exist, or this user may not see it"),
            format!("kafka-topics.sh --create --topic {topic} --partitions …, or grant DESCRIBE and WRITE"),
        );
        return;
    };
    let found = format!(
        "{topic}: {} partitions, {} replicas",
        settings.partitions, settings.replication
    );
    let in_sync = settings.min_insync_replicas();
    if settings.may_write == Some(false) {
        checks.fail(
            "topic",
            format!("{topic}: this user may not write"),
            format!("grant WRITE on topic {topic} to the relay"),
        );
    } else if settings.unclean_leader_election() == Some(true) {
        checks.warn(
            "topic",
            format!("{found}, unclean.leader.election.enable=true"),
            "set it to false: an unclean election loses published messages (G2)",
        );
    } else if brokers > 1 && settings.replication < 2 {
        checks.warn(
            "topic",
            found,
            "raise its replication factor: a lost broker loses published messages (G2)",
        );
    } else if settings.replication > 1 && in_sync == Some(1) {
        checks.warn(
            "topic",
            format!("{found}, min.insync.replicas=1"),
            "set it to 2: a message may be acknowledged by one broker and lost with it (G2)",
        );
    } else {
        checks.ok("topic", found);
    }
}

/// Adds the line for an error of Kafka.
fn explain(checks: &mut Checks, name: &str, error: &Error) {
    let place = |reason: &str, bootstrap: &str| format!("{bootstrap}: {reason}");
    let (name, found, remedy) = match error {
        Error::Config { .. } => (
            name,
            error.to_string(),
            "correct the property it names (--kafka-property, ONCEBOX_KAFKA_…)",
        ),
        Error::Unreachable { bootstrap, reason } => (
            name,
            place(reason, bootstrap),
            "start Kafka there, or correct --kafka and security.protocol",
        ),
        Error::Authentication { bootstrap, reason } => (
            "kafka credentials",
            place(reason, bootstrap),
            "correct sasl.username, sasl.password (ONCEBOX_KAFKA_SASL_PASSWORD) and sasl.mechanism",
        ),
        Error::Authorization {
            operation,
            code,
            reason,
            remedy,
        } => (name, format!("{operation}: {code}: {reason}"), *remedy),
        _ if error.is_retriable() => (
            name,
            error.to_string(),
            "try again; if it stays, look at the brokers' log",
        ),
        _ => (name, error.to_string(), "look at the brokers' log"),
    };
    checks.fail(name, found, remedy);
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

    fn topic(replication: usize, config: &[(&str, &str)]) -> TopicSettings {
        let config = config
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect();
        TopicSettings {
            id: "t".into(),
            partitions: 3,
            replication,
            may_write: Some(true),
            may_read: None,
            config,
        }
    }

    #[test]
    fn topics_are_missing_thin_forbidden_or_fine() {
        let verdict = |settings: Option<TopicSettings>| {
            let mut checks = Checks::default();
            judge_topic(&mut checks, 3, "orders", settings.as_ref());
            checks.text().lines().next().unwrap_or_default().to_owned()
        };
        assert!(verdict(None).contains("--create --topic orders"));
        assert!(verdict(Some(topic(1, &[]))).starts_with("warn"));
        assert!(verdict(Some(topic(3, &[("min.insync.replicas", "1")]))).starts_with("warn"));
        assert!(
            verdict(Some(topic(
                3,
                &[("unclean.leader.election.enable", "true")]
            )))
            .starts_with("warn")
        );
        assert!(verdict(Some(topic(3, &[("min.insync.replicas", "2")]))).starts_with("ok"));
        let forbidden = TopicSettings {
            may_write: Some(false),
            ..topic(3, &[])
        };
        assert!(verdict(Some(forbidden)).starts_with("FAIL"));
    }

    #[test]
    fn old_brokers_and_limits_below_the_relays_settings_fail() {
        let relay = crate::config::load(None, [], &crate::config::Flags::default())
            .unwrap()
            .relay;
        let verdict = |config: &[(&str, &str)]| {
            let config = config
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect();
            let mut checks = Checks::default();
            judge_brokers(
                &mut checks,
                &BrokerSettings {
                    config: [(1, config)].into(),
                },
                &relay,
            );
            checks.text()
        };
        let new = ("telemetry.max.bytes", "1");
        assert!(verdict(&[new]).starts_with("ok"));
        assert!(verdict(&[("x", "1")]).starts_with("FAIL  kafka version"));
        assert!(
            verdict(&[new, ("transaction.max.timeout.ms", "1000")])
                .contains("--transaction-timeout")
        );
        assert!(
            verdict(&[new, ("offset.metadata.max.bytes", "1024")]).contains("--checkpoint-bytes")
        );
        assert!(verdict(&[new, ("offsets.retention.minutes", "30")]).contains("--heartbeat"));
    }
}
