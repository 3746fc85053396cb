//! What every database must do for a relay. A database without this suite does not exist.

use std::time::Duration;

use oncebox_kafka::Config as Kafka;
use oncebox_migrations::Dialect;
use sqlx::AssertSqlSafe;
use uuid::Uuid;

use super::{
    Cause, Filter, Limit, Overview, Parking, ParkingSession, PostgresSession, Rewrite, Session,
    SqliteSession, Written,
};
use crate::config::{Config, Database};
use crate::error::Error;
use crate::position::{Checkpoint, Gaps, Interval, Position, Tally};

/// A fresh database with the outbox in it, and a writer beside the relay.
pub(crate) struct TestDb {
    pub(crate) config: Config,
    url: String,
    writer: sqlx::AnyConnection,
    outbox: String,
    numbered: bool,
    _dir: Option<tempfile::TempDir>,
}

impl TestDb {
    pub(crate) async fn sqlite() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}?mode=rwc", dir.path().join("shop.db").display());
        Self::open(url, Dialect::Sqlite, Some(dir)).await
    }

    /// `None` and a word when the workspace's test command did not start a server.
    pub(crate) async fn postgres() -> Option<Self> {
        let Ok(url) = std::env::var("ONCEBOX_TEST_POSTGRES_URL") else {
            eprintln!("skipped: ONCEBOX_TEST_POSTGRES_URL is not set");
            return None;
        };
        sqlx::any::install_default_drivers();
        let name = format!("relay_{}", Uuid::new_v4().simple());
        let mut admin = <sqlx::AnyConnection as sqlx::Connection>::connect(&url)
            .await
            .unwrap();
        sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {name}")))
            .execute(&mut admin)
            .await
            .unwrap();
        let (server, _) = url.rsplit_once('/').unwrap();
        Some(Self::open(format!("{server}/{name}"), Dialect::Postgres, None).await)
    }

    async fn open(url: String, dialect: Dialect, dir: Option<tempfile::TempDir>) -> Self {
        sqlx::any::install_default_drivers();
        let names = oncebox_migrations::Names::default();
        oncebox_migrations::migrate(&url, &names).await.unwrap();
        let writer = <sqlx::AnyConnection as sqlx::Connection>::connect(&url)
            .await
            .unwrap();
        let config = Config::new(
            "shop",
            Database::parse(&url).unwrap(),
            Kafka::new("127.0.0.1:9"),
        );
        let outbox = names.outbox(dialect);
        Self {
            config,
            url,
            writer,
            outbox,
            numbered: dialect == Dialect::Postgres,
            _dir: dir,
        }
    }

    /// Inserts a row with this id; its message id is made of the id.
    pub(crate) async fn insert(&mut self, id: i64) {
        self.insert_for(id, "orders", Some("k")).await;
    }

    /// The same for a topic and a key.
    pub(crate) async fn insert_for(&mut self, id: i64, topic: &str, key: Option<&str>) {
        let overriding = if self.numbered {
            "OVERRIDING SYSTEM VALUE"
        } else {
            ""
        };
        let message_id = match self.numbered {
            true => format!("'{}'", Uuid::from_u128(id as u128)),
            false => format!("x'{}'", Uuid::from_u128(id as u128).simple()),
        };
        let bytes = |text: &str| {
            if self.numbered {
                format!("'{text}'::bytea")
            } else {
                format!("CAST('{text}' AS BLOB)")
            }
        };
        self.execute(&format!(
            "INSERT INTO {} (id, message_id, topic, key, payload, headers) {overriding} VALUES ({id}, {message_id}, '{topic}', {}, {}, {})",
            self.outbox,
            key.map_or("NULL".to_owned(), bytes),
            bytes("payload"),
            bytes("")
        ))
        .await;
        if self.numbered {
            self.execute(&format!(
                "SELECT setval(pg_get_serial_sequence('{}', 'id'), {id})",
                self.outbox
            ))
            .await;
        }
    }

    pub(crate) async fn delete(&mut self, id: i64) {
        self.execute(&format!("DELETE FROM {} WHERE id = {id}", self.outbox))
            .await;
    }

    pub(crate) async fn execute(&mut self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql))
            .execute(&mut self.writer)
            .await
            .unwrap();
    }

    /// Ends it; a PostgreSQL database is dropped.
    pub(crate) async fn close(self) {
        if !self.numbered {
            return;
        }
        let (server, name) = self.url.rsplit_once('/').unwrap();
        sqlx::Connection::close(self.writer).await.unwrap();
        let mut admin =
            <sqlx::AnyConnection as sqlx::Connection>::connect(&format!("{server}/postgres"))
                .await
                .unwrap();
        sqlx::raw_sql(AssertSqlSafe(format!("DROP DATABASE {name} WITH (FORCE)")))
            .execute(&mut admin)
            .await
            .unwrap();
    }
}

const LIMIT: Limit = Limit {
    rows: 100,
    bytes: 1 << 20,
};

pub(crate) fn tally(ids: &[i64]) -> Tally {
    let mut tally = Tally::default();
    ids.iter().for_each(|id| tally.add(*id));
    tally
}

fn checkpoint(seq: i64, high: i64, gaps: &[(i64, i64)], ids: &[i64]) -> Checkpoint {
    let gaps = Gaps::new(
        gaps.iter()
            .map(|&(low, high)| Interval { low, high })
            .collect(),
    )
    .unwrap();
    Checkpoint {
        format: 1,
        seq,
        epoch: 1,
        source_id: Uuid::from_u128(1),
        system: "s".to_owned(),
        timeline: 1,
        position: Position {
            high,
            high_message_id: Some(Uuid::from_u128(high as u128)),
            gaps,
            settled: tally(ids),
        },
        parked: Tally::default(),
        released: Gaps::default(),
        incomplete: false,
    }
}

async fn looks_return_both_halves_in_order<S: Session>(db: &mut TestDb, gapless: bool) {
    let mut session = S::connect(&db.config).await.unwrap();
    for id in [1, 2, 4, 6, 7, 9] {
        db.insert(id).await;
    }
    let look = session.look(&Gaps::default(), 0, LIMIT).await.unwrap();
    let ids: Vec<_> = look.new.iter().map(|row| row.id).collect();
    assert_eq!((ids, look.new_cut), (vec![1, 2, 4, 6, 7, 9], false));
    let row = &look.new[2];
    assert_eq!(row.message_id, Uuid::from_u128(4));
    assert_eq!(
        (
            &*row.record.topic,
            row.record.key.as_deref(),
            row.record.payload.as_deref()
        ),
        ("orders", Some(&b"k"[..]), Some(&b"payload"[..]))
    );
    let age = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_micros() as i64
        - row.created_at_micros;
    assert!((0..60_000_000).contains(&age), "created {age} µs ago");

    let look = session
        .look(
            &Gaps::default(),
            1,
            Limit {
                rows: 2,
                bytes: 1 << 20,
            },
        )
        .await
        .unwrap();
    assert_eq!((look.new.len(), look.new_cut), (2, true));
    let look = session
        .look(
            &Gaps::default(),
            1,
            Limit {
                rows: 100,
                bytes: 1,
            },
        )
        .await
        .unwrap();
    assert_eq!(
        (look.new.len(), look.new_cut),
        (1, true),
        "one row is always allowed"
    );
    assert_eq!(session.last_visible().await.unwrap(), 9);
    assert_eq!(
        session.row_at_or_below(5).await.unwrap(),
        Some((4, Uuid::from_u128(4)))
    );
    assert_eq!(session.row_at_or_below(0).await.unwrap(), None);
    assert_eq!(session.probe().await.unwrap().last_id, 9);
    if gapless {
        return;
    }
    let gaps = Gaps::new(vec![
        Interval { low: 1, high: 2 },
        Interval { low: 5, high: 6 },
    ])
    .unwrap();
    let look = session.look(&gaps, 7, LIMIT).await.unwrap();
    let ids = |rows: &[super::Row]| rows.iter().map(|row| row.id).collect::<Vec<_>>();
    assert_eq!(
        (ids(&look.late), ids(&look.new), look.late_cut),
        (vec![1, 2, 6], vec![9], false)
    );
    let look = session
        .look(
            &gaps,
            7,
            Limit {
                rows: 2,
                bytes: 1 << 20,
            },
        )
        .await
        .unwrap();
    assert_eq!((ids(&look.late), look.late_cut), (vec![1, 2], true));
}

async fn g3_the_mark_moves_only_forward_and_only_for_its_leader<S: Session>(db: &TestDb) {
    let mut session = S::connect(&db.config).await.unwrap();
    let fresh = session.mark().await.unwrap();
    assert_eq!(
        (
            fresh.epoch,
            fresh.seq,
            fresh.checkpoint.is_none(),
            fresh.owner.as_deref()
        ),
        (0, 0, true, None)
    );
    assert!(session.take(&fresh, 1, "shop", "me").await.unwrap());
    assert!(
        !session.take(&fresh, 1, "shop", "other").await.unwrap(),
        "compare-and-set"
    );
    let stored = checkpoint(5, 9, &[(3, 3)], &[1, 2, 4]);
    assert_eq!(
        session.confirm(1, &stored, "cluster").await.unwrap(),
        Written::Done
    );
    assert_eq!(
        session.confirm(1, &stored, "cluster").await.unwrap(),
        Written::Done,
        "the answer was lost: still done"
    );
    assert_eq!(
        session
            .confirm(1, &checkpoint(4, 7, &[], &[1]), "cluster")
            .await
            .unwrap(),
        Written::Done
    );
    let mark = session.mark().await.unwrap();
    assert_eq!(
        (
            mark.seq,
            mark.checkpoint.as_ref(),
            mark.cluster_id.as_deref()
        ),
        (5, Some(&stored), Some("cluster"))
    );
    assert_eq!(
        (mark.source.as_deref(), mark.owner.as_deref()),
        (Some("shop"), Some("me"))
    );

    assert!(session.take(&mark, 2, "shop", "other").await.unwrap());
    assert_eq!(
        session
            .confirm(1, &checkpoint(9, 9, &[], &[1]), "cluster")
            .await
            .unwrap(),
        Written::Deposed(2)
    );
    assert_eq!(session.renew(1).await.unwrap(), Written::Deposed(2));
    assert_eq!(session.release(1).await.unwrap(), Written::Deposed(2));
    assert_eq!(
        session.clean_up(1, Duration::ZERO, 10).await.unwrap().0,
        Written::Deposed(2)
    );
    let before = session.mark().await.unwrap();
    assert_eq!(session.renew(2).await.unwrap(), Written::Done);
    assert_eq!(session.mark().await.unwrap().renewal, before.renewal + 1);
    assert_eq!(session.release(2).await.unwrap(), Written::Done);
    assert_eq!(session.mark().await.unwrap().owner, None);
}

async fn g10_facts_are_what_is_in_the_table<S: Session>(db: &mut TestDb) {
    let mut session = S::connect(&db.config).await.unwrap();
    for id in [1, 2, 4, 6, 7, 9, 4_294_967_296 + 5] {
        db.insert(id).await;
    }
    let gaps = Gaps::new(vec![
        Interval { low: 2, high: 3 },
        Interval { low: 5, high: 6 },
    ])
    .unwrap();
    let facts = session.facts(7, &gaps, &Gaps::default()).await.unwrap();
    assert_eq!(
        (facts.rows, facts.high_message_id),
        (tally(&[1, 4, 7]), Some(Uuid::from_u128(7)))
    );
    let facts = session
        .facts(4_294_967_296 + 5, &Gaps::default(), &Gaps::default())
        .await
        .unwrap();
    assert_eq!(facts.rows, tally(&[1, 2, 4, 6, 7, 9, 4_294_967_296 + 5]));
    let facts = session
        .facts(8, &Gaps::default(), &Gaps::default())
        .await
        .unwrap();
    assert_eq!(facts.high_message_id, None);
}

async fn g2_clean_up_stays_behind_the_mark<S: Session>(db: &mut TestDb) {
    let mut session = S::connect(&db.config).await.unwrap();
    for id in 1..=9 {
        db.insert(id).await;
    }
    db.delete(7).await;
    let fresh = session.mark().await.unwrap();
    assert!(session.take(&fresh, 1, "shop", "me").await.unwrap());
    assert_eq!(
        session.clean_up(1, Duration::ZERO, 10).await.unwrap(),
        (Written::Done, 0),
        "nothing is confirmed"
    );
    session
        .confirm(
            1,
            &checkpoint(1, 9, &[(7, 7)], &[1, 2, 3, 4, 5, 6, 8, 9]),
            "c",
        )
        .await
        .unwrap();
    assert_eq!(
        session
            .clean_up(1, Duration::from_secs(3600), 10)
            .await
            .unwrap(),
        (Written::Done, 0),
        "too young"
    );
    assert_eq!(
        session.clean_up(1, Duration::ZERO, 4).await.unwrap(),
        (Written::Done, 4),
        "a chunk"
    );
    assert_eq!(
        session.clean_up(1, Duration::ZERO, 10).await.unwrap(),
        (Written::Done, 2),
        "up to the gap"
    );
    assert_eq!(
        session.clean_up(1, Duration::ZERO, 10).await.unwrap(),
        (Written::Done, 0)
    );
    let mark = session.mark().await.unwrap();
    assert_eq!(
        (mark.low_water, mark.deleted),
        (6, tally(&[1, 2, 3, 4, 5, 6]))
    );
    session
        .confirm(1, &checkpoint(2, 9, &[], &[1, 2, 3, 4, 5, 6, 8, 9]), "c")
        .await
        .unwrap();
    assert_eq!(
        session.clean_up(1, Duration::ZERO, 10).await.unwrap(),
        (Written::Done, 1),
        "the row high stays"
    );
    let look = session.look(&Gaps::default(), 0, LIMIT).await.unwrap();
    assert_eq!(look.new.iter().map(|row| row.id).collect::<Vec<_>>(), [9]);
    let mark = session.mark().await.unwrap();
    assert_eq!((mark.low_water, mark.deleted.count), (8, 7));
}

/// G8: whoever lost the lead writes nothing, also when it was stopped right before it wrote.
async fn g8_only_the_leader_parks_pauses_and_releases<S: ParkingSession>(db: &mut TestDb) {
    let mut session = S::connect(&db.config).await.unwrap();
    db.insert(1).await;
    let fresh = session.mark().await.unwrap();
    assert!(session.take(&fresh, 3, "shop", "me").await.unwrap());
    let parking = [Parking {
        id: 1,
        cause: Cause::Refused,
        reason: "too large".to_owned(),
    }];
    let released = Checkpoint {
        epoch: 3,
        released: Gaps::single(1),
        ..checkpoint(9, 1, &[], &[1])
    };
    let deposed = Written::Deposed(3);
    let nothing = Overview::default();
    assert_eq!(session.park(2, &parking).await.unwrap(), deposed);
    assert_eq!(session.pause(2, "orders", "no").await.unwrap(), deposed);
    assert_eq!(session.overview().await.unwrap(), nothing);
    assert_eq!(session.park(3, &parking).await.unwrap(), Written::Done);
    assert_eq!(
        session.pause(3, "orders", "no").await.unwrap(),
        Written::Done
    );
    let before = session.overview().await.unwrap();
    assert_eq!(
        (&*before.parked, before.paused.len()),
        (&[("orders".to_owned(), 1)][..], 1)
    );
    assert_eq!(session.refuse(2, 1, "again").await.unwrap(), deposed);
    assert_eq!(session.resume_topic(2, "orders").await.unwrap(), deposed);
    let finished = session.finish_release(2, &released, "c").await.unwrap();
    assert_eq!(finished, deposed);
    assert_eq!(session.overview().await.unwrap(), before);
    let all = session.list_parked(&Filter::default(), 9).await.unwrap();
    assert_eq!((all.len(), all[0].attempts), (1, 1));
    assert_eq!(
        session.resume_topic(3, "orders").await.unwrap(),
        Written::Done
    );
    // The answer to the first may have been lost.
    for _ in 0..2 {
        let finished = session.finish_release(3, &released, "c").await.unwrap();
        assert_eq!(finished, Written::Done);
    }
    assert_eq!(session.overview().await.unwrap(), nothing);
    assert_eq!(session.mark().await.unwrap().checkpoint, Some(released));
}

async fn g10_a_rewrite_needs_the_lease<S: Session>(db: &TestDb) {
    let mut session = S::connect(&db.config).await.unwrap();
    let fresh = session.mark().await.unwrap();
    assert!(session.take(&fresh, 3, "shop", "me").await.unwrap());
    let stored = Checkpoint {
        epoch: 4,
        ..checkpoint(9, 2, &[], &[1, 2])
    };
    let rewrite = Rewrite {
        checkpoint: stored.clone(),
        cluster_id: "c2".to_owned(),
        source_epoch: 2,
        source: "shop".to_owned(),
    };
    assert_eq!(
        session.rewrite(2, &rewrite).await.unwrap(),
        Written::Deposed(3)
    );
    assert_eq!(session.rewrite(3, &rewrite).await.unwrap(), Written::Done);
    let mark = session.mark().await.unwrap();
    assert_eq!(
        (
            mark.epoch,
            mark.seq,
            mark.source_epoch,
            mark.checkpoint,
            mark.owner
        ),
        (4, 9, 2, Some(stored), None)
    );
}

macro_rules! suite {
    ($name:ident, $session:ty, $open:expr, $gapless:expr) => {
        mod $name {
            use super::*;

            #[tokio::test]
            async fn looks_return_both_halves_in_order() {
                let Some(mut db) = $open else { return };
                super::looks_return_both_halves_in_order::<$session>(&mut db, $gapless).await;
                db.close().await;
            }

            #[tokio::test]
            async fn g3_the_mark_moves_only_forward_and_only_for_its_leader() {
                let Some(db) = $open else { return };
                super::g3_the_mark_moves_only_forward_and_only_for_its_leader::<$session>(&db)
                    .await;
                db.close().await;
            }

            #[tokio::test]
            async fn g10_facts_are_what_is_in_the_table() {
                let Some(mut db) = $open else { return };
                super::g10_facts_are_what_is_in_the_table::<$session>(&mut db).await;
                db.close().await;
            }

            #[tokio::test]
            async fn g2_clean_up_stays_behind_the_mark() {
                let Some(mut db) = $open else { return };
                super::g2_clean_up_stays_behind_the_mark::<$session>(&mut db).await;
                db.close().await;
            }

            #[tokio::test]
            async fn g8_only_the_leader_parks_pauses_and_releases() {
                let Some(mut db) = $open else { return };
                super::g8_only_the_leader_parks_pauses_and_releases::<$session>(&mut db).await;
                db.close().await;
            }

            #[tokio::test]
            async fn g10_a_rewrite_needs_the_lease() {
                let Some(db) = $open else { return };
                super::g10_a_rewrite_needs_the_lease::<$session>(&db).await;
                db.close().await;
            }
        }
    };
}

suite!(sqlite, SqliteSession, Some(TestDb::sqlite().await), true);
suite!(postgres, PostgresSession, TestDb::postgres().await, false);

#[tokio::test]
async fn a_missing_table_is_named_with_its_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}?mode=rwc", dir.path().join("empty.db").display());
    std::fs::write(dir.path().join("empty.db"), "").unwrap();
    let config = Config::new(
        "shop",
        Database::parse(&url).unwrap(),
        Kafka::new("127.0.0.1:9"),
    );
    let mut session = SqliteSession::connect(&config).await.unwrap();
    let error = session.mark().await.unwrap_err();
    assert!(
        matches!(error, Error::Migrations(_)) && error.to_string().contains("oncebox migrate"),
        "{error}"
    );
}
