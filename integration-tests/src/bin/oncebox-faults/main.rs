//! Faults against relays and consumers on real PostgreSQL and Kafka: `cargo xtask faults`.
//!
//! Writers commit, roll back and hold transactions open on hot keys; two relays stand by for each other, and two
//! consumers share the topic, all under supervisors; one fault after the other is injected, and after each they have to
//! get on again by themselves. Several such scenes run at once, because most of a fault is waiting. At the end everything
//! committed has to be in the topic once and in order, and has to have its effect once and in order (`history`). Exit
//! code 1 when it does not.

mod consumer;
mod crew;
mod fault;
mod kind;
mod offsets;
mod outcome;
mod scene;
mod takeover;
mod watch;
mod workload;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use tokio::task::JoinSet;

use crate::kind::{Kind, Stage};
use crate::outcome::Outcome;
use crate::scene::Scene;

/// Of the relays under random faults; take-overs are measured with the default.
const LEASE: Duration = Duration::from_secs(1);

#[derive(Parser)]
#[command(
    name = "cargo xtask faults",
    about = "Injects faults into relays and consumers on real PostgreSQL and Kafka and checks that nothing is lost, doubled or out of order"
)]
struct Arguments {
    /// How often every kind of fault is injected.
    #[arg(long, default_value_t = 1)]
    each: usize,
    /// At least so many in all: filled up with those that are over in a second, lost, late and doubled requests and cuts.
    #[arg(long, default_value_t = 0)]
    all: usize,
    /// Only kinds whose names begin so; may be repeated.
    #[arg(long = "kind", value_name = "PREFIX")]
    kinds: Vec<String>,
    /// Instead of that, measures so often each how long nothing is published when the leader is killed, stopped, paused or
    /// cut off from its database, with the default lease.
    #[arg(long, value_name = "RUNS")]
    takeover: Option<usize>,
    /// Decides order, times and the workload. Defaults to a random one, which is printed.
    #[arg(long)]
    seed: Option<u64>,
    /// So many at once, each with servers of its own; a small disk and a cluster of three brokers are two more.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=32))]
    scenes: u64,
}

fn main() -> ExitCode {
    // Relays and consumers are this program as well, so that they always are the code beside it.
    let outcome = match std::env::args().nth(1).as_deref() {
        Some("relay") => return oncebox::main(),
        Some("consumer") => {
            let options = consumer::Options::parse_from(std::env::args_os().skip(1));
            in_runtime(consumer::process(options))
        }
        _ => {
            let arguments = Arguments::parse();
            match arguments.takeover {
                Some(runs) => in_runtime(takeover::measure(runs)),
                None => in_runtime(run(&arguments)),
            }
        }
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("faults: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn in_runtime(work: impl Future<Output = Result<ExitCode>>) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(work)
}

async fn run(arguments: &Arguments) -> Result<ExitCode> {
    let seed = arguments.seed.unwrap_or_else(rand::random);
    let replay = replay(arguments, seed);
    println!("replay: {replay}");
    let mut kinds = Kind::all();
    kinds.retain(|kind| {
        let name = kind.to_string();
        arguments.kinds.is_empty() || arguments.kinds.iter().any(|k| name.starts_with(k.as_str()))
    });
    if kinds.is_empty() || arguments.each == 0 {
        bail!("no fault has such a name, or --each is 0");
    }
    let mut plan: Vec<Kind> = (0..arguments.each).flat_map(|_| kinds.clone()).collect();
    let quick = kinds.iter().copied().filter(|kind| kind.is_quick());
    plan.extend(quick.cycle().take(arguments.all.saturating_sub(plan.len())));
    plan.shuffle(&mut StdRng::seed_from_u64(seed));
    let progress = Progress::new(plan.len());
    let mut running = JoinSet::new();
    for (n, (stage, faults)) in deal(plan, arguments.scenes).into_iter().enumerate() {
        let seed = seed.wrapping_add(n as u64);
        running.spawn(act(n, stage, faults, seed, Arc::clone(&progress)));
    }
    let mut outcome = Outcome::default();
    while let Some(done) = running.join_next().await {
        outcome.add(done?.with_context(|| format!("replay: {replay}"))?);
    }
    outcome.print();
    if outcome.is_clean() {
        return Ok(ExitCode::SUCCESS);
    }
    println!("FAILED; replay: {replay}");
    Ok(ExitCode::FAILURE)
}

fn replay(arguments: &Arguments, seed: u64) -> String {
    let mut words = vec![format!(
        "cargo xtask faults --seed {seed} --each {} --scenes {}",
        arguments.each, arguments.scenes
    )];
    if arguments.all > 0 {
        words.push(format!("--all {}", arguments.all));
    }
    words.extend(arguments.kinds.iter().map(|kind| format!("--kind {kind}")));
    words.join(" ")
}

/// Which faults each scene gets; those that take longest to begin come first.
fn deal(plan: Vec<Kind>, scenes: u64) -> Vec<(Stage, Vec<Kind>)> {
    let mut dealt: Vec<(Stage, Vec<Kind>)> = [Stage::ThreeBrokers, Stage::SmallDisk]
        .into_iter()
        .chain((0..scenes).map(|_| Stage::Plain))
        .map(|stage| (stage, Vec::new()))
        .collect();
    for kind in plan {
        let smallest = dealt
            .iter_mut()
            .filter(|(stage, _)| *stage == kind.stage())
            .min_by_key(|(_, faults)| faults.len());
        if let Some((_, faults)) = smallest {
            faults.push(kind);
        }
    }
    dealt.retain(|(_, faults)| !faults.is_empty());
    dealt
}

/// One scene from beginning to end.
async fn act(
    n: usize,
    stage: Stage,
    faults: Vec<Kind>,
    seed: u64,
    progress: Arc<Progress>,
) -> Result<Outcome> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut scene = {
        // One after the other: several servers that start at once starve the relays that wait for them.
        let _turn = progress.turn.lock().await;
        let scene = Scene::set(stage, LEASE, seed).await?;
        scene
            .recovered()
            .await
            .with_context(|| format!("scene {n} does not begin"))?;
        scene
    };
    let mut outcome = Outcome::default();
    for (number, kind) in faults.iter().enumerate() {
        let recovery = scene.disturb(*kind, &mut rng).await.with_context(|| {
            let relays = scene.relays.log_end();
            format!("scene {n}, fault {number}, {kind}; of its relays {relays}\n")
        })?;
        outcome.hit(*kind, recovery);
        progress.one_more();
    }
    outcome
        .end(scene)
        .await
        .with_context(|| format!("scene {n}"))?;
    Ok(outcome)
}

/// How many faults are done, and whose turn it is to begin.
struct Progress {
    turn: tokio::sync::Mutex<()>,
    start: Instant,
    done: AtomicUsize,
    all: usize,
}

impl Progress {
    fn new(all: usize) -> Arc<Self> {
        Arc::new(Self {
            turn: tokio::sync::Mutex::default(),
            start: Instant::now(),
            done: AtomicUsize::new(0),
            all,
        })
    }

    fn one_more(&self) {
        let done = self.done.fetch_add(1, Relaxed) + 1;
        if done.is_multiple_of(50) {
            let elapsed = self.start.elapsed();
            println!("{done} of {} faults, {elapsed:.0?}", self.all);
        }
    }
}
