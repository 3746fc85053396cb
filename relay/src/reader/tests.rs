//! The reader on a model of a database that goes on between any two of its looks: the order of the looks (G2), of the
//! rows (G4), and what a batch says about itself.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use oncebox_kafka::Record;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::sync::{mpsc, watch};
use uuid::Uuid;

use super::{Batch, Reader};
use crate::config::{Config, Database};
use crate::error::{Error, Stop};
use crate::health::Health;
use crate::position::model::{Db, Tx};
use crate::position::{Checkpoint, Gaps, Holders, Position, Tally, Tracker};
use crate::session::{Facts, Limit, Look, Mark, Probe, Rewrite, Row, Server, Session, Written};

/// The database, and the chance in it.
struct World {
    db: Db,
    rng: StdRng,
    /// Whether transactions go on while the reader looks.
    busy: bool,
    /// Looks that are left to this session.
    looks: usize,
    last_id: Option<i64>,
    /// Rows were looked at so often.
    row_looks: usize,
    /// The position in the mark at the next look at the facts.
    marked: Option<Checkpoint>,
    /// The facts were looked at so often.
    checks: usize,
    script: Vec<(usize, When, Event)>,
}

/// What happens to the database by itself.
type Event = fn(&mut Db);

/// When something of a script happens: just before a look at the rows, or just after it.
#[derive(Clone, Copy, PartialEq)]
enum When {
    Before,
    After,
}

#[derive(Clone)]
struct ModelSession(Arc<Mutex<World>>);

impl ModelSession {
    fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(World {
            db: Db::default(),
            rng: StdRng::seed_from_u64(seed),
            busy: false,
            looks: usize::MAX,
            last_id: None,
            row_looks: 0,
            marked: None,
            checks: 0,
            script: vec![],
        })))
    }

    fn lock(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }

    /// One look, and the database going on before and after it. A restart of the server ends the session.
    fn look_at<T>(&self, look: impl FnOnce(&mut World) -> T) -> Result<T, Error> {
        let mut world = self.lock();
        let restarts = world.db.restarts;
        world.goes_on();
        let seen = look(&mut world);
        world.goes_on();
        world.looks = world.looks.saturating_sub(1);
        if world.db.restarts != restarts || world.looks == 0 {
            return Err(Error::Database(sqlx::Error::PoolClosed));
        }
        Ok(seen)
    }
}

impl World {
    fn aborts(&mut self) -> bool {
        self.busy && self.rng.random_bool(0.1)
    }

    /// A session that ends after some looks.
    fn begin_term(&mut self) {
        self.busy = true;
        self.db.steady = self.rng.random_bool(0.7);
        self.looks = self.rng.random_range(1..150);
    }

    /// Every transaction ends, and one more row is committed, to read up to: its id.
    fn finish(&mut self) -> i64 {
        (self.busy, self.looks) = (false, usize::MAX);
        self.db.finish(&mut self.rng);
        self.db.next_id += 1;
        self.db.rows.insert(self.db.next_id, 0);
        self.db.next_id
    }

    fn play(&mut self, when: When) {
        for (n, _, act) in self.script.iter().filter(|(_, w, _)| *w == when) {
            if *n == self.row_looks {
                act(&mut self.db);
            }
        }
    }

    fn goes_on(&mut self) {
        if self.busy {
            // Mostly little, so that a transaction outlives some rounds; sometimes whole transactions at once.
            let most = if self.rng.random_bool(0.2) { 12 } else { 2 };
            for _ in 0..self.rng.random_range(0..most) {
                self.db.step(&mut self.rng);
            }
        }
    }
}

fn row(id: i64) -> Row {
    Row {
        id,
        message_id: Uuid::from_u128(id as u128),
        created_at_micros: 0,
        record: Record {
            topic: "orders".into(),
            key: None,
            payload: None,
            headers: bytes::Bytes::new(),
            envelope: None,
        },
    }
}

impl Session for ModelSession {
    const GAPLESS: bool = false;

    async fn probe(&mut self) -> Result<Probe, Error> {
        self.look_at(|world| Probe {
            holders: world.db.holders(),
            last_id: world.last_id.unwrap_or(world.db.next_id),
        })
    }

    async fn look(&mut self, gaps: &Gaps, high: i64, limit: Limit) -> Result<Look, Error> {
        self.look_at(|world| {
            world.row_looks += 1;
            world.play(When::Before);
            let late = world.db.rows.keys().filter(|id| gaps.contains(**id));
            let new = world.db.rows.range(high + 1..).map(|(id, _)| id);
            let mut collector = Look::collector(limit);
            for (id, is_late) in late.map(|id| (id, true)).chain(new.map(|id| (id, false))) {
                collector.push(is_late, row(*id))?;
            }
            world.play(When::After);
            Ok(collector.finish())
        })?
    }

    async fn last_visible(&mut self) -> Result<i64, Error> {
        self.look_at(|world| world.db.rows.keys().next_back().copied().unwrap_or(0))
    }

    async fn facts(&mut self, high: i64, gaps: &Gaps, _: &Gaps) -> Result<Facts, Error> {
        self.lock().checks += 1;
        self.look_at(|world| Facts {
            mark: Mark {
                format: 1,
                source_id: Uuid::nil(),
                source: None,
                source_epoch: 1,
                epoch: 1,
                owner: None,
                renewal: 0,
                seq: 0,
                checkpoint: world.marked.take(),
                cluster_id: None,
                low_water: 0,
                deleted: Tally::default(),
            },
            high_message_id: Some(row(high).message_id),
            rows_below_low_water: false,
            parked: Tally::default(),
            rows: tally(
                world
                    .db
                    .rows
                    .keys()
                    .filter(|id| **id <= high && !gaps.contains(**id)),
            ),
        })
    }

    // The reader only looks.

    async fn connect(_: &Config) -> Result<Self, Error> {
        unreachable!()
    }
    fn server(&self) -> &Server {
        unreachable!()
    }
    async fn mark(&mut self) -> Result<Mark, Error> {
        unreachable!()
    }
    async fn row_at_or_below(&mut self, _: i64) -> Result<Option<(i64, Uuid)>, Error> {
        unreachable!()
    }
    async fn take(&mut self, _: &Mark, _: i64, _: &str, _: &str) -> Result<bool, Error> {
        unreachable!()
    }
    async fn renew(&mut self, _: i64) -> Result<Written, Error> {
        unreachable!()
    }
    async fn confirm(&mut self, _: i64, _: &Checkpoint, _: &str) -> Result<Written, Error> {
        unreachable!()
    }
    async fn release(&mut self, _: i64) -> Result<Written, Error> {
        unreachable!()
    }
    async fn clean_up(&mut self, _: i64, _: Duration, _: usize) -> Result<(Written, u64), Error> {
        unreachable!()
    }
    async fn raise_format(&mut self, _: u32) -> Result<(), Error> {
        unreachable!()
    }
    async fn rewrite(&mut self, _: i64, _: &Rewrite) -> Result<Written, Error> {
        unreachable!()
    }
}

fn tally<'a>(ids: impl IntoIterator<Item = &'a i64>) -> Tally {
    let mut tally = Tally::default();
    ids.into_iter().for_each(|id| tally.add(*id));
    tally
}

/// A reader that goes on from `position`, its gaps held by the transactions of now.
fn reader(session: &ModelSession, position: &Position, until: Option<i64>) -> Reader<ModelSession> {
    let database = Database::parse("sqlite::memory:").unwrap();
    let mut config = Config::new("shop", database, oncebox_kafka::Config::new("127.0.0.1:9"));
    (config.poll_min, config.poll_max) = (Duration::ZERO, Duration::ZERO);
    config.max_batch_rows = 5;
    let (_, acknowledged) = watch::channel(None);
    Reader {
        config,
        session: session.clone(),
        tracker: Tracker::load(position.clone(), session.lock().db.holders(), 3_000),
        health: Health::new(),
        until,
        start_holders: Holders::new(),
        acknowledged,
    }
}

/// What Kafka has: rows in their order, and the position that travelled with the last of them.
#[derive(Default)]
struct Published {
    ids: Vec<i64>,
    position: Position,
}

impl Published {
    /// A batch is published; its position is the one after it and after nothing else.
    fn take(&mut self, batch: Batch) {
        self.ids.extend(batch.rows.iter().map(|row| row.id));
        self.position = batch.position;
        for id in &self.ids {
            assert!(
                *id <= self.position.high && !self.position.gaps.contains(*id),
                "row {id} is published but not settled"
            );
        }
        assert_eq!(
            tally(&self.ids),
            self.position.settled,
            "the batch's position is not the one after its rows"
        );
    }
}

/// Reads until the session ends; some of the last batches may not get to Kafka.
async fn term(session: &ModelSession, published: &mut Published, until: Option<i64>) {
    let (batches, mut received) = mpsc::channel(1);
    let work = tokio::spawn(reader(session, &published.position, until).run(batches));
    while let Some(batch) = received.recv().await {
        if session.lock().aborts() {
            break;
        }
        published.take(batch);
    }
    drop(received);
    let _ = work.await.unwrap();
}

async fn run(seed: u64) {
    let session = ModelSession::new(seed);
    let mut published = Published::default();
    for _ in 0..4 {
        session.lock().begin_term();
        term(&session, &mut published, None).await;
    }
    let last = session.lock().finish();
    term(&session, &mut published, Some(last)).await;

    let world = session.lock();
    let committed: BTreeSet<_> = world.db.rows.keys().copied().collect();
    let missing: Vec<_> = committed
        .iter()
        .filter(|id| !published.ids.contains(id))
        .collect();
    assert!(missing.is_empty(), "seed {seed}: skipped {missing:?}");
    let once: BTreeSet<_> = published.ids.iter().copied().collect();
    assert_eq!(once.len(), published.ids.len(), "seed {seed}: not once");
    assert_eq!(once, committed, "seed {seed}");
    // Ids of one key ascend in the order in which its transactions were serialised.
    let mut last = BTreeMap::new();
    for id in &published.ids {
        let key = world.db.rows[id];
        let before = last.insert(key, *id).unwrap_or(0);
        assert!(
            before < *id,
            "seed {seed}: key {key} inverted: {before} before {id}"
        );
    }
}

/// G2: holders before rows, holders again after rows; G4: late rows first; each batch with its own position.
#[tokio::test]
async fn g2_g4_committed_means_read_once_and_in_order_whatever_happens_between_two_looks() {
    if let Ok(seed) = std::env::var("ONCEBOX_SEED") {
        return run(seed.parse().unwrap()).await;
    }
    for seed in 0..100 {
        run(seed).await;
    }
}

/// The two moments that matter: a writer that comes after the holders were looked at and before the rows are, and one that
/// ends after the rows were looked at and before the holders are.
#[tokio::test]
async fn g2_holders_are_looked_at_before_the_rows_and_again_after_them() {
    let session = ModelSession::new(0);
    let comes: Event = |db| {
        db.next_id = 2;
        db.open.push(Tx {
            name: "3/1".to_owned(),
            ids: vec![1],
            ..Tx::default()
        });
        db.rows.insert(2, 1);
    };
    let ends: Event = |db| {
        db.rows.insert(1, 0);
        db.open.clear();
    };
    session.lock().script = vec![(1, When::Before, comes), (4, When::After, ends)];
    session.lock().looks = 50;
    let mut published = Published::default();
    term(&session, &mut published, None).await;
    assert_eq!(published.ids, [2, 1]);
    assert!(published.position.gaps.is_empty());
}

async fn stop(reader: Reader<ModelSession>) -> Stop {
    let (batches, received) = mpsc::channel(1);
    let result = tokio::time::timeout(Duration::from_secs(3), reader.run(batches)).await;
    drop(received);
    match result {
        Ok(Err(Error::Stop(stop))) => *stop,
        other => panic!("expected a stop, got {other:?}"),
    }
}

/// TRUNCATE … RESTART IDENTITY, setval, an older standby.
#[tokio::test]
async fn g10_a_sequence_below_the_position_stops_the_relay() {
    let session = ModelSession::new(0);
    session.lock().last_id = Some(3);
    let position = Position {
        high: 4,
        ..Position::default()
    };
    let stop = stop(reader(&session, &position, None)).await;
    assert!(
        matches!(
            stop,
            Stop::SequenceBehind {
                sequence: 3,
                high: 4
            }
        ),
        "{stop}"
    );
}

/// A crash of the server can lose a ROLLBACK PREPARED: the transaction is there again, and with it the burnt id.
#[tokio::test]
async fn g10_a_burnt_id_that_comes_back_to_life_stops_the_relay() {
    let session = with_a_burnt_id_that_is_back();
    let stop = stop(second_check(&session)).await;
    assert!(matches!(stop, Stop::ForeignRows { .. }), "{stop}");
}

/// Facts of a later moment than the position say nothing about it: a release or the clean-up has moved on.
#[tokio::test]
async fn g10_the_second_check_is_repeated_when_the_mark_is_newer_than_the_position() {
    let session = with_a_burnt_id_that_is_back();
    let mut reader = second_check(&session);
    let newer = reader.acknowledged.borrow().clone();
    session.lock().marked = newer.map(|position| Checkpoint {
        seq: position.seq + 1,
        ..position
    });
    reader.turn(10, false).await.unwrap();
    assert_eq!(session.lock().checks, 1);
    let stop = stop(reader).await;
    assert!(matches!(stop, Stop::ForeignRows { .. }), "{stop}");
    assert_eq!(session.lock().checks, 2);
}

/// Ids 1 and 3 are published, 2 was burnt and has a row.
fn with_a_burnt_id_that_is_back() -> ModelSession {
    let session = ModelSession::new(0);
    session.lock().db.next_id = 3;
    session.lock().db.rows.extend([(1, 0), (2, 0), (3, 0)]);
    session
}

/// The transaction that was prepared at the start has ended since.
fn second_check(session: &ModelSession) -> Reader<ModelSession> {
    let position = Position {
        high: 3,
        high_message_id: Some(row(3).message_id),
        settled: tally(&[1, 3]),
        ..Position::default()
    };
    let checkpoint = Checkpoint {
        format: 1,
        seq: 1,
        epoch: 1,
        source_id: Uuid::nil(),
        system: "s".to_owned(),
        timeline: 1,
        position: position.clone(),
        parked: Tally::default(),
        released: Gaps::default(),
        incomplete: false,
    };
    let mut reader = reader(session, &position, None);
    reader.acknowledged = watch::channel(Some(checkpoint)).1;
    reader.start_holders = ["-1/700".to_owned()].into();
    reader
}
