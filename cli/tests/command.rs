//! The command as its users meet it: exit codes, messages, secrets, and the life of a relay.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use oncebox::embedded::Embedded;
use oncebox_kafka::{TopicSpec, ensure_topic};
use oncebox_outbox::{Config, Message, Outbox};
use sqlx::SqlitePool;

const SECRET: &str = "never-print-this-word";

/// `oncebox` with these arguments, without any variable of ours.
fn oncebox(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncebox"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("ONCEBOX_") || name == "RUST_LOG" {
            command.env_remove(name);
        }
    }
    command.args(arguments);
    command
}

fn run(command: &mut Command) -> (Option<i32>, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&stdout),
        String::from_utf8_lossy(&stderr)
    );
    (status.code(), text)
}

/// A SQLite file with Oncebox's tables, and the broker with a topic `orders`.
struct World {
    directory: tempfile::TempDir,
    broker: Embedded,
    url: String,
}

impl World {
    async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let broker = Embedded::start().await.unwrap();
        let url = format!("sqlite:{}", directory.path().join("orders.db").display());
        oncebox_migrations::migrate(&url, &Default::default())
            .await
            .unwrap();
        let kafka = oncebox_kafka::Config::new(broker.bootstrap());
        ensure_topic(&kafka, "orders", &TopicSpec::new(1))
            .await
            .unwrap();
        Self {
            directory,
            broker,
            url,
        }
    }

    fn relay(&self, extra: &[&str]) -> Command {
        let mut command = oncebox(&["relay", "--source", "orders", "--lease", "500ms"]);
        command
            .args(extra)
            .env("ONCEBOX_DATABASE_URL", &self.url)
            .env("ONCEBOX_KAFKA", self.broker.bootstrap());
        command
    }

    async fn enqueue(&self, count: usize) {
        let pool = SqlitePool::connect(&self.url).await.unwrap();
        let outbox = Outbox::new(Config::default());
        for order in 0..count {
            let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
            outbox
                .enqueue(&mut tx, Message::json("orders", order, &order).unwrap())
                .await
                .unwrap();
            tx.commit().await.unwrap();
        }
        pool.close().await;
    }
}

/// A child that does not outlive its test.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Self {
        Self(
            command
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap(),
        )
    }

    fn terminate(&self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }

    fn wait(&mut self) -> std::process::ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(
                begun.elapsed() < Duration::from_secs(30),
                "the process does not end"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn get(port: u16, path: &str) -> Option<String> {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).ok()?;
    write!(
        socket,
        "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    .ok()?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).ok()?;
    Some(answer)
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

fn wait_ready(port: u16) -> String {
    let begun = Instant::now();
    loop {
        if let Some(answer) = get(port, "/ready").filter(|a| a.starts_with("HTTP/1.1 200")) {
            return answer;
        }
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "the relay does not get ready"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn usage_and_configuration_errors_exit_with_2_and_name_their_origin() {
    let with = |arguments: &[&str], variable: &str, value: &str| {
        let mut command = oncebox(arguments);
        command.env(variable, value);
        command
    };
    for (mut command, words) in [
        (oncebox(&["nonsense"]), "nonsense"),
        (
            oncebox(&["relay", "--lease", "soon"]),
            "flag --lease: \"soon\"",
        ),
        (
            with(&["relay"], "ONCEBOX_RELAY_HTTP", "here"),
            "variable ONCEBOX_RELAY_HTTP",
        ),
        (
            with(&["relay"], "ONCEBOX_LEASE", "1s"),
            "variable ONCEBOX_LEASE",
        ),
        (oncebox(&["relay"]), "--database-url"),
        (
            oncebox(&["relay", "--database-url", "sqlite:x.db"]),
            "--source",
        ),
        (
            oncebox(&["relay", "--config", "/nowhere.toml"]),
            "/nowhere.toml",
        ),
        (oncebox(&["relay", "--kill-at", "lunch"]), "endtxn-sent"),
        (
            oncebox(&["migrate", "--print", "--to", "99"]),
            "newest version",
        ),
    ] {
        let (code, text) = run(&mut command);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn a_file_is_read_and_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "source = 'orders'\n[relay]\npoll = '1ms'\n").unwrap();
    let name = file.path().display().to_string();
    let (code, text) = run(oncebox(&["relay"]).env("ONCEBOX_CONFIG", file.path()));
    assert_eq!(code, Some(2), "{text}");
    assert!(
        text.contains("relay.poll") && text.contains(&name),
        "{text}"
    );
}

#[test]
fn secrets_are_in_no_output() {
    let url = format!("postgres://app:{SECRET}@127.0.0.1:1/shop");
    let wrong = format!("mysql://app:{SECRET}@127.0.0.1:1/shop");
    let property = format!("sasl.password={SECRET}");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("database_url = \"{url}\n")).unwrap();
    let relay = [
        "relay",
        "--source",
        "orders",
        "--database-url",
        &url,
        "--kafka",
        "127.0.0.1:1",
    ];
    let doctor = [
        "doctor",
        "--json",
        "--database-url",
        &url,
        "--kafka",
        "127.0.0.1:1",
        "--kafka-property",
    ];
    let mut talkative = oncebox(&relay);
    talkative
        .args(["--kafka-property", &property])
        .env("RUST_LOG", "trace");
    let commands = [
        oncebox(&["migrate", "--database-url", &url]),
        oncebox(&["migrate", "--database-url", &wrong]),
        oncebox(&["migrate", &url]),
        oncebox(&[&doctor[..], &[&property]].concat()),
        oncebox(&[&doctor[..], &[SECRET]].concat()),
        oncebox(&relay),
        talkative,
        oncebox(&["migrate", "--config", &file.path().display().to_string()]),
    ];
    for mut command in commands {
        let (code, text) = run(&mut command);
        assert_ne!(code, Some(0), "{text}");
        assert!(!text.is_empty());
        assert!(!text.contains(SECRET), "{text}");
    }
}

#[test]
fn migrate_creates_the_tables_once_and_prints_the_same_sql() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", directory.path().join("x.db").display());
    let (code, text) = run(&mut oncebox(&["migrate", "--database-url", &url]));
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("applied 1"), "{text}");
    let (code, text) = run(&mut oncebox(&["migrate", "--database-url", &url]));
    assert_eq!(
        (code, text.contains("nothing to do")),
        (Some(0), true),
        "{text}"
    );
    let (code, text) = run(&mut oncebox(&[
        "migrate", "--print", "--prefix", "box_", "--schema", "app",
    ]));
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("CREATE TABLE \"app\".\"box_outbox\""),
        "{text}"
    );
    let (code, text) = run(&mut oncebox(&["migrate", "--print", "--dialect", "sqlite"]));
    assert_eq!(
        (code, text.contains("AUTOINCREMENT")),
        (Some(0), true),
        "{text}"
    );
    let (code, text) = run(&mut oncebox(&["migrate", "--grants", "--relay", "carrier"]));
    assert_eq!(
        (code, text.contains("TO \"carrier\"")),
        (Some(0), true),
        "{text}"
    );
}

#[test]
fn the_doctor_answers_soon_and_with_remedies_when_nothing_is_there() {
    let begun = Instant::now();
    let (code, text) = run(&mut oncebox(&[
        "doctor",
        "--json",
        "--source",
        "orders",
        "--database-url",
        "postgres://app@127.0.0.1:1/shop",
        "--kafka",
        "127.0.0.1:1",
    ]));
    assert_eq!(code, Some(1), "{text}");
    assert!(
        begun.elapsed() < Duration::from_secs(15),
        "{:?}",
        begun.elapsed()
    );
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let failed: Vec<&serde_json::Value> = json["checks"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|c| c["status"] == "fail")
        .collect();
    assert_eq!(failed.len(), 2, "{text}");
    assert!(failed.iter().all(|c| c["remedy"].is_string()), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_finds_a_healthy_outbox_and_a_missing_topic() {
    let world = World::new().await;
    world.enqueue(1).await;
    let doctor = |extra: &[&str]| {
        let mut command = oncebox(&[
            "doctor",
            "--source",
            "orders",
            "--database-url",
            &world.url,
            "--kafka",
        ]);
        run(command.arg(world.broker.bootstrap()).args(extra))
    };
    let (code, text) = doctor(&[]);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("ok    topic") && text.contains("orders: 1 partitions"),
        "{text}"
    );
    let (code, text) = doctor(&["--topic", "gone"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("FAIL  topic") && text.contains("--create --topic gone"),
        "{text}"
    );
    let empty = format!(
        "sqlite:{}",
        world.directory.path().join("empty.db").display()
    );
    std::fs::write(Path::new(empty.trim_start_matches("sqlite:")), b"").unwrap();
    let (code, text) = run(&mut oncebox(&["doctor", "--database-url", &empty]));
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("FAIL  schema") && text.contains("oncebox migrate"),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_leads_says_so_and_stops_at_sigterm() {
    let world = World::new().await;
    let port = free_port();
    let mut leader = Running::start(&mut world.relay(&["--http", &format!("127.0.0.1:{port}")]));
    assert!(wait_ready(port).contains("\"role\":\"leader\""));
    world.enqueue(3).await;
    let begun = Instant::now();
    while !get(port, "/metrics")
        .unwrap()
        .contains("oncebox_relay_published_total 3")
    {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "{:?}",
            get(port, "/metrics")
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(get(port, "/live").unwrap().starts_with("HTTP/1.1 200"));

    let (code, text) = run(&mut world.relay(&["--until-empty"]));
    assert_eq!(code, Some(3), "{text}");
    let other = run(world.relay(&["--until-empty"]).args(["--source", "shop"]));
    assert_eq!(
        other.0,
        Some(2),
        "--source twice is a usage error: {}",
        other.1
    );

    leader.terminate();
    assert_eq!(leader.wait().code(), Some(0));
    let (code, text) = run(&mut world.relay(&["--until-empty"]));
    assert_eq!(code, Some(0), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outbox_of_another_source_exits_with_4_and_missing_tables_with_1() {
    let world = World::new().await;
    let (code, text) = run(&mut world.relay(&["--until-empty"]));
    assert_eq!(code, Some(0), "{text}");
    let mut other = oncebox(&[
        "relay",
        "--until-empty",
        "--source",
        "shop",
        "--lease",
        "500ms",
        "--database-url",
        &world.url,
    ]);
    let (code, text) = run(other.args(["--kafka", &world.broker.bootstrap()]));
    assert_eq!(code, Some(4), "{text}");
    assert!(text.contains("--source orders"), "{text}");

    let empty = world.directory.path().join("empty.db");
    std::fs::write(&empty, b"").unwrap();
    let url = format!("sqlite:{}", empty.display());
    let mut bare = oncebox(&["relay", "--source", "orders", "--database-url", &url]);
    let (code, text) = run(bare.args(["--kafka", &world.broker.bootstrap()]));
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("oncebox migrate"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_at_is_a_real_sigkill_at_that_step() {
    let world = World::new().await;
    world.enqueue(5).await;
    for step in ["batch-read", "acked", "marked"] {
        let mut relay = Running::start(&mut world.relay(&["--kill-at", step]));
        assert_eq!(relay.wait().signal(), Some(9), "{step}");
        world.enqueue(1).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_is_a_dry_run_unless_applied() {
    let world = World::new().await;
    world.enqueue(2).await;
    let (code, text) = run(&mut world.relay(&["--until-empty"]));
    assert_eq!(code, Some(0), "{text}");
    let resume = |extra: &[&str]| {
        let mut command = oncebox(&[
            "relay",
            "resume",
            "--source",
            "orders",
            "--database-url",
            &world.url,
            "--kafka",
        ]);
        run(command.arg(world.broker.bootstrap()).args(extra))
    };
    let (code, text) = resume(&["--from", "0"]);
    assert_eq!(
        (code, text.contains("nothing was changed")),
        (Some(0), true),
        "{text}"
    );
    let (code, text) = resume(&["--from", "yesterday"]);
    assert_eq!(
        (code, text.contains("flag --from")),
        (Some(2), true),
        "{text}"
    );
    let (code, text) = resume(&["--from", "0", "--apply"]);
    assert_eq!((code, text.contains("written")), (Some(0), true), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a16_reconcile_reads_the_position_that_a_relay_has_confirmed() {
    let world = World::new().await;
    world.enqueue(4).await;
    let (code, text) = run(&mut world.relay(&["--until-empty"]));
    assert_eq!(code, Some(0), "{text}");
    let pool = SqlitePool::connect(&world.url).await.unwrap();
    for text in [
        "INSERT INTO oncebox_position (consumer, topic, partition, topic_id, next, seq, owner) \
         VALUES ('inventory', 'orders', 0, 'id', 4, 1, zeroblob(16))",
        "INSERT INTO oncebox_inbox (consumer, message_id) SELECT 'inventory', message_id FROM oncebox_outbox WHERE id <> 2",
    ] {
        sqlx::query(text).execute(&pool).await.unwrap();
    }
    // Two that no relay has seen yet.
    world.enqueue(2).await;
    std::thread::sleep(Duration::from_millis(20));
    let (code, text) = run(&mut oncebox(&[
        "reconcile",
        "--consumer",
        "inventory",
        "--database-url",
        &world.url,
        "--grace",
        "0s",
        "--json",
    ]));
    assert_eq!(code, Some(1), "{text}");
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["published"]["waiting"], 2, "{text}");
    assert_eq!(json["missing_count"], 1, "{text}");
    assert_eq!(json["missing"][0]["outbox_id"], 2, "{text}");
}
