//! The transaction of the next batch, opened while the one before is under way (ADR 13).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use oncebox_inbox::HandlerError;
use tokio::sync::Notify;
use uuid::Uuid;

use crate::scene::{Running, Scene, effect, until};

/// Transactions that are open and wait for their turn, or in their handler.
const OPEN: &str = "SELECT count(*) FROM pg_stat_activity \
                    WHERE datname = current_database() AND state = 'idle in transaction'";

/// A handler that stops at one message until it is let go, the first time.
#[derive(Clone, Default)]
struct Gate {
    reached: Arc<AtomicBool>,
    open: Arc<Notify>,
}

impl Gate {
    /// Whether this was the first time.
    async fn pass(&self) -> bool {
        let first = !self.reached.swap(true, Ordering::SeqCst);
        if first {
            self.open.notified().await;
        }
        first
    }

    fn consume(&self, inbox: oncebox_inbox::Inbox<sqlx::Postgres>, fails: bool) -> Running {
        let gate = self.clone();
        Running::new(inbox.handle(move |tx, delivery| {
            let gate = gate.clone();
            Box::pin(async move {
                let waits = delivery.payload.as_deref() == Some(b"10");
                if waits && gate.pass().await && fails {
                    return Err(HandlerError::retriable("the first time"));
                }
                effect(tx, delivery).await
            })
        }))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_what_is_opened_ahead_of_a_batch_that_fails_goes_with_it() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    scene.publish_numbers(0..20).await;
    let gate = Gate::default();
    let running = gate.consume(scene.inbox().batch(2), true);
    until(async || gate.reached.load(Ordering::SeqCst)).await;
    until(async || scene.count(OPEN).await == 2).await;
    gate.open.notify_one();
    scene.effects_reach(20).await;
    until(async || scene.count(OPEN).await == 0).await;
    running.stop().await.unwrap();
    let expected: Vec<String> = (0..20).map(|n| n.to_string()).collect();
    assert_eq!(scene.effects().await, expected, "once and in order");
    assert_eq!(scene.marks().await, 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g9_what_is_due_goes_before_what_comes_next() {
    let Some(scene) = Scene::new(2).await else {
        return;
    };
    let [slow, other] = [0, 1].map(|partition| {
        let mut keys = (0..).map(|n: i32| n.to_string());
        let is_there =
            |key: &String| oncebox_kafka::partition::for_key(key.as_bytes(), 2) == partition;
        keys.find(is_there).unwrap()
    });
    let texts: Vec<String> = (0..20).map(|n| n.to_string()).collect();
    let messages = texts.iter().map(|t| (&*slow, &**t, Uuid::now_v7()));
    scene.publish(messages).await;
    let gate = Gate::default();
    // A look at the row would take the second connection, too.
    let inbox = scene.inbox().connections(2);
    let inbox = inbox.check_interval(Duration::from_secs(60));
    let running = gate.consume(inbox, false);
    until(async || gate.reached.load(Ordering::SeqCst)).await;
    until(async || scene.count(OPEN).await == 2).await;
    // Both connections are taken, one of them by what cannot begin.
    scene.publish([(&*other, "other", Uuid::now_v7())]).await;
    let came = async {
        while !scene.effects().await.contains(&"other".to_owned()) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), came)
        .await
        .expect("it waits for a handler of another partition");
    gate.open.notify_one();
    scene.effects_reach(21).await;
    running.stop().await.unwrap();
    assert_eq!(scene.marks().await, 21);
}
