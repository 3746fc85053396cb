//! Bad surroundings get a clear error that names the remedy, an exit code that is not 0, and nothing is lost.

use std::time::{Duration, Instant};

use oncebox_integration_tests::kafka_cli;
use oncebox_integration_tests::services::{self, Database, PASSWORD_ROLE, SASL_ADMIN, SASL_USER};
use oncebox_integration_tests::source::{Process, Source};
use oncebox_migrations::Names;
use sqlx::AssertSqlSafe;

use crate::relays::{ONCEBOX, until_empty};

/// Runs `oncebox <command> …` and returns its exit code and everything it wrote.
async fn run(
    command: &str,
    source: &Source,
    database_url: &str,
    kafka: &str,
    more: &[&str],
) -> (i32, String) {
    let mut arguments = vec![
        command,
        "--database-url",
        database_url,
        "--kafka",
        kafka,
        "--source",
        &source.name,
    ];
    arguments.extend(more);
    let mut process = Process::start(ONCEBOX, &arguments);
    let status = process.wait().await;
    (status.code().unwrap_or(-1), process.output())
}

/// Both commands fail, and both say `expected`.
async fn both_say(source: &Source, database_url: &str, kafka: &str, expected: &[&str]) {
    for (command, more) in [
        ("relay", &["--until-empty"][..]),
        ("doctor", &["--topic", &source.topic]),
    ] {
        let (code, output) = run(command, source, database_url, kafka, more).await;
        assert_ne!(code, 0, "{command} succeeded:\n{output}");
        for word in expected {
            assert!(
                output.contains(word),
                "{command} does not say {word:?}:\n{output}"
            );
        }
        assert!(
            !output.contains("s3cret"),
            "{command} printed a password:\n{output}"
        );
    }
}

/// What was committed is still published once everything is right.
async fn nothing_is_lost(source: &Source) {
    until_empty(source).await;
    source.expect(&["kept"]).await;
}

#[tokio::test]
async fn no_database() {
    let source = Source::create().await;
    source.commit("k", "kept").await;
    both_say(
        &source,
        "postgres://u:s3cret@127.0.0.1:1/shop",
        &source.bootstrap,
        &["127.0.0.1:1"],
    )
    .await;
    nothing_is_lost(&source).await;
}

#[tokio::test]
async fn no_broker() {
    let source = Source::create().await;
    source.commit("k", "kept").await;
    both_say(
        &source,
        source.database.url(),
        "127.0.0.1:1",
        &["127.0.0.1:1"],
    )
    .await;
    nothing_is_lost(&source).await;
}

#[tokio::test]
async fn missing_migrations() {
    let source = Source::create().await;
    let empty = Database::create().await;
    both_say(
        &source,
        empty.url(),
        &source.bootstrap,
        &["oncebox migrate"],
    )
    .await;
}

#[tokio::test]
async fn wrong_password() {
    let source = Source::create().await;
    source.commit("k", "kept").await;
    let role = format!("r_{}", uuid::Uuid::new_v4().simple());
    let create = format!("CREATE ROLE {role} LOGIN PASSWORD 'right' IN ROLE {PASSWORD_ROLE}");
    sqlx::raw_sql(AssertSqlSafe(create))
        .execute(&mut source.database.connect().await)
        .await
        .unwrap();
    both_say(
        &source,
        &source.database.url_as(&role, "s3cret"),
        &source.bootstrap,
        &["password authentication failed"],
    )
    .await;
    nothing_is_lost(&source).await;
}

#[tokio::test]
async fn missing_rights_then_the_printed_grants() {
    let source = Source::create().await;
    source.commit("k", "kept").await;
    let role = format!("r_{}", uuid::Uuid::new_v4().simple());
    let mut admin = source.database.connect().await;
    let create = format!("CREATE ROLE {role} LOGIN PASSWORD 's3cret'");
    sqlx::raw_sql(AssertSqlSafe(create))
        .execute(&mut admin)
        .await
        .unwrap();
    let url = source.database.url_as(&role, "s3cret");
    both_say(&source, &url, &source.bootstrap, &["grants"]).await;

    let (code, grants) = run(
        "migrate",
        &source,
        &url,
        &source.bootstrap,
        &[
            "--grants",
            "--relay",
            &role,
            "--producer",
            &role,
            "--consumer",
            &role,
        ],
    )
    .await;
    assert_eq!(code, 0, "{grants}");
    sqlx::raw_sql(AssertSqlSafe(grants))
        .execute(&mut admin)
        .await
        .unwrap();
    let (code, output) = run(
        "relay",
        &source,
        &url,
        &source.bootstrap,
        &["--until-empty"],
    )
    .await;
    assert_eq!(code, 0, "{output}");
    source.expect(&["kept"]).await;
}

#[tokio::test]
async fn wrong_password_and_missing_rights_on_kafka_then_the_documented_rights() {
    let source = Source::create().await;
    source.commit("k", "kept").await;
    let kafka = services::kafka().await;
    let Some(sasl) = kafka.sasl_bootstrap() else {
        panic!("the tests' own Kafka has a SASL listener")
    };
    // No other test gives the user rights on this one.
    let checkpoints = kafka.create_topic("checkpoints", 1).await;
    let try_as = async |command: &str, (user, password): (&str, &str)| {
        let properties = [
            "security.protocol=SASL_PLAINTEXT".to_owned(),
            "sasl.mechanism=PLAIN".to_owned(),
            format!("sasl.username={user}"),
            format!("sasl.password={password}"),
        ];
        let mut more = match command {
            "relay" => vec!["--until-empty", "--checkpoint-topic", &checkpoints],
            _ => vec!["--topic", &source.topic],
        };
        more.extend(properties.iter().flat_map(|p| ["--kafka-property", p]));
        let (code, output) = run(command, &source, source.database.url(), sasl, &more).await;
        assert!(
            !output.contains(password),
            "{command} printed a password:\n{output}"
        );
        (code, output)
    };
    let principal = format!("User:{}", SASL_USER.0);
    let allow = async |operations: &[&str], resource: [&str; 2]| {
        let mut arguments = vec!["--add", "--allow-principal", &principal];
        arguments.extend(operations.iter().flat_map(|o| ["--operation", o]));
        arguments.extend(resource);
        kafka_cli::acls(kafka.bootstrap(), &arguments)
            .await
            .unwrap();
    };

    for command in ["relay", "doctor"] {
        let (code, output) = try_as(command, (SASL_ADMIN.0, "s3cret")).await;
        assert_ne!(code, 0, "{output}");
        assert!(output.contains("sasl."), "{output}");
        let (code, output) = try_as(command, SASL_USER).await;
        assert_ne!(code, 0, "{output}");
        assert!(output.contains("grant"), "{output}");
    }

    // What docs/operations.md says, WRITE on the topic last.
    let id = format!("oncebox.{}", source.name);
    allow(&["Write", "Describe"], ["--transactional-id", &id]).await;
    allow(&["Read"], ["--group", &id]).await;
    allow(&["Read"], ["--topic", &checkpoints]).await;
    allow(&["Describe"], ["--topic", &source.topic]).await;
    let started = Instant::now();
    let (code, output) = try_as("relay", SASL_USER).await;
    assert_eq!(code, 0, "{output}");
    for word in [&*source.topic, "WRITE", "topic paused"] {
        assert!(output.contains(word), "{output}");
    }
    // Not only when the records are too old, after the transaction's 30 s.
    assert!(started.elapsed() < Duration::from_secs(20), "{output}");
    source.expect(&[]).await;

    allow(&["Write"], ["--topic", &source.topic]).await;
    let (code, output) = try_as("relay", SASL_USER).await;
    assert_eq!(code, 0, "{output}");
    source.expect(&["kept"]).await;
}

#[tokio::test]
async fn a_missing_topic_is_named() {
    let mut source = Source::create().await;
    source.topic = format!("missing-{}", uuid::Uuid::new_v4().simple());
    source.commit("k", "kept").await;
    let (url, kafka) = (source.database.url(), &*source.bootstrap);
    let (code, output) = run("relay", &source, url, kafka, &["--until-empty"]).await;
    assert_eq!(code, 0, "{output}");
    assert!(
        output.contains("topic paused") && output.contains(&source.topic),
        "{output}"
    );
    let (code, output) = run("doctor", &source, url, kafka, &[]).await;
    assert_ne!(code, 0, "{output}");
    for word in [&*source.topic, "1 messages", "park list"] {
        assert!(output.contains(word), "{output}");
    }
    services::kafka()
        .await
        .create_topic_named(&source.topic, 1)
        .await;
    nothing_is_lost(&source).await;
}

#[tokio::test]
async fn g10_the_checkpoint_of_another_database() {
    let source = Source::create().await;
    source.commit("k", "kept").await;
    until_empty(&source).await;
    let other = Database::create().await;
    oncebox_migrations::migrate(other.url(), &Names::default())
        .await
        .unwrap();
    both_say(
        &source,
        other.url(),
        &source.bootstrap,
        &["another database"],
    )
    .await;
    let (code, _) = run(
        "relay",
        &source,
        other.url(),
        &source.bootstrap,
        &["--until-empty"],
    )
    .await;
    assert_eq!(code, 4, "a guarantee is in danger");
    nothing_is_lost(&source).await;
}

#[tokio::test]
async fn g10_published_rows_that_vanished_stop_the_relay_and_resume_is_the_way_out() {
    let source = Source::create().await;
    for text in ["a", "b", "c"] {
        source.commit("k", text).await;
    }
    until_empty(&source).await;
    sqlx::query("DELETE FROM oncebox_outbox WHERE id = 2")
        .execute(&mut source.database.connect().await)
        .await
        .unwrap();
    source.commit("k", "d").await;
    let url = source.database.url().to_owned();
    let (code, output) = run(
        "relay",
        &source,
        &url,
        &source.bootstrap,
        &["--until-empty"],
    )
    .await;
    assert_eq!(code, 4, "{output}");
    assert!(output.contains("oncebox relay resume"), "{output}");
    source.expect(&["a", "b", "c"]).await;

    let resume = |more: &'static [&'static str]| {
        let mut process_arguments = vec!["relay".to_owned(), "resume".to_owned()];
        process_arguments.extend(source.arguments().into_iter().skip(1).take(6));
        process_arguments.extend(more.iter().map(|a| (*a).to_owned()));
        async move {
            let mut process = Process::start(ONCEBOX, &process_arguments);
            process.wait_ok().await;
            process.output()
        }
    };
    let dry = resume(&["--from", "mark"]).await;
    assert!(dry.contains("nothing was changed"), "{dry}");
    let (code, _) = run(
        "relay",
        &source,
        &url,
        &source.bootstrap,
        &["--until-empty"],
    )
    .await;
    assert_eq!(code, 4, "a dry run changes nothing");
    resume(&["--from", "mark", "--apply"]).await;
    until_empty(&source).await;
    until_empty(&source).await;
    source.expect(&["a", "b", "c", "d"]).await;
}
