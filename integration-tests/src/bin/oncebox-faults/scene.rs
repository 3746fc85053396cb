//! Where faults happen: private servers, an outbox, a topic, two relays and two consumers, writers at work.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use oncebox_integration_tests::cable::Cable;
use oncebox_integration_tests::history::{Entry, History, Place, Verdict};
use oncebox_integration_tests::proxy::Proxy;
use oncebox_integration_tests::reader::{self, Isolation, Record};
use oncebox_integration_tests::services::{
    Database, Kafka, KafkaOptions, Postgres, PostgresOptions,
};
use oncebox_migrations::Names;
use sqlx::postgres::PgConnectOptions;

use crate::consumer;
use crate::crew::{self, Crew};
use crate::kind::Stage;
use crate::offsets::Offsets;
use crate::watch::Watch;
use crate::workload::{self, Counts, Workload};

pub(crate) const SOURCE: &str = "shop";
/// Of the topic.
pub(crate) const PARTITIONS: i32 = 4;
const TRANSACTION_TIMEOUT: Duration = Duration::from_secs(4);
/// How long all may take to get on again after a fault, on a machine that several scenes share. How long it did take is reported.
pub(crate) const RECOVERY: Duration = Duration::from_secs(180);
/// A disk that a few minutes of the workload do not fill.
const SMALL_DISK: u64 = 300 << 20;

/// What faults act on.
pub(crate) struct Scene {
    pub(crate) postgres: Postgres,
    pub(crate) kafka: Kafka,
    /// Between each relay and its database.
    pub(crate) cables: Vec<Cable>,
    /// Between everybody else and the databases.
    pub(crate) cable: Cable,
    /// Between the relays and Kafka.
    pub(crate) proxy: Proxy,
    /// Between the consumers and Kafka.
    pub(crate) consumers_proxy: Proxy,
    pub(crate) database: Database,
    pub(crate) inventory: Database,
    pub(crate) topic: String,
    pub(crate) relays: Crew,
    pub(crate) consumers: Crew,
    pub(crate) lease: Duration,
    pub(crate) transaction_timeout: Duration,
    pub(crate) counts: Arc<Counts>,
    pub(crate) watch: Watch,
    /// Rows that were seen parked.
    pub(crate) parked: usize,
    /// Of faults that have an outbox or a topic of their own.
    pub(crate) apart: Vec<History>,
    /// A server for those.
    pub(crate) spare: Option<Postgres>,
    scratch: tempfile::TempDir,
    workload: Workload,
    offsets: Offsets,
}

impl Scene {
    /// Starts everything and waits until it runs.
    pub(crate) async fn set(stage: Stage, lease: Duration, seed: u64) -> Result<Self> {
        let scratch = tempfile::tempdir()?;
        let (postgres, kafka) = servers(stage).await?;
        let database = Database::create_on(&postgres).await?;
        let inventory = Database::create_on(&postgres).await?;
        for database in [&database, &inventory] {
            oncebox_migrations::migrate(database.url(), &Names::default()).await?;
        }
        consumer::create_table(&inventory).await?;
        let topic = kafka.create_topic("orders", PARTITIONS).await;
        let proxy = Proxy::start(&kafka).await?;
        let consumers_proxy = Proxy::start(&kafka).await?;
        let server = address(&database);
        let cables = [Cable::start(server).await?, Cable::start(server).await?];
        let cable = Cable::start(server).await?;
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
            ("--database-url", &*carried_url(&inventory, server, &cable)),
            ("--kafka", consumers_proxy.bootstrap()),
            ("--topic", &topic),
        ];
        let relays = cables.each_ref().map(|cable| {
            let mut all = words("relay", &relay);
            all.extend([
                "--database-url".to_owned(),
                carried_url(&database, server, cable),
            ]);
            all
        });
        let consumers = vec![words("consumer", &consumer); 2];
        let (through, inventory_through) =
            (carried(&database, &cable), carried(&inventory, &cable));
        let workload = Workload::start(&through, &topic, seed).await?;
        let watch = Watch::new(through.clone(), inventory_through.clone());
        let offsets = Offsets::watch(&kafka, watch, &topic)?;
        let scene = Self {
            postgres,
            kafka,
            cables: cables.into(),
            cable,
            proxy,
            consumers_proxy,
            database,
            inventory,
            topic,
            relays: Crew::start(relays.into(), scratch.path().join("relays.log")),
            consumers: Crew::start(consumers, scratch.path().join("consumers.log")),
            lease,
            transaction_timeout: TRANSACTION_TIMEOUT,
            counts: Arc::clone(&workload.counts),
            watch: Watch::new(through, inventory_through),
            parked: 0,
            apart: Vec::new(),
            spare: None,
            scratch,
            workload,
            offsets,
        };
        Ok(scene)
    }

    /// The file for what a fault's own processes write.
    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Waits until relays commit and consumers work again.
    pub(crate) async fn recovered(&self) -> Result<()> {
        let deadline = Instant::now() + RECOVERY;
        let (mut first_seq, mut first_effect) = (None, None);
        loop {
            // While the database is down, nothing is known.
            if let (Ok(seq), Ok(effect)) = (self.watch.seq().await, self.watch.effects().await)
                // Two more transactions: one may have been under way.
                && seq >= *first_seq.get_or_insert(seq) + 2
                && effect > *first_effect.get_or_insert(effect)
            {
                return Ok(());
            }
            if Instant::now() > deadline {
                let (relays, consumers) = (self.relays.log_end(), self.consumers.log_end());
                let brokers = self.kafka.log_tail().await?;
                bail!(
                    "nothing got on for {RECOVERY:?}; relays: {relays}\nconsumers: {consumers}\nKafka: {brokers}"
                );
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }

    /// Lets everything that was committed arrive, ends all, and compares what happened. Also how many records of aborted
    /// transactions there are.
    pub(crate) async fn end(self) -> Result<(Verdict, usize)> {
        self.workload.finish().await?;
        self.proxy.clear();
        self.consumers_proxy.clear();
        let log = self.relays.log.clone();
        self.relays.finish().await?;
        let relay = [
            ("--database-url", self.database.url()),
            ("--kafka", self.kafka.bootstrap()),
            ("--source", SOURCE),
        ];
        crew::until_empty(words("relay", &relay), &log).await?;
        let committed = workload::committed(&self.database).await?;
        let (mut before, mut moved) = (0, Instant::now());
        loop {
            let effects = consumer::count(&self.inventory).await?;
            if effects >= i64::try_from(committed.len())? {
                break;
            }
            if effects > before {
                (before, moved) = (effects, Instant::now());
            }
            if moved.elapsed() > RECOVERY {
                // What is missing is lost, and the verdict will say so.
                let state = consumer::state(&self.inventory).await?;
                let log = self.consumers.log_end();
                println!("the consumers do not get on: {state}; {log}");
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        // A second effect would come late.
        tokio::time::sleep(Duration::from_secs(1)).await;
        self.consumers.finish().await?;

        let published = published(&self.kafka, &self.topic).await?;
        let bootstrap = self.kafka.bootstrap();
        let all = reader::read(bootstrap, &self.topic, Isolation::ReadUncommitted).await?;
        let aborted = all.len() - published.len();
        let history = History {
            committed,
            published,
            effects: Some(consumer::effects(&self.inventory).await?),
            acknowledged: self.offsets.seen().await?,
        };
        let mut verdict = history.check();
        for history in &self.apart {
            verdict.add(history.check());
        }
        Ok((verdict, aborted))
    }
}

async fn servers(stage: Stage) -> Result<(Postgres, Kafka)> {
    let kafka = match stage {
        Stage::ThreeBrokers => KafkaOptions {
            brokers: 3,
            // The others take over from a dead broker so soon.
            properties: [
                ("broker.session.timeout.ms", "2000"),
                ("broker.heartbeat.interval.ms", "500"),
            ]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
            ..KafkaOptions::default()
        },
        Stage::Plain | Stage::SmallDisk => KafkaOptions {
            // Several scenes share the machine.
            light: true,
            ..KafkaOptions::default()
        },
    };
    let postgres = PostgresOptions {
        // Few, so that they can be exhausted soon, and a log that is soon used again.
        settings: [
            ("max_connections", "60"),
            ("max_wal_size", "64MB"),
            // The order of the effects is that of their commits.
            ("track_commit_timestamp", "on"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into(),
        disk: (stage == Stage::SmallDisk).then_some(SMALL_DISK),
        ..PostgresOptions::default()
    };
    tokio::try_join!(Postgres::start(postgres), Kafka::start(kafka))
}

/// Where the server of a database listens.
pub(crate) fn address(database: &Database) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, database.options().get_port()))
}

fn carried(database: &Database, cable: &Cable) -> PgConnectOptions {
    database.options().port(cable.address().port())
}

fn carried_url(database: &Database, server: SocketAddr, cable: &Cable) -> String {
    let (direct, carried) = (server.to_string(), cable.address().to_string());
    database.url().replace(&direct, &carried)
}

/// A command line.
pub(crate) fn words(command: &str, options: &[(&str, &str)]) -> Vec<String> {
    let options = options.iter().flat_map(|(flag, value)| [*flag, *value]);
    command
        .split(' ')
        .chain(options)
        .map(str::to_owned)
        .collect()
}

/// What a `read_committed` reader sees in a topic.
pub(crate) async fn published(kafka: &Kafka, topic: &str) -> Result<Vec<(Entry, Place)>> {
    let records = reader::read(kafka.bootstrap(), topic, Isolation::ReadCommitted).await?;
    records.iter().map(entry).collect()
}

fn entry(record: &Record) -> Result<(Entry, Place)> {
    let id = record.header("oncebox-id");
    let payload = record.payload_text();
    let entry = Entry {
        id: id.context("a record without an id")?.parse()?,
        key: record
            .key_text()
            .context("a record without a key")?
            .to_owned(),
        number: workload::number(payload.context("a record without a payload")?)?,
    };
    let place = Place {
        partition: record.partition,
        offset: record.offset,
    };
    Ok((entry, place))
}
