//! Faults against relays and consumers on real PostgreSQL and Kafka: `cargo xtask faults`.
//!
//! Writers commit, roll back and hold transactions open on hot keys; two relays stand by for each other, and two
//! consumers share the topic, all under supervisors; one fault after the other is injected, and after each they have to
//! get on again by themselves. At the end everything committed has to be in the topic once and in order, and has to have
//! its effect once and in order (`history`). Exit code 1 when it does not.

mod consumer;
mod crew;
mod fault;
mod takeover;
mod workload;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use oncebox_integration_tests::cable::Cable;
use oncebox_integration_tests::history::{Entry, History, Place, Verdict, Violation};
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

const SOURCE: &str = "shop";
/// Of the relays under random faults; take-overs are measured with the default.
const LEASE: Duration = Duration::from_secs(1);
const TRANSACTION_TIMEOUT: Duration = Duration::from_secs(4);
/// How long the relays may take to get on again after a fault.
const RECOVERY: Duration = Duration::from_secs(60);
/// A fault that did not hit, for lack of an occasion, is tried again so often.
const ATTEMPTS: usize = 3;

#[derive(Parser)]
#[command(
    name = "cargo xtask faults",
    about = "Injects faults into relays and consumers on real PostgreSQL and Kafka and checks that nothing is lost, doubled or out of order"
)]
struct Arguments {
    /// How often every kind of fault is injected.
    #[arg(long, default_value_t = 1)]
    each: usize,
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
    let (mut scene, topic) = set(scratch.path(), LEASE).await?;
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
    workload.finish().await?;
    let (history, aborted) = end(scene, &topic).await?;
    let verdict = history.check();
    print(&hits, &verdict, &counts, aborted);
    let complete = hits.values().all(|tally| tally.missed == 0);
    if complete && verdict.is_clean() {
        return Ok(ExitCode::SUCCESS);
    }
    println!("FAILED; replay: {replay}");
    Ok(ExitCode::FAILURE)
}

fn replay(arguments: &Arguments, seed: u64) -> String {
    let mut words = vec![format!(
        "cargo xtask faults --seed {seed} --each {}",
        arguments.each
    )];
    words.extend(arguments.kinds.iter().map(|kind| format!("--kind {kind}")));
    words.join(" ")
}

/// Services, an outbox, a topic, two relays and two consumers, which reach Kafka through proxies.
async fn set(scratch: &std::path::Path, lease: Duration) -> Result<(Scene, String)> {
    let (postgres, kafka) = tokio::try_join!(
        Postgres::start(PostgresOptions::default()),
        Kafka::start(KafkaOptions::default()),
    )?;
    let database = Database::create_on(&postgres).await?;
    let inventory = Database::create_on(&postgres).await?;
    for database in [&database, &inventory] {
        oncebox_migrations::migrate(database.url(), &Names::default()).await?;
    }
    consumer::create_table(&inventory).await?;
    let topic = kafka.create_topic("orders", 4).await;
    let proxy = Proxy::start(&kafka).await?;
    let consumers_proxy = Proxy::start(&kafka).await?;
    let options = database.options();
    let server = SocketAddr::from((Ipv4Addr::LOCALHOST, options.get_port()));
    let cables = [Cable::start(server).await?, Cable::start(server).await?];
    let carried_url = |cable: &Cable| {
        let (direct, carried) = (server.to_string(), cable.address().to_string());
        database.url().replace(&direct, &carried)
    };
    let millis = |d: Duration| format!("{}ms", d.as_millis());
    let relay = [
        ("--kafka", proxy.bootstrap()),
        ("--source", SOURCE),
        ("--lease", &millis(lease)),
        ("--transaction-timeout", &millis(TRANSACTION_TIMEOUT)),
        ("--mark-interval", "50ms"),
        ("--retention", "5s"),
    ];
    let consumer = [
        ("--database-url", inventory.url()),
        ("--kafka", consumers_proxy.bootstrap()),
        ("--topic", &topic),
    ];
    let relays = cables.each_ref().map(|cable| {
        let mut all = words("relay", &relay);
        all.extend(["--database-url".to_owned(), carried_url(cable)]);
        all
    });
    let consumers = vec![words("consumer", &consumer); 2];
    let scene = Scene {
        postgres,
        kafka,
        cables: cables.into(),
        proxy,
        consumers_proxy,
        database,
        inventory,
        relays: Crew::start(relays.into(), scratch.join("relays.log")),
        consumers: Crew::start(consumers, scratch.join("consumers.log")),
        lease,
        transaction_timeout: TRANSACTION_TIMEOUT,
    };
    Ok((scene, topic))
}

fn words(command: &str, options: &[(&str, &str)]) -> Vec<String> {
    let options = options.iter().flat_map(|(flag, value)| [*flag, *value]);
    std::iter::once(command)
        .chain(options)
        .map(str::to_owned)
        .collect()
}

/// Lets everything that was committed arrive, ends all, and collects what happened. Also how many records of aborted
/// transactions there are.
async fn end(scene: Scene, topic: &str) -> Result<(History, usize)> {
    scene.proxy.clear();
    scene.consumers_proxy.clear();
    let log = scene.relays.log.clone();
    scene.relays.finish().await?;
    let relay = [
        ("--database-url", scene.database.url()),
        ("--kafka", scene.kafka.bootstrap()),
        ("--source", SOURCE),
    ];
    crew::until_empty(words("relay", &relay), &log).await?;
    let committed = workload::committed(&scene.database).await?;
    let deadline = Instant::now() + 2 * RECOVERY;
    while consumer::count(&scene.inventory).await? < i64::try_from(committed.len())? {
        if Instant::now() > deadline {
            // What is missing is lost, and the verdict will say so.
            println!("the consumers do not get on; {}", scene.consumers.log_end());
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // A second effect would come late.
    tokio::time::sleep(Duration::from_secs(1)).await;
    scene.consumers.finish().await?;

    let bootstrap = scene.kafka.bootstrap();
    let records = reader::read(bootstrap, topic, Isolation::ReadCommitted).await?;
    let all = reader::read(bootstrap, topic, Isolation::ReadUncommitted).await?;
    let aborted = all.len() - records.len();
    let published: Result<Vec<_>> = records.iter().map(published).collect();
    let history = History {
        committed,
        published: published?,
        effects: Some(consumer::effects(&scene.inventory).await?),
    };
    Ok((history, aborted))
}

/// One fault and the recovery from it: how long that took from the end of the fault, `None` if the fault never hit.
async fn disturb(scene: &mut Scene, kind: Kind, rng: &mut StdRng) -> Result<Option<Duration>> {
    for _ in 0..ATTEMPTS {
        // In the middle of something, not always at the same place.
        tokio::time::sleep(Duration::from_millis(rng.random_range(0..200))).await;
        let hit = scene.inject(kind, rng).await?;
        scene.proxy.clear();
        scene.consumers_proxy.clear();
        let start = Instant::now();
        recovered(scene).await?;
        scene.relays.check().await?;
        scene.consumers.check().await?;
        if hit {
            return Ok(Some(start.elapsed()));
        }
    }
    Ok(None)
}

/// Waits until relays commit and consumers work again.
async fn recovered(scene: &Scene) -> Result<()> {
    let deadline = Instant::now() + RECOVERY;
    let (mut first_seq, mut first_count) = (None, None);
    loop {
        // While the database is down, nothing is known.
        if let (Ok(seq), Ok(count)) = (scene.seq().await, consumer::count(&scene.inventory).await)
            // Two more transactions: one may have been under way.
            && seq >= *first_seq.get_or_insert(seq) + 2
            && count > *first_count.get_or_insert(count)
        {
            return Ok(());
        }
        if Instant::now() > deadline {
            let (relays, consumers) = (scene.relays.log_end(), scene.consumers.log_end());
            bail!("nothing got on for {RECOVERY:?}; relays: {relays}\nconsumers: {consumers}");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
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
        "rows: {} committed, {} published on {} keys, {} effects; {aborted} records of aborted transactions stay invisible",
        verdict.committed, verdict.published, verdict.keys, verdict.effects
    );
    let found = Violation::NAMES.map(|name| format!("{name} {}", verdict.count(name)));
    println!("{}", found.join(", "));
    for violation in verdict.violations.iter().take(20) {
        println!("  {violation}");
    }
}
