//! G3: a `read_committed` reader sees each published message exactly once, across crashes, take-overs and lost answers.

use std::time::Duration;

use oncebox_integration_tests::proxy::{Proxy, api};
use oncebox_integration_tests::source::Source;
use oncebox_integration_tests::{kafka_cli, reader, services};
use oncebox_relay::Step;

use crate::relays::{relay, relay_through, relay_with, until_empty};

#[tokio::test]
async fn g3_a_relay_killed_at_every_step_publishes_once() {
    let source = Source::create().await;
    let mut expected = vec![];
    for (n, step) in Step::LOOP.into_iter().enumerate() {
        for nth in 1..=2 {
            let text = format!("{n}-{nth}");
            source.commit("k", &text).await;
            expected.push(text);
            let mut relay = relay_with(&source, &["--kill-at", &format!("{step}:{nth}")]);
            // A second batch, for the second time a step is reached.
            let text = format!("{n}-{nth}-more");
            source.commit("k", &text).await;
            expected.push(text);
            if nth == 2 && matches!(step, Step::BatchRead | Step::Producing) {
                source
                    .expect(&expected.iter().map(String::as_str).collect::<Vec<_>>())
                    .await;
                let text = format!("{n}-{nth}-last");
                source.commit("k", &text).await;
                expected.push(text);
            }
            relay.wait_killed().await;
        }
    }
    until_empty(&source).await;
    source
        .expect(&expected.iter().map(String::as_str).collect::<Vec<_>>())
        .await;
}

#[tokio::test]
async fn g3_killed_between_kafka_commit_and_mark_publishes_once() {
    let source = Source::create().await;
    source.commit_all("k", &["a", "b", "c"]).await;
    relay_with(&source, &["--kill-at", "committed:2"])
        .wait_killed()
        .await;
    source.expect(&["a", "b", "c"]).await;
    let (seq, position): (i64, String) = sqlx::query_as("SELECT seq, position FROM oncebox_mark")
        .fetch_one(&mut source.database.connect().await)
        .await
        .unwrap();
    assert!(
        position.is_empty() || position.contains(" high=0 "),
        "the mark lags: seq {seq}, {position:?}"
    );
    until_empty(&source).await;
    source.expect(&["a", "b", "c"]).await;
}

/// A batch takes several times as long as the lease: the lease is renewed beside it, and the standby stands by.
#[tokio::test]
async fn g3_a_broker_slower_than_the_lease_does_not_move_the_lead() {
    let source = Source::create().await;
    let proxy = Proxy::start(services::kafka().await).await.unwrap();
    let patient = ["--transaction-timeout", "12s"];
    let leader = relay_through(&source, proxy.bootstrap(), &patient);
    leader.wrote("leading").await;
    let standby = relay_through(&source, proxy.bootstrap(), &patient);
    let epoch = async || {
        let epoch = sqlx::query_scalar("SELECT epoch FROM oncebox_mark");
        let mut conn = source.database.connect().await;
        epoch.fetch_one(&mut conn).await.unwrap()
    };
    let before: i64 = epoch().await;
    for (n, key) in [api::PRODUCE, api::END_TXN].into_iter().enumerate() {
        let slow = proxy.on_response(key).delay(Duration::from_secs(2));
        source.commit("k", &format!("{n}")).await;
        slow.hit().await;
        tokio::time::sleep(Duration::from_millis(2_500)).await;
    }
    source.expect(&["0", "1"]).await;
    assert_eq!(epoch().await, before, "{}", standby.output());
    leader.kill().await;
    standby.kill().await;
}

#[tokio::test]
async fn g3_an_aborted_transaction_is_invisible_to_read_committed() {
    let source = Source::create().await;
    source.commit("k", "once").await;
    relay_with(&source, &["--kill-at", "acked:2"])
        .wait_killed()
        .await;
    let raw = reader::uncommitted(&source.bootstrap, &source.topic).await;
    assert_eq!(
        raw.len(),
        1,
        "the record is in the log, its transaction is open"
    );
    source.expect(&[]).await;
    until_empty(&source).await;
    source.expect(&["once"]).await;
    let raw = reader::uncommitted(&source.bootstrap, &source.topic).await;
    assert_eq!(raw.len(), 2, "the aborted copy is still in the log");
}

/// The second relay takes over from a paused first one, which must neither publish nor fence anybody when it wakes.
#[tokio::test]
async fn g3_a_second_relay_with_the_same_identity_fences_the_first() {
    let source = Source::create().await;
    let first = relay(&source);
    source.commit("k", "a").await;
    source.expect(&["a"]).await;
    first.signal("STOP");
    let second = relay(&source);
    source.commit("k", "b").await;
    source.expect(&["a", "b"]).await;
    first.signal("CONT");
    // Fenced by Kafka or deposed by the mark, whichever it meets first.
    first.wrote("starting over").await;
    source.commit("k", "c").await;
    source.expect(&["a", "b", "c"]).await;
    second.kill().await;
    source.commit("k", "d").await;
    source.expect(&["a", "b", "c", "d"]).await;
}

#[tokio::test]
async fn g3_paused_inside_a_transaction_and_taken_over_publishes_once() {
    let source = Source::create().await;
    let proxy = Proxy::start(services::kafka().await).await.unwrap();
    let first = relay_through(&source, proxy.bootstrap(), &[]);
    source.commit("k", "a").await;
    source.expect(&["a"]).await;
    let held = proxy.on_request(api::END_TXN).times(1).hold();
    source.commit("k", "b").await;
    held.hit().await;
    first.signal("STOP");
    let _second = relay(&source);
    source.expect(&["a", "b"]).await;
    let answer = held.release().await.expect("the broker answers");
    assert_ne!(
        answer.error_code(),
        Some(0),
        "the late EndTxn of a fenced producer is refused"
    );
    first.signal("CONT");
    first.wrote("starting over").await;
    source.commit("k", "c").await;
    source.expect(&["a", "b", "c"]).await;
}

#[tokio::test]
async fn g3_lost_answers_do_not_repeat() {
    for api_key in [
        api::PRODUCE,
        api::ADD_PARTITIONS_TO_TXN,
        api::ADD_OFFSETS_TO_TXN,
        api::TXN_OFFSET_COMMIT,
        api::END_TXN,
    ] {
        let source = Source::create().await;
        let proxy = Proxy::start(services::kafka().await).await.unwrap();
        let _relay = relay_through(&source, proxy.bootstrap(), &[]);
        source.commit("k", "a").await;
        source.expect(&["a"]).await;
        let cut = proxy.on_response(api_key).times(1).cut();
        source.commit("k", "b").await;
        cut.hit().await;
        source.commit("k", "c").await;
        source.expect(&["a", "b", "c"]).await;
    }
}

#[tokio::test]
async fn g3_a_deleted_checkpoint_continues_from_the_mark() {
    let source = Source::create().await;
    source.commit("k", "a").await;
    until_empty(&source).await;
    let group = format!("oncebox.{}", source.name);
    let arguments = [
        "--bootstrap-server",
        &source.bootstrap,
        "--delete",
        "--group",
        &group,
    ];
    kafka_cli::run(
        "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
        &arguments,
    )
    .await
    .unwrap();
    source.commit("k", "b").await;
    let mut relay = relay_with(&source, &["--until-empty"]);
    relay.wait_ok().await;
    assert!(
        relay.output().contains("no checkpoint in Kafka"),
        "{}",
        relay.output()
    );
    source.expect(&["a", "b"]).await;
}

#[tokio::test]
async fn until_empty_leaves_a_leader_alone() {
    let source = Source::create().await;
    let _leader = relay(&source);
    source.commit("k", "a").await;
    source.expect(&["a"]).await;
    let mut second = relay_with(&source, &["--until-empty"]);
    assert_eq!(second.wait().await.code(), Some(3), "{}", second.output());
}
