//! What is wrong is said before anything is read, with the remedy.

use std::time::Duration;

use oncebox_inbox::{Error, Inbox};
use oncebox_migrations::Names;
use sqlx::Postgres;

use crate::scene::{Running, Scene};

async fn refused(inbox: Inbox<Postgres>) -> Error {
    Running::new(inbox.handle(|_tx, _delivery| Box::pin(async move { Ok(()) })))
        .error()
        .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_setting_is_named() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    let new = || Inbox::new(scene.pool.clone(), scene.kafka.clone());
    for (inbox, setting, part) in [
        (new().topic("t"), "consumer", "missing"),
        (new().consumer("Inventory").topic("t"), "consumer", "a-z"),
        (new().consumer("-x").topic("t"), "consumer", "a-z"),
        (
            new().consumer("x".repeat(101)).topic("t"),
            "consumer",
            "100",
        ),
        (new().consumer("x"), "topic", "missing"),
        (
            scene
                .inbox()
                .transaction_idle_limit(Duration::from_secs(300)),
            "transaction_idle_limit",
            "max.poll.interval.ms",
        ),
        (
            scene.inbox().check_interval(Duration::ZERO),
            "check_interval",
            "0",
        ),
    ] {
        let error = refused(inbox).await;
        assert!(error.is_config(), "{error}");
        let text = error.to_string();
        assert!(text.contains(setting) && text.contains(part), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_topic_is_an_error_with_its_remedy() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    let error = refused(scene.inbox().topic("no-such-topic")).await;
    assert!(
        matches!(&error, Error::UnknownTopic { topic } if topic == "no-such-topic"),
        "{error}"
    );
    assert!(error.to_string().contains("--create"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_tables_name_the_command() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    let error = refused(scene.inbox().names(Names::new("public", "other_").unwrap())).await;
    assert!(matches!(error, Error::Schema(_)), "{error}");
    assert!(error.to_string().contains("oncebox migrate"), "{error}");
}
