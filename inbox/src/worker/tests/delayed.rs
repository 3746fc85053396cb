//! Retries outside the lane, for those who declare that order does not matter.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use uuid::Uuid;

use super::bench::{Bench, Options, at, effect, handler, until};
use super::failures::dead_topic;
use crate::{HandlerError, RetryPolicy, Step};

/// Fails for the key `broken` until it is repaired; the attempts are far enough apart to go aside.
fn broken(repaired: &Arc<AtomicBool>, calls: &Arc<AtomicU32>, attempts: u32) -> Options {
    let (repaired, calls) = (Arc::clone(repaired), Arc::clone(calls));
    Options {
        handler: handler(move |tx, delivery| {
            let broken = delivery.key.as_deref() == Some(b"broken");
            let fails = broken && !repaired.load(Ordering::SeqCst);
            if broken {
                calls.fetch_add(1, Ordering::SeqCst);
            }
            Box::pin(async move {
                effect(tx, delivery).await?;
                if fails {
                    return Err(HandlerError::retriable("not yet"));
                }
                Ok(())
            })
        }),
        retry: RetryPolicy {
            attempts,
            initial: Duration::from_millis(500),
            max: Duration::from_millis(500),
            fast: 0,
        },
        delayed_retries: true,
        batch: 4,
        ..Options::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_a_delayed_message_holds_nobody_and_has_its_effect_once() {
    let bench = Bench::new(1).await;
    for n in 0..20 {
        let key = if n % 4 == 0 { "broken" } else { "fine" };
        bench
            .kafka
            .append_keyed(0, Uuid::now_v7(), key, &n.to_string());
    }
    let (repaired, calls) = Default::default();
    let one = bench.start(&[0], broken(&repaired, &calls, 1_000));
    // Another member of the group looks for what is due as well.
    let two = bench.start(&[], broken(&repaired, &calls, 1_000));
    bench.settled(0, 20).await;
    assert_eq!(bench.effects().await.len(), 15, "the others went on");
    let delayed =
        "SELECT count(*) FROM oncebox_dead_letter WHERE delayed AND replay_at IS NOT NULL";
    assert_eq!(bench.count(delayed).await, 5);
    // It failed again outside the lane.
    until(async || calls.load(Ordering::SeqCst) > 15).await;
    repaired.store(true, Ordering::SeqCst);
    until(async || bench.count(delayed).await == 0).await;
    // A redelivery does nothing: the marks have stayed.
    bench.kafka.redeliver(one.member, 20);
    until(async || one.stats.duplicates() >= 20).await;
    let effects = one.stats.effects() + two.stats.effects();
    for worker in [one, two] {
        worker.stop().await.unwrap();
    }
    assert_eq!(bench.numbers().await, (0..20).collect::<Vec<_>>());
    assert_eq!(effects, 20);
    let letters = "SELECT count(*) FROM oncebox_dead_letter";
    assert_eq!(bench.count(letters).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_a_delayed_message_without_an_attempt_left_is_a_dead_letter() {
    let bench = Bench::new(1).await;
    bench.kafka.append_keyed(0, Uuid::now_v7(), "broken", "0");
    let (repaired, calls) = Default::default();
    let options = Options {
        dead_topic: dead_topic(),
        record: Some(Arc::new(|_| Some("business".to_owned()))),
        ..broken(&repaired, &calls, 3)
    };
    let worker = bench.start(&[0], options);
    let delayed = "SELECT count(*) FROM oncebox_dead_letter WHERE delayed";
    until(async || bench.count(delayed).await == 1).await;
    assert!(bench.enqueued().await.is_empty(), "not dead yet");
    let dead = "SELECT count(*) FROM oncebox_dead_letter WHERE NOT delayed AND replay_at IS NULL AND attempts = 3 AND error = 'not yet'";
    until(async || bench.count(dead).await == 1).await;
    until(async || worker.stats.dead_letters() == 1).await;
    assert_eq!(worker.stats.retries(), 2);
    worker.stop().await.unwrap();
    assert_eq!(calls.load(Ordering::SeqCst), 3);
    assert!(bench.effects().await.is_empty());
    assert_eq!(
        bench.enqueued().await.len(),
        1,
        "published once, with the last attempt"
    );
    let records = "SELECT count(*) FROM oncebox_record WHERE status = 'dead' AND attempts = 3 AND business_id = 'business'";
    assert_eq!(bench.count(records).await, 1);
    assert_eq!(bench.count("SELECT count(*) FROM oncebox_record").await, 1);
}

/// Two records of one message, as of a producer that writes it twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_the_second_record_of_a_delayed_message_is_a_duplicate() {
    let bench = Bench::new(1).await;
    let id = Uuid::now_v7();
    for _ in 0..2 {
        bench.kafka.append_keyed(0, id, "broken", "0");
    }
    let (repaired, calls) = Default::default();
    let worker = bench.start(&[0], broken(&repaired, &calls, 1_000));
    bench.settled(0, 2).await;
    let letters = "SELECT count(*) FROM oncebox_dead_letter";
    assert_eq!(bench.count(letters).await, 1, "one licence for one effect");
    repaired.store(true, Ordering::SeqCst);
    until(async || bench.count(letters).await == 0).await;
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await, ["0"]);
}

/// Between the failure and the letter somebody else has settled the message: the partition was theirs for a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_no_letter_is_written_for_a_message_that_somebody_else_has_settled() {
    for delayed_retries in [false, true] {
        let bench = Bench::new(1).await;
        let id = Uuid::now_v7();
        bench.kafka.append_keyed(0, id, "broken", "0");
        let pool = bench.pool.clone();
        let settle = move || {
            let settled = async {
                for statement in [
                    "INSERT INTO oncebox_inbox (consumer, message_id) VALUES ('inventory', $1)",
                    "INSERT INTO effect (payload, place) VALUES ('0', 0)",
                ] {
                    let settled = sqlx::query(statement).bind(id).execute(&pool);
                    settled.await.unwrap();
                }
            };
            tokio::runtime::Handle::current().block_on(settled);
        };
        let (repaired, calls) = Default::default();
        let attempts = if delayed_retries { 1_000 } else { 1 };
        let options = Options {
            delayed_retries,
            on_step: Some(at(Step::Failed, 1, settle)),
            ..broken(&repaired, &calls, attempts)
        };
        let worker = bench.start(&[0], options);
        bench.settled(0, 1).await;
        let letters = "SELECT count(*) FROM oncebox_dead_letter";
        assert_eq!(bench.count(letters).await, 0, "it would be handled twice");
        worker.stop().await.unwrap();
        assert_eq!(bench.effects().await, ["0"]);
    }
}
