//! A seeded simulation of relays that lead, die, stop and take over while the database and Kafka fail around them. The
//! relays are the real ones; the database and Kafka are models small enough to be read, and time is virtual.
//!
//! Invariants, most of them checked at every commit in Kafka: G1 nothing rolled back is published; G2 whatever the
//! position settles was published or is parked, and no id is burnt while its transaction is open; G3 nothing is
//! published twice, and the mark holds only what Kafka has committed; G4 the rows of a key come in order, none missing;
//! G8 a parked row comes only by its release, a refused one only when somebody asked; G9 rows wait only for what holds
//! them; no relay stops. When the faults end, everything comes to rest in bounded time.
//!
//! A seed names the faults and nearly the whole schedule: `tokio::select!` takes one of two timers that fire at the same
//! moment by a coin of its own. A failure prints its trace; a replay may take several runs.

mod database;
mod kafka;
mod session;
mod world;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use oncebox_kafka::Config as KafkaConfig;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use self::database::Stored;
use self::kafka::{FakeLog, TRANSACTION_TIMEOUT};
use self::session::FakeSession;
use self::world::{Process, SELF, World};
use super::{Exit, Mode, Relay};
use crate::config::{Config, Database};
use crate::error::Error;
use crate::health::Health;
use crate::session::{Cause, Deadline, Paused, Request};

/// How long the faults last.
const STORM: Duration = Duration::from_secs(12);

/// How long it may take until everything is at rest: a paused topic is tried again after a minute at most.
const REST: Duration = Duration::from_secs(200);

/// Longer than a lease and the longest pause before a relay starts over.
const LULL: Duration = Duration::from_secs(10);

const TOPICS: [&str; 2] = ["orders", "payments"];

/// A relay under a supervisor that starts it again whatever happens.
struct Slot {
    process: Arc<Process>,
    running: Option<JoinHandle<Result<Exit, Error>>>,
    shutdown: CancellationToken,
    start_at: Instant,
    resume_at: Option<Instant>,
}

impl Slot {
    /// Whatever was paused goes on.
    fn wake(&mut self) {
        if !self.process.is_killed() {
            self.resume_at = Some(Instant::now());
        }
    }
}

struct Simulation {
    world: Arc<Mutex<World>>,
    config: Config,
    slots: Vec<Slot>,
    started: usize,
    /// What the supervisors and the operators do.
    rng: StdRng,
    deletes_checkpoints: bool,
    /// No relay is started any more.
    closing: bool,
    /// Relays that stopped after the database lost commits.
    stopped: u64,
}

fn millis(rng: &mut StdRng, range: Range<u64>) -> Duration {
    Duration::from_millis(rng.random_range(range))
}

impl Simulation {
    fn new(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(!seed);
        let mut world = World::new(seed);
        world.faults = [0.5, 1.5, 3.0][rng.random_range(0..3)];
        let world = Arc::new(Mutex::new(world));
        let database = Database::parse("sqlite::memory:").unwrap();
        let mut config = Config::new("shop", database, KafkaConfig::new("127.0.0.1:9"));
        config.lease = Duration::from_millis(900);
        config.transaction_timeout = TRANSACTION_TIMEOUT;
        config.mark_interval = Duration::from_millis(230);
        config.retention = Duration::from_millis([0, 300, 3_000][rng.random_range(0..3)]);
        config.heartbeat = Duration::from_secs(7);
        config.poll_max = Duration::from_millis(100);
        config.max_batch_rows = [3, 10, 200][rng.random_range(0..3)];
        config.max_batch_bytes = [300, 1 << 20][rng.random_range(0..2)];
        config.checkpoint_bytes = [512, 4096][rng.random_range(0..2)];
        let slots = (0..rng.random_range(2..=3)).map(|number| Slot {
            process: Process::new(number, &world),
            running: None,
            shutdown: CancellationToken::new(),
            start_at: Instant::now(),
            resume_at: None,
        });
        Self {
            slots: slots.collect(),
            started: 0,
            deletes_checkpoints: rng.random_bool(0.25),
            closing: false,
            stopped: 0,
            world,
            config,
            rng,
        }
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    fn start(&mut self, n: usize) {
        self.started += 1;
        let process = Process::new(self.started, &self.world);
        let mut config = self.config.clone();
        let mortal = Arc::clone(&process);
        config.on_step = Some(Arc::new(move |step| {
            let dies = mortal.world().fault(20.0);
            if dies {
                let mut world = mortal.world();
                world.note(format_args!(
                    "process {} is killed at {step}",
                    mortal.number
                ));
                world.count("killed at a step");
                drop(world);
                mortal.kill();
            }
        }));
        let shutdown = CancellationToken::new();
        let log = FakeLog(Arc::clone(&process));
        let mut relay = Relay::<Deadline<FakeSession>, _>::new(
            config,
            Mode::Forever,
            log,
            Health::new(),
            shutdown.clone(),
        );
        relay.jitter = StdRng::seed_from_u64(self.rng.random());
        let running = tokio::spawn(SELF.scope(Arc::clone(&process), relay.run()));
        let slot = &mut self.slots[n];
        (slot.process, slot.shutdown) = (process, shutdown);
        (slot.running, slot.resume_at) = (Some(running), None);
        self.world()
            .note(format_args!("process {} starts", self.started));
    }

    /// Whatever ended is started again.
    async fn supervise(&mut self) {
        for n in 0..self.slots.len() {
            let slot = &mut self.slots[n];
            if slot.resume_at.is_some_and(|at| at <= Instant::now()) {
                slot.resume_at = None;
                slot.process.set_running(true);
            }
            if let Some(running) = &slot.running
                && slot.process.is_killed()
            {
                running.abort();
            }
            if let Some(running) = slot.running.take_if(|r| r.is_finished()) {
                let ended = running.await;
                let (number, asked) = (slot.process.number, slot.shutdown.is_cancelled());
                slot.start_at = Instant::now() + millis(&mut self.rng, 0..600);
                let mut world = self.world();
                match ended {
                    Ok(Err(error)) if error.is_stop() && world.history.lost => {
                        world.note(format_args!("{number} stops: {error}"));
                        drop(world);
                        self.stopped += 1;
                        continue;
                    }
                    Ok(Ok(Exit::Stopped)) if asked => world.note(format_args!("{number} ends")),
                    Ok(Err(error)) if error.is_retriable() => {
                        world.count("ended before they led");
                        world.note(format_args!("{number} ends: {error}"));
                    }
                    Err(error) if error.is_cancelled() => {}
                    ended => world.violated(format_args!("process {number} ends with {ended:?}")),
                }
            }
            let slot = &self.slots[n];
            if slot.running.is_none() && slot.start_at <= Instant::now() && !self.closing {
                self.start(n);
            }
        }
        // Whatever was killed is gone before anything else happens.
        tokio::task::yield_now().await;
        let world = self.world();
        assert!(
            world.violations.is_empty(),
            "{}",
            world.violations.join("\n")
        );
    }

    async fn storm(&mut self, end: Instant) {
        while Instant::now() < end {
            sleep(millis(&mut self.rng, 1..20)).await;
            if self.rng.random_bool(0.08) {
                self.world().write();
            }
            self.trouble_processes();
            self.trouble_kafka();
            self.operate();
            self.supervise().await;
        }
    }

    fn trouble_processes(&mut self) {
        let n = self.rng.random_range(0..self.slots.len());
        let slot = &mut self.slots[n];
        let number = slot.process.number;
        let mut world = self.world.lock().unwrap();
        if world.fault(1.5) {
            slot.process.kill();
            world.note(format_args!("process {number} is killed"));
            world.count("killed");
        }
        if world.fault(2.0) && !slot.process.is_killed() {
            let pause = millis(&mut self.rng, 20..5_000);
            slot.process.set_running(false);
            slot.resume_at = Some(Instant::now() + pause);
            world.note(format_args!("process {number} stops for {pause:?}"));
            world.count("paused");
        }
        if world.fault(1.0) {
            slot.shutdown.cancel();
            world.note(format_args!("process {number} is to end"));
            world.count("shut down");
        }
    }

    fn trouble_kafka(&mut self) {
        let topic = TOPICS[self.rng.random_range(0..2)];
        let mut world = self.world.lock().unwrap();
        if world.fault(0.5) {
            let outage = millis(&mut self.rng, 200..4_000);
            world.kafka.down_until = Some(Instant::now() + outage);
            world.note(format_args!("kafka is down for {outage:?}"));
            world.count("kafka outages");
        }
        if world.fault(1.0) {
            world.kafka.missing = [topic].into();
            world.note(format_args!("{topic} is missing"));
            world.count("topics missing");
        }
        if world.fault(1.0) {
            world.kafka.silent = [topic].into();
            world.note(format_args!("{topic} is silent"));
            world.count("topics silent");
        }
        if world.fault(6.0) {
            world.kafka.missing.clear();
            world.kafka.silent.clear();
        }
        if self.deletes_checkpoints && world.fault(1.5) {
            world.delete_checkpoint();
        }
    }

    fn operate(&mut self) {
        let mut world = self.world.lock().unwrap();
        if world.fault(15.0) && !world.tables.parked.is_empty() {
            let nth = self.rng.random_range(0..world.tables.parked.len());
            let id = *world.tables.parked.keys().nth(nth).unwrap();
            if self.rng.random_bool(0.5) {
                world.kafka.refused.remove(&id);
            }
            let drop = self.rng.random_bool(0.3);
            world.decide(
                id,
                if drop {
                    Request::Skip
                } else {
                    Request::Requeue
                },
            );
        }
        if world.fault(2.0) {
            let topic = TOPICS[self.rng.random_range(0..2)].to_owned();
            let key = self.rng.random_bool(0.7).then(|| "a".into());
            let known = |p: &Paused| (&p.topic, &p.key) == (&topic, &key);
            world.note(format_args!("operator: pause {topic} {key:?}"));
            world.tables.paused.retain(|p| !known(p));
            world.tables.paused.push(Paused {
                topic,
                key,
                by_relay: false,
                reason: "audit".to_owned(),
            });
            world.count("pauses of operators");
        }
        if world.fault(4.0) {
            world.tables.paused.retain(|p| p.by_relay);
        }
    }

    /// The database fails over and loses some commits. Returns whether something acknowledged was among them.
    async fn fail_over(&mut self) {
        let backup = self.world().tables.backup();
        let until = Instant::now() + millis(&mut self.rng, 5..1_500);
        self.storm(until).await;
        self.world().fail_over(backup);
        self.world().faults = 0.0;
        self.slots.iter_mut().for_each(Slot::wake);
        self.wait_for_quiet().await;
        let (lost, stopped) = (self.world().history.lost, self.stopped);
        assert_eq!(lost, stopped > 0, "relays that stopped: {stopped}");
    }

    /// Long enough for every lease, every pause before another attempt, and every statement that hangs.
    async fn wait_for_quiet(&mut self) {
        let until = self.world().quiet_at.max(Instant::now() + LULL);
        while Instant::now() < until {
            sleep(Duration::from_millis(50)).await;
            self.supervise().await;
        }
    }

    /// Waits until there is nothing to complain about.
    async fn rest(&mut self, complaints: impl Fn(&mut World) -> Vec<String>) {
        let end = Instant::now() + REST;
        loop {
            sleep(Duration::from_millis(50)).await;
            self.supervise().await;
            let complaints = complaints(&mut self.world());
            if complaints.is_empty() {
                return;
            }
            assert!(Instant::now() < end, "no rest: {complaints:#?}");
        }
    }

    /// The faults end. Some writers keep their transactions open, one topic stays away, what was refused stays so.
    async fn calm(&mut self) {
        let stays = self.rng.random_range(0..3);
        self.slots.iter_mut().for_each(Slot::wake);
        {
            let mut world = self.world();
            world.note("calm");
            world.faults = 0.0;
            world.kafka.missing.clear();
            world.kafka.silent.clear();
            if stays == 0 {
                world.kafka.missing.insert("payments");
            }
        }
        self.rest(|world| {
            let written: Vec<(i64, Stored)> = world
                .tables
                .written
                .iter()
                .map(|(id, row)| (*id, *row))
                .collect();
            let waits = written
                .into_iter()
                .filter(|(id, row)| world.waits_unjustly(*id, row));
            waits.map(|(id, _)| format!("G9: row {id} waits")).collect()
        })
        .await;
    }

    /// Everything is repaired, every transaction ends, and operators decide about what was refused.
    async fn repair(&mut self) {
        let drops = self.rng.random_bool(0.3);
        {
            let mut world = self.world();
            world.note("repair");
            world.finish_writing();
            world.kafka.missing.clear();
            world.tables.paused.retain(|p| p.by_relay);
            if !drops {
                world.kafka.refused.clear();
            }
        }
        self.rest(|world| {
            world.decide_all(if drops {
                Request::Skip
            } else {
                Request::Requeue
            });
            let done = &world.history.done;
            let open = world.tables.written.keys().filter(|id| !done.contains(id));
            let open = open.map(|id| format!("G2: row {id} is neither published nor dropped"));
            let parked = world
                .tables
                .parked
                .keys()
                .map(|id| format!("G8: row {id} is parked"));
            let paused = world.tables.paused.iter().map(|p| format!("G9: {p}"));
            open.chain(parked).chain(paused).collect()
        })
        .await;
    }

    /// Every relay ends well, and leaves everything to whoever comes next.
    async fn close(&mut self) {
        // A relay that died or failed has not given its lease back; whoever follows does.
        self.wait_for_quiet().await;
        self.closing = true;
        self.slots.iter().for_each(|slot| slot.shutdown.cancel());
        let end = Instant::now() + REST;
        while self.slots.iter().any(|slot| slot.running.is_some()) {
            assert!(Instant::now() < end, "a relay does not end");
            sleep(Duration::from_millis(50)).await;
            self.supervise().await;
        }
        let world = self.world();
        let mark = &world.tables.mark;
        assert_eq!(mark.owner, None, "the lease is not given back");
        let known = world.tables.confirmed().map(|c| c.encode());
        assert_eq!(known, world.kafka.checkpoint, "the mark lags at the end");
    }
}

impl World {
    /// Not published, and nothing holds it (G9).
    fn waits_unjustly(&self, id: i64, row: &Stored) -> bool {
        if self.history.done.contains(&id) {
            return false;
        }
        let Some(parked) = self.tables.parked.get(&id) else {
            return true;
        };
        let refused =
            |cause, request: Option<Request>| cause == Cause::Refused && request.is_none();
        let mut before = self.tables.parked.range(..id);
        let behind = row.key().is_some()
            && before.any(|(_, b)| b.stored.kind == row.kind && refused(b.cause, b.request));
        let held = behind
            || refused(parked.cause, parked.request)
            || self.tables.is_paused(row)
            || self.kafka.missing.contains(row.topic());
        !held
    }

    fn decide_all(&mut self, request: Request) {
        let rows = self.tables.parked.iter();
        let undecided = rows.filter(|(_, p)| p.cause == Cause::Refused && p.request.is_none());
        let ids: Vec<i64> = undecided.map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.decide(id, request));
    }
}

type Counts = BTreeMap<&'static str, u64>;

/// Runs one seed; returns what happened.
fn run(seed: u64, scenario: impl AsyncFnOnce(&mut Simulation)) -> Counts {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_time().start_paused(true);
    let runtime = runtime.build().unwrap();
    let world: Arc<Mutex<Option<Arc<Mutex<World>>>>> = Arc::default();
    let shared = Arc::clone(&world);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        runtime.block_on(async move {
            let mut simulation = Simulation::new(seed);
            *shared.lock().unwrap() = Some(Arc::clone(&simulation.world));
            scenario(&mut simulation).await;
        });
    }));
    drop(runtime);
    let world = world.lock().unwrap().take().unwrap();
    let world = world
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Err(panic) = result {
        let last = world.trace.len().saturating_sub(200);
        println!("{}", world.trace[last..].join("\n"));
        println!(
            "replay: ONCEBOX_SIMULATION_SEEDS={seed}..{} cargo test -p oncebox-relay simulation",
            seed + 1
        );
        std::panic::resume_unwind(panic);
    }
    world.counts.clone()
}

/// `N` = the first N seeds, `A..B` = these.
fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var("ONCEBOX_SIMULATION_SEEDS") else {
        return 0..64;
    };
    let number = |text: &str| text.trim().parse().unwrap();
    match text.split_once("..") {
        Some((from, to)) => number(from)..number(to),
        None => 0..number(&text),
    }
}

/// The faults really happen: a simulation in which nothing goes wrong proves nothing.
fn check_floors(total: &Counts, floors: &[(&'static str, u64)]) {
    if seeds().count() < 64 {
        return;
    }
    for (what, floor) in floors {
        let n = total.get(what).copied().unwrap_or_default();
        assert!(n >= *floor, "{what}: {n}, expected {floor} at least");
    }
}

fn run_all(scenario: &impl AsyncFn(&mut Simulation)) -> Counts {
    let mut total = Counts::new();
    for seed in seeds() {
        for (what, n) in run(seed, scenario) {
            *total.entry(what).or_default() += n;
        }
    }
    println!("{total:#?}");
    total
}

#[test]
fn every_schedule_publishes_every_committed_row_once_and_in_order() {
    let total = run_all(&async |simulation: &mut Simulation| {
        simulation.storm(Instant::now() + STORM).await;
        simulation.calm().await;
        simulation.repair().await;
        simulation.close().await;
    });
    check_floors(
        &total,
        &[
            ("commits", 1_000),
            ("rows", 2_000),
            ("rows deleted", 1_000),
            ("terms", 200),
            ("take-overs", 50),
            ("killed", 50),
            ("killed at a step", 5),
            ("paused", 50),
            ("leases given back", 20),
            ("producers fenced", 10),
            ("server restarts", 20),
            ("database calls failed", 20),
            ("database answers lost", 20),
            ("database calls out of time", 1),
            ("kafka requests failed", 20),
            ("kafka answers lost", 20),
            ("kafka outages", 20),
            ("fate: aborts", 10),
            ("fate: late", 10),
            ("fate: prepared", 10),
            ("fate: taints", 10),
            ("fate: unreported", 10),
            ("fate: vanishes", 10),
            ("transactions fenced", 30),
            ("transactions timed out", 3),
            ("checkpoints deleted", 5),
            ("repeats allowed", 2),
            ("parked: refused", 20),
            ("parked: key", 200),
            ("parked: topic", 200),
            ("refused again", 5),
            ("releases", 500),
            ("skips", 40),
            ("topics paused", 10),
            ("topics resumed", 10),
        ],
    );
}

#[test]
fn g10_a_failover_that_loses_what_was_acknowledged_stops_every_relay() {
    let total = run_all(&async |simulation: &mut Simulation| {
        simulation.world().faults = 0.3;
        let before = millis(&mut simulation.rng, 500..4_000);
        simulation.storm(Instant::now() + before).await;
        simulation.fail_over().await;
    });
    check_floors(&total, &[("failovers", 40), ("failovers with loss", 15)]);
}
