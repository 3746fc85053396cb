//! Messages that Kafka refuses, and topics that are paused, on real databases.

use std::collections::BTreeSet;

use uuid::Uuid;

use super::*;
use crate::park;
use crate::session::{Cause, Filter, ParkingSession, Request};
use crate::step::{Step, StepHook};

/// A relay on this kind of database, until everything visible is published and nothing is releasable.
async fn drain<S: ParkingSession>(config: Config, log: &FakeLog) -> Result<Exit, Error> {
    let relay = Relay::<S, _>::new(
        config,
        Mode::UntilEmpty,
        log.clone(),
        Health::new(),
        CancellationToken::new(),
    );
    tokio::time::timeout(Duration::from_secs(60), relay.run())
        .await
        .expect("the relay hangs")
}

/// The same after a relay that died: its lease has to run out.
async fn drain_after_a_crash<S: ParkingSession>(
    config: Config,
    log: &FakeLog,
) -> Result<(), Error> {
    for _ in 0..20 {
        if drain::<S>(config.clone(), log).await? == Exit::Stopped {
            return Ok(());
        }
    }
    panic!("the lease does not run out");
}

async fn parked(config: &Config) -> Vec<(i64, Cause)> {
    let rows = park::list(config, &Filter::default(), 100).await.unwrap();
    rows.iter().map(|row| (row.id, row.cause)).collect()
}

fn large(db: &TestDb) -> Config {
    Config {
        max_batch_rows: 100,
        ..config(db)
    }
}

/// Each test on each database.
macro_rules! on_both {
    ($($name:ident),* $(,)?) => {
        mod sqlite {
            use super::*;
            $(#[tokio::test]
            async fn $name() {
                super::$name::<SqliteSession>(TestDb::sqlite().await).await;
            })*
        }
        mod postgres {
            use super::*;
            $(#[tokio::test]
            async fn $name() {
                let Some(db) = TestDb::postgres().await else { return };
                super::$name::<PostgresSession>(db).await;
            })*
        }
    };
}

on_both!(
    g8_a_refused_row_waits_with_its_key_and_the_rest_goes_on,
    g8_requeue_publishes_what_waits_in_the_order_of_the_key,
    g8_skip_drops_one_message_and_the_key_goes_on,
    g8_a_requeued_row_that_is_refused_again_waits_again,
    g8_killed_at_every_step_of_parking_and_release_publishes_once,
    g8_an_unreported_release_is_finished_and_not_repeated,
    g8_many_refused_rows_in_one_batch_are_all_found,
    g9_a_missing_topic_is_paused_and_resumes_by_itself,
    g9_a_topic_that_alone_is_silent_is_paused,
    g10_a_lost_parking_stops_the_relay_and_resume_is_the_way_out,
    what_an_operator_pauses_waits_until_it_is_resumed,
    a_topic_that_refuses_large_batches_gets_small_ones,
    after_a_rewind_parked_rows_stay_parked_and_the_others_are_repeated,
);

async fn g8_a_refused_row_waits_with_its_key_and_the_rest_goes_on<S: ParkingSession>(
    mut db: TestDb,
) {
    for (id, key) in [(1, "a"), (2, "b"), (3, "a"), (4, "b"), (5, "a")] {
        db.insert_for(id, "orders", Some(key)).await;
    }
    db.insert_for(6, "orders", None).await;
    let log = FakeLog::default();
    log.lock().refused = [3].into();
    drain::<S>(large(&db), &log).await.unwrap();
    assert_eq!(log.ids(), [1, 2, 4, 6]);
    assert_eq!(
        parked(&db.config).await,
        [(3, Cause::Refused), (5, Cause::Key)]
    );
    // Later messages of the key wait too, also for another relay.
    for (id, key) in [(7, "a"), (8, "b")] {
        db.insert_for(id, "orders", Some(key)).await;
    }
    drain::<S>(large(&db), &log).await.unwrap();
    assert_eq!(log.ids(), [1, 2, 4, 6, 8]);
    let waiting = [(3, Cause::Refused), (5, Cause::Key), (7, Cause::Key)];
    assert_eq!(parked(&db.config).await, waiting);
    let all = park::list(&db.config, &Filter::default(), 100)
        .await
        .unwrap();
    assert_eq!(all[0].message_id, Uuid::from_u128(3));
    assert_eq!(all[0].payload.as_deref(), Some(&b"payload"[..]));
    assert_eq!((all[0].attempts, all[1].attempts), (1, 0));
    assert!(all[0].reason.contains("too large") && all[1].reason.contains("row 3"));
    db.close().await;
}

async fn g8_requeue_publishes_what_waits_in_the_order_of_the_key<S: ParkingSession>(
    mut db: TestDb,
) {
    for (id, key) in [(1, "a"), (2, "a"), (3, "b"), (4, "a")] {
        db.insert_for(id, "orders", Some(key)).await;
    }
    let log = FakeLog::default();
    log.lock().refused = [1].into();
    drain::<S>(large(&db), &log).await.unwrap();
    assert_eq!(log.ids(), [3]);
    log.lock().refused.clear();
    assert_eq!(
        park::request(&db.config, &[1, 99], Request::Requeue)
            .await
            .unwrap(),
        1
    );
    db.insert_for(5, "orders", Some("a")).await;
    drain::<S>(large(&db), &log).await.unwrap();
    // Message 5 came before the relay released the others: it waited behind them.
    assert_eq!(log.ids(), [3, 1, 2, 4, 5]);
    assert!(parked(&db.config).await.is_empty());
    db.insert_for(6, "orders", Some("a")).await;
    drain::<S>(large(&db), &log).await.unwrap();
    assert_eq!(log.ids(), [3, 1, 2, 4, 5, 6]);
    db.close().await;
}

async fn g8_skip_drops_one_message_and_the_key_goes_on<S: ParkingSession>(mut db: TestDb) {
    for id in 1..=3 {
        db.insert_for(id, "orders", Some("a")).await;
    }
    let log = FakeLog::default();
    log.lock().refused = [1].into();
    drain::<S>(large(&db), &log).await.unwrap();
    park::request(&db.config, &[1], Request::Skip)
        .await
        .unwrap();
    drain::<S>(large(&db), &log).await.unwrap();
    assert_eq!(log.ids(), [2, 3]);
    drain::<S>(large(&db), &log).await.unwrap();
    assert!(parked(&db.config).await.is_empty());
    db.close().await;
}

async fn g8_a_requeued_row_that_is_refused_again_waits_again<S: ParkingSession>(mut db: TestDb) {
    for id in 1..=3 {
        db.insert_for(id, "orders", Some("a")).await;
    }
    let log = FakeLog::default();
    log.lock().refused = [1, 2].into();
    drain::<S>(large(&db), &log).await.unwrap();
    park::request(&db.config, &[1], Request::Requeue)
        .await
        .unwrap();
    drain::<S>(large(&db), &log).await.unwrap();
    let all = park::list(&db.config, &Filter::default(), 100)
        .await
        .unwrap();
    assert_eq!((all[0].attempts, all[0].request), (2, None));
    assert!(log.ids().is_empty());
    // The first goes through, the one behind it does not.
    log.lock().refused = [2].into();
    park::request(&db.config, &[1], Request::Requeue)
        .await
        .unwrap();
    drain::<S>(large(&db), &log).await.unwrap();
    assert_eq!(log.ids(), [1]);
    assert_eq!(
        parked(&db.config).await,
        [(2, Cause::Refused), (3, Cause::Key)]
    );
    db.close().await;
}

/// Panics when it comes to a step for the n-th time: the task is gone, as a killed process is.
fn die_at(step: Step, n: usize) -> StepHook {
    let left = Arc::new(std::sync::atomic::AtomicUsize::new(n));
    Arc::new(move |reached| {
        use std::sync::atomic::Ordering::SeqCst;
        if reached == step && left.fetch_sub(1, SeqCst) == 1 {
            // Without a word: what a test prints is its failure.
            std::panic::resume_unwind(Box::new("killed"));
        }
    })
}

async fn g8_killed_at_every_step_of_parking_and_release_publishes_once<S: ParkingSession>(
    mut db: TestDb,
) {
    let log = FakeLog::default();
    let mut id = 0;
    let (mut published, mut died_at) = (Vec::new(), BTreeSet::new());
    for step in [Step::Parked, Step::Released, Step::Unparked, Step::Marked] {
        for n in 1..=2 {
            // A refused row, one behind it, one of another key, one of a topic that is missing.
            for key in ["a", "a", "b"] {
                id += 1;
                db.insert_for(id, "orders", Some(key)).await;
            }
            id += 1;
            db.insert_for(id, "payments", Some("a")).await;
            let (refused, missing) = (id - 3, "payments".to_owned());
            log.lock().refused = [refused].into();
            log.lock().missing = [missing].into();
            let mortal = || Config {
                on_step: Some(die_at(step, n)),
                ..large(&db)
            };
            let died = tokio::spawn(drain_owned::<S>(mortal(), log.clone())).await;
            died_at.extend(died.is_err().then(|| step.to_string()));
            drain_after_a_crash::<S>(large(&db), &log).await.unwrap();
            // Nothing of key a went past its refused row, nothing else waits.
            published.push(id - 1);
            assert_eq!(log.ids(), published, "parking, {step} {n}");
            assert_eq!(
                parked(&db.config).await,
                [
                    (refused, Cause::Refused),
                    (refused + 1, Cause::Key),
                    (id, Cause::Topic)
                ]
            );
            log.lock().refused.clear();
            log.lock().missing.clear();
            park::request(&db.config, &[refused], Request::Requeue)
                .await
                .unwrap();
            park::resume(&db.config, "payments", None).await.unwrap();
            let died = tokio::spawn(drain_owned::<S>(mortal(), log.clone())).await;
            died_at.extend(died.is_err().then(|| step.to_string()));
            drain_after_a_crash::<S>(large(&db), &log).await.unwrap();
            drain_after_a_crash::<S>(large(&db), &log).await.unwrap();
            published.extend([refused, refused + 1, id]);
            assert_eq!(log.ids(), published, "release, {step} {n}");
            assert!(parked(&db.config).await.is_empty());
        }
    }
    assert_eq!(died_at.len(), 4, "only {died_at:?}");
    db.close().await;
}

async fn drain_owned<S: ParkingSession>(config: Config, log: FakeLog) {
    drain::<S>(config, &log).await.unwrap();
}

/// The commit of a release happens and its answer is lost; or it does not happen.
async fn g8_an_unreported_release_is_finished_and_not_repeated<S: ParkingSession>(mut db: TestDb) {
    let log = FakeLog::default();
    let mut published = Vec::new();
    let fates = [
        Fate::HappensUnreported,
        Fate::DoesNotHappen,
        Fate::Taints,
        Fate::SettledByTheFence,
    ];
    for (n, fate) in fates.into_iter().enumerate() {
        let id = 2 * n as i64 + 1;
        for id in [id, id + 1] {
            db.insert_for(id, "orders", Some("a")).await;
        }
        log.lock().refused = [id].into();
        drain::<S>(large(&db), &log).await.unwrap();
        assert_eq!(parked(&db.config).await.len(), 2);
        log.lock().refused.clear();
        park::request(&db.config, &[id], Request::Requeue)
            .await
            .unwrap();
        // The claim is the first.
        log.fate(2, fate);
        drain_after_a_crash::<S>(large(&db), &log).await.unwrap();
        published.extend([id, id + 1]);
        assert_eq!(log.ids(), published, "{fate:?}");
        assert!(parked(&db.config).await.is_empty(), "{fate:?}");
    }
    db.close().await;
}

async fn g8_many_refused_rows_in_one_batch_are_all_found<S: ParkingSession>(mut db: TestDb) {
    for id in 1..=64 {
        db.insert_for(id, "orders", None).await;
    }
    let log = FakeLog::default();
    log.lock().refused = [2, 17, 18, 40, 64].into();
    drain::<S>(large(&db), &log).await.unwrap();
    let expected: Vec<_> = (1..=64)
        .filter(|id| ![2, 17, 18, 40, 64].contains(id))
        .collect();
    assert_eq!(log.ids(), expected);
    assert_eq!(parked(&db.config).await.len(), 5);
    let rehearsals = log.lock().rehearsals;
    assert!(rehearsals < 64, "{rehearsals} rehearsals for 5 of 64");
    db.close().await;
}

async fn g9_a_missing_topic_is_paused_and_resumes_by_itself<S: ParkingSession>(mut db: TestDb) {
    let log = FakeLog::default();
    log.lock().missing = ["payments".to_owned()].into();
    let (shutdown, health) = (CancellationToken::new(), Health::new());
    let relay = Relay::<S, _>::new(
        large(&db),
        Mode::Forever,
        log.clone(),
        health.clone(),
        shutdown.clone(),
    );
    let running = tokio::spawn(relay.run());
    for (id, topic) in [
        (1, "orders"),
        (2, "payments"),
        (3, "orders"),
        (4, "payments"),
    ] {
        db.insert_for(id, topic, Some("a")).await;
    }
    wait(|| log.ids() == [1, 3]).await;
    wait(|| health.snapshot().parked == 2).await;
    assert_eq!(health.snapshot().paused, ["payments"]);
    assert_eq!(
        parked(&db.config).await,
        [(2, Cause::Topic), (4, Cause::Topic)]
    );
    log.lock().missing.clear();
    // The first try comes after two seconds.
    wait(|| log.ids() == [1, 3, 2, 4]).await;
    wait(|| health.snapshot().paused.is_empty() && health.snapshot().parked == 0).await;
    db.insert_for(5, "payments", Some("a")).await;
    wait(|| log.ids() == [1, 3, 2, 4, 5]).await;
    shutdown.cancel();
    assert_eq!(running.await.unwrap().unwrap(), Exit::Stopped);
    db.close().await;
}

async fn g9_a_topic_that_alone_is_silent_is_paused<S: ParkingSession>(mut db: TestDb) {
    for (id, topic) in [(1, "orders"), (2, "payments"), (3, "orders")] {
        db.insert_for(id, topic, Some("a")).await;
    }
    let log = FakeLog::default();
    log.lock().silent = ["payments".to_owned()].into();
    drain_after_a_crash::<S>(large(&db), &log).await.unwrap();
    assert_eq!(log.ids(), [1, 3]);
    assert_eq!(parked(&db.config).await, [(2, Cause::Topic)]);
    db.close().await;
}

async fn g10_a_lost_parking_stops_the_relay_and_resume_is_the_way_out<S: ParkingSession>(
    mut db: TestDb,
) {
    for id in 1..=4 {
        db.insert_for(id, "orders", Some("a")).await;
    }
    let log = FakeLog::default();
    log.lock().refused = [2].into();
    drain::<S>(large(&db), &log).await.unwrap();
    assert_eq!(log.ids(), [1]);
    db.execute("DELETE FROM oncebox_parked WHERE id = 3").await;
    log.lock().refused.clear();
    let stop = stop(drain::<S>(large(&db), &log).await);
    assert!(matches!(stop, Stop::ParkedRows { .. }), "{stop}");
    // The position counts what is lost: neither of the stored ones will do.
    for from in [resume::From::Mark, resume::From::Checkpoint] {
        let refused = resume::apply_with::<S, _>(&large(&db), &log, from).await;
        assert!(refused.unwrap_err().to_string().contains("--from <id>"));
    }
    let from = resume::From::Id(1);
    resume::apply_with::<S, _>(&large(&db), &log, from)
        .await
        .unwrap();
    drain::<S>(large(&db), &log).await.unwrap();
    // Row 2 is parked still and blocks what comes behind it, the lost one too.
    assert_eq!(log.ids(), [1]);
    assert_eq!(
        parked(&db.config).await,
        [(2, Cause::Refused), (3, Cause::Key), (4, Cause::Key)]
    );
    park::request(&db.config, &[2], Request::Requeue)
        .await
        .unwrap();
    drain::<S>(large(&db), &log).await.unwrap();
    assert_eq!(log.ids(), [1, 2, 3, 4]);
    db.close().await;
}

async fn what_an_operator_pauses_waits_until_it_is_resumed<S: ParkingSession>(mut db: TestDb) {
    let log = FakeLog::default();
    assert!(
        park::pause(&db.config, "orders", Some(b"a"), "audit")
            .await
            .unwrap()
    );
    assert!(
        park::pause(&db.config, "payments", None, "audit")
            .await
            .unwrap()
    );
    assert!(
        !park::pause(&db.config, "payments", None, "again")
            .await
            .unwrap()
    );
    let mut id = 0;
    for (topic, key) in [
        ("orders", "a"),
        ("orders", "b"),
        ("payments", "a"),
        ("orders", "a"),
    ] {
        id += 1;
        db.insert_for(id, topic, Some(key)).await;
    }
    drain::<S>(large(&db), &log).await.unwrap();
    assert_eq!(log.ids(), [2]);
    let waiting = [(1, Cause::Key), (3, Cause::Topic), (4, Cause::Key)];
    assert_eq!(parked(&db.config).await, waiting);
    let shown: Vec<_> = park::overview(&db.config).await.unwrap().paused;
    assert_eq!(
        (shown.len(), shown[0].by_relay, &*shown[1].reason),
        (2, false, "again")
    );
    assert!(park::resume(&db.config, "payments", None).await.unwrap());
    assert!(!park::resume(&db.config, "payments", None).await.unwrap());
    drain::<S>(large(&db), &log).await.unwrap();
    assert_eq!(log.ids(), [2, 3]);
    assert!(
        park::resume(&db.config, "orders", Some(b"a"))
            .await
            .unwrap()
    );
    drain::<S>(large(&db), &log).await.unwrap();
    assert_eq!(log.ids(), [2, 3, 1, 4]);
    db.close().await;
}

async fn a_topic_that_refuses_large_batches_gets_small_ones<S: ParkingSession>(mut db: TestDb) {
    for id in 1..=20 {
        db.insert_for(id, "orders", None).await;
    }
    let log = FakeLog::default();
    log.lock().largest_batch = Some(3);
    drain::<S>(large(&db), &log).await.unwrap();
    assert_eq!(log.ids(), (1..=20).collect::<Vec<_>>());
    assert!(parked(&db.config).await.is_empty());
    db.close().await;
}

async fn after_a_rewind_parked_rows_stay_parked_and_the_others_are_repeated<S: ParkingSession>(
    mut db: TestDb,
) {
    for (id, key) in [(1, "a"), (2, "a"), (3, "b"), (4, "a"), (5, "a")] {
        db.insert_for(id, "orders", Some(key)).await;
    }
    let log = FakeLog::default();
    log.lock().refused = [4].into();
    drain::<S>(large(&db), &log).await.unwrap();
    assert_eq!(log.ids(), [1, 2, 3]);
    let from = resume::From::Id(1);
    resume::apply_with::<S, _>(&large(&db), &log, from)
        .await
        .unwrap();
    drain::<S>(large(&db), &log).await.unwrap();
    // Row 2 comes before the parked row of its key: it is repeated. Rows 4 and 5 are parked.
    assert_eq!(log.ids(), [1, 2, 3, 2, 3]);
    assert_eq!(
        parked(&db.config).await,
        [(4, Cause::Refused), (5, Cause::Key)]
    );
    log.lock().refused.clear();
    park::request(&db.config, &[4], Request::Requeue)
        .await
        .unwrap();
    drain::<S>(large(&db), &log).await.unwrap();
    assert_eq!(log.ids(), [1, 2, 3, 2, 3, 4, 5]);
    db.close().await;
}
