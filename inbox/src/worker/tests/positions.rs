//! The database knows where we are: start, takeover, restored databases, missing ranges (G10).

use std::time::Duration;

use uuid::Uuid;

use super::bench::{Bench, Options, Running, until};
use crate::{Error, Refusal};

fn fill(bench: &Bench, partition: i32, range: std::ops::Range<i32>) {
    for n in range {
        bench
            .kafka
            .append(partition, Uuid::now_v7(), &n.to_string());
    }
}

async fn refusal(worker: Running) -> Refusal {
    match worker.ended().await.unwrap_err() {
        Error::Position { refusal, .. } => refusal,
        other => panic!("{other}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_consumer_begins_at_the_first_offset_that_is_still_there() {
    let bench = Bench::new(1).await;
    fill(&bench, 0, 0..10);
    bench.kafka.expire(0, 4);
    let worker = bench.start(&[0], Options::default());
    bench.settled(0, 10).await;
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await, ["4", "5", "6", "7", "8", "9"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_appears_later_begins_at_its_first_offset() {
    let bench = Bench::new(2).await;
    fill(&bench, 0, 0..3);
    fill(&bench, 1, 0..3);
    let worker = bench.start(&[0], Options::default());
    bench.settled(0, 3).await;
    bench.kafka.revoke(worker.member, &[0]);
    bench.kafka.assign(worker.member, &[0, 1]);
    bench.settled(1, 3).await;
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await.len(), 6);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_position_of_the_database_wins_over_kafkas() {
    let bench = Bench::new(1).await;
    fill(&bench, 0, 0..5);
    let worker = bench.start(&[0], Options::default());
    bench.settled(0, 5).await;
    worker.stop().await.unwrap();
    fill(&bench, 0, 5..8);
    // Somebody moved the group's offset past messages that were not handled.
    bench.kafka.set_committed(0, 8);
    let worker = bench.start(&[0], Options::default());
    bench.settled(0, 8).await;
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await.len(), 8);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g10_an_existing_group_is_not_adopted_without_a_decision() {
    let bench = Bench::new(1).await;
    fill(&bench, 0, 0..5);
    bench.kafka.set_committed(0, 3);
    let worker = bench.start(&[0], Options::default());
    let error = worker.ended().await.unwrap_err();
    assert!(error.is_stop());
    assert!(
        error.to_string().contains("oncebox inbox resume"),
        "{error}"
    );
    assert!(bench.effects().await.is_empty());
    assert_eq!(
        bench.next(0).await,
        None,
        "no row: the next start asks again"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g10_a_missing_range_or_another_topic_stops_with_its_name() {
    let bench = Bench::new(1).await;
    fill(&bench, 0, 0..5);
    let worker = bench.start(&[0], Options::default());
    bench.settled(0, 5).await;
    worker.stop().await.unwrap();

    fill(&bench, 0, 5..9);
    bench.kafka.expire(0, 7);
    let worker = bench.start(&[0], Options::default());
    assert_eq!(refusal(worker).await, Refusal::Deleted { next: 5, low: 7 });

    bench.kafka.recreate();
    let worker = bench.start(&[0], Options::default());
    assert!(matches!(
        refusal(worker).await,
        Refusal::TopicRecreated { next: 5, .. }
    ));

    sqlx::query("UPDATE oncebox_position SET topic_id = 'topic-2'")
        .execute(&bench.pool)
        .await
        .unwrap();
    let worker = bench.start(&[0], Options::default());
    assert_eq!(
        refusal(worker).await,
        Refusal::EndsBelow { next: 5, high: 0 }
    );
    assert_eq!(
        bench.next(0).await,
        Some(5),
        "a refusal does not move the position"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g10_a_range_that_goes_missing_while_the_consumer_runs_stops_it() {
    let bench = Bench::new(1).await;
    fill(&bench, 0, 0..5);
    let worker = bench.start(&[0], Options::default());
    bench.settled(0, 5).await;
    bench.kafka.recreate();
    assert!(matches!(
        refusal(worker).await,
        Refusal::TopicRecreated { next: 5, .. }
    ));
}

/// Back to the state after five messages: marks, effects and position, without a rebalance.
async fn restore_five_of_ten(bench: &Bench) {
    let mut tx = bench.pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    for sql in [
        "DELETE FROM effect WHERE place >= 5",
        // Marks are in the order of their ids (UUIDv7).
        "DELETE FROM oncebox_inbox WHERE message_id IN \
         (SELECT message_id FROM oncebox_inbox ORDER BY message_id LIMIT -1 OFFSET 5)",
        "UPDATE oncebox_position SET next = 5, seq = seq - 5",
    ] {
        sqlx::query(sql).execute(&mut *tx).await.unwrap();
    }
    tx.commit().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g10_what_an_earlier_start_brings_late_is_not_taken() {
    let bench = Bench::new(1).await;
    fill(&bench, 0, 0..10);
    let worker = bench.start(&[0], Options::default());
    bench.settled(0, 10).await;
    // Polled for the start at 0, while the one at 5 is on its way.
    bench.kafka.be_slow_after_the_question();
    restore_five_of_ten(&bench).await;
    until(async || bench.kafka.is_slow()).await;
    fill(&bench, 0, 10..12);
    bench.settled(0, 12).await;
    worker.stop().await.unwrap();
    let expected: Vec<String> = (0..12).map(|n| n.to_string()).collect();
    assert_eq!(bench.effects().await, expected, "nothing is passed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g10_a_restored_database_is_noticed_and_what_is_missing_is_applied_again() {
    let bench = Bench::new(1).await;
    fill(&bench, 0, 0..10);
    let worker = bench.start(&[0], Options::default());
    bench.settled(0, 10).await;
    restore_five_of_ten(&bench).await;
    bench.settled(0, 10).await;
    worker.stop().await.unwrap();
    let expected: Vec<String> = (0..10).map(|n| n.to_string()).collect();
    assert_eq!(bench.effects().await, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resume_by_an_operator_is_noticed_by_a_running_consumer() {
    let bench = Bench::new(1).await;
    fill(&bench, 0, 0..5);
    let worker = bench.start(&[0], Options::default());
    bench.settled(0, 5).await;
    let taken = worker.stats.ownership();
    sqlx::query("UPDATE oncebox_position SET next = 2, seq = seq + 1, owner = $1")
        .bind(Uuid::new_v4())
        .execute(&bench.pool)
        .await
        .unwrap();
    until(async || worker.stats.ownership() > taken).await;
    bench.settled(0, 5).await;
    let stats = worker.stats.clone();
    worker.stop().await.unwrap();
    assert_eq!(stats.duplicates(), 3, "the marks are still there");
    assert_eq!(bench.effects().await.len(), 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_moves_between_two_workers_and_back() {
    let bench = Bench::new(1).await;
    let one = bench.start(&[0], Options::default());
    let two = bench.start(&[], Options::default());
    for round in 0..6 {
        fill(&bench, 0, round * 10..round * 10 + 10);
        tokio::time::sleep(Duration::from_millis(5)).await;
        let (from, to) = if round % 2 == 0 {
            (&one, &two)
        } else {
            (&two, &one)
        };
        bench.kafka.revoke(from.member, &[0]);
        bench.kafka.assign(to.member, &[0]);
    }
    bench.settled(0, 60).await;
    one.stop().await.unwrap();
    two.stop().await.unwrap();
    let expected: Vec<String> = (0..60).map(|n| n.to_string()).collect();
    assert_eq!(bench.effects().await, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g10_a_database_that_is_restored_under_traffic_is_gone_through_again() {
    let bench = Bench::new(1).await;
    let kafka = bench.kafka.clone();
    // Without a pause: something is on its way from Kafka at every moment.
    let feeder = tokio::spawn(async move {
        for n in 0..1_000 {
            kafka.append(0, Uuid::now_v7(), &n.to_string());
            if n % 10 == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    });
    let options = Options {
        batch: 20,
        ..Options::default()
    };
    let worker = bench.start(&[0], options);
    for _ in 0..4 {
        until(async || bench.effects().await.len() >= 200).await;
        // The worker writes all the time.
        let mut tx = loop {
            if let Ok(tx) = bench.pool.begin_with("BEGIN IMMEDIATE").await {
                break tx;
            }
        };
        // An older backup: everything above offset 100 is gone.
        for lost in [
            "DELETE FROM effect WHERE place >= 100",
            "UPDATE oncebox_position SET next = 100, seq = seq - 50",
        ] {
            sqlx::query(lost).execute(&mut *tx).await.unwrap();
        }
        // The marks of what is left are the oldest ones: their ids are in the order of time.
        sqlx::query("DELETE FROM oncebox_inbox WHERE message_id NOT IN (SELECT message_id FROM oncebox_inbox ORDER BY message_id LIMIT 100)")
            .execute(&mut *tx)
            .await
            .unwrap();
        tx.commit().await.unwrap();
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    feeder.await.unwrap();
    until(async || bench.next(0).await >= Some(1_000)).await;
    worker.stop().await.unwrap();
    let expected: Vec<String> = (0..1_000).map(|n| n.to_string()).collect();
    let effects = bench.effects().await;
    assert!(
        effects == expected,
        "{} effects of 1000: what came while the partition was not ours was passed",
        effects.len()
    );
}
