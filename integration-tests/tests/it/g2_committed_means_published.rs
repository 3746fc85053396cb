//! G2: a message enqueued in a transaction that committed is published: nothing is skipped, whatever commits out of id
//! order, whoever crashes when.

use std::time::Duration;

use oncebox_integration_tests::proxy::{Proxy, api};
use oncebox_integration_tests::services::{self, Postgres, PostgresOptions};
use oncebox_integration_tests::source::{Source, begin};
use oncebox_relay::Step;

use crate::relays::{relay, relay_through, relay_with, until_empty};

#[tokio::test]
async fn g2_a_late_commit_with_a_lower_id_is_published() {
    let source = Source::create().await;
    let _relay = relay(&source);
    let mut conn = source.database.connect().await;
    let mut late = begin(&mut conn).await;
    source.enqueue(&mut late, "late", "late").await;
    source.commit("k", "first").await;
    source.expect(&["first"]).await;
    source.commit("k", "second").await;
    source.expect(&["first", "second"]).await;
    late.commit().await.unwrap();
    source.expect(&["first", "late", "second"]).await;
}

/// The late row is in the batch that the relay has just read, sent or committed when it dies.
#[tokio::test]
async fn g2_a_late_row_in_the_batch_survives_a_kill_at_every_step() {
    for step in Step::LOOP {
        let source = Source::create().await;
        let mut conn = source.database.connect().await;
        let mut late = begin(&mut conn).await;
        source.enqueue(&mut late, "late", "late").await;
        source.commit("k", "first").await;
        until_empty(&source).await;
        source.expect(&["first"]).await;
        late.commit().await.unwrap();
        source.commit("k", "second").await;
        // The claim passes most steps once before the batch does, and reads no batch.
        let nth = if step == Step::BatchRead || step == Step::Producing {
            1
        } else {
            2
        };
        relay_with(&source, &["--kill-at", &format!("{step}:{nth}")])
            .wait_killed()
            .await;
        until_empty(&source).await;
        source.expect(&["first", "late", "second"]).await;
    }
}

/// A gap that was loaded after a crash is held by the transactions of now.
#[tokio::test]
async fn g2_a_gap_held_across_a_crash_is_not_burnt() {
    let source = Source::create().await;
    let mut conn = source.database.connect().await;
    let mut late = begin(&mut conn).await;
    source.enqueue(&mut late, "late", "late").await;
    source.commit("k", "first").await;
    let running = relay(&source);
    source.expect(&["first"]).await;
    running.kill().await;
    let _again = relay(&source);
    // Enough rounds to burn what nobody holds.
    source.commit("k", "second").await;
    source.expect(&["first", "second"]).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    late.commit().await.unwrap();
    source.expect(&["first", "late", "second"]).await;
}

/// Only Kafka's side is made anew: the answer to EndTxn is lost, the producer is tainted.
#[tokio::test]
async fn g2_a_gap_survives_a_rebuild_of_the_producer_alone() {
    let source = Source::create().await;
    let proxy = Proxy::start(services::kafka().await).await.unwrap();
    let relay = relay_through(&source, proxy.bootstrap(), &[]);
    source.commit("k", "first").await;
    source.expect(&["first"]).await;
    let mut conn = source.database.connect().await;
    let mut late = begin(&mut conn).await;
    source.enqueue(&mut late, "late", "late").await;
    let cut = proxy.on_response(api::END_TXN).times(1).cut();
    source.commit("k", "second").await;
    cut.hit().await;
    relay.wrote("making the producer anew").await;
    source.commit("k", "third").await;
    source.expect(&["first", "second", "third"]).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    late.commit().await.unwrap();
    source.expect(&["first", "late", "second", "third"]).await;
}

/// A prepared transaction changes its name over a restart of the server: names of before must not burn its gap.
#[tokio::test]
async fn g2_a_prepared_transaction_survives_a_restart_of_the_server() {
    let postgres = Postgres::start(PostgresOptions::default()).await.unwrap();
    let source = Source::create_on(&postgres).await;
    let relay = relay(&source);
    let mut conn = source.database.connect().await;
    sqlx::query("BEGIN").execute(&mut conn).await.unwrap();
    let insert = "INSERT INTO oncebox_outbox (message_id, topic, key, payload, headers) VALUES (gen_random_uuid(), $1, 'p', 'prepared', '')";
    sqlx::query(insert)
        .bind(&source.topic)
        .execute(&mut conn)
        .await
        .unwrap();
    sqlx::query("PREPARE TRANSACTION 'p'")
        .execute(&mut conn)
        .await
        .unwrap();
    source.commit("k", "first").await;
    source.expect(&["first"]).await;
    postgres.crash().await.unwrap();
    postgres.start_again().await.unwrap();
    source.commit("k", "second").await;
    source.expect(&["first", "second"]).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let mut conn = source.database.connect().await;
    sqlx::query("COMMIT PREPARED 'p'")
        .execute(&mut conn)
        .await
        .unwrap();
    source.expect(&["first", "prepared", "second"]).await;
    drop(relay);
}

/// A look that is cut off has not seen what lies behind the cut: nothing there is burnt.
#[tokio::test]
async fn g2_a_gap_larger_than_one_read_is_published_whole() {
    let source = Source::create().await;
    let mut conn = source.database.connect().await;
    let mut late = begin(&mut conn).await;
    let texts: Vec<_> = (0..50).map(|n| format!("bulk {n:02}")).collect();
    for text in &texts {
        source.enqueue(&mut late, "bulk", text).await;
    }
    source.commit("k", "first").await;
    let _relay = relay_with(&source, &["--max-batch-rows", "7"]);
    source.expect(&["first"]).await;
    late.commit().await.unwrap();
    let mut expected: Vec<_> = texts.iter().map(String::as_str).collect();
    expected.push("first");
    source.expect(&expected).await;
    let records = source.published().await;
    let bulk: Vec<_> = records
        .iter()
        .filter_map(|r| r.payload_text())
        .filter(|t| t.starts_with("bulk"))
        .collect();
    assert_eq!(bulk, texts, "in id order");
}

/// One open writer beside many short ones: every row of its own leaves a gap. More gaps than the checkpoint's metadata holds
/// go into a base record, and nobody else waits (G9).
#[tokio::test]
async fn g2_g9_more_gaps_than_a_checkpoint_holds_stop_nobody_and_survive_a_kill() {
    let source = Source::create().await;
    let checkpoints = services::kafka()
        .await
        .create_topic_with("checkpoints", 1, &[("cleanup.policy", "compact")])
        .await;
    let small = [
        "--checkpoint-bytes",
        "700",
        "--checkpoint-topic",
        &checkpoints,
    ];
    let mut slow = source.database.connect().await;
    let mut slow = begin(&mut slow).await;
    let mut expected = Vec::new();
    let mut late = Vec::new();
    let mut running = relay_with(&source, &small);
    for n in 0..400 {
        let text = format!("slow {n}");
        source.enqueue(&mut slow, "slow", &text).await;
        late.push(text);
        let text = format!("quick {n}");
        source.commit("quick", &text).await;
        expected.push(text);
        if n % 100 == 99 {
            source
                .expect(&expected.iter().map(String::as_str).collect::<Vec<_>>())
                .await;
            // Killed with a base record and changes since, at a moment when the checkpoint is ahead of the mark.
            running.kill().await;
            let text = format!("more {n}");
            source.commit("quick", &text).await;
            expected.push(text);
            let mut all = small.to_vec();
            all.extend(["--kill-at", "committed:2"]);
            relay_with(&source, &all).wait_killed().await;
            running = relay_with(&source, &small);
        }
    }
    let committed = oncebox_kafka::committed;
    let config = oncebox_kafka::Config::new(&*source.bootstrap);
    let group = format!("oncebox.{}", source.name);
    let any = oncebox_kafka::Stability::Any;
    let stored = committed(
        &config,
        &group,
        &checkpoints,
        0,
        any,
        Duration::from_secs(15),
    )
    .await;
    let text = stored.unwrap().unwrap().1;
    assert!(text.contains(" base=0:") && text.len() <= 700, "{text}");
    slow.commit().await.unwrap();
    expected.extend(late);
    source
        .expect(&expected.iter().map(String::as_str).collect::<Vec<_>>())
        .await;
    running.kill().await;
}
