//! What an operator's commands on letters promise, on every database.

use std::collections::HashSet;
use std::time::Duration;

use sqlx::Pool;

use super::*;
use crate::operator::testing::{block, letter, number, on_both, run};
use crate::operator::{OperatorStore, Value};

on_both!(
    g8_pages_are_stable_while_letters_come_and_go,
    g8_every_condition_of_a_filter_holds,
    g8_a_letter_is_shown_in_full,
    a15_letters_are_counted_by_consumer_and_topic,
    g8_a_rate_spreads_the_letters_in_offset_order,
    g8_an_order_changes_nothing_for_what_is_ordered,
    g8_letters_that_were_replayed_in_vain_are_refused,
    g8_a_blocked_key_is_ordered_as_a_whole,
    g8_two_operators_order_each_letter_once,
    g8_orders_are_taken_back,
    g8_a_letter_in_work_is_left_alone,
    g8_what_is_discarded_is_gone_and_nothing_else,
    g8_the_last_parked_letter_unblocks_its_key,
    g8_a_discard_waits_for_the_consumer_that_holds_the_key,
    g8_two_operators_discard_without_an_error,
);

fn all() -> Filter {
    Filter::default()
}

async fn times<D: OperatorStore>(letters: &Letters<D>) -> Vec<(i64, Option<i64>)> {
    let page = letters
        .list(&all(), Direction::Oldest, None, 1_000)
        .await
        .unwrap();
    let times = page.letters.iter();
    times
        .map(|l| (l.id, l.replay_at.map(operator::micros)))
        .collect()
}

async fn blocked<D: OperatorStore>(pool: &Pool<D>) -> i64 {
    number(pool, "SELECT count(*) FROM {blocked_key}", vec![]).await
}

async fn g8_pages_are_stable_while_letters_come_and_go<D: OperatorStore>(pool: &Pool<D>) {
    let mut ids = Vec::new();
    for offset in 0..25 {
        ids.push(letter(pool, 0, offset, None, false).await);
    }
    let letters = Letters::new(pool.clone());
    let mut offset = 1_000;
    for direction in [Direction::Newest, Direction::Oldest] {
        let mut expected = ids.clone();
        if direction == Direction::Newest {
            expected.reverse();
        }
        let (mut seen, mut after) = (Vec::new(), None);
        loop {
            let page = letters.list(&all(), direction, after, 10).await.unwrap();
            assert!(page.letters.len() <= 10);
            seen.extend(page.letters.iter().map(|l| l.id));
            after = page.next;
            if after.is_none() {
                break;
            }
            // One that was shown goes, and a new one comes.
            let gone = seen[0];
            run(
                pool,
                "DELETE FROM {dead_letter} WHERE id = ?",
                vec![Value::Int(gone)],
            )
            .await;
            offset += 1;
            let new = letter(pool, 1, offset, None, false).await;
            if direction == Direction::Oldest {
                expected.push(new);
            } else {
                ids.push(new);
            }
            ids.retain(|id| *id != gone);
        }
        seen.dedup();
        if direction == Direction::Newest {
            assert_eq!(seen, expected, "what comes later is not on a later page");
        } else {
            assert_eq!(seen, expected, "nothing is skipped and nothing comes twice");
        }
    }
    let page = letters
        .list(&all(), Direction::Newest, None, 0)
        .await
        .unwrap();
    assert!(page.letters.is_empty());
}

async fn g8_every_condition_of_a_filter_holds<D: OperatorStore>(pool: &Pool<D>) {
    let first = letter(pool, 0, 1, Some("a"), false).await;
    let second = letter(pool, 1, 2, Some("b"), true).await;
    let letters = Letters::new(pool.clone());
    let shown = letters.show(first).await.unwrap().unwrap().listed;
    let other = letters.show(second).await.unwrap().unwrap().listed;
    run(
        pool,
        "UPDATE {dead_letter} SET replay_at = failed_at WHERE id = ?",
        vec![Value::Int(second)],
    )
    .await;
    let set = |change: fn(&mut Filter, &Listed), of: &Listed| {
        let mut filter = all();
        change(&mut filter, of);
        filter
    };
    let conditions: [fn(&mut Filter, &Listed); 8] = [
        |f, l| f.ids = vec![l.id],
        |f, l| f.partition = Some(l.partition),
        |f, l| f.key.clone_from(&l.key),
        |f, l| f.message_id = Some(l.message_id),
        |f, l| f.error = Some(format!("of {} is", l.offset)),
        |f, l| f.kind = Some(l.kind),
        |f, l| f.ordered = Some(l.kind == Kind::Parked),
        |f, l| (f.topic, f.ids) = (Some(l.topic.clone()), vec![l.id]),
    ];
    for (at, condition) in conditions.into_iter().enumerate() {
        for letter in [&shown, &other] {
            let filter = set(condition, letter);
            let page = letters
                .list(&filter, Direction::Newest, None, 10)
                .await
                .unwrap();
            let ids: Vec<i64> = page.letters.iter().map(|l| l.id).collect();
            assert_eq!(ids, [letter.id], "condition {at}");
        }
    }
    for (filter, expected) in [
        (
            Filter {
                consumer: Some("other".into()),
                ..all()
            },
            0,
        ),
        (
            Filter {
                consumer: Some("inventory".into()),
                ..all()
            },
            2,
        ),
        (
            Filter {
                since: Some(shown.failed_at),
                ..all()
            },
            2,
        ),
        (
            Filter {
                since: Some(shown.failed_at + Duration::from_secs(60)),
                ..all()
            },
            0,
        ),
        (
            Filter {
                until: Some(shown.failed_at),
                ..all()
            },
            0,
        ),
        (
            Filter {
                until: Some(other.failed_at + Duration::from_secs(60)),
                ..all()
            },
            2,
        ),
        (
            Filter {
                error: Some("OF 1 IS".into()),
                ..all()
            },
            0,
        ),
        (
            Filter {
                error: Some("' OR 1=1 --".into()),
                ..all()
            },
            0,
        ),
    ] {
        let page = letters
            .list(&filter, Direction::Newest, None, 10)
            .await
            .unwrap();
        assert_eq!(page.letters.len(), expected, "{filter:?}");
    }
}

async fn g8_a_letter_is_shown_in_full<D: OperatorStore>(pool: &Pool<D>) {
    let id = letter(pool, 2, 7, Some("k"), true).await;
    let letters = Letters::new(pool.clone());
    let shown = letters.show(id).await.unwrap().unwrap();
    assert_eq!(shown.payload.as_deref(), Some(&b"{\"order\":7}"[..]));
    assert_eq!(shown.listed.payload_bytes, Some(11));
    assert_eq!(shown.listed.key.as_deref(), Some(&b"k"[..]));
    assert_eq!((shown.listed.partition, shown.listed.offset), (2, 7));
    assert_eq!((shown.listed.attempts, shown.listed.replays), (3, 0));
    assert_eq!(shown.listed.kind, Kind::Parked);
    assert_eq!(
        shown.headers,
        [
            ("tenant".to_owned(), Some(b"42".to_vec())),
            ("raw".to_owned(), Some(vec![0xff, 0])),
            ("flag".to_owned(), None)
        ]
    );
    assert_eq!(shown.headers_damaged, None);
    run(
        pool,
        "UPDATE {dead_letter} SET headers = ?, payload = NULL, record_timestamp = 1795983713123 WHERE id = ?",
        vec![Value::Bytes(vec![0, 1, b'a', 0, 0, 0, 1, b'x', 9]), Value::Int(id)],
    )
    .await;
    let damaged = letters.show(id).await.unwrap().unwrap();
    assert_eq!(damaged.headers.len(), 1, "what can be read is shown");
    assert!(damaged.headers_damaged.unwrap().contains("ends inside"));
    assert_eq!(
        (damaged.payload, damaged.listed.payload_bytes),
        (None, None)
    );
    let timestamp = damaged.listed.record_timestamp.unwrap();
    assert_eq!(operator::micros(timestamp), 1_795_983_713_123_000);
    assert_eq!(letters.show(id + 1).await.unwrap(), None);
}

async fn a15_letters_are_counted_by_consumer_and_topic<D: OperatorStore>(pool: &Pool<D>) {
    let letters = Letters::new(pool.clone());
    assert_eq!(letters.groups(&all()).await.unwrap(), []);
    letter(pool, 0, 1, None, false).await;
    letter(pool, 0, 2, Some("a"), true).await;
    letter(pool, 0, 3, Some("a"), true).await;
    let fourth = letter(pool, 0, 4, Some("b"), true).await;
    run(
        pool,
        "UPDATE {dead_letter} SET consumer = 'billing', replay_at = failed_at WHERE id = ?",
        vec![Value::Int(fourth)],
    )
    .await;
    let groups = letters.groups(&all()).await.unwrap();
    let numbers: Vec<_> = groups
        .iter()
        .map(|g| (g.consumer.as_str(), g.dead, g.parked, g.keys, g.ordered))
        .collect();
    assert_eq!(
        numbers,
        [("billing", 0, 1, 1, 1), ("inventory", 1, 2, 1, 0)]
    );
    assert!(groups[1].oldest_age < Duration::from_secs(60), "{groups:?}");
}

async fn g8_a_rate_spreads_the_letters_in_offset_order<D: OperatorStore>(pool: &Pool<D>) {
    // By their ids they come in another order.
    let mut by_offset = Vec::new();
    for offset in [30, 10, 20] {
        for partition in [1, 0] {
            let id = letter(pool, partition, offset, None, false).await;
            by_offset.push((offset, partition, id));
        }
    }
    by_offset.sort_unstable();
    let letters = Letters::new(pool.clone());
    let replay = Replay {
        rate: Some("4/s".parse().unwrap()),
        ..Replay::default()
    };
    let plan = letters.plan_replay(&all(), &replay).await.unwrap();
    let ids: Vec<i64> = by_offset.iter().map(|(_, _, id)| *id).collect();
    assert_eq!(plan.letters, ids);
    assert!(!plan.applied);
    assert_eq!(plan.takes(), Duration::from_millis(1_250));
    assert!(
        times(&letters).await.iter().all(|(_, at)| at.is_none()),
        "a plan changes nothing"
    );

    let done = letters.replay(&all(), &replay).await.unwrap();
    assert_eq!(
        (done.letters, done.applied, done.busy),
        (ids.clone(), true, 0)
    );
    let times = times(&letters).await;
    let at = |id: i64| times.iter().find(|(i, _)| *i == id).unwrap().1.unwrap();
    let begin = at(ids[0]);
    for (i, id) in ids.iter().enumerate() {
        assert_eq!(at(*id) - begin, 250_000 * i64::try_from(i).unwrap());
    }
    let now = number(pool, &format!("SELECT {}", D::NOW), vec![]).await;
    assert!((now - begin).abs() < 60_000_000, "by the database's clock");
}

async fn g8_an_order_changes_nothing_for_what_is_ordered<D: OperatorStore>(pool: &Pool<D>) {
    letter(pool, 0, 1, None, false).await;
    let letters = Letters::new(pool.clone());
    let once = letters.replay(&all(), &Replay::default()).await.unwrap();
    assert_eq!(once.letters.len(), 1);
    let before = times(&letters).await;
    letter(pool, 0, 2, None, false).await;
    let plan = letters
        .plan_replay(&all(), &Replay::default())
        .await
        .unwrap();
    assert_eq!((plan.letters.len(), plan.ordered_before), (1, 1));
    let again = letters.replay(&all(), &Replay::default()).await.unwrap();
    assert_eq!((again.letters.len(), again.ordered_before), (1, 1));
    assert_eq!(times(&letters).await[0], before[0]);
}

async fn g8_letters_that_were_replayed_in_vain_are_refused<D: OperatorStore>(pool: &Pool<D>) {
    for (offset, key, parked) in [
        (1, None, false),
        (2, None, false),
        (3, Some("a"), true),
        (4, Some("a"), true),
        (5, Some("b"), true),
    ] {
        letter(pool, 0, offset, key, parked).await;
    }
    run(
        pool,
        "UPDATE {dead_letter} SET replays = 3 WHERE record_offset IN (1, 3)",
        vec![],
    )
    .await;
    run(
        pool,
        "UPDATE {dead_letter} SET replays = 2 WHERE record_offset = 2",
        vec![],
    )
    .await;
    let letters = Letters::new(pool.clone());
    let plan = letters
        .plan_replay(&all(), &Replay::default())
        .await
        .unwrap();
    assert_eq!(
        (plan.letters.len(), plan.refused),
        (2, 3),
        "with a looping letter its whole key: {plan}"
    );
    assert!(plan.to_string().contains("3 refused"));
    let done = letters.replay(&all(), &Replay::default()).await.unwrap();
    assert_eq!((done.letters.len(), done.refused), (2, 3));
    let force = Replay {
        force: true,
        ..Replay::default()
    };
    let done = letters.replay(&all(), &force).await.unwrap();
    assert_eq!(
        (done.letters.len(), done.refused, done.ordered_before),
        (3, 0, 2)
    );
}

async fn g8_a_blocked_key_is_ordered_as_a_whole<D: OperatorStore>(pool: &Pool<D>) {
    letter(pool, 0, 1, Some("a"), true).await;
    let second = letter(pool, 0, 2, Some("a"), true).await;
    letter(pool, 0, 3, Some("a"), true).await;
    letter(pool, 0, 4, Some("b"), true).await;
    letter(pool, 0, 5, Some("a"), false).await;
    let keyless = letter(pool, 0, 6, None, true).await;
    letter(pool, 0, 7, None, true).await;
    let letters = Letters::new(pool.clone());
    let one = |id| Filter {
        ids: vec![id],
        ..all()
    };
    let plan = letters
        .plan_replay(&one(second), &Replay::default())
        .await
        .unwrap();
    assert_eq!(plan.letters.len(), 3);
    let share = &plan.shares[0];
    assert_eq!((share.letters, share.keys, share.drawn_in), (3, 1, 2));
    assert!(plan.to_string().contains("orders all of them"), "{plan}");
    let done = letters
        .replay(&one(second), &Replay::default())
        .await
        .unwrap();
    assert_eq!(done.letters, plan.letters);
    let done = letters
        .replay(&one(keyless), &Replay::default())
        .await
        .unwrap();
    assert_eq!(done.letters, [keyless], "without a key it stands alone");
    let taken = letters.cancel(&one(second)).await.unwrap();
    assert_eq!(taken.letters, plan.letters, "and taken back as a whole");
}

async fn g8_two_operators_order_each_letter_once<D: OperatorStore>(pool: &Pool<D>) {
    for offset in 0..200 {
        let key = format!("k{}", offset % 7);
        letter(pool, offset % 3, offset, Some(&key), offset % 2 == 0).await;
    }
    let letters = Letters::new(pool.clone());
    let order = || async {
        letters
            .replay(&all(), &Replay::default())
            .await
            .unwrap()
            .letters
    };
    let (a, b, c) = tokio::join!(order(), order(), order());
    let mut ordered: Vec<i64> = [a, b, c].concat();
    // What one skipped because another held it was ordered by that one.
    assert_eq!(ordered.len(), 200);
    ordered.sort_unstable();
    ordered.dedup();
    assert_eq!(ordered.len(), 200);
    assert!(times(&letters).await.iter().all(|(_, at)| at.is_some()));
}

async fn g8_orders_are_taken_back<D: OperatorStore>(pool: &Pool<D>) {
    let first = letter(pool, 0, 1, None, false).await;
    let second = letter(pool, 0, 2, None, false).await;
    letter(pool, 0, 3, None, false).await;
    let letters = Letters::new(pool.clone());
    let two = Filter {
        ids: vec![first, second],
        ..all()
    };
    letters.replay(&two, &Replay::default()).await.unwrap();
    let plan = letters.plan_cancel(&all()).await.unwrap();
    assert_eq!(plan.letters, [first, second]);
    assert_eq!(
        times(&letters).await.iter().flat_map(|(_, at)| at).count(),
        2
    );
    let taken = letters.cancel(&all()).await.unwrap();
    assert_eq!((taken.letters, taken.applied), (vec![first, second], true));
    assert!(times(&letters).await.iter().all(|(_, at)| at.is_none()));
    assert!(letters.cancel(&all()).await.unwrap().letters.is_empty());
}

/// The consumer has deleted the letter and calls the handler: on PostgreSQL nobody waits for it; on SQLite there is one writer.
async fn g8_a_letter_in_work_is_left_alone<D: OperatorStore>(pool: &Pool<D>) {
    if D::DIALECT == oncebox_migrations::Dialect::Sqlite {
        return;
    }
    let held = letter(pool, 0, 1, None, false).await;
    let free = letter(pool, 0, 2, None, false).await;
    let letters = Letters::new(pool.clone());
    let mut consumer = pool.begin_with(D::BEGIN_WRITE).await.unwrap();
    let mut take = Sql::new(operator::tables::<D>(
        "DELETE FROM {dead_letter} WHERE id = ",
        &Names::default(),
    ));
    let id = take.bind(Value::Int(held));
    take.push(&id);
    assert_eq!(D::change(&mut consumer, take).await.unwrap(), 1);
    let patience = Duration::from_secs(20);
    let (filter, at_once) = (all(), Replay::default());
    let done = tokio::time::timeout(patience, letters.replay(&filter, &at_once));
    let done = done.await.expect("nobody waits").unwrap();
    assert_eq!((done.letters, done.busy), (vec![free], 1));
    let gone = tokio::time::timeout(patience, letters.discard(&filter));
    let gone = gone.await.expect("nobody waits").unwrap();
    assert_eq!((gone.deleted, gone.busy), (1, 1));
    consumer.rollback().await.unwrap();
    assert!(letters.show(held).await.unwrap().is_some());
}

async fn g8_what_is_discarded_is_gone_and_nothing_else<D: OperatorStore>(pool: &Pool<D>) {
    for offset in 0..5 {
        letter(pool, 0, offset, None, false).await;
    }
    let keyless = letter(pool, 1, 9, None, true).await;
    let letters = Letters::new(pool.clone());
    let of_two = Filter {
        error: Some("of 2 is".into()),
        ..all()
    };
    let plan = letters.plan_discard(&of_two).await.unwrap();
    assert_eq!(
        (plan.dead.len(), plan.parked.len(), plan.applied),
        (1, 0, false)
    );
    assert_eq!(times(&letters).await.len(), 6, "a plan changes nothing");
    let done = letters.discard(&of_two).await.unwrap();
    assert_eq!((done.deleted, done.busy, done.applied), (1, 0, true));
    let one = Filter {
        ids: vec![keyless],
        ..all()
    };
    assert_eq!(letters.discard(&one).await.unwrap().deleted, 1);
    assert_eq!(times(&letters).await.len(), 4);
    assert_eq!(letters.discard(&one).await.unwrap().deleted, 0);
}

async fn g8_the_last_parked_letter_unblocks_its_key<D: OperatorStore>(pool: &Pool<D>) {
    for key in ["a", "b"] {
        block(pool, key).await;
    }
    let first = letter(pool, 0, 1, Some("a"), true).await;
    let last = letter(pool, 0, 2, Some("a"), true).await;
    letter(pool, 0, 3, Some("b"), true).await;
    // A dead letter of the key blocks nobody.
    letter(pool, 0, 4, Some("a"), false).await;
    let letters = Letters::new(pool.clone());
    for (id, unblocked, still_blocked, keys) in [(first, 0, 1, 2), (last, 1, 0, 1)] {
        let one = Filter {
            ids: vec![id],
            ..all()
        };
        let plan = letters.plan_discard(&one).await.unwrap();
        assert_eq!(
            (plan.unblocked, plan.still_blocked),
            (unblocked, still_blocked)
        );
        let done = letters.discard(&one).await.unwrap();
        assert_eq!(
            (done.unblocked, done.still_blocked),
            (unblocked, still_blocked)
        );
        assert_eq!((done.deleted, blocked(pool).await), (1, keys));
    }
}

async fn g8_a_discard_waits_for_the_consumer_that_holds_the_key<D: OperatorStore>(pool: &Pool<D>) {
    for commits in [true, false] {
        run(pool, "DELETE FROM {dead_letter}", vec![]).await;
        run(pool, "DELETE FROM {blocked_key}", vec![]).await;
        block(pool, "a").await;
        letter(pool, 0, 1, Some("a"), true).await;
        let letters = Letters::new(pool.clone());
        // The consumer locks the key and parks one more message behind it.
        let mut consumer = pool.begin_with(D::BEGIN_WRITE).await.unwrap();
        for text in [
            "UPDATE {blocked_key} SET reason = reason",
            "INSERT INTO {dead_letter} (consumer, message_id, topic, partition, record_offset, key, headers, error, attempts, parked) \
             SELECT consumer, message_id, topic, partition, record_offset + 1, key, headers, error, attempts, parked FROM {dead_letter}",
        ] {
            let sql = Sql::new(operator::tables::<D>(text, &Names::default()));
            assert_eq!(D::change(&mut consumer, sql).await.unwrap(), 1);
        }
        let filter = all();
        let discard = letters.discard(&filter);
        let end = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            if commits {
                consumer.commit().await.unwrap();
            } else {
                consumer.rollback().await.unwrap();
            }
        };
        let (done, ()) = tokio::join!(discard, end);
        let done = done.unwrap();
        assert_eq!(done.deleted, 1, "what came later was not meant");
        let left = i64::from(commits);
        assert_eq!(times(&letters).await.len() as i64, left);
        assert_eq!(
            blocked(pool).await,
            left,
            "a key with a parked letter stays blocked, one without is free"
        );
        assert_eq!(done.unblocked, u64::from(!commits));
    }
}

async fn g8_two_operators_discard_without_an_error<D: OperatorStore>(pool: &Pool<D>) {
    for key in 0..5 {
        block(pool, &format!("k{key}")).await;
    }
    for offset in 0..100 {
        let key = format!("k{}", offset % 5);
        letter(pool, 0, offset, Some(&key), offset % 2 == 0).await;
    }
    let letters = Letters::new(pool.clone());
    let filter = all();
    let (a, b) = tokio::join!(letters.discard(&filter), letters.discard(&filter));
    let (a, b) = (a.unwrap(), b.unwrap());
    assert_eq!(a.deleted + b.deleted, 100, "each letter once");
    assert_eq!(a.unblocked + b.unblocked, 5, "each key once");
    assert_eq!(blocked(pool).await, 0);
    let left: HashSet<i64> = times(&letters)
        .await
        .into_iter()
        .map(|(id, _)| id)
        .collect();
    assert!(left.is_empty());
}

#[cfg(feature = "postgres")]
#[test]
fn the_futures_can_be_spawned() {
    fn sendable<T: Send>(_: T) {}
    fn all_of(letters: &Letters<sqlx::Postgres>, filter: &Filter) {
        sendable(letters.list(filter, Direction::Newest, None, 1));
        sendable(letters.plan_discard(filter));
        sendable(letters.discard(filter));
    }
    let _ = all_of;
}
