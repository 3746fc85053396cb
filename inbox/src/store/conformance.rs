//! What every database must do with the statements of [`Store`]. A database without a call of [`conforms`] does not exist.

use std::collections::BTreeSet;
use std::time::Duration;

use oncebox_migrations::Names;
use sqlx::Pool;
use uuid::Uuid;

use super::{DeadLetter, Letter, Recorded};
use crate::InboxStore;
use crate::chain::Move;
use crate::operator::testing;
use crate::partition::Attempt;
use crate::position::{Key, Known, Row};

fn key(consumer: &str, partition: i32) -> Key {
    Key {
        consumer: consumer.into(),
        topic: "orders".into(),
        partition,
    }
}

/// A dead letter of a message at this offset.
fn letter_at(offset: i64) -> DeadLetter<'static> {
    DeadLetter {
        message_id: Uuid::now_v7(),
        offset,
        key: None,
        payload: None,
        headers: &[],
        error: "no",
        attempts: 3,
        parked: false,
        timestamp_ms: None,
        first_failed_at: None,
        delay_micros: None,
    }
}

/// The whole contract, in one database with fresh tables.
async fn conforms<D: InboxStore>(pool: &Pool<D>) {
    let statements = &D::statements(&Names::default(), Duration::from_secs(60));
    let mut conn = pool.acquire().await.unwrap();
    D::check(&mut conn, &Names::default()).await.unwrap();
    drop(conn);
    marks(pool, statements).await;
    positions(pool, statements).await;
    resumes(pool, statements).await;
    letters(pool, statements).await;
    blocked_keys(pool, statements).await;
    attempts(pool, statements).await;
    records(pool, statements).await;
    breakers(pool, statements).await;
    pauses(pool, statements).await;
    savepoints(pool, statements).await;
    sweeps(pool, statements).await;
    keeps_marks(pool, statements).await;
    replays(pool, statements).await;
    delayed_letters(pool, statements).await;
}

async fn mark<D: InboxStore>(
    conn: &mut D::Connection,
    statements: &super::Statements,
    consumer: &str,
    id: Uuid,
) -> bool {
    !D::mark(conn, statements, consumer, &[id])
        .await
        .unwrap()
        .is_empty()
}

async fn marks<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let id = Uuid::now_v7();
    let mut tx = D::begin(pool, statements).await.unwrap();
    assert!(mark::<D>(&mut tx, statements, "a", id).await);
    tx.rollback().await.unwrap();
    let mut tx = D::begin(pool, statements).await.unwrap();
    assert!(
        mark::<D>(&mut tx, statements, "a", id).await,
        "a rolled-back mark is no mark"
    );
    assert!(
        !mark::<D>(&mut tx, statements, "a", id).await,
        "the second one is a duplicate"
    );
    assert!(
        mark::<D>(&mut tx, statements, "b", id).await,
        "each consumer has its own"
    );
    tx.commit().await.unwrap();
    let mut tx = D::begin(pool, statements).await.unwrap();
    assert!(!mark::<D>(&mut tx, statements, "a", id).await);
    tx.rollback().await.unwrap();
}

async fn blocked_keys<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let (here, there) = (key("a", 0), key("b", 0));
    let mut tx = D::begin(pool, statements).await.unwrap();
    let names: [&[u8]; 3] = [b"", b"k\0", b"z"];
    let blocked = D::blocked(&mut tx, statements, &here, &names)
        .await
        .unwrap();
    assert!(blocked.is_empty());
    for _ in 0..2 {
        D::block(&mut tx, statements, &here, b"k\0", "why")
            .await
            .unwrap();
    }
    let blocked = D::blocked(&mut tx, statements, &here, &names)
        .await
        .unwrap();
    assert_eq!(blocked, [b"k\0"]);
    let blocked = D::blocked(&mut tx, statements, &there, &names)
        .await
        .unwrap();
    assert!(blocked.is_empty(), "each consumer has its own");
    tx.commit().await.unwrap();
}

async fn attempts<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let here = key("a", 0);
    let mut attempt = Attempt {
        message_id: Uuid::now_v7(),
        attempts: 3,
        error: "no".to_owned(),
        first_failed_at: 1_700_000_000_123_000,
        wait: Duration::from_secs(100),
    };
    let mut tx = D::begin(pool, statements).await.unwrap();
    for offset in [4, 5, 9] {
        D::note(&mut tx, statements, &here, offset, &attempt)
            .await
            .unwrap();
    }
    attempt.attempts = 4;
    D::note(&mut tx, statements, &here, 9, &attempt)
        .await
        .unwrap();
    D::forget(&mut tx, statements, &here, 5).await.unwrap();
    let found = D::attempts(&mut tx, statements, &here, 5).await.unwrap();
    assert_eq!(found.keys().copied().collect::<Vec<_>>(), [9]);
    let wait = found[&9].wait;
    assert!(
        wait > Duration::from_secs(90) && wait <= Duration::from_secs(101),
        "{wait:?}"
    );
    attempt.wait = wait;
    assert_eq!(found[&9], attempt);
    let others = D::attempts(&mut tx, statements, &key("b", 0), 0)
        .await
        .unwrap();
    assert!(others.is_empty());
    tx.commit().await.unwrap();
}

async fn records<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let record = |offset, business_id: Option<&str>, error| Recorded {
        offset,
        message_id: Uuid::now_v7(),
        business_id: business_id.map(str::to_owned),
        status: if error == Some("no") {
            "dead"
        } else {
            "effect"
        },
        attempts: 2,
        first_at: 1_700_000_000_123_000,
        duration_us: 17,
        error,
    };
    let records = [
        record(1, Some("order 7"), None),
        record(2, None, Some("no")),
    ];
    let mut tx = D::begin(pool, statements).await.unwrap();
    D::record(&mut tx, statements, &key("a", 0), &records)
        .await
        .unwrap();
    let mut odd = record(3, None, None);
    odd.status = "lost";
    D::record(&mut tx, statements, &key("a", 0), &[odd])
        .await
        .unwrap_err();
    tx.rollback().await.unwrap();
}

async fn breakers<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let mut conn = pool.acquire().await.unwrap();
    let tripped = D::all_tripped(&mut conn, statements, "a").await.unwrap();
    assert_eq!(tripped, []);
    for failures in [5, 6] {
        D::trip(&mut conn, statements, "a", "t", failures, "no")
            .await
            .unwrap();
    }
    let tripped = D::all_tripped(&mut conn, statements, "a").await.unwrap();
    let first = ("t".to_owned(), 5, "no".to_owned());
    assert_eq!(tripped, [first], "the first one stays");
    assert_eq!(D::accept(&mut conn, statements, "b").await.unwrap(), 0);
    assert_eq!(D::accept(&mut conn, statements, "a").await.unwrap(), 1);
    let tripped = D::all_tripped(&mut conn, statements, "a").await.unwrap();
    assert_eq!(tripped, []);
}

async fn pauses<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let mut conn = pool.acquire().await.unwrap();
    assert!(!D::unpause(&mut conn, statements, "a", "t").await.unwrap());
    for (topic, reason) in [("u", "so"), ("t", "because"), ("t", "still")] {
        D::pause(&mut conn, statements, "a", topic, reason)
            .await
            .unwrap();
    }
    let paused = D::paused(&mut conn, statements, "a").await.unwrap();
    let why: Vec<_> = paused.iter().map(|(t, why, _)| (&**t, &**why)).collect();
    assert_eq!(why, [("t", "still"), ("u", "so")]);
    let now = crate::operator::micros(time::OffsetDateTime::now_utc());
    assert!((now - paused[0].2).abs() < 60_000_000, "{paused:?}");
    let others = D::paused(&mut conn, statements, "b").await.unwrap();
    assert_eq!(others, []);
    assert!(!D::unpause(&mut conn, statements, "b", "t").await.unwrap());
    assert!(D::unpause(&mut conn, statements, "a", "t").await.unwrap());
    let paused = D::paused(&mut conn, statements, "a").await.unwrap();
    assert_eq!(paused.len(), 1);
}

/// Sweeps all marks of this consumer that are older than so many seconds.
async fn sweep<D: InboxStore>(
    conn: &mut D::Connection,
    statements: &super::Statements,
    consumer: &str,
    window: u64,
) -> u64 {
    let (mut deleted, mut chunk) = (0, Some(0));
    while let Some(at) = chunk {
        let (rows, next) = D::sweep(conn, statements, consumer, Duration::from_secs(window), at)
            .await
            .unwrap();
        (deleted, chunk) = (deleted + rows, next);
    }
    deleted
}

async fn sweeps<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let mut conn = pool.acquire().await.unwrap();
    let ids: Vec<Uuid> = (0..5).map(|_| Uuid::now_v7()).collect();
    for consumer in ["swept", "other"] {
        D::mark(&mut conn, statements, consumer, &ids)
            .await
            .unwrap();
    }
    let inside = sweep::<D>(&mut conn, statements, "swept", 600).await;
    assert_eq!(inside, 0, "they are inside the window");
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    assert_eq!(sweep::<D>(&mut conn, statements, "swept", 1).await, 5);
    assert_eq!(sweep::<D>(&mut conn, statements, "swept", 1).await, 0);
    let others = D::mark(&mut conn, statements, "other", &ids).await.unwrap();
    assert!(others.is_empty(), "those of other consumers stay");
}

/// The window does not count where a mark is still needed: above a position with a hole, and beside a letter.
async fn keeps_marks<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let here = key("holey", 0);
    let [above, letter, settled] = [(); 3].map(|()| Uuid::now_v7());
    let row = Row {
        topic_id: "t".into(),
        next: 5,
        seq: 0,
        owner: Uuid::new_v4(),
    };
    let mut step = Move {
        from: row.known(),
        to: row.known(),
        hole: true,
    };
    let mut tx = D::begin(pool, statements).await.unwrap();
    D::create(&mut tx, statements, &here, &row).await.unwrap();
    tx.commit().await.unwrap();
    for (id, next, hole) in [(above, 5, true), (letter, 5, true), (settled, 8, false)] {
        step.to = Known {
            next,
            seq: step.from.seq + 1,
            ..step.from
        };
        step.hole = hole;
        let mut tx = D::begin(pool, statements).await.unwrap();
        D::mark(&mut tx, statements, "holey", &[id]).await.unwrap();
        if id == letter {
            let letter = DeadLetter {
                message_id: id,
                ..letter_at(7)
            };
            D::bury(&mut tx, statements, &here, &letter).await.unwrap();
        }
        let moved = D::advance(&mut tx, statements, &here, &step, Some(id)).await;
        assert!(moved.unwrap());
        tx.commit().await.unwrap();
        step.from = step.to;
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        let mut conn = pool.acquire().await.unwrap();
        let swept = sweep::<D>(&mut conn, statements, "holey", 1).await;
        let expected = if hole { 0 } else { 2 };
        assert_eq!(swept, expected, "next {next}, hole {hole}");
    }
    let mut conn = pool.acquire().await.unwrap();
    let ids = [above, letter, settled];
    let fresh = D::mark(&mut conn, statements, "holey", &ids).await;
    let fresh: BTreeSet<Uuid> = fresh.unwrap().into_iter().collect();
    assert_eq!(
        fresh,
        BTreeSet::from([above, settled]),
        "a letter keeps its mark"
    );
}

async fn replays<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let here = key("replayed", 0);
    let mut conn = pool.acquire().await.unwrap();
    for offset in [7, 8] {
        let letter = DeadLetter {
            key: Some(b"k"),
            parked: true,
            ..letter_at(offset)
        };
        assert!(
            D::bury(&mut conn, statements, &here, &letter)
                .await
                .unwrap()
        );
    }
    D::block(&mut conn, statements, &here, b"k", "no")
        .await
        .unwrap();
    let due = D::due_letter(&mut conn, statements, "replayed")
        .await
        .unwrap();
    assert!(due.is_none(), "nobody has ordered anything");
    let first = D::first_parked(&mut conn, statements, &here, b"k")
        .await
        .unwrap()
        .unwrap();
    assert!(!D::take_letter(&mut conn, statements, first).await.unwrap());
    // An order for the first one.
    D::release_next(&mut conn, statements, &here, b"k")
        .await
        .unwrap();
    let due = D::due_letter(&mut conn, statements, "replayed")
        .await
        .unwrap()
        .unwrap();
    assert_eq!((due.id, due.offset, due.parked), (first, 7, true));
    let mut counts = Vec::new();
    for _ in 0..2 {
        counts.push(D::count_replay(&mut conn, statements, &due).await.unwrap());
    }
    assert_eq!(counts, [true, false], "one of those that have read it");
    D::refuse_replay(&mut conn, statements, &here, &due, "again")
        .await
        .unwrap();
    let again = D::due_letter(&mut conn, statements, "replayed")
        .await
        .unwrap();
    assert!(again.is_none(), "the order is taken back");
    let due = Letter { replays: 1, ..due };
    let counted = D::count_replay(&mut conn, statements, &due).await.unwrap();
    assert!(!counted, "without an order");
    D::release_next(&mut conn, statements, &here, b"k")
        .await
        .unwrap();
    let due = D::due_letter(&mut conn, statements, "replayed")
        .await
        .unwrap()
        .unwrap();
    assert_eq!(due.attempts, 4);
    assert!(D::take_letter(&mut conn, statements, first).await.unwrap());
    assert!(
        !D::take_letter(&mut conn, statements, first).await.unwrap(),
        "once"
    );
    D::release_next(&mut conn, statements, &here, b"k")
        .await
        .unwrap();
    let due = D::due_letter(&mut conn, statements, "replayed")
        .await
        .unwrap()
        .unwrap();
    assert_eq!(due.offset, 8);
    assert!(D::take_letter(&mut conn, statements, due.id).await.unwrap());
    let blocked = D::blocked(&mut conn, statements, &here, &[b"k"])
        .await
        .unwrap();
    assert_eq!(blocked.len(), 1);
    D::release_next(&mut conn, statements, &here, b"k")
        .await
        .unwrap();
    let blocked = D::blocked(&mut conn, statements, &here, &[b"k"])
        .await
        .unwrap();
    assert!(blocked.is_empty(), "the key is free with the last one");
}

async fn delayed_letters<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let here = key("delayed", 0);
    let mut conn = pool.acquire().await.unwrap();
    let mut letter = DeadLetter {
        payload: Some(b"payload"),
        first_failed_at: Some(1_700_000_000_000_000),
        delay_micros: Some(3_600_000_000),
        ..letter_at(7)
    };
    let later = D::bury(&mut conn, statements, &here, &letter);
    assert!(later.await.unwrap());
    (letter.offset, letter.delay_micros) = (8, Some(0));
    let now = D::bury(&mut conn, statements, &here, &letter);
    assert!(now.await.unwrap());
    let due = D::due_letter(&mut conn, statements, "delayed")
        .await
        .unwrap()
        .unwrap();
    assert_eq!((due.offset, due.delayed, due.attempts), (8, true, 3));
    assert_eq!((&*due.error, due.replays), ("no", 0));
    assert_eq!(due.first_failed_at, letter.first_failed_at);
    D::pause(&mut conn, statements, "delayed", "orders", "")
        .await
        .unwrap();
    let held = D::due_letter(&mut conn, statements, "delayed")
        .await
        .unwrap();
    assert!(held.is_none(), "its topic is paused");
    D::unpause(&mut conn, statements, "delayed", "orders")
        .await
        .unwrap();
    let hour = Duration::from_secs(3_600);
    for (delay, expected) in [(hour, None), (Duration::ZERO, Some(5))] {
        let again = D::delay_again(&mut conn, statements, due.id, delay, "again");
        assert!(again.await.unwrap());
        let due = D::due_letter(&mut conn, statements, "delayed")
            .await
            .unwrap();
        assert_eq!(due.map(|letter| letter.attempts), expected);
    }
    let depths = async |conn: &mut D::Connection| {
        let depths = D::depths(conn, statements, "delayed").await.unwrap();
        let depths = depths.into_iter().map(|d| (d.kind, d.letters, d.oldest));
        depths.collect::<Vec<_>>()
    };
    let counted = depths(&mut conn).await;
    assert!(
        matches!(&counted[..], [(kind, 2, 0..60_000_000)] if kind == "delayed"),
        "{counted:?}"
    );
    for expected in [true, false] {
        let done = D::give_up(&mut conn, statements, due.id, "never");
        assert_eq!(done.await.unwrap(), expected, "once");
    }
    let again = D::delay_again(&mut conn, statements, due.id, hour, "again");
    assert!(!again.await.unwrap(), "it is a dead letter");
    let due = D::due_letter(&mut conn, statements, "delayed")
        .await
        .unwrap();
    assert!(due.is_none(), "and nobody has ordered it");
    let kinds = depths(&mut conn).await.into_iter().map(|d| (d.0, d.1));
    let expected = [("dead".to_owned(), 1), ("delayed".to_owned(), 1)];
    assert_eq!(kinds.collect::<Vec<_>>(), expected);
}

async fn savepoints<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let mut tx = D::begin(pool, statements).await.unwrap();
    D::guard(&mut tx).await.unwrap();
    D::intact(&mut tx).await.unwrap();
    D::guard(&mut tx).await.unwrap();
    D::plain(&mut tx, "ROLLBACK").await.unwrap();
    let gone = D::intact(&mut tx).await;
    assert!(gone.is_err(), "the transaction is another one");
    D::reopen(&mut tx).await.unwrap();
    let gone = D::intact(&mut tx).await;
    assert!(gone.is_err(), "also when one is open again");
    tx.rollback().await.unwrap();
}

async fn positions<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let (here, there) = (key("a", 0), key("a", 1));
    let (first, second) = (Uuid::new_v4(), Uuid::new_v4());
    let id = Uuid::now_v7();
    let mut tx = D::begin_brief(pool, statements).await.unwrap();
    assert_eq!(
        D::take(&mut tx, statements, &here, first).await.unwrap(),
        None
    );
    let row = Row {
        topic_id: "id".into(),
        next: 5,
        seq: 0,
        owner: first,
    };
    assert!(D::create(&mut tx, statements, &here, &row).await.unwrap());
    assert!(
        !D::create(&mut tx, statements, &here, &row).await.unwrap(),
        "it is there"
    );
    assert!(D::create(&mut tx, statements, &there, &row).await.unwrap());
    assert_eq!(
        D::read(&mut tx, statements, &here).await.unwrap(),
        Some(row.clone())
    );
    assert_eq!(
        D::read(&mut tx, statements, &key("b", 0)).await.unwrap(),
        None
    );

    let taken = D::take(&mut tx, statements, &here, second)
        .await
        .unwrap()
        .unwrap();
    let expected = Row {
        seq: 1,
        owner: second,
        ..row.clone()
    };
    assert_eq!(
        taken, expected,
        "taking changes owner and seq, and nothing else"
    );

    let known = taken.known();
    let to = Known {
        next: 9,
        seq: 2,
        ..known
    };
    let step = Move {
        from: known,
        to,
        hole: false,
    };
    let unmarked = D::advance(&mut tx, statements, &here, &step, Some(id))
        .await
        .unwrap();
    assert!(!unmarked, "no position without the mark of its message");
    assert!(mark::<D>(&mut tx, statements, "b", id).await);
    let foreign = D::advance(&mut tx, statements, &here, &step, Some(id))
        .await
        .unwrap();
    assert!(!foreign, "another consumer's mark is none");
    assert!(mark::<D>(&mut tx, statements, "a", id).await);
    for wrong in [
        Known {
            owner: first,
            ..known
        },
        Known { next: 6, ..known },
        Known { seq: 0, ..known },
    ] {
        let step = Move {
            from: wrong,
            ..step
        };
        let moved = D::advance(&mut tx, statements, &here, &step, Some(id))
            .await
            .unwrap();
        assert!(!moved, "{wrong:?}");
    }
    assert!(
        D::advance(&mut tx, statements, &here, &step, Some(id))
            .await
            .unwrap()
    );
    assert!(
        !D::advance(&mut tx, statements, &here, &step, Some(id))
            .await
            .unwrap(),
        "once"
    );
    let moved = D::read(&mut tx, statements, &here).await.unwrap().unwrap();
    assert_eq!(moved.known(), to);
    assert_eq!(
        D::read(&mut tx, statements, &there).await.unwrap(),
        Some(row),
        "the other partition stays"
    );
    tx.commit().await.unwrap();
}

async fn resumes<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let key = key("resumed", 0);
    let mut tx = D::begin(pool, statements).await.unwrap();
    let mut row = Row {
        topic_id: "old".into(),
        next: 100,
        seq: 0,
        owner: Uuid::new_v4(),
    };
    D::put(&mut tx, statements, &key, &row).await.unwrap();
    assert_eq!(
        D::read(&mut tx, statements, &key).await.unwrap(),
        Some(row.clone())
    );
    row.topic_id = "new".into();
    row.next = 3;
    row.owner = Uuid::new_v4();
    D::put(&mut tx, statements, &key, &row).await.unwrap();
    row.seq = 1;
    assert_eq!(
        D::read(&mut tx, statements, &key).await.unwrap(),
        Some(row),
        "seq only grows"
    );
    tx.commit().await.unwrap();
}

async fn letters<D: InboxStore>(pool: &Pool<D>, statements: &super::Statements) {
    let key = key("a", 0);
    let mut letter = DeadLetter {
        payload: Some(b"payload"),
        timestamp_ms: Some(1_700_000_000_000),
        first_failed_at: Some(1_700_000_000_000_000),
        ..letter_at(8)
    };
    let mut tx = D::begin(pool, statements).await.unwrap();
    assert_eq!(D::buried(&mut tx, statements, &key, 8).await.unwrap(), None);
    assert!(D::bury(&mut tx, statements, &key, &letter).await.unwrap());
    let first = letter.message_id;
    letter.message_id = Uuid::now_v7();
    assert!(
        !D::bury(&mut tx, statements, &key, &letter).await.unwrap(),
        "the place is taken"
    );
    assert_eq!(
        D::buried(&mut tx, statements, &key, 8).await.unwrap(),
        Some(first)
    );
    letter.offset = 9;
    assert!(D::bury(&mut tx, statements, &key, &letter).await.unwrap());
    tx.commit().await.unwrap();
}

#[cfg(feature = "sqlite")]
#[tokio::test]
async fn sqlite_conforms() {
    let (_dir, pool) = testing::sqlite().await;
    conforms(&pool).await;
}

#[cfg(feature = "postgres")]
mod postgres {
    use super::*;
    use crate::store::Store;

    #[tokio::test]
    async fn postgres_conforms() {
        let Some(pool) = testing::postgres().await else {
            return;
        };
        conforms(&pool).await;
    }

    #[tokio::test]
    async fn postgres_waits_for_the_other_transaction_and_then_knows() {
        let Some(pool) = testing::postgres().await else {
            return;
        };
        let statements = sqlx::Postgres::statements(&Names::default(), Duration::from_secs(60));
        for commit in [true, false] {
            let id = Uuid::now_v7();
            let mut first = sqlx::Postgres::begin(&pool, &statements).await.unwrap();
            assert!(mark::<sqlx::Postgres>(&mut first, &statements, "a", id).await);
            let (pool, sql) = (pool.clone(), statements.clone());
            let second = tokio::spawn(async move {
                let mut tx = sqlx::Postgres::begin(&pool, &sql).await.unwrap();
                mark::<sqlx::Postgres>(&mut tx, &sql, "a", id).await
            });
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert!(!second.is_finished(), "it waits");
            if commit {
                first.commit().await.unwrap();
            } else {
                first.rollback().await.unwrap();
            }
            assert_eq!(second.await.unwrap(), !commit, "a duplicate, or its turn");
        }
    }

    #[tokio::test]
    async fn postgres_ends_a_session_that_stands_still_in_a_transaction() {
        let Some(pool) = testing::postgres().await else {
            return;
        };
        let statements = sqlx::Postgres::statements(&Names::default(), Duration::from_millis(300));
        let id = Uuid::now_v7();
        let mut still = sqlx::Postgres::begin(&pool, &statements).await.unwrap();
        assert!(mark::<sqlx::Postgres>(&mut still, &statements, "a", id).await);
        let mut next = sqlx::Postgres::begin(&pool, &statements).await.unwrap();
        assert!(mark::<sqlx::Postgres>(&mut next, &statements, "a", id).await);
        next.commit().await.unwrap();
        assert!(still.commit().await.is_err());
    }
}
