//! `oncebox doctor`: what is wrong, and what to type.
//!
//! Every check is one line, has a remedy, and takes a bounded time, also when nothing answers. The doctor changes
//! nothing, and uses no name that belongs to a relay.

mod database;
mod kafka;
pub mod position;
mod postgres;
pub mod report;
mod sqlite;

use std::time::Duration;

use self::report::Checks;
use crate::args::Doctor;
use crate::commands::print;
use crate::config::{ConfigError, Settings};
use crate::exit::Failure;

/// Examines what the settings name. [`Failure::Said`] when a check failed.
pub(crate) async fn run(args: &Doctor, settings: &Settings) -> Result<(), Failure> {
    let names = settings.names()?;
    let roles = args.roles();
    let database = async {
        match settings.database_url() {
            Ok(url) => database::examine(url, &names, &roles).await,
            Err(missing) => database::Findings {
                checks: not_given("database", &missing),
                ..Default::default()
            },
        }
    };
    let source = settings.source.as_ref().map(|s| s.as_str());
    let broker = async {
        match settings.kafka() {
            Ok(config) => kafka::examine(&config, source, &settings.relay).await,
            Err(missing) => kafka::Findings {
                checks: not_given("kafka", &missing),
                ..Default::default()
            },
        }
    };
    let (database, broker) = tokio::join!(database, broker);
    let relay_can_read = database.mark.is_some();
    let mut wanted = database.topics.clone();
    wanted.extend(args.topic.iter().cloned());
    let topics = match (&broker.cluster, settings.kafka()) {
        (Some(cluster), Ok(config)) => kafka::topics(&config, cluster, &wanted).await,
        _ => skipped("topics", "Kafka did not answer"),
    };
    let mut checks = together(source, settings.relay.lease, database, broker, topics);
    if relay_can_read {
        checks.extend(parked(settings).await);
    }
    print(&if args.json {
        checks.json()
    } else {
        checks.text()
    })?;
    if checks.healthy() {
        Ok(())
    } else {
        Err(Failure::Said)
    }
}

/// The checks that need both sides.
fn together(
    source: Option<&str>,
    lease: Duration,
    database: database::Findings,
    broker: kafka::Findings,
    topics: Checks,
) -> Checks {
    let mut checks = database.checks;
    checks.extend(broker.checks);
    checks.extend(topics);
    match (&broker.cluster, source, &database.mark, &broker.checkpoint) {
        (None, ..) => checks.skip("checkpoint", "Kafka did not answer"),
        (_, None, ..) => checks.skip("checkpoint", "needs --source"),
        (_, _, None, _) => checks.skip("checkpoint", "no mark to compare it with"),
        (Some(cluster), Some(source), Some((_, mark)), Some(checkpoint)) => {
            position::judge(
                &mut checks,
                source,
                mark,
                checkpoint.as_ref(),
                &cluster.cluster_id,
            );
        }
        // Reading it failed, and its line is there already.
        (.., None) => {}
    }
    match &database.mark {
        Some((first, later)) => position::leader(&mut checks, first, later, lease),
        None => checks.skip("leader", "no mark to read"),
    }
    checks
}

/// What waits for somebody.
async fn parked(settings: &Settings) -> Checks {
    let mut checks = Checks::default();
    let config = match settings.relay_database() {
        Ok(config) => config,
        Err(missing) => return not_given("parked", &missing),
    };
    match oncebox_relay::park::overview(&config).await {
        Err(error) => checks.fail("parked", error.to_string(), "see above"),
        Ok(overview) if overview.parked.is_empty() && overview.paused.is_empty() => {
            checks.ok("parked", "no message is parked, no topic is paused");
        }
        Ok(overview) => {
            let topics = overview
                .parked
                .iter()
                .map(|(topic, n)| format!("{n} messages of {topic} are parked"));
            let paused = overview.paused.iter().map(ToString::to_string);
            let found: Vec<_> = topics.chain(paused).collect();
            checks.warn(
                "parked",
                found.join("; "),
                "oncebox relay park list says why; then park requeue or skip, or resume --topic",
            );
        }
    }
    checks
}

fn not_given(name: &str, missing: &ConfigError) -> Checks {
    let mut checks = Checks::default();
    checks.fail(name, "not given", missing.to_string());
    checks
}

fn skipped(name: &str, why: &str) -> Checks {
    let mut checks = Checks::default();
    checks.skip(name, why);
    checks
}
