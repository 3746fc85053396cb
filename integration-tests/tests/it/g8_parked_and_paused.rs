//! G8 and G9 on real parts: what Kafka refuses waits with its key, a topic in trouble waits alone, and both come back once,
//! in order.

use std::time::Duration;

use oncebox_integration_tests::proxy::{Proxy, api};
use oncebox_integration_tests::services;
use oncebox_integration_tests::source::{Process, Source};

use crate::relays::{ONCEBOX, relay, relay_through, relay_with, until_empty};

/// An operator's command on the relay's tables; what it printed.
async fn operate(source: &Source, arguments: &[&str]) -> String {
    let mut all = vec!["relay"];
    all.extend(arguments);
    all.extend(["--database-url", source.database.url()]);
    let mut process = Process::start(ONCEBOX, &all);
    process.wait_ok().await;
    process.output()
}

/// A payload that no compression makes small.
fn random(bytes: usize) -> String {
    let letters = (0..bytes).map(|_| char::from(rand::random_range(b'a'..=b'z')));
    letters.collect()
}

/// Ids, causes.
async fn parked(source: &Source) -> Vec<(i64, String)> {
    sqlx::query_as("SELECT id, cause FROM oncebox_parked ORDER BY id")
        .fetch_all(&mut source.database.connect().await)
        .await
        .unwrap()
}

fn parked_as(expected: &[(i64, &str)]) -> Vec<(i64, String)> {
    let owned = expected
        .iter()
        .map(|(id, cause)| (*id, (*cause).to_owned()));
    owned.collect()
}

/// The payloads of one key as a consumer sees them, the large one as a word.
async fn of_key(source: &Source, key: &str, large: &str) -> Vec<String> {
    let records = source.published().await;
    let mine = records
        .iter()
        .filter(|record| record.key_text() == Some(key));
    let texts = mine.filter_map(|record| record.payload_text());
    texts
        .map(|text| {
            if text == large {
                "large".to_owned()
            } else {
                text.to_owned()
            }
        })
        .collect()
}

#[tokio::test]
async fn g8_a_record_that_the_broker_refuses_waits_with_its_key_and_is_published_once_after_requeue()
 {
    let mut source = Source::create().await;
    let kafka = services::kafka().await;
    source.topic = kafka
        .create_topic_with("small", 1, &[("max.message.bytes", "2000")])
        .await;
    let large = random(10_000);
    // One batch on the wire: the broker refuses it as a whole.
    source.commit("k", "before").await;
    source.commit("k", &large).await;
    source.commit("other", "x").await;
    source.commit("k", "after").await;
    until_empty(&source).await;
    source.expect(&["before", "x"]).await;
    assert_eq!(
        parked(&source).await,
        parked_as(&[(2, "refused"), (4, "key")])
    );

    let listed = operate(&source, &["park", "list"]).await;
    for word in [
        "refused   2",
        "key       4",
        "MSG_SIZE_TOO_LARGE",
        "behind parked row 2",
    ] {
        assert!(listed.contains(word), "{listed}");
    }
    let shown = operate(&source, &["park", "show", "2", "--json"]).await;
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(
        (&shown["payload"], &shown["attempts"]),
        (&large.as_str().into(), &1.into())
    );
    let dry = operate(&source, &["park", "requeue", "2"]).await;
    assert!(dry.contains("add --apply"), "{dry}");

    // Nothing has changed at the broker: it waits again.
    operate(&source, &["park", "requeue", "2", "--apply"]).await;
    until_empty(&source).await;
    source.expect(&["before", "x"]).await;
    assert_eq!(
        parked(&source).await,
        parked_as(&[(2, "refused"), (4, "key")])
    );

    kafka
        .set_topic(&source.topic, &[("max.message.bytes", "100000")])
        .await;
    operate(
        &source,
        &["park", "requeue", "--cause", "refused", "--apply"],
    )
    .await;
    source.commit("k", "last").await;
    until_empty(&source).await;
    assert_eq!(
        of_key(&source, "k", &large).await,
        ["before", "large", "after", "last"]
    );
    assert!(parked(&source).await.is_empty());
    // The next start finds everything as it should be.
    until_empty(&source).await;
    assert_eq!(source.texts().await.len(), 5);
}

#[tokio::test]
async fn g8_skip_drops_the_refused_record_and_its_key_goes_on() {
    let mut source = Source::create().await;
    let kafka = services::kafka().await;
    source.topic = kafka
        .create_topic_with("small", 1, &[("max.message.bytes", "2000")])
        .await;
    source.commit("k", &random(10_000)).await;
    source.commit("k", "after").await;
    let running = relay(&source);
    running.wrote("message parked").await;
    let refused = operate(&source, &["park", "skip", "1", "--apply"]).await;
    assert!(refused.contains("dropped for good"), "{refused}");
    source.expect(&["after"]).await;
    running.kill().await;
    until_empty(&source).await;
    source.expect(&["after"]).await;
    assert!(parked(&source).await.is_empty());
}

#[tokio::test]
async fn g8_small_records_that_only_a_batch_makes_too_large_are_published() {
    let mut source = Source::create().await;
    let kafka = services::kafka().await;
    source.topic = kafka
        .create_topic_with("small", 1, &[("max.message.bytes", "2000")])
        .await;
    let texts: Vec<_> = (0..60).map(|n| format!("{n:02} {}", random(300))).collect();
    let texts: Vec<_> = texts.iter().map(String::as_str).collect();
    source.commit_all("k", &texts).await;
    until_empty(&source).await;
    source.expect(&texts).await;
    assert!(parked(&source).await.is_empty());
}

#[tokio::test]
async fn g8_a_relay_killed_at_every_step_of_parking_and_release_publishes_once() {
    let mut source = Source::create().await;
    let kafka = services::kafka().await;
    let limit = |bytes: &'static str| [("max.message.bytes", bytes)];
    source.topic = kafka.create_topic_with("small", 1, &limit("2000")).await;
    let (mut expected, mut id) = (Vec::new(), 0);
    for step in [
        "parked",
        "offsets-sent",
        "endtxn-sent",
        "committed",
        "released",
        "unparked",
        "marked",
    ] {
        kafka.set_topic(&source.topic, &limit("2000")).await;
        let large = random(5_000);
        source.commit("k", &large).await;
        source.commit("k", step).await;
        id += 2;
        let parking = [
            "parked",
            "offsets-sent",
            "endtxn-sent",
            "committed",
            "marked",
        ];
        if parking.contains(&step) {
            // The first transaction of a term is its claim.
            let nth = if matches!(step, "parked" | "marked") {
                1
            } else {
                2
            };
            relay_with(&source, &["--kill-at", &format!("{step}:{nth}")])
                .wait_killed()
                .await;
        }
        until_empty(&source).await;
        assert_eq!(
            parked(&source).await,
            parked_as(&[(id - 1, "refused"), (id, "key")]),
            "{step}"
        );
        kafka.set_topic(&source.topic, &limit("100000")).await;
        operate(
            &source,
            &["park", "requeue", &(id - 1).to_string(), "--apply"],
        )
        .await;
        let nth = if matches!(step, "released" | "unparked" | "marked") {
            1
        } else {
            2
        };
        if step != "parked" {
            relay_with(&source, &["--kill-at", &format!("{step}:{nth}")])
                .wait_killed()
                .await;
        }
        until_empty(&source).await;
        expected.extend([large, step.to_owned()]);
        let seen = of_key(&source, "k", "").await;
        assert_eq!(seen, expected, "{step}");
        assert!(parked(&source).await.is_empty(), "{step}");
    }
}

#[tokio::test]
async fn g9_a_missing_topic_waits_alone_and_comes_back_by_itself() {
    let mut source = Source::create().await;
    let there = source.topic.clone();
    let missing = format!("missing-{}", uuid::Uuid::new_v4().simple());
    let running = relay(&source);
    for n in 0..3 {
        source.topic.clone_from(&missing);
        source.commit("k", &format!("late {n}")).await;
        source.topic.clone_from(&there);
        source.commit("k", &format!("at once {n}")).await;
    }
    source
        .expect(&["at once 0", "at once 1", "at once 2"])
        .await;
    let listed = operate(&source, &["park", "list"]).await;
    assert!(
        listed.contains("paused by the relay") && listed.contains(&missing),
        "{listed}"
    );
    services::kafka()
        .await
        .create_topic_named(&missing, 1)
        .await;
    source.topic.clone_from(&missing);
    source.expect(&["late 0", "late 1", "late 2"]).await;
    assert_eq!(
        of_key(&source, "k", "").await,
        ["late 0", "late 1", "late 2"]
    );
    running.kill().await;
}

/// As a topic whose partition has no leader, or too few replicas: its records alone are never acknowledged.
#[tokio::test]
async fn g9_a_topic_that_alone_is_not_acknowledged_waits_alone_and_comes_back_by_itself() {
    let mut source = Source::create().await;
    let kafka = services::kafka().await;
    let proxy = Proxy::start(kafka).await.unwrap();
    let there = source.topic.clone();
    let broken = kafka.create_topic("broken", 1).await;
    let rule = proxy
        .on_request(api::PRODUCE)
        .containing(&broken)
        .always()
        .drop_frame();
    source.topic.clone_from(&broken);
    source.commit("k", "late").await;
    source.topic.clone_from(&there);
    source.commit("k", "at once").await;
    let running = relay_through(&source, proxy.bootstrap(), &["--transaction-timeout", "3s"]);
    running.wrote("topic paused").await;
    source.expect(&["at once"]).await;
    assert!(rule.hits() >= 2);
    assert_eq!(parked(&source).await, parked_as(&[(1, "topic")]));
    proxy.clear();
    source.topic.clone_from(&broken);
    source.expect(&["late"]).await;
    running.kill().await;
}

#[tokio::test]
async fn what_an_operator_pauses_waits_until_it_is_resumed() {
    let source = Source::create().await;
    let topic = source.topic.clone();
    operate(
        &source,
        &[
            "pause", "--topic", &topic, "--key", "k", "--reason", "audit",
        ],
    )
    .await;
    let running = relay(&source);
    source.commit("k", "held").await;
    source.commit("other", "free").await;
    source.expect(&["free"]).await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    source.expect(&["free"]).await;
    let listed = operate(
        &source,
        &[
            "park",
            "list",
            "--json",
            "--topic",
            &topic,
            "--key-hex",
            "6b",
        ],
    )
    .await;
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(
        (&listed["cause"], &listed["key"]),
        (&"key".into(), &"k".into())
    );
    let resumed = operate(&source, &["resume", "--topic", &topic, "--key", "k"]).await;
    assert!(resumed.contains("published to again"), "{resumed}");
    source.expect(&["free", "held"]).await;
    running.kill().await;
}
