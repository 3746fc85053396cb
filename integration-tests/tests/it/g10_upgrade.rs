//! G10: a rolling deploy needs no guess. Two builds, one of which knows a newer format of the position.

use oncebox_integration_tests::source::{Process, Source};
use oncebox_kafka::Stability;

use crate::relays::{ONCEBOX, relay_with};

/// What makes a process the newer build.
const NEWER: [&str; 2] = ["--know-format", "2"];

/// Where the outbox stands, in both places.
async fn stored(source: &Source) -> (String, Option<(i64, String)>) {
    let mark = sqlx::query_scalar("SELECT oncebox_mark::text FROM oncebox_mark");
    let mut conn = source.database.connect().await;
    let kafka = oncebox_kafka::Config::new(source.bootstrap.clone());
    let (group, topic) = (format!("oncebox.{}", source.name), "oncebox.checkpoints");
    let patience = std::time::Duration::from_secs(10);
    let committed = oncebox_kafka::committed(&kafka, &group, topic, 0, Stability::Stable, patience);
    (
        mark.fetch_one(&mut conn).await.unwrap(),
        committed.await.unwrap(),
    )
}

async fn upgrade(source: &Source, more: &[&str]) -> String {
    let mut arguments = vec!["relay", "upgrade", "--database-url", source.database.url()];
    arguments.extend(more);
    let mut process = Process::start(ONCEBOX, &arguments);
    process.wait_ok().await;
    process.output()
}

#[tokio::test]
async fn g10_old_and_new_builds_alternate_until_the_upgrade() {
    let source = Source::create().await;
    let mut expected = Vec::new();
    for round in 0..10 {
        let builds: [&[&str]; 2] = [&[], &NEWER];
        for (text, end) in [
            ("a", ["--kill-at", "committed:2"].as_slice()),
            ("b", &["--until-empty"]),
        ] {
            let text = format!("{round}{text}");
            source.commit("k", &text).await;
            expected.push(text);
            // Killed between Kafka's commit and the mark, the other build goes on from the checkpoint.
            let build = (round + usize::from(end.len() == 1)) % 2;
            let mut relay = relay_with(&source, &[builds[build], end].concat());
            if end.len() == 2 {
                relay.wait_killed().await;
            } else {
                relay.wait_ok().await;
            }
        }
        let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
        source.expect(&expected).await;
    }
    let (mark, checkpoint) = stored(&source).await;
    assert!(mark.contains("v1 seq"), "{mark}");
    assert!(checkpoint.is_some_and(|(_, text)| text.starts_with("v1 ")));

    let said = upgrade(&source, &["--apply"]).await;
    assert!(said.contains("nothing to do"), "{said}");
    let said = upgrade(&source, &NEWER).await;
    assert!(
        said.contains("from 1 to 2") && said.contains("nothing was changed"),
        "{said}"
    );
    assert_eq!(stored(&source).await.0, mark);
    upgrade(&source, &[&NEWER[..], &["--apply"]].concat()).await;

    // Before the newer build wrote it, and after.
    for text in ["c", "d"] {
        source.commit("k", text).await;
        let before = stored(&source).await;
        let mut old = relay_with(&source, &["--until-empty"]);
        assert_eq!(old.wait().await.code(), Some(4), "{}", old.output());
        let said = old.output();
        assert!(
            said.contains("v2") && said.contains("newer build"),
            "{said}"
        );
        assert_eq!(stored(&source).await, before, "refused without writing");
        relay_with(&source, &[&NEWER[..], &["--until-empty"]].concat())
            .wait_ok()
            .await;
        expected.push(text.to_owned());
        let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
        source.expect(&expected).await;
        let (mark, checkpoint) = stored(&source).await;
        assert!(mark.contains("v2 seq"), "{mark}");
        assert!(checkpoint.is_some_and(|(_, text)| text.starts_with("v2 ")));
    }
}
