//! An outbox in a database of its own, the topic that it feeds, and relays for it as separate processes that a test may
//! kill.

use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use oncebox_migrations::Names;
use oncebox_outbox::{Config, Message, Outbox};
use sqlx::{PgConnection, Postgres as Pg, Transaction};
use tokio::process::{Child, Command};

use crate::reader::{self, Record};
use crate::services::{self, Database, Postgres, process};

/// How long a test waits for what must happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// The lease of the relays here: short, so that a killed one costs little.
const LEASE: &str = "400ms";

/// An outbox, its topic, and the name under which relays publish it.
#[derive(Debug)]
pub struct Source {
    /// The database with the outbox.
    pub database: Database,
    /// The topic, with four partitions.
    pub topic: String,
    /// The relay's `--source`.
    pub name: String,
    /// The broker.
    pub bootstrap: String,
    outbox: Outbox,
}

impl Source {
    /// On the shared services.
    pub async fn create() -> Self {
        Self::in_database(Database::create().await).await
    }

    /// On a private database server.
    ///
    /// # Panics
    /// The server refuses.
    pub async fn create_on(postgres: &Postgres) -> Self {
        match Database::create_on(postgres).await {
            Ok(database) => Self::in_database(database).await,
            Err(refused) => panic!("cannot create a database: {refused:#}"),
        }
    }

    async fn in_database(database: Database) -> Self {
        let kafka = services::kafka().await;
        if let Err(error) = oncebox_migrations::migrate(database.url(), &Names::default()).await {
            panic!("cannot migrate: {error}");
        }
        let topic = kafka.create_topic("orders", 4).await;
        let name = format!("s-{}", uuid::Uuid::new_v4().simple());
        let bootstrap = kafka.bootstrap().to_owned();
        Self {
            database,
            topic,
            name,
            bootstrap,
            outbox: Outbox::new(Config::default()),
        }
    }

    /// Enqueues one message whose payload is `text`.
    ///
    /// # Panics
    /// It is refused.
    pub async fn enqueue(&self, tx: &mut Transaction<'_, Pg>, key: &str, text: &str) {
        let message = Message::new(&self.topic)
            .key(key.to_owned())
            .payload(text.to_owned());
        if let Err(error) = self.outbox.enqueue(tx, message).await {
            panic!("enqueue: {error}");
        }
    }

    /// The same, taking the key's lock first.
    ///
    /// # Panics
    /// It is refused.
    pub async fn enqueue_ordered(&self, tx: &mut Transaction<'_, Pg>, key: &str, text: &str) {
        let message = Message::new(&self.topic)
            .key(key.to_owned())
            .payload(text.to_owned());
        if let Err(error) = self.outbox.enqueue_ordered(tx, message).await {
            panic!("enqueue_ordered: {error}");
        }
    }

    /// Enqueues and commits one message.
    pub async fn commit(&self, key: &str, text: &str) {
        self.commit_all(key, &[text]).await;
    }

    /// Enqueues and commits several messages in one transaction.
    ///
    /// # Panics
    /// The database refuses.
    pub async fn commit_all(&self, key: &str, texts: &[&str]) {
        let mut conn = self.database.connect().await;
        let mut tx = begin(&mut conn).await;
        for text in texts {
            self.enqueue(&mut tx, key, text).await;
        }
        if let Err(error) = tx.commit().await {
            panic!("commit: {error}");
        }
    }

    /// What a `read_committed` consumer has seen of the topic by now.
    pub async fn published(&self) -> Vec<Record> {
        reader::committed(&self.bootstrap, &self.topic).await
    }

    /// The payloads of it, sorted: what is there twice shows twice.
    pub async fn texts(&self) -> Vec<String> {
        let records = self.published().await;
        let mut texts: Vec<_> = records
            .iter()
            .filter_map(Record::payload_text)
            .map(str::to_owned)
            .collect();
        texts.sort();
        texts
    }

    /// Waits until every one of these payloads was seen, and checks that nothing else was, and nothing twice.
    ///
    /// # Panics
    /// They are not there after a minute, or something else is.
    pub async fn expect(&self, expected: &[&str]) {
        let mut expected: Vec<_> = expected.iter().map(|text| (*text).to_owned()).collect();
        expected.sort();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let texts = self.texts().await;
            if texts.len() >= expected.len() || Instant::now() > deadline {
                assert_eq!(
                    texts, expected,
                    "published (left) and committed (right) differ"
                );
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The arguments that every relay of this source gets.
    pub fn arguments(&self) -> Vec<String> {
        self.arguments_through(&self.bootstrap)
    }

    /// The same, reaching Kafka elsewhere: through a proxy.
    pub fn arguments_through(&self, bootstrap: &str) -> Vec<String> {
        let pairs = [
            ("--database-url", self.database.url()),
            ("--kafka", bootstrap),
            ("--source", &self.name),
            ("--lease", LEASE),
            ("--mark-interval", "50ms"),
        ];
        let mut arguments = vec!["relay".to_owned()];
        arguments.extend(
            pairs
                .into_iter()
                .flat_map(|(flag, value)| [flag.to_owned(), value.to_owned()]),
        );
        arguments
    }
}

/// Begins a transaction.
///
/// # Panics
/// The database refuses.
pub async fn begin(conn: &mut PgConnection) -> Transaction<'_, Pg> {
    match sqlx::Connection::begin(conn).await {
        Ok(tx) => tx,
        Err(error) => panic!("begin: {error}"),
    }
}

/// Sends a signal, for example `STOP`, to a process.
///
/// # Errors
/// There is no such process.
pub fn signal(pid: u32, name: &str) -> anyhow::Result<()> {
    process::kill(&pid.to_string(), name)
}

/// A child process; killed when dropped. What it wrote is printed when a test fails.
#[derive(Debug)]
pub struct Process {
    child: Child,
    output: tempfile::NamedTempFile,
}

impl Process {
    /// Starts `program` with these arguments.
    ///
    /// # Panics
    /// It does not start.
    pub fn start<S: AsRef<str>>(program: &str, arguments: &[S]) -> Self {
        let started = (|| {
            let output = tempfile::NamedTempFile::new()?;
            let child = Command::new(program)
                .args(arguments.iter().map(AsRef::as_ref))
                .env("RUST_LOG", "info,librdkafka=warn")
                .stdin(Stdio::null())
                .stdout(output.reopen()?)
                .stderr(output.reopen()?)
                .kill_on_drop(true)
                .spawn()?;
            Ok::<_, std::io::Error>(Self { child, output })
        })();
        match started {
            Ok(process) => process,
            Err(error) => panic!("cannot start {program}: {error}"),
        }
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// It does not end within a minute.
    pub async fn wait(&mut self) -> ExitStatus {
        match tokio::time::timeout(PATIENCE, self.child.wait()).await {
            Ok(Ok(status)) => status,
            _ => panic!("still running:\n{}", self.output()),
        }
    }

    /// Waits for its end by SIGKILL, given by itself at a named step.
    ///
    /// # Panics
    /// It ends otherwise.
    pub async fn wait_killed(&mut self) {
        use std::os::unix::process::ExitStatusExt as _;
        let status = self.wait().await;
        assert_eq!(status.signal(), Some(9), "{status}:\n{}", self.output());
    }

    /// Waits for its end with exit code 0.
    ///
    /// # Panics
    /// It ends otherwise.
    pub async fn wait_ok(&mut self) {
        let status = self.wait().await;
        assert!(status.success(), "{status}:\n{}", self.output());
    }

    /// Sends a signal, for example `STOP`, `CONT`, `TERM`, `KILL`.
    ///
    /// # Panics
    /// It has ended.
    pub fn signal(&self, name: &str) {
        let Some(pid) = self.child.id() else {
            panic!("ended:\n{}", self.output())
        };
        if let Err(error) = signal(pid, name) {
            panic!("{error}");
        }
    }

    /// Kills it and waits for its end.
    ///
    /// # Panics
    /// It cannot be killed.
    pub async fn kill(mut self) {
        if let Err(error) = self.child.kill().await {
            panic!("kill: {error}");
        }
    }

    /// Everything it wrote.
    pub fn output(&self) -> String {
        std::fs::read_to_string(self.output.path()).unwrap_or_default()
    }

    /// Waits until it wrote `text`.
    ///
    /// # Panics
    /// It does not within a minute.
    pub async fn wrote(&self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.output().contains(text) {
            assert!(
                Instant::now() < deadline,
                "it never wrote {text:?}:\n{}",
                self.output()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
