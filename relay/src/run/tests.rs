//! The relay's own rules on a real SQLite outbox and an in-memory log whose transactions may happen or not and be
//! reported or not.

mod fake_log;
mod parking;

use std::sync::Arc;
use std::time::{Duration, Instant};

use sqlx::{ConnectOptions as _, PgConnection};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use self::fake_log::{FakeLog, Fate};
use super::{Exit, Mode, Relay};
use crate::config::{Config, Database};
use crate::error::{Error, Stop};
use crate::health::Health;
use crate::position::{Gaps, Tally};
use crate::session::conformance::TestDb;
use crate::session::{PostgresSession, Session as _, SqliteSession};
use crate::{rename, resume};

fn config(db: &TestDb) -> Config {
    let mut config = db.config.clone();
    config.lease = Duration::from_millis(200);
    config.max_batch_rows = 3;
    config
}

fn relay(
    config: Config,
    mode: Mode,
    log: &FakeLog,
    shutdown: &CancellationToken,
) -> Relay<SqliteSession, FakeLog> {
    Relay::new(config, mode, log.clone(), Health::new(), shutdown.clone())
}

async fn until_empty(config: Config, log: &FakeLog) -> Result<Exit, Error> {
    let work = relay(config, Mode::UntilEmpty, log, &CancellationToken::new()).run();
    tokio::time::timeout(Duration::from_secs(20), work)
        .await
        .expect("the relay hangs")
}

/// The same after a relay that ended without giving the lease back: its last sign of life may land when the next one
/// already looks.
async fn after_a_crash(config: Config, log: &FakeLog) {
    for _ in 0..10 {
        if until_empty(config.clone(), log).await.unwrap() == Exit::Stopped {
            return;
        }
    }
    panic!("the lease does not run out");
}

fn stop(result: Result<Exit, Error>) -> Stop {
    match result {
        Err(Error::Stop(stop)) => *stop,
        other => panic!("expected a stop, got {other:?}"),
    }
}

#[tokio::test]
async fn g2_g3_every_row_once_whatever_happens_to_a_transaction() {
    for fate in [
        Fate::HappensUnreported,
        Fate::DoesNotHappen,
        Fate::Taints,
        Fate::SettledByTheFence,
    ] {
        // The first is the claim, the others carry rows.
        for n in 1..=5 {
            let mut db = TestDb::sqlite().await;
            for id in 1..=10 {
                db.insert(id).await;
            }
            let log = FakeLog::default();
            log.fate(n, fate);
            let result = until_empty(config(&db), &log).await;
            if n == 1 {
                // What fails before the first lead ends the process; a supervisor starts it again.
                assert!(result.is_err_and(|e| e.is_retriable()));
                after_a_crash(config(&db), &log).await;
            } else {
                assert_eq!(
                    result.unwrap(),
                    Exit::Stopped,
                    "{fate:?} at transaction {n}"
                );
            }
            assert_eq!(
                log.ids(),
                (1..=10).collect::<Vec<_>>(),
                "{fate:?} at transaction {n}"
            );
        }
    }
}

/// Kafka does not answer: what it may not have committed is nowhere taken for done.
#[tokio::test]
async fn g2_the_mark_is_never_ahead_of_what_kafka_has_committed() {
    let mut db = TestDb::sqlite().await;
    for id in 1..=4 {
        db.insert(id).await;
    }
    let log = FakeLog::default();
    // The claim, rows 1 to 3, row 4.
    log.fate(3, Fate::NeverAnswered);
    let mut config = config(&db);
    config.mark_interval = Duration::from_millis(10);
    let shutdown = CancellationToken::new();
    let running = tokio::spawn(relay(config.clone(), Mode::Forever, &log, &shutdown).run());
    wait(|| log.lock().transactions == 3).await;
    tokio::time::sleep(config.mark_interval * 15).await;
    let mark = SqliteSession::connect(&config).await.unwrap().mark().await;
    assert_eq!(mark.unwrap().checkpoint, log.lock().checkpoint);
    running.abort();
    let _ = running.await;
    after_a_crash(config, &log).await;
    assert_eq!(log.ids(), [1, 2, 3, 4]);
}

#[tokio::test]
async fn g10_a_renamed_source_goes_on_where_it_was() {
    let mut db = TestDb::sqlite().await;
    for id in 1..=3 {
        db.insert(id).await;
    }
    let (log, new_log) = (FakeLog::default(), FakeLog::default());
    until_empty(config(&db), &log).await.unwrap();
    db.insert(4).await;
    let old = config(&db);
    let new = Config {
        source: "store".to_owned(),
        ..config(&db)
    };
    let rename = async |apply| {
        rename::rename_with::<SqliteSession, _>((&old, &new), (&log, &new_log), apply).await
    };
    assert!(
        rename(false)
            .await
            .unwrap()
            .to_string()
            .contains("add --apply")
    );
    assert!(new_log.lock().checkpoint.is_none());
    // Done once, interrupted before the mark had the name, done again after the old relay went on.
    let before = SqliteSession::connect(&old)
        .await
        .unwrap()
        .mark()
        .await
        .unwrap();
    rename(true).await.unwrap();
    db.execute("UPDATE oncebox_mark SET source = 'shop'").await;
    until_empty(old.clone(), &log).await.unwrap();
    rename(true).await.unwrap();
    assert!(matches!(
        stop(until_empty(old.clone(), &log).await),
        Stop::OtherSource { .. }
    ));
    db.insert(5).await;
    until_empty(new.clone(), &new_log).await.unwrap();
    assert_eq!((log.ids(), new_log.ids()), (vec![1, 2, 3, 4], vec![5]));
    let after = SqliteSession::connect(&new)
        .await
        .unwrap()
        .mark()
        .await
        .unwrap();
    assert_eq!(after.source.as_deref(), Some("store"));
    assert!(after.epoch > before.epoch);
    // A name that another outbox uses is refused.
    let mut other = TestDb::sqlite().await;
    other.insert(1).await;
    let third = FakeLog::default();
    until_empty(config(&other), &third).await.unwrap();
    let refused =
        rename::rename_with::<SqliteSession, _>((&new, &old), (&new_log, &third), true).await;
    assert!(matches!(refused, Err(Error::Stop(_))));
}

/// An outbox on PostgreSQL, where gaps are real: id 1 belongs to a transaction that is still open, row 2 is published.
async fn with_an_open_gap() -> Option<(TestDb, PgConnection, FakeLog)> {
    let mut db = TestDb::postgres().await?;
    let Database::Postgres(options) = &db.config.database else {
        unreachable!()
    };
    let mut writer = options.connect().await.unwrap();
    let late = "BEGIN; INSERT INTO oncebox_outbox (message_id, topic, headers) VALUES (gen_random_uuid(), 'orders', '')";
    sqlx::raw_sql(late).execute(&mut writer).await.unwrap();
    db.insert(2).await;
    let log = FakeLog::default();
    restart(&db, &log).await;
    assert_eq!((log.ids(), log.gaps()), (vec![2], "1".to_owned()));
    Some((db, writer, log))
}

/// Another relay on PostgreSQL, until everything visible is published.
async fn restart(db: &TestDb, log: &FakeLog) {
    let (health, shutdown) = (Health::new(), CancellationToken::new());
    let relay = Relay::<PostgresSession, _>::new(
        config(db),
        Mode::UntilEmpty,
        log.clone(),
        health,
        shutdown,
    );
    assert_eq!(relay.run().await.unwrap(), Exit::Stopped);
}

#[tokio::test]
async fn g2_a_gap_that_is_held_across_a_restart_of_the_relay_is_not_burnt() {
    let Some((mut db, mut writer, log)) = with_an_open_gap().await else {
        return;
    };
    db.insert(3).await;
    restart(&db, &log).await;
    assert_eq!((log.ids(), log.gaps()), (vec![2, 3], "1".to_owned()));
    sqlx::raw_sql("COMMIT").execute(&mut writer).await.unwrap();
    restart(&db, &log).await;
    assert_eq!((log.ids(), log.gaps()), (vec![2, 3, 1], String::new()));
    db.close().await;
}

/// A failover lost the roll-back of a transaction whose id had been burnt. It is open when the rows are checked, and commits
/// before the start has ended.
#[tokio::test]
async fn g10_a_burnt_id_that_is_revived_while_a_relay_starts_stops_it() {
    let Some((mut db, mut writer, log)) = with_an_open_gap().await else {
        return;
    };
    db.execute("UPDATE oncebox_mark SET position = replace(position, 'gaps=1', 'gaps=')")
        .await;
    let gate = Arc::new((Notify::new(), Notify::new()));
    {
        let mut state = log.lock();
        state.checkpoint.as_mut().unwrap().position.gaps = Gaps::default();
        state.gate = Some(Arc::clone(&gate));
    }
    let (health, shutdown) = (Health::new(), CancellationToken::new());
    let (log, mode) = (log.clone(), Mode::Forever);
    let relay = Relay::<PostgresSession, _>::new(config(&db), mode, log, health, shutdown);
    let running = tokio::spawn(relay.run());
    gate.0.notified().await;
    sqlx::raw_sql("COMMIT").execute(&mut writer).await.unwrap();
    gate.1.notify_one();
    let ended = tokio::time::timeout(Duration::from_secs(5), running).await;
    let result = ended.expect("nobody noticed the row").unwrap();
    assert!(matches!(stop(result), Stop::ForeignRows { .. }));
    db.close().await;
}

#[tokio::test]
async fn g2_the_mark_alone_knows_the_gaps() {
    let Some((db, mut writer, log)) = with_an_open_gap().await else {
        return;
    };
    log.lock().checkpoint = None;
    restart(&db, &log).await;
    assert_eq!((log.ids(), log.gaps()), (vec![2], "1".to_owned()));
    sqlx::raw_sql("COMMIT").execute(&mut writer).await.unwrap();
    restart(&db, &log).await;
    assert_eq!(log.ids(), [2, 1]);
    db.close().await;
}

#[tokio::test]
async fn g3_a_deleted_checkpoint_is_replaced_by_the_mark() {
    let mut db = TestDb::sqlite().await;
    db.insert(1).await;
    let log = FakeLog::default();
    until_empty(config(&db), &log).await.unwrap();
    log.lock().checkpoint = None;
    db.insert(2).await;
    until_empty(config(&db), &log).await.unwrap();
    assert_eq!(log.ids(), [1, 2]);
}

#[tokio::test]
async fn a_graceful_stop_gives_the_lease_back_and_writes_the_mark() {
    let mut db = TestDb::sqlite().await;
    db.insert(1).await;
    let log = FakeLog::default();
    until_empty(config(&db), &log).await.unwrap();
    let mark = SqliteSession::connect(&db.config)
        .await
        .unwrap()
        .mark()
        .await
        .unwrap();
    assert_eq!(mark.owner, None);
    assert_eq!(mark.checkpoint, log.lock().checkpoint);
    assert_eq!(mark.seq, log.lock().checkpoint.as_ref().unwrap().seq);
}

#[tokio::test]
async fn one_leads_one_stands_by_and_takes_over() {
    let mut db = TestDb::sqlite().await;
    db.insert(1).await;
    let log = FakeLog::default();
    let (first_stop, second_stop) = (CancellationToken::new(), CancellationToken::new());
    let first = tokio::spawn(relay(config(&db), Mode::Forever, &log, &first_stop).run());
    wait(|| log.ids() == [1]).await;
    assert_eq!(
        until_empty(config(&db), &log).await.unwrap(),
        Exit::NotLeader,
        "two relays of one process are two"
    );
    first_stop.cancel();
    first.await.unwrap().unwrap();
    let second = tokio::spawn(relay(config(&db), Mode::Forever, &log, &second_stop).run());
    db.insert(2).await;
    wait(|| log.ids() == [1, 2]).await;
    second_stop.cancel();
    assert_eq!(second.await.unwrap().unwrap(), Exit::Stopped);
}

#[tokio::test]
async fn g10_another_source_another_cluster_and_lost_rows_stop_before_anything_is_published() {
    let mut db = TestDb::sqlite().await;
    for id in 1..=4 {
        db.insert(id).await;
    }
    let log = FakeLog::default();
    log.lock().cluster = "one".to_owned();
    until_empty(config(&db), &log).await.unwrap();
    db.insert(5).await;
    let epoch = log.lock().epoch;
    let published = log.ids();

    let mut other = config(&db);
    other.source = "cart".to_owned();
    assert!(matches!(
        stop(until_empty(other, &log).await),
        Stop::OtherSource { .. }
    ));

    let checkpoint = log.lock().checkpoint.take();
    log.lock().cluster = "two".to_owned();
    assert!(matches!(
        stop(until_empty(config(&db), &log).await),
        Stop::OtherCluster { .. }
    ));
    log.lock().cluster = "one".to_owned();
    log.lock().checkpoint = checkpoint;

    db.delete(3).await;
    assert!(matches!(
        stop(until_empty(config(&db), &log).await),
        Stop::RowsMissing { .. }
    ));
    db.insert(3).await;
    db.delete(4).await;
    db.insert(4).await;
    db.execute(
        "UPDATE oncebox_outbox SET message_id = x'00000000000000000000000000000077' WHERE id = 4",
    )
    .await;
    assert!(matches!(
        stop(until_empty(config(&db), &log).await),
        Stop::RowsMissing { .. }
    ));
    assert_eq!(log.lock().epoch, epoch, "nobody was fenced");
    assert_eq!(log.ids(), published, "nothing was published");
}

#[tokio::test]
async fn g10_resume_is_a_way_out_and_the_next_start_does_not_stop_again() {
    let mut db = TestDb::sqlite().await;
    db.insert(1).await;
    db.insert(2).await;
    let log = FakeLog::default();
    until_empty(config(&db), &log).await.unwrap();
    db.execute("CREATE TABLE backup AS SELECT * FROM oncebox_mark")
        .await;
    db.insert(3).await;
    db.insert(4).await;
    until_empty(config(&db), &log).await.unwrap();
    // A restored backup: the two newest rows are gone, and the mark is that of before.
    db.delete(3).await;
    db.delete(4).await;
    db.execute("DELETE FROM oncebox_mark; INSERT INTO oncebox_mark SELECT * FROM backup")
        .await;
    assert!(matches!(
        stop(until_empty(config(&db), &log).await),
        Stop::RowsMissing { .. }
    ));

    let config = config(&db);
    let plan = resume::plan_with::<SqliteSession, _>(&config, &log, resume::From::Mark)
        .await
        .unwrap();
    assert!(plan.to_string().contains("nothing was changed"), "{plan}");
    assert!(
        matches!(
            stop(until_empty(config.clone(), &log).await),
            Stop::RowsMissing { .. }
        ),
        "a dry run changes nothing"
    );
    // Ids of lost rows may have been issued again: the checkpoint cannot tell new rows from published ones.
    db.insert(4).await;
    db.execute("UPDATE oncebox_outbox SET message_id = randomblob(16) WHERE id = 4")
        .await;
    let refused =
        resume::apply_with::<SqliteSession, _>(&config, &log, resume::From::Checkpoint).await;
    assert!(refused.unwrap_err().to_string().contains("--from <id>"));
    let plan = resume::apply_with::<SqliteSession, _>(&config, &log, resume::From::Mark)
        .await
        .unwrap();
    assert!(plan.to_string().contains("source epoch 2"), "{plan}");
    db.insert(5).await;
    assert_eq!(
        until_empty(config.clone(), &log).await.unwrap(),
        Exit::Stopped
    );
    assert_eq!(log.ids(), [1, 2, 3, 4, 4, 5]);

    // A row written below the position: published again from an id below it.
    db.insert(3).await;
    assert!(matches!(
        stop(until_empty(config.clone(), &log).await),
        Stop::ForeignRows { .. }
    ));
    let refused = resume::apply_with::<SqliteSession, _>(&config, &log, resume::From::Mark).await;
    assert!(refused.unwrap_err().is_stop(), "the mark is above it");
    resume::apply_with::<SqliteSession, _>(&config, &log, resume::From::Id(2))
        .await
        .unwrap();
    assert_eq!(until_empty(config, &log).await.unwrap(), Exit::Stopped);
    assert_eq!(log.ids(), [1, 2, 3, 4, 4, 5, 3, 4, 5]);
}

#[tokio::test]
async fn g10_a_name_used_by_another_database_is_taken_over_only_by_resume() {
    let mut old = TestDb::sqlite().await;
    old.insert(1).await;
    let log = FakeLog::default();
    until_empty(config(&old), &log).await.unwrap();
    let mut new = TestDb::sqlite().await;
    new.insert(1).await;
    new.insert(2).await;
    let config = config(&new);
    assert!(matches!(
        stop(until_empty(config.clone(), &log).await),
        Stop::OtherDatabase { .. }
    ));
    assert_eq!(log.ids(), [1], "nothing was published");
    resume::apply_with::<SqliteSession, _>(&config, &log, resume::From::Id(0))
        .await
        .unwrap();
    assert_eq!(
        until_empty(config.clone(), &log).await.unwrap(),
        Exit::Stopped
    );
    assert_eq!(
        until_empty(config.clone(), &log).await.unwrap(),
        Exit::Stopped,
        "the next start does not stop again"
    );
    assert_eq!(log.ids(), [1, 1, 2]);
    let skipping = resume::plan_with::<SqliteSession, _>(&config, &log, resume::From::Id(9)).await;
    assert!(skipping.unwrap_err().to_string().contains("skipped"));
}

#[tokio::test]
async fn clean_up_and_a_restart_after_it() {
    let mut db = TestDb::sqlite().await;
    for id in 1..=9 {
        db.insert(id).await;
    }
    let log = FakeLog::default();
    let mut config = config(&db);
    config.retention = Duration::ZERO;
    let shutdown = CancellationToken::new();
    let running = tokio::spawn(relay(config.clone(), Mode::Forever, &log, &shutdown).run());
    let mut session = SqliteSession::connect(&config).await.unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while session.mark().await.unwrap().low_water < 8 {
        assert!(Instant::now() < deadline, "nothing is cleaned up");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    shutdown.cancel();
    running.await.unwrap().unwrap();
    db.insert(10).await;
    until_empty(config, &log).await.unwrap();
    assert_eq!(log.ids(), (1..=10).collect::<Vec<_>>());
    let settled = log.lock().checkpoint.as_ref().unwrap().position.settled;
    assert_eq!(
        settled,
        crate::session::conformance::tally(&(1..=10).collect::<Vec<_>>())
    );
    assert_ne!(settled, Tally::default());
}

async fn wait(done: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
