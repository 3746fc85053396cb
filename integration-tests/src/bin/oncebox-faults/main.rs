//! Faults against a relay on real PostgreSQL and Kafka: `cargo xtask faults`.
//!
//! Writers commit, roll back and hold transactions open on hot keys; two relays stand by for each other under a
//! supervisor; one fault after the other is injected, and after each the relays have to get on again by themselves. At
//! the end everything committed has to be in the topic once and in order (`history`). Exit code 1 when it is not.

mod crew;
mod fault;
mod workload;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use oncebox_integration_tests::history::{Entry, History, Place, Verdict};
use oncebox_integration_tests::proxy::Proxy;
use oncebox_integration_tests::reader::{self, Isolation, Record};
use oncebox_integration_tests::services::{
    Database, Kafka, KafkaOptions, Postgres, PostgresOptions,
};
use oncebox_migrations::Names;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};

use crate::crew::Crew;
use crate::fault::{Kind, Scene};
use crate::workload::{Counts, Workload};

const LEASE: Duration = Duration::from_secs(1);
const TRANSACTION_TIMEOUT: Duration = Duration::from_secs(4);
/// How long the relays may take to get on again after a fault.
const RECOVERY: Duration = Duration::from_secs(60);
/// A fault that did not hit, for lack of an occasion, is tried again so often.
const ATTEMPTS: usize = 3;

#[derive(Parser)]
#[command(
    name = "cargo xtask faults",
    about = "Injects faults into relays on real PostgreSQL and Kafka and checks that nothing is lost, doubled or out of order"
)]
struct Arguments {
    /// How often every kind of fault is injected.
    #[arg(long, default_value_t = 1)]
    each: usize,
    /// Only kinds whose names begin so; may be repeated.
    #[arg(long = "kind", value_name = "PREFIX")]
    kinds: Vec<String>,
    /// Decides order, times and the workload. Defaults to a random one, which is printed.
    #[arg(long)]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    // The relays are this program as well, so that they always are the code beside it.
    if std::env::args().nth(1).as_deref() == Some("relay") {
        return oncebox::main();
    }
    let arguments = Arguments::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    let outcome = runtime
        .map_err(Into::into)
        .and_then(|r| r.block_on(run(&arguments)));
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("faults: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: &Arguments) -> Result<bool> {
    let seed = arguments.seed.unwrap_or_else(rand::random);
    let replay = replay(arguments, seed);
    println!("replay: {replay}");
    let mut rng = StdRng::seed_from_u64(seed);
    let mut kinds = Kind::all();
    kinds.retain(|kind| {
        let name = kind.to_string();
        arguments.kinds.is_empty() || arguments.kinds.iter().any(|k| name.starts_with(k.as_str()))
    });
    if kinds.is_empty() || arguments.each == 0 {
        bail!("no fault has such a name, or --each is 0");
    }
    let mut plan: Vec<Kind> = (0..arguments.each).flat_map(|_| kinds.clone()).collect();
    plan.shuffle(&mut rng);

    let scratch = tempfile::tempdir()?;
    let (mut scene, topic) = set(scratch.path()).await?;
    let workload = Workload::start(&scene.database, &topic, seed).await?;
    let counts = std::sync::Arc::clone(&workload.counts);
    recovered(&scene).await?;
    let mut hits = BTreeMap::<String, Tally>::new();
    let start = Instant::now();
    for (n, kind) in plan.iter().enumerate() {
        let tally = hits.entry(kind.to_string()).or_default();
        let recovery = disturb(&mut scene, *kind, &mut rng)
            .await
            .with_context(|| format!("fault {n}, {kind}; {replay}"))?;
        match recovery {
            Some(took) => {
                tally.hits += 1;
                tally.slowest = tally.slowest.max(took);
            }
            None => tally.missed += 1,
        }
        if (n + 1) % 25 == 0 {
            println!(
                "{} of {} faults, {:.0?}",
                n + 1,
                plan.len(),
                start.elapsed()
            );
        }
    }
    scene.proxy.clear();
    workload.finish().await?;
    let Scene {
        kafka,
        database,
        crew,
        postgres,
        ..
    } = scene;
    crew.finish().await?;

    let verdict = verdict(&database, kafka.bootstrap(), &topic).await?;
    let uncommitted = reader::read(kafka.bootstrap(), &topic, Isolation::ReadUncommitted).await?;
    print(
        &hits,
        &verdict,
        &counts,
        uncommitted.len() - verdict.published,
    );
    drop(postgres);
    let complete = hits.values().all(|tally| tally.missed == 0);
    if !complete || !verdict.is_clean() {
        println!("FAILED; replay: {replay}");
    }
    Ok(complete && verdict.is_clean())
}

fn replay(arguments: &Arguments, seed: u64) -> String {
    let mut words = vec![format!(
        "cargo xtask faults --seed {seed} --each {}",
        arguments.each
    )];
    words.extend(arguments.kinds.iter().map(|kind| format!("--kind {kind}")));
    words.join(" ")
}

/// Services, an outbox, a topic and two relays that reach Kafka through the proxy.
async fn set(scratch: &std::path::Path) -> Result<(Scene, String)> {
    let (postgres, kafka) = tokio::try_join!(
        Postgres::start(PostgresOptions::default()),
        Kafka::start(KafkaOptions::default()),
    )?;
    let database = Database::create_on(&postgres).await?;
    oncebox_migrations::migrate(database.url(), &Names::default()).await?;
    let topic = kafka.create_topic("orders", 4).await;
    let proxy = Proxy::start(&kafka).await?;
    let millis = |d: Duration| format!("{}ms", d.as_millis());
    let arguments = [
        ("--database-url", database.url().to_owned()),
        ("--kafka", proxy.bootstrap().to_owned()),
        ("--source", "shop".to_owned()),
        ("--lease", millis(LEASE)),
        ("--transaction-timeout", millis(TRANSACTION_TIMEOUT)),
        ("--mark-interval", "50ms".to_owned()),
        ("--retention", "5s".to_owned()),
    ];
    let mut all = vec!["relay".to_owned()];
    all.extend(
        arguments
            .into_iter()
            .flat_map(|(flag, value)| [flag.to_owned(), value]),
    );
    let crew = Crew::start(2, all, scratch.join("relays.log"));
    let scene = Scene {
        postgres,
        kafka,
        proxy,
        database,
        crew,
        lease: LEASE,
        transaction_timeout: TRANSACTION_TIMEOUT,
    };
    Ok((scene, topic))
}

/// One fault and the recovery from it: how long that took, `None` if the fault never hit.
async fn disturb(scene: &mut Scene, kind: Kind, rng: &mut StdRng) -> Result<Option<Duration>> {
    for _ in 0..ATTEMPTS {
        // In the middle of something, not always at the same place.
        tokio::time::sleep(Duration::from_millis(rng.random_range(0..200))).await;
        let hit = scene.inject(kind, rng).await?;
        scene.proxy.clear();
        let start = Instant::now();
        recovered(scene).await?;
        scene.crew.check().await?;
        if hit {
            return Ok(Some(start.elapsed()));
        }
    }
    Ok(None)
}

/// Waits until relays commit again.
async fn recovered(scene: &Scene) -> Result<()> {
    let deadline = Instant::now() + RECOVERY;
    let mut first = None;
    loop {
        if let Ok(seq) = scene.seq().await {
            // Two more transactions: one may have been under way.
            if seq >= *first.get_or_insert(seq) + 2 {
                return Ok(());
            }
        }
        if Instant::now() > deadline {
            let said = scene.crew.log_end();
            bail!("nothing was published for {RECOVERY:?}; {said}");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Compares the database with the topic.
async fn verdict(database: &Database, bootstrap: &str, topic: &str) -> Result<Verdict> {
    let records = reader::read(bootstrap, topic, Isolation::ReadCommitted).await?;
    let published: Result<Vec<_>> = records.iter().map(published).collect();
    let history = History {
        committed: workload::committed(database).await?,
        published: published?,
        effects: None,
    };
    Ok(history.check())
}

fn published(record: &Record) -> Result<(Entry, Place)> {
    let entry = Entry {
        id: record
            .header("oncebox-id")
            .context("a record without an id")?
            .parse()?,
        key: record
            .key_text()
            .context("a record without a key")?
            .to_owned(),
        number: record
            .payload_text()
            .context("a record without a payload")?
            .parse()?,
    };
    let place = Place {
        partition: record.partition,
        offset: record.offset,
    };
    Ok((entry, place))
}

/// How often a kind hit, how often it found no occasion, and the slowest recovery.
#[derive(Clone, Copy, Default)]
struct Tally {
    hits: usize,
    missed: usize,
    slowest: Duration,
}

fn print(hits: &BTreeMap<String, Tally>, verdict: &Verdict, counts: &Counts, aborted: usize) {
    println!(
        "\n{:<34} {:>5} {:>7} {:>17}",
        "fault", "hits", "missed", "slowest recovery"
    );
    for (kind, tally) in hits {
        let slowest = tally.slowest.as_secs_f64();
        println!(
            "{:<34} {:>5} {:>7} {slowest:>15.1} s",
            kind, tally.hits, tally.missed
        );
    }
    let faults: usize = hits.values().map(|t| t.hits).sum();
    println!("{:<34} {faults:>5}", "all");
    let load = |n: &std::sync::atomic::AtomicUsize| n.load(Relaxed);
    println!(
        "\ntransactions: {} committed, {} rolled back, {} held open, {} whose commit got no answer",
        load(&counts.committed),
        load(&counts.rolled_back),
        load(&counts.slow),
        load(&counts.unknown),
    );
    println!(
        "rows: {} committed, {} published on {} keys; {aborted} records of aborted transactions stay invisible",
        verdict.committed, verdict.published, verdict.keys
    );
    let names = [
        "lost",
        "duplicate",
        "inversion",
        "phantom",
        "altered",
        "scattered",
    ];
    let found: Vec<_> = names
        .map(|name| format!("{name} {}", verdict.count(name)))
        .into();
    println!("{}", found.join(", "));
    for violation in verdict.violations.iter().take(20) {
        println!("  {violation}");
    }
}
