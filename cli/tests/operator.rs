//! `oncebox dead`, `oncebox record` and `oncebox reconcile` as an operator meets them.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::process::{Command, Output};

use serde_json::Value;
use sqlx::{AssertSqlSafe, SqlitePool};
use uuid::Uuid;

/// A SQLite file with Oncebox's tables.
struct Database {
    _directory: tempfile::TempDir,
    url: String,
    pool: SqlitePool,
}

impl Database {
    async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("x.db").display());
        oncebox_migrations::migrate(&url, &Default::default())
            .await
            .unwrap();
        let pool = SqlitePool::connect(&url).await.unwrap();
        Self {
            _directory: directory,
            url,
            pool,
        }
    }

    async fn run(&self, text: &str) {
        sqlx::query(AssertSqlSafe(text.to_owned()))
            .execute(&self.pool)
            .await
            .unwrap();
    }

    async fn number(&self, text: &str) -> i64 {
        sqlx::query_scalar(AssertSqlSafe(text.to_owned()))
            .fetch_one(&self.pool)
            .await
            .unwrap()
    }

    /// A letter of consumer `inventory`; its id is the offset.
    async fn letter(&self, offset: i64, key: &str, parked: bool) {
        let payload = format!("{{\"order\":{offset},\"paid\":true}}");
        let parked = i64::from(parked);
        sqlx::query(
            "INSERT INTO oncebox_dead_letter (id, consumer, message_id, topic, partition, record_offset, key, payload, headers, \
             error, attempts, parked) VALUES ($1, 'inventory', $2, 'orders', 0, $1, $3, $4, $5, $6, 3, $7)",
        )
        .bind(offset)
        .bind(Uuid::now_v7())
        .bind(key.as_bytes())
        .bind(payload.as_bytes())
        .bind(oncebox_migrations::headers::encode([("tenant", Some(&b"42"[..]))]).unwrap())
        .bind(format!("no stock of {offset}\n  at the second line"))
        .bind(parked)
        .execute(&self.pool)
        .await
        .unwrap();
    }

    async fn position(&self) {
        self.run(
            "INSERT INTO oncebox_position (consumer, topic, partition, topic_id, next, seq, owner) \
             VALUES ('inventory', 'orders', 0, 'id', 1, 1, zeroblob(16))",
        )
        .await;
    }

    fn oncebox(&self, arguments: &[&str]) -> (Option<i32>, String) {
        oncebox(&[arguments, &["--database-url", &self.url]].concat())
    }

    /// Runs it and takes the only line of its output for JSON.
    fn json(&self, arguments: &[&str]) -> (Option<i32>, Value) {
        let (code, text) = self.oncebox(&[arguments, &["--json"]].concat());
        (
            code,
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")),
        )
    }
}

/// `oncebox` with these arguments, without any variable of ours: exit code and everything it said.
fn oncebox(arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncebox"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("ONCEBOX_") || name == "RUST_LOG" {
            command.env_remove(name);
        }
    }
    let Output {
        status,
        stdout,
        stderr,
    } = command.args(arguments).output().unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&stdout),
        String::from_utf8_lossy(&stderr)
    );
    (status.code(), text)
}

#[tokio::test(flavor = "multi_thread")]
async fn a15_dead_list_and_show_say_what_failed_and_why() {
    let database = Database::new().await;
    let (code, text) = database.oncebox(&["dead", "list"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("no message is dead, parked or delayed"),
        "{text}"
    );
    for offset in 1..=3 {
        database.letter(offset, "k", offset == 3).await;
    }
    let (code, text) = database.oncebox(&["dead", "list", "--limit", "2"]);
    assert_eq!(code, Some(0), "{text}");
    for words in [
        "inventory orders: 2 dead, 1 parked behind 1 keys, 0 delayed, 0 ordered",
        "parked  3 inventory orders[0]@3 key k",
        "no stock of 2",
        "--after 2",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(!text.contains("no stock of 1"), "{text}");
    assert_eq!(text.lines().count(), 4, "a line for each letter: {text}");
    let (_, text) = database.oncebox(&["dead", "list", "--after", "2"]);
    assert!(
        text.contains("no stock of 1") && !text.contains("no stock of 2"),
        "{text}"
    );
    let (code, json) = database.json(&["dead", "list", "--kind", "parked"]);
    assert_eq!(
        (code, &json["id"], &json["kind"]),
        (Some(0), &3.into(), &"parked".into())
    );
    let (_, json) = database.json(&["dead", "list", "--count"]);
    assert_eq!((&json["dead"], &json["parked"]), (&2.into(), &1.into()));
    let (_, json) = database.json(&["dead", "list", "--error", "of 2", "--since", "1h"]);
    assert_eq!(json["offset"], 2);

    let (code, text) = database.oncebox(&["dead", "show", "3"]);
    assert_eq!(code, Some(0), "{text}");
    for words in [
        "tenant: 42",
        "  \"order\": 3,",
        "not ordered, 0 times in vain",
        "after 3 attempts",
        "error      no stock of 3\n  at the second line\n",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let (_, json) = database.json(&["dead", "show", "3"]);
    assert_eq!(json["payload"], "{\"order\":3,\"paid\":true}");
    assert_eq!(json["headers"][0]["value"], "42");
    let (code, text) = database.oncebox(&["dead", "show", "9"]);
    assert_eq!(
        (code, text.contains("no letter 9")),
        (Some(1), true),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a14_a_delayed_message_is_shown_and_may_be_had_now() {
    let database = Database::new().await;
    for offset in 1..=3 {
        database.letter(offset, "k", false).await;
    }
    let tomorrow = "(julianday('now') - 2440586.5) * 86400000000";
    let delayed = format!(
        "UPDATE oncebox_dead_letter SET delayed = 1, replays = 5, replay_at = CAST({tomorrow} AS INTEGER) WHERE id > 1"
    );
    database.run(&delayed).await;
    let (code, text) = database.oncebox(&["dead", "list", "--kind", "delayed"]);
    assert_eq!(code, Some(0), "{text}");
    for words in [
        "inventory orders: 0 dead, 0 parked behind 0 keys, 2 delayed, 0 ordered",
        "delayed 3 inventory orders[0]@3 key k",
        "(next attempt at ",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let (_, json) = database.json(&["dead", "list", "--kind", "dead"]);
    assert_eq!((&json["id"], &json["kind"]), (&1.into(), &"dead".into()));
    // Nobody has ordered these: there is nothing to take back.
    let (_, json) = database.json(&["dead", "cancel", "--all", "--apply"]);
    assert_eq!(json["letters"], serde_json::json!([]));
    let (code, json) = database.json(&["dead", "replay", "--kind", "delayed", "--apply"]);
    assert_eq!(
        (code, &json["letters"]),
        (Some(0), &serde_json::json!([2, 3]))
    );
    let due = "SELECT count(*) FROM oncebox_dead_letter WHERE delayed AND replay_at <= CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)";
    assert_eq!(database.number(due).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn g8_dead_replay_orders_when_applied_and_cancel_takes_it_back() {
    let database = Database::new().await;
    for offset in 1..=4 {
        database.letter(offset, "k", false).await;
    }
    let ordered = "SELECT count(*) FROM oncebox_dead_letter WHERE replay_at IS NOT NULL";
    let all = ["dead", "replay", "--consumer", "inventory", "--rate", "2/s"];
    let (code, text) = database.oncebox(&all);
    assert_eq!(code, Some(0), "{text}");
    for words in [
        "4 to order: 1, 2, 3, 4",
        "the last one 1.5 s after the first",
        "add --apply",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(database.number(ordered).await, 0);
    let (code, text) = database.oncebox(&[&all[..], &["--apply"]].concat());
    assert_eq!(
        (code, text.contains("4 ordered")),
        (Some(0), true),
        "{text}"
    );
    assert_eq!(database.number(ordered).await, 4);
    let (code, json) = database.json(&[&all[..], &["--apply"]].concat());
    assert_eq!(code, Some(0));
    assert_eq!(
        (&json["ordered_before"], &json["applied"]),
        (&4.into(), &true.into())
    );
    let (code, json) = database.json(&["dead", "cancel", "2", "3", "--apply"]);
    assert_eq!(
        (code, &json["letters"]),
        (Some(0), &serde_json::json!([2, 3]))
    );
    let (_, text) = database.oncebox(&["dead", "list", "--ordered"]);
    assert!(
        text.contains("2 ordered") && text.contains("replay ordered for"),
        "{text}"
    );

    database
        .run("UPDATE oncebox_dead_letter SET replays = 3 WHERE id = 2")
        .await;
    let (code, text) = database.oncebox(&["dead", "replay", "2", "--apply"]);
    assert_eq!(
        (code, text.contains("1 refused")),
        (Some(0), true),
        "{text}"
    );
    let (_, json) = database.json(&["dead", "replay", "2", "--force", "--apply"]);
    assert_eq!(json["letters"], serde_json::json!([2]));
    for (arguments, code, words) in [
        (&["dead", "replay"][..], 2, "required"),
        (&["dead", "replay", "--all", "--rate", "fast"], 2, "10/s"),
        (
            &["dead", "replay", "--all", "--since", "yesterday"],
            2,
            "--since",
        ),
        (
            &["dead", "replay", "77"],
            1,
            "no dead or parked message was meant",
        ),
    ] {
        let (found, text) = database.oncebox(arguments);
        assert_eq!(found, Some(code), "{text}");
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn g8_dead_discard_deletes_when_applied_and_unblocks_the_key() {
    let database = Database::new().await;
    database
        .run("INSERT INTO oncebox_blocked_key (consumer, topic, key, reason) VALUES ('inventory', 'orders', x'6b', 'poison')")
        .await;
    database.letter(1, "k", true).await;
    database.letter(2, "other", false).await;
    let (code, text) = database.oncebox(&["dead", "discard", "--topic", "orders", "--key", "k"]);
    assert_eq!(code, Some(0), "{text}");
    for words in [
        "1 parked letters to delete: 1",
        "1 blocked keys will be unblocked",
        "add --apply",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let (code, json) = database.json(&["dead", "discard", "--all", "--apply"]);
    assert_eq!(
        (code, &json["deleted"], &json["unblocked_keys"]),
        (Some(0), &2.into(), &1.into())
    );
    assert_eq!(
        database
            .number("SELECT count(*) FROM oncebox_blocked_key")
            .await,
        0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a16_record_lists_sums_up_and_is_cleaned() {
    let database = Database::new().await;
    let now = "(CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000)";
    let day = 86_400_000_000_i64;
    for (offset, status, ago) in [
        (1, "effect", 0),
        (2, "effect", 0),
        (3, "dead", 0),
        (4, "effect", 40 * day),
    ] {
        let id = Uuid::now_v7().simple();
        database
            .run(&format!(
                "INSERT INTO oncebox_record (consumer, topic, partition, record_offset, message_id, business_id, status, attempts, \
                 first_at, settled_at, duration_us, error) VALUES ('inventory', 'orders', 0, {offset}, x'{id}', 'order-{offset}', \
                 '{status}', 1, {now}, {now} - {ago}, {offset}000, NULL)"
            ))
            .await;
    }
    let (code, text) = database.oncebox(&["record", "list", "--limit", "2"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("order-") && text.contains("--after "),
        "{text}"
    );
    let place = text.trim().rsplit(' ').next().unwrap().to_owned();
    let (code, text) = database.oncebox(&["record", "list", "--after", &place]);
    assert_eq!((code, text.lines().count()), (Some(0), 1), "{text}");
    // By its business id also what is older than a day.
    let (_, json) = database.json(&["record", "list", "--business-id", "order-4"]);
    assert_eq!(
        (&json["offset"], &json["duration_us"]),
        (&4.into(), &4_000.into())
    );
    let (_, json) = database.json(&["record", "list", "--status", "dead"]);
    assert_eq!(json["status"], "dead");
    let (code, text) = database.oncebox(&["record", "summary"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("inventory orders effect 2, 0 of them retried"),
        "{text}"
    );
    let (_, json) = database.json(&["record", "summary", "--status", "effect", "--since", "60d"]);
    assert_eq!(
        (&json["count"], &json["longest_us"]),
        (&3.into(), &4_000.into())
    );
    let (code, text) = database.oncebox(&["record", "clean"]);
    assert_eq!(
        (code, text.contains("1 rows to delete")),
        (Some(0), true),
        "{text}"
    );
    let (_, json) = database.json(&["record", "clean", "--apply"]);
    assert_eq!((&json["rows"], &json["applied"]), (&1.into(), &true.into()));
    let (_, json) = database.json(&["record", "clean", "--keep", "0"]);
    assert_eq!(json["rows"], 0, "today is kept");
    let (code, text) = database.oncebox(&["record", "partitions", "--apply"]);
    assert_eq!(
        (code, text.contains("not partitioned")),
        (Some(0), true),
        "{text}"
    );
    for (arguments, words) in [
        (
            &["record", "list", "--status", "lost"][..],
            "none of effect",
        ),
        (&["record", "list", "--after", "here"], "no place"),
    ] {
        let (code, text) = database.oncebox(arguments);
        assert_eq!((code, text.contains(words)), (Some(2), true), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a16_record_partitions_are_made_on_postgresql() {
    let Some(server) = std::env::var("ONCEBOX_TEST_POSTGRES_URL")
        .ok()
        .filter(|v| !v.is_empty())
    else {
        println!("skipped: ONCEBOX_TEST_POSTGRES_URL is not set");
        return;
    };
    let name = format!("cli_record_{}", Uuid::now_v7().simple());
    let admin = sqlx::PgPool::connect(&server).await.unwrap();
    sqlx::query(AssertSqlSafe(format!("CREATE DATABASE {name}")))
        .execute(&admin)
        .await
        .unwrap();
    let url = format!("{}/{name}", server.rsplit_once('/').unwrap().0);
    oncebox_migrations::migrate(&url, &Default::default())
        .await
        .unwrap();
    let run = |arguments: &[&str]| oncebox(&[arguments, &["--database-url", &url]].concat());
    let (code, text) = run(&["record", "partitions", "--days", "2"]);
    assert_eq!(
        (
            code,
            text.contains("3 partitions to make; nothing was changed")
        ),
        (Some(0), true),
        "{text}"
    );
    let (code, text) = run(&["record", "partitions", "--days", "2", "--apply"]);
    assert_eq!(
        (code, text.contains("3 made, 0 there before")),
        (Some(0), true),
        "{text}"
    );
    let (_, text) = run(&["record", "partitions", "--days", "2", "--json", "--apply"]);
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["there"].as_array().unwrap().len(), 3, "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a16_reconcile_exits_with_1_when_something_is_missing() {
    let (outbox, inbox) = (Database::new().await, Database::new().await);
    inbox.position().await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        let id = Uuid::now_v7();
        sqlx::query(
            "INSERT INTO oncebox_outbox (message_id, topic, headers) VALUES ($1, 'orders', x'')",
        )
        .bind(id)
        .execute(&outbox.pool)
        .await
        .unwrap();
        sqlx::query("INSERT INTO oncebox_inbox (consumer, message_id) VALUES ('inventory', $1)")
            .bind(id)
            .execute(&inbox.pool)
            .await
            .unwrap();
        ids.push(id);
    }
    outbox
        .run("UPDATE oncebox_mark SET position = 'v1 seq=1 epoch=1 src=0 sys=x tl=1 high=3 msg=0 n=3 fp=0 pn=0 pfp=0 rel= gaps='")
        .await;
    // SQLite's clock has milliseconds: what was just written lies in the past.
    std::thread::sleep(std::time::Duration::from_millis(20));
    let reconcile = |extra: &[&str]| {
        let urls = [
            "reconcile",
            "--outbox-url",
            &outbox.url,
            "--inbox-url",
            &inbox.url,
        ];
        let rest = ["--consumer", "inventory", "--grace", "0s"];
        oncebox(&[&urls[..], &rest, extra].concat())
    };
    let (code, text) = reconcile(&[]);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("3 outbox rows") && text.contains("0 missing, 0 extra"),
        "{text}"
    );
    sqlx::query("DELETE FROM oncebox_inbox WHERE message_id = $1")
        .bind(ids[1])
        .execute(&inbox.pool)
        .await
        .unwrap();
    let (code, text) = reconcile(&[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("MISSING") && text.contains(&ids[1].to_string()),
        "{text}"
    );
    let (code, text) = reconcile(&["--json", "--topic", "orders"]);
    assert_eq!(code, Some(1), "{text}");
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["complete"], false);
    assert_eq!(json["missing"][0]["message_id"], ids[1].to_string());
    assert_eq!(json["published"]["rows"], 3);
    // What is younger than the grace period is on its way.
    let (code, text) = reconcile(&["--until", "1h"]);
    assert_eq!(
        (code, text.contains("0 outbox rows")),
        (Some(0), true),
        "{text}"
    );

    for (arguments, words) in [
        (&["--topic", "order"][..], "it has of: orders"),
        (&["--since", "then"], "--since"),
        (&["--quiet", "long"], "--quiet"),
        (&["--inbox-prefix", "Bad"], "--inbox-prefix"),
    ] {
        let (code, text) = reconcile(arguments);
        assert_eq!((code, text.contains(words)), (Some(2), true), "{text}");
    }
    let (code, text) = oncebox(&[
        "reconcile",
        "--consumer",
        "inventory",
        "--outbox-url",
        &outbox.url,
    ]);
    assert_eq!(
        (code, text.contains("--inbox-url")),
        (Some(2), true),
        "{text}"
    );
    let (code, text) = oncebox(&[
        "reconcile",
        "--consumer",
        "x",
        "--outbox-url",
        "mysql://u:top-secret@h/d",
    ]);
    assert_eq!(
        (code, text.contains("--outbox-url")),
        (Some(2), true),
        "{text}"
    );
    assert!(!text.contains("top-secret"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_is_paused_listed_and_goes_on() {
    let database = Database::new().await;
    let of = ["--consumer", "inventory", "--topic", "orders"];
    let paused = ["inbox", "paused", "--consumer", "inventory"];
    let (code, text) = database.oncebox(&paused);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("nothing is paused"), "{text}");
    let unpause = [&["inbox", "unpause"], &of[..]].concat();
    let (code, text) = database.oncebox(&unpause);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("\"orders\" is not paused") && text.contains("inbox paused"),
        "{text}"
    );

    let pause = [&["inbox", "pause"], &of[..], &["--reason", "stock-taking"]].concat();
    let (code, text) = database.oncebox(&pause);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("oncebox inbox unpause --consumer inventory --topic orders"),
        "{text}"
    );
    let (code, text) = database.oncebox(&paused);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.starts_with("orders  since 20") && text.contains("stock-taking"),
        "{text}"
    );
    let (_, rows) = database.json(&paused);
    assert_eq!(rows[0]["topic"], "orders");
    assert_eq!(rows[0]["reason"], "stock-taking");

    let (code, text) = database.oncebox(&unpause);
    assert_eq!(code, Some(0), "{text}");
    let (_, rows) = database.json(&paused);
    assert_eq!(rows.as_array().unwrap().len(), 0);
    let wrong = [
        "inbox",
        "pause",
        "--consumer",
        "In Ventory",
        "--topic",
        "orders",
    ];
    let (code, text) = database.oncebox(&wrong);
    assert_eq!(code, Some(2), "{text}");
    assert!(
        text.contains("consumer") && text.contains("not allowed"),
        "{text}"
    );
}
