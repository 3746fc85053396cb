//! Poison, panics, outages: nothing is dropped and the partition goes on (G8).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use oncebox_migrations::{Names, headers};
use oncebox_outbox::{Config, Message, Outbox};
use sqlx::{Row, Sqlite, Transaction};
use uuid::Uuid;

use super::bench::{Bench, Options, effect, handler, until};
use crate::dead_topic::DeadTopic;
use crate::pause;
use crate::{Delivery, Error, ForeignId, HandlerError, HandlerFuture};

fn poison<'a>(tx: &'a mut Transaction<'static, Sqlite>, delivery: Delivery) -> HandlerFuture<'a> {
    let text =
        String::from_utf8_lossy(delivery.payload.as_deref().unwrap_or_default()).into_owned();
    Box::pin(async move {
        effect(tx, delivery.clone()).await?;
        match text.as_str() {
            "panic" => panic!("the panic of this test"),
            "json" => delivery.json::<u32>().map(|_| ()),
            "constraint" => {
                sqlx::query("INSERT INTO oncebox_mark (singleton, source_id) VALUES (2, x'00')")
                    .execute(&mut **tx)
                    .await?;
                Ok(())
            }
            "retriable" => Err(HandlerError::retriable("still not")),
            _ => Ok(()),
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_poison_goes_to_the_dead_letters_and_the_partition_goes_on() {
    let bench = Bench::new(1).await;
    let mut ids = Vec::new();
    for payload in [
        "before",
        "panic",
        "json",
        "constraint",
        "retriable",
        "after",
    ] {
        ids.push(Uuid::now_v7());
        bench.kafka.append(0, ids[ids.len() - 1], payload);
    }
    let worker = bench.start(
        &[0],
        Options {
            handler: handler(poison),
            ..Options::default()
        },
    );
    bench.settled(0, 6).await;
    let stats = worker.stats.clone();
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await, ["before", "after"]);
    assert_eq!(
        bench.marks().await,
        6,
        "a dead letter has a mark: no duplicate revives it"
    );
    assert_eq!(
        (stats.dead_letters(), stats.effects(), stats.retries()),
        (4, 2, 2)
    );
    let letters = sqlx::query(
        "SELECT message_id, consumer, topic, partition, record_offset, key, payload, headers, error, attempts \
         FROM oncebox_dead_letter ORDER BY record_offset",
    )
    .fetch_all(&bench.pool)
    .await
    .unwrap();
    let errors: Vec<String> = letters.iter().map(|r| r.get("error")).collect();
    assert!(errors[0].contains("the panic of this test"), "{errors:?}");
    assert!(errors[1].contains("expected value"), "{errors:?}");
    assert!(errors[2].contains("CHECK constraint"), "{errors:?}");
    assert_eq!(errors[3], "still not");
    let attempts: Vec<i32> = letters.iter().map(|r| r.get("attempts")).collect();
    assert_eq!(attempts, [1, 1, 1, 3]);
    for (n, letter) in letters.iter().enumerate() {
        assert_eq!(letter.get::<Uuid, _>("message_id"), ids[n + 1]);
        assert_eq!(letter.get::<i64, _>("record_offset"), n as i64 + 1);
        assert_eq!(letter.get::<Vec<u8>, _>("key"), b"key");
        let list: Vec<u8> = letter.get("headers");
        let names: Vec<_> = headers::decode(&list)
            .map(|h| h.unwrap().0.to_owned())
            .collect();
        assert_eq!(names.len(), 7, "the original headers are kept: {names:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_a_duplicate_of_a_dead_letter_writes_nothing() {
    let bench = Bench::new(1).await;
    let id = Uuid::now_v7();
    bench.kafka.append(0, id, "panic");
    bench.kafka.append(0, id, "panic");
    let worker = bench.start(
        &[0],
        Options {
            handler: handler(poison),
            ..Options::default()
        },
    );
    bench.settled(0, 2).await;
    worker.stop().await.unwrap();
    assert_eq!(
        bench
            .count("SELECT count(*) FROM oncebox_dead_letter")
            .await,
        1
    );
}

pub(super) fn dead_topic() -> Option<DeadTopic> {
    Some(DeadTopic {
        outbox: Outbox::new(Config::default()),
        name: "orders.dead".to_owned(),
    })
}

/// Names and values, where a name is there once.
fn decoded(list: &[u8]) -> BTreeMap<String, String> {
    let pairs = headers::decode(list).map(|pair| {
        let (name, value) = pair.unwrap();
        let value = String::from_utf8_lossy(value.unwrap_or_default()).into_owned();
        (name.to_owned(), value)
    });
    pairs.collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a15_a_dead_letter_is_published_with_its_content_place_and_error() {
    let bench = Bench::new(1).await;
    let ids: Vec<_> = ["before", "retriable", "retriable"]
        .map(|payload| {
            let id = Uuid::now_v7();
            bench.kafka.append(0, id, payload);
            id
        })
        .into();
    // Once more: a letter is there already, and its mark.
    bench.kafka.append(0, ids[1], "retriable");
    let options = Options {
        handler: handler(poison),
        dead_topic: dead_topic(),
        ..Options::default()
    };
    let worker = bench.start(&[0], options);
    bench.settled(0, 4).await;
    worker.stop().await.unwrap();
    let enqueued = bench.enqueued().await;
    assert_eq!(enqueued.len(), 2, "one for each letter");
    for (n, (topic, key, payload, list)) in enqueued.iter().enumerate() {
        assert_eq!(topic, "orders.dead");
        assert_eq!(key.as_deref(), Some(&b"key"[..]));
        assert_eq!(payload.as_deref(), Some(&b"retriable"[..]));
        let headers = decoded(list);
        let id = ids[n + 1].to_string();
        let expected = [
            ("dead-consumer", "inventory"),
            ("dead-topic", "orders"),
            ("dead-partition", "0"),
            ("dead-offset", ["1", "2"][n]),
            ("dead-message-id", &id),
            ("dead-oncebox-id", &id),
            ("dead-attempts", "3"),
            ("dead-error", "still not"),
        ];
        for (name, value) in expected {
            assert_eq!(headers.get(name).map(String::as_str), Some(value), "{name}");
        }
    }
}

/// What Kafka allowed and the outbox does not, or what the additions make too large, is said; the letter has the rest.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a15_a_dead_letter_that_is_too_large_is_published_without_its_content() {
    let bench = Bench::new(1).await;
    bench.kafka.append(0, Uuid::now_v7(), &"x".repeat(3_000));
    let mut small = dead_topic();
    if let Some(topic) = &mut small {
        topic.outbox = Outbox::new(Config {
            max_record_bytes: 3_000,
            ..Config::default()
        });
    }
    let options = Options {
        handler: handler(|_, _| Box::pin(async { Err(HandlerError::fatal("é".repeat(1_000))) })),
        dead_topic: small,
        ..Options::default()
    };
    let worker = bench.start(&[0], options);
    bench.settled(0, 1).await;
    worker.stop().await.unwrap();
    let [(_, key, payload, list)] = &bench.enqueued().await[..] else {
        panic!("one message")
    };
    assert_eq!((key, payload.as_deref()), (&None, Some(&b""[..])));
    let headers = decoded(list);
    assert!(headers["dead-shortened"].contains("limit"), "{headers:?}");
    assert_eq!(headers["dead-error"], "é".repeat(500));
    let payload = "SELECT length(payload) FROM oncebox_dead_letter";
    assert_eq!(bench.count(payload).await, 3_000);
}

/// Letter and message are one transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_a_dead_letter_that_cannot_be_published_stops_the_partition() {
    let bench = Bench::new(1).await;
    bench.kafka.append(0, Uuid::now_v7(), "panic");
    sqlx::query("CREATE TRIGGER no BEFORE INSERT ON oncebox_outbox BEGIN SELECT RAISE(ABORT, 'no messages'); END")
        .execute(&bench.pool)
        .await
        .unwrap();
    let options = Options {
        handler: handler(poison),
        dead_topic: dead_topic(),
        ..Options::default()
    };
    let error = bench.start(&[0], options).ended().await.unwrap_err();
    assert!(
        matches!(error, Error::DeadLetter { offset: 0, .. }) && error.is_stop(),
        "{error}"
    );
    assert!(error.to_string().contains("no messages"), "{error}");
    assert_eq!(bench.next(0).await, Some(0), "nothing was skipped");
    let letters = "SELECT count(*) FROM oncebox_dead_letter";
    assert_eq!(bench.count(letters).await, 0);
}

/// Stock, points and two messages to others: all of them once, or none, however often the message comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a19_several_effects_and_messages_of_one_message_are_one_transaction() {
    let bench = Bench::new(1).await;
    sqlx::query("CREATE TABLE points (total INTEGER NOT NULL)")
        .execute(&bench.pool)
        .await
        .unwrap();
    let id = Uuid::now_v7();
    bench.kafka.append(0, id, "order");
    bench.kafka.append(0, id, "order");
    let outbox = Outbox::new(Config::default());
    let calls = Arc::new(AtomicU32::new(0));
    let called = Arc::clone(&calls);
    let options = Options {
        handler: handler(move |tx, delivery| {
            let (outbox, called) = (outbox.clone(), Arc::clone(&called));
            Box::pin(async move {
                effect(tx, delivery).await?;
                sqlx::query("INSERT INTO points VALUES (10)")
                    .execute(&mut **tx)
                    .await?;
                for topic in ["coupons", "mails"] {
                    let message = Message::new(topic).key("17").payload("order");
                    outbox
                        .enqueue(tx, message)
                        .await
                        .map_err(HandlerError::retriable)?;
                }
                // The last part fails twice.
                match called.fetch_add(1, Ordering::SeqCst) {
                    0 | 1 => Err(HandlerError::retriable("not yet")),
                    _ => Ok(()),
                }
            })
        }),
        ..Options::default()
    };
    let worker = bench.start(&[0], options);
    bench.settled(0, 2).await;
    worker.stop().await.unwrap();
    assert_eq!(calls.load(Ordering::SeqCst), 3);
    assert_eq!(bench.effects().await, ["order"]);
    assert_eq!(bench.count("SELECT sum(total) FROM points").await, 10);
    let topics: Vec<_> = bench
        .enqueued()
        .await
        .into_iter()
        .map(|row| row.0)
        .collect();
    assert_eq!(topics, ["coupons", "mails"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_a_dead_letter_that_cannot_be_written_stops_the_partition() {
    let bench = Bench::new(1).await;
    bench.kafka.append(0, Uuid::now_v7(), "panic");
    bench.kafka.append(0, Uuid::now_v7(), "after");
    sqlx::query("CREATE TRIGGER no BEFORE INSERT ON oncebox_dead_letter BEGIN SELECT RAISE(ABORT, 'no letters'); END")
        .execute(&bench.pool)
        .await
        .unwrap();
    let worker = bench.start(
        &[0],
        Options {
            handler: handler(poison),
            ..Options::default()
        },
    );
    let error = worker.ended().await.unwrap_err();
    assert!(
        matches!(error, Error::DeadLetter { offset: 0, .. }) && error.is_stop(),
        "{error}"
    );
    assert!(error.to_string().contains("no letters"), "{error}");
    assert_eq!(bench.next(0).await, Some(0), "nothing was skipped");
    assert_eq!(bench.marks().await, 0);
    assert_eq!(bench.kafka.committed(0), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_a_dead_letter_of_another_message_is_not_overwritten() {
    let bench = Bench::new(1).await;
    bench.kafka.append(0, Uuid::now_v7(), "panic");
    sqlx::query(
        "INSERT INTO oncebox_dead_letter (consumer, message_id, topic, partition, record_offset, headers, error, attempts) \
         VALUES ('inventory', $1, 'orders', 0, 0, x'', 'older', 1)",
    )
    .bind(Uuid::now_v7())
    .execute(&bench.pool)
    .await
    .unwrap();
    let worker = bench.start(
        &[0],
        Options {
            handler: handler(poison),
            ..Options::default()
        },
    );
    let error = worker.ended().await.unwrap_err();
    assert!(error.to_string().contains("another message"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g9_a_message_that_waits_for_a_retry_does_not_hold_the_other_partitions() {
    let bench = Bench::new(2).await;
    bench.kafka.append(0, Uuid::now_v7(), "retriable");
    for n in 0..5 {
        bench.kafka.append(1, Uuid::now_v7(), &n.to_string());
    }
    let mut options = Options {
        handler: handler(poison),
        ..Options::default()
    };
    options.retry.initial = Duration::from_secs(60);
    options.retry.max = Duration::from_secs(60);
    let worker = bench.start(&[0, 1], options);
    bench.settled(1, 5).await;
    assert_eq!(bench.next(0).await, Some(0));
    worker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_of_the_database_is_waited_out_and_costs_no_attempt() {
    let bench = Bench::new(1).await;
    bench.kafka.append(0, Uuid::now_v7(), "a");
    // Somebody holds the write lock for longer than busy_timeout, again and again.
    let lock = bench.pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let calls = std::sync::Arc::new(AtomicU32::new(0));
    let count = std::sync::Arc::clone(&calls);
    let options = Options {
        handler: handler(move |tx, delivery| {
            count.fetch_add(1, Ordering::SeqCst);
            Box::pin(effect(tx, delivery))
        }),
        ..Options::default()
    };
    let worker = bench.start(&[0], options);
    tokio::time::sleep(Duration::from_millis(900)).await;
    assert!(bench.effects().await.is_empty());
    lock.rollback().await.unwrap();
    bench.settled(0, 1).await;
    let stats = worker.stats.clone();
    worker.stop().await.unwrap();
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    assert_eq!((stats.retries(), stats.effects()), (0, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_takes_long_keeps_the_consumer_polling() {
    let bench = Bench::new(2).await;
    bench.kafka.append(0, Uuid::now_v7(), "a");
    let options = Options {
        handler: handler(|tx, delivery| {
            Box::pin(async move {
                tokio::time::sleep(Duration::from_millis(1_500)).await;
                effect(tx, delivery).await
            })
        }),
        ..Options::default()
    };
    let worker = bench.start(&[0], options);
    until(async || worker.stats.deliveries() == 1).await;
    // Only a consumer that polls learns of it; the partition that is being worked on is revoked.
    bench.kafka.revoke(worker.member, &[0]);
    bench.kafka.assign(worker.member, &[1]);
    until(async || bench.next(1).await == Some(0)).await;
    assert!(
        bench.effects().await.is_empty(),
        "the revoked partition's work was given up"
    );
    worker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_a_handler_that_never_ends_does_not_stop_the_partition() {
    let bench = Bench::new(1).await;
    bench.kafka.append(0, Uuid::now_v7(), "hangs");
    bench.kafka.append(0, Uuid::now_v7(), "after");
    let options = Options {
        handler: handler(|tx, delivery| {
            Box::pin(async move {
                if delivery.offset == 0 {
                    std::future::pending::<()>().await;
                }
                effect(tx, delivery).await
            })
        }),
        handler_limit: Duration::from_millis(50),
        ..Options::default()
    };
    let worker = bench.start(&[0], options);
    bench.settled(0, 2).await;
    let stats = worker.stats.clone();
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await, ["after"]);
    assert_eq!((stats.retries(), stats.dead_letters()), (2, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_finishes_the_running_message() {
    let bench = Bench::new(1).await;
    for n in 0..10 {
        bench.kafka.append(0, Uuid::now_v7(), &n.to_string());
    }
    let options = Options {
        handler: handler(|tx, delivery| {
            Box::pin(async move {
                tokio::time::sleep(Duration::from_millis(300)).await;
                effect(tx, delivery).await
            })
        }),
        ..Options::default()
    };
    let worker = bench.start(&[0], options);
    until(async || worker.stats.deliveries() >= 1).await;
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await, ["0"]);
    assert_eq!(bench.kafka.committed(0), Some(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_without_an_envelope_are_known_as_configured() {
    for (policy, effects, letters) in [
        (ForeignId::PartitionOffset, 4, 0),
        (ForeignId::Header("order-id".into()), 2, 1),
        (ForeignId::Refuse, 0, 4),
    ] {
        let bench = Bench::new(1).await;
        bench.kafka.append_raw(0, "a", &[("order-id", "1")]);
        bench.kafka.append_raw(0, "a again", &[("order-id", "1")]);
        bench.kafka.append_raw(0, "b", &[("order-id", "2")]);
        bench.kafka.append_raw(0, "c", &[]);
        let options = Options {
            foreign_id: policy.clone(),
            ..Options::default()
        };
        let worker = bench.start(&[0], options);
        bench.settled(0, 4).await;
        worker.stop().await.unwrap();
        assert_eq!(bench.effects().await.len(), effects, "{policy:?}");
        let found = bench
            .count("SELECT count(*) FROM oncebox_dead_letter")
            .await;
        assert_eq!(found, letters, "{policy:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_envelope_version_stops_and_loses_nothing() {
    let bench = Bench::new(1).await;
    bench.kafka.append(0, Uuid::now_v7(), "a");
    bench.kafka.append_raw(0, "b", &[("oncebox-v", "2")]);
    let worker = bench.start(&[0], Options::default());
    let error = worker.ended().await.unwrap_err();
    assert!(
        matches!(error, Error::UnknownEnvelope { offset: 1, .. }),
        "{error}"
    );
    assert_eq!(bench.next(0).await, Some(1));
    assert_eq!(bench.effects().await, ["a"]);
}

/// What is under way ends, nothing more begins, and the position is looked at all the same; a restart keeps the pause.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_topic_waits_and_goes_on_where_it_was() {
    let bench = Bench::new(1).await;
    let names = Names::default();
    bench.kafka.append(0, Uuid::now_v7(), "0");
    let worker = bench.start(&[0], Options::default());
    bench.settled(0, 1).await;
    pause::pause(&bench.pool, &names, "inventory", "orders", "stock-taking")
        .await
        .unwrap();
    until(async || bench.kafka.is_paused(0)).await;
    for n in 1..20 {
        bench.kafka.append(0, Uuid::now_v7(), &n.to_string());
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(bench.next(0).await, Some(1));
    worker.stop().await.unwrap();

    let worker = bench.start(&[0], Options::default());
    until(async || bench.kafka.is_paused(0)).await;
    // A restored database is noticed although nothing is handled.
    let owned = worker.stats.ownership();
    sqlx::query("UPDATE oncebox_position SET seq = seq - 1")
        .execute(&bench.pool)
        .await
        .unwrap();
    until(async || worker.stats.ownership() > owned).await;
    assert_eq!(bench.next(0).await, Some(1));
    let paused = pause::list(&bench.pool, &names, "inventory").await.unwrap();
    assert_eq!(paused[0].reason, "stock-taking");
    let other = pause::unpause(&bench.pool, &names, "inventory", "payments").await;
    assert!(!other.unwrap());
    let was = pause::unpause(&bench.pool, &names, "inventory", "orders").await;
    assert!(was.unwrap());
    bench.settled(0, 20).await;
    worker.stop().await.unwrap();
    assert_eq!(bench.numbers().await, (0..20).collect::<Vec<_>>());
}
