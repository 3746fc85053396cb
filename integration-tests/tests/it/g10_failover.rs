//! G10 on real servers: a planned switchover, a dump and a restart need no guess; a failover that lost something stops the relay
//! before it publishes, and `resume` is the way out.

use oncebox_integration_tests::services::Postgres;
use oncebox_integration_tests::source::{Process, Source, begin};

use crate::relays::{ONCEBOX, relay, relay_with, until_empty};

/// A relay that does not want to go on; what it said.
async fn stops(source: &Source) -> String {
    stops_with(source, &[]).await
}

async fn stops_with(source: &Source, more: &[&str]) -> String {
    let mut relay = relay_with(source, &[&["--until-empty"], more].concat());
    let status = relay.wait().await;
    let output = relay.output();
    assert_eq!(status.code(), Some(4), "{output}");
    output
}

async fn resume(source: &Source, from: &str) -> String {
    resume_with(source, from, &[]).await
}

async fn resume_with(source: &Source, from: &str, more: &[&str]) -> String {
    let mut arguments = vec!["relay", "resume", "--from", from, "--apply"];
    arguments.extend(more);
    arguments.extend([
        "--database-url",
        source.database.url(),
        "--kafka",
        &source.bootstrap,
    ]);
    arguments.extend(["--source", &source.name]);
    let mut process = Process::start(ONCEBOX, &arguments);
    process.wait_ok().await;
    process.output()
}

/// A primary with a relay's outbox, and its asynchronous standby.
async fn pair() -> (Postgres, Postgres, Source) {
    let primary = Postgres::start(Default::default()).await.unwrap();
    let source = Source::create_on(&primary).await;
    source.commit("k", "a").await;
    until_empty(&source).await;
    let standby = primary.standby().await.unwrap();
    (primary, standby, source)
}

#[tokio::test]
async fn g10_a_clean_switchover_continues_by_itself() {
    let (primary, standby, mut source) = pair().await;
    let running = relay(&source);
    source.commit("k", "b").await;
    source.expect(&["a", "b"]).await;
    standby.caught_up(&primary).await.unwrap();
    // An orderly stop sends everything to the standby before it ends.
    primary.stop().await.unwrap();
    standby.promote().await.unwrap();
    source.database = source.database.on(&standby).unwrap();
    source.commit("k", "c").await;
    running.kill().await;
    let running = relay(&source);
    source.expect(&["a", "b", "c"]).await;
    // And the restart after it.
    running.kill().await;
    source.commit("k", "d").await;
    until_empty(&source).await;
    source.expect(&["a", "b", "c", "d"]).await;
}

#[tokio::test]
async fn g10_a_lossy_failover_stops_the_relay_and_resume_is_the_way_out() {
    let (primary, standby, mut source) = pair().await;
    standby.caught_up(&primary).await.unwrap();
    standby.stop().await.unwrap();
    // Published, and known to the lost primary alone.
    source.commit("k", "lost").await;
    until_empty(&source).await;
    source.expect(&["a", "lost"]).await;
    primary.crash().await.unwrap();
    standby.start_again().await.unwrap();
    standby.promote().await.unwrap();
    source.database = source.database.on(&standby).unwrap();
    // Its id is issued a second time.
    source.commit("k", "after").await;
    let said = stops(&source).await;
    assert!(
        said.contains("published rows are missing") && said.contains("relay resume"),
        "{said}"
    );
    source.expect(&["a", "lost"]).await;
    let said = resume(&source, "mark").await;
    assert!(said.contains("source epoch 2"), "{said}");
    until_empty(&source).await;
    source.expect(&["a", "after", "lost"]).await;
    source.commit("k", "later").await;
    until_empty(&source).await;
    source.expect(&["a", "after", "later", "lost"]).await;
}

#[tokio::test]
async fn g10_a_failover_that_lost_only_a_parking_stops_the_relay() {
    let (primary, standby, mut source) = pair().await;
    let there = source.topic.clone();
    let missing = format!("missing-{}", uuid::Uuid::new_v4().simple());
    source.topic.clone_from(&missing);
    source.commit("k", "parked").await;
    standby.caught_up(&primary).await.unwrap();
    standby.stop().await.unwrap();
    until_empty(&source).await;
    primary.crash().await.unwrap();
    standby.start_again().await.unwrap();
    standby.promote().await.unwrap();
    source.database = source.database.on(&standby).unwrap();
    let said = stops(&source).await;
    assert!(said.contains("parked rows are not those"), "{said}");
    resume(&source, "mark").await;
    let kafka = oncebox_integration_tests::services::kafka().await;
    kafka.create_topic_named(&missing, 1).await;
    until_empty(&source).await;
    source.expect(&["parked"]).await;
    source.topic.clone_from(&there);
    source.expect(&["a"]).await;
    until_empty(&source).await;
}

/// A split: the old primary was never told of the promotion, and each side has a relay.
#[tokio::test]
async fn g10_a_split_with_a_relay_on_each_side_ends_with_one() {
    let (primary, standby, source) = pair().await;
    let mut old = relay(&source);
    source.commit("k", "b").await;
    source.expect(&["a", "b"]).await;
    // The mark, too: it is written up to 50 ms later here.
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    standby.caught_up(&primary).await.unwrap();
    standby.promote().await.unwrap();
    let mut promoted = Source::create_on(&standby).await;
    (promoted.name, promoted.topic) = (source.name.clone(), source.topic.clone());
    promoted.database = source.database.on(&standby).unwrap();
    promoted.commit("k", "c").await;
    let new = relay(&promoted);
    promoted.expect(&["a", "b", "c"]).await;
    // The old one notices when it is to publish, or at its next start; again and again.
    source.commit("k", "never").await;
    assert_eq!(old.wait().await.code(), Some(4), "{}", old.output());
    for n in 0..3 {
        let said = stops(&source).await;
        assert!(
            said.contains("timeline 1") && said.contains("timeline 2"),
            "{said}"
        );
        promoted.commit("k", &format!("d{n}")).await;
    }
    promoted.expect(&["a", "b", "c", "d0", "d1", "d2"]).await;
    // It was never fenced.
    assert!(!new.output().contains("starting over"), "{}", new.output());
    new.kill().await;
}

#[tokio::test]
async fn g10_a_dump_restored_on_another_server_continues_by_itself() {
    let first = Postgres::start(Default::default()).await.unwrap();
    let mut source = Source::create_on(&first).await;
    source.commit_all("k", &["a", "b"]).await;
    until_empty(&source).await;
    source.commit("k", "c").await;
    let second = Postgres::start(Default::default()).await.unwrap();
    first
        .dump_into(source.database.name(), &second)
        .await
        .unwrap();
    source.database = source.database.on(&second).unwrap();
    source.commit("k", "d").await;
    until_empty(&source).await;
    source.expect(&["a", "b", "c", "d"]).await;
    until_empty(&source).await;
}

#[tokio::test]
async fn a_database_that_becomes_read_only_is_waited_for() {
    let postgres = Postgres::start(Default::default()).await.unwrap();
    let source = Source::create_on(&postgres).await;
    source.commit("k", "a").await;
    let running = relay(&source);
    source.expect(&["a"]).await;
    let mut admin = source.database.connect().await;
    for on in ["on", "off"] {
        let sql = format!("ALTER SYSTEM SET default_transaction_read_only = {on}");
        sqlx::query("SET default_transaction_read_only = off")
            .execute(&mut admin)
            .await
            .unwrap();
        sqlx::query(sqlx::AssertSqlSafe(sql))
            .execute(&mut admin)
            .await
            .unwrap();
        sqlx::query("SELECT pg_reload_conf()")
            .execute(&mut admin)
            .await
            .unwrap();
        if on == "on" {
            running.wrote("read-only").await;
        }
    }
    source.commit("k", "b").await;
    source.expect(&["a", "b"]).await;
    running.kill().await;
}

/// Somebody emptied the topic of the checkpoints while an open transaction had left more gaps than a checkpoint holds.
#[tokio::test]
async fn g10_a_missing_base_record_stops_the_relay_and_the_mark_is_the_way_out() {
    let kafka = oncebox_integration_tests::services::kafka().await;
    let source = Source::create().await;
    let compact = [("cleanup.policy", "compact")];
    let checkpoints = kafka.create_topic_with("checkpoints", 1, &compact).await;
    let topic = ["--checkpoint-topic", &checkpoints];
    let small = [&topic[..], &["--checkpoint-bytes", "700"]].concat();
    let run = async |more: &[&str]| {
        let mut relay = relay_with(&source, &[&small, more].concat());
        relay.wait().await
    };
    let mut slow = source.database.connect().await;
    let mut slow = begin(&mut slow).await;
    let mut expected = Vec::new();
    for n in 0..300 {
        for text in [format!("slow {n}"), format!("quick {n}")] {
            if text.starts_with("slow") {
                source.enqueue(&mut slow, "slow", &text).await;
            } else {
                source.commit("quick", &text).await;
            }
            expected.push(text);
        }
    }
    assert!(run(&["--until-empty"]).await.success());
    // Killed when its checkpoint is ahead of the mark.
    source.commit("quick", "more").await;
    relay_with(
        &source,
        &[&small[..], &["--kill-at", "committed:2"]].concat(),
    )
    .wait_killed()
    .await;

    let deletable = [("cleanup.policy", "compact,delete")];
    kafka.set_topic(&checkpoints, &deletable).await;
    kafka.delete_records(&checkpoints, 0).await.unwrap();
    kafka.set_topic(&checkpoints, &compact).await;
    let said = stops_with(&source, &small).await;
    assert!(
        said.contains("base record is gone") && said.contains("relay resume --from mark"),
        "{said}"
    );

    resume_with(&source, "mark", &topic).await;
    assert!(run(&["--until-empty"]).await.success());
    slow.commit().await.unwrap();
    assert!(run(&["--until-empty"]).await.success());
    // What the mark lagged is repeated, nothing is skipped.
    expected.extend(["more".to_owned(), "more".to_owned()]);
    let expected: Vec<_> = expected.iter().map(String::as_str).collect();
    source.expect(&expected).await;
}
