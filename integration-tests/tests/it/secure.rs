//! Real security: PostgreSQL with TLS, Kafka with TLS, SCRAM and ACLs. The relay and the inbox work with the rights that
//! docs/operations.md names, and say what is missing when one is taken away.

use std::time::Duration;

use oncebox_inbox::Inbox;
use oncebox_integration_tests::kafka_cli;
use oncebox_integration_tests::services::{Kafka, KafkaOptions, Postgres, PostgresOptions};
use oncebox_integration_tests::source::{Process, Source};
use sqlx::AssertSqlSafe;
use tokio_util::sync::CancellationToken;

use crate::relays::ONCEBOX;

/// Users of Kafka and their passwords.
const RELAY: (&str, &str) = ("relay", "relay-s3cret");
const STOCK: (&str, &str) = ("stock", "stock-s3cret");

/// A certificate authority, and files that it has signed for 127.0.0.1.
struct Certificates {
    dir: tempfile::TempDir,
    certificate: String,
    key: String,
}

impl Certificates {
    fn create() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        for name in ["ca.pem", "other-ca.pem"] {
            let key = rcgen::KeyPair::generate().unwrap();
            let mut ca = rcgen::CertificateParams::new(Vec::new()).unwrap();
            ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            ca.distinguished_name.push(rcgen::DnType::CommonName, name);
            write(name, &ca.self_signed(&key).unwrap().pem());
            if name == "ca.pem" {
                let server_key = rcgen::KeyPair::generate().unwrap();
                let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
                let server = rcgen::CertificateParams::new(names).unwrap();
                let issuer = rcgen::Issuer::new(ca, key);
                let signed = server.signed_by(&server_key, &issuer).unwrap().pem();
                write(
                    "server.pem",
                    &format!("{}{signed}", server_key.serialize_pem()),
                );
                write("server.crt", &signed);
                write("server.key", &server_key.serialize_pem());
            }
        }
        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        Self {
            certificate: read("server.crt"),
            key: read("server.key"),
            dir,
        }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }
}

fn properties((user, password): (&str, &str), ca: &str) -> [(&'static str, String); 5] {
    [
        ("security.protocol", "SASL_SSL".to_owned()),
        ("sasl.mechanism", "SCRAM-SHA-512".to_owned()),
        ("sasl.username", user.to_owned()),
        ("sasl.password", password.to_owned()),
        ("ssl.ca.location", ca.to_owned()),
    ]
}

struct Scene {
    certificates: Certificates,
    kafka: Kafka,
    source: Source,
    url: String,
    _postgres: Postgres,
}

impl Scene {
    async fn create() -> Self {
        let certificates = Certificates::create();
        let postgres = Postgres::start(PostgresOptions {
            tls: Some((certificates.certificate.clone(), certificates.key.clone())),
            ..PostgresOptions::default()
        });
        let kafka = Kafka::start(KafkaOptions {
            secure: Some(certificates.path("server.pem").into()),
            ..KafkaOptions::default()
        });
        let (postgres, kafka) = tokio::join!(postgres, kafka);
        let (postgres, kafka) = (postgres.unwrap(), kafka.unwrap());
        for (name, password) in [RELAY, STOCK] {
            kafka.scram_user(name, password).await.unwrap();
        }
        let mut source = Source::create_on(&postgres).await;
        source.bootstrap = kafka.bootstrap().to_owned();
        source.topic = kafka.create_topic("orders", 1).await;
        kafka.create_topic_named("oncebox.checkpoints", 1).await;

        // A role of its own, with a password and exactly the printed rights.
        let mut conn = source.database.connect().await;
        let execute = async |conn: &mut sqlx::PgConnection, sql: &str| {
            sqlx::raw_sql(AssertSqlSafe(sql))
                .execute(conn)
                .await
                .unwrap();
        };
        let roles = ["producer", "relay", "consumer"];
        for role in roles {
            let sql = format!(
                "CREATE ROLE oncebox_{role} LOGIN PASSWORD 'db-s3cret' IN ROLE with_password"
            );
            execute(&mut conn, &sql).await;
        }
        let mut grants = Process::start(ONCEBOX, &["migrate", "--grants"]);
        grants.wait_ok().await;
        execute(&mut conn, &grants.output()).await;
        let url = format!(
            "{}?sslmode=verify-full&sslrootcert={}",
            source.database.url_as("oncebox_relay", "db-s3cret"),
            certificates.path("ca.pem")
        );
        Self {
            certificates,
            kafka,
            source,
            url,
            _postgres: postgres,
        }
    }

    async fn acl(&self, change: &str, (user, operations): (&str, &[&str]), resource: [&str; 2]) {
        let principal = format!("User:{user}");
        let mut arguments = vec![change, "--allow-principal", &principal];
        arguments.extend(operations.iter().flat_map(|o| ["--operation", o]));
        arguments.extend(resource);
        if change == "--remove" {
            arguments.push("--force");
        }
        kafka_cli::acls(self.kafka.bootstrap(), &arguments)
            .await
            .unwrap();
    }

    /// Runs the relay until everything is published; its exit code and what it wrote.
    async fn relay(&self, url: &str, user: (&str, &str), ca: &str) -> (Option<i32>, String) {
        let sasl = self.kafka.sasl_bootstrap().unwrap().to_owned();
        let mut arguments = vec!["relay".to_owned(), "--until-empty".to_owned()];
        let fixed = [
            ("--database-url", url),
            ("--kafka", &sasl),
            ("--source", &self.source.name),
            ("--lease", "400ms"),
        ];
        for (flag, value) in fixed {
            arguments.extend([flag.to_owned(), value.to_owned()]);
        }
        for (key, value) in properties(user, &self.certificates.path(ca)) {
            arguments.extend(["--kafka-property".to_owned(), format!("{key}={value}")]);
        }
        let mut relay = Process::start(ONCEBOX, &arguments);
        let status = relay.wait().await;
        let output = relay.output();
        assert!(!output.contains("s3cret"), "printed a password:\n{output}");
        (status.code(), output)
    }
}

#[tokio::test]
async fn tls_scram_and_acls_with_exactly_the_documented_rights() {
    let scene = Scene::create().await;
    let source = &scene.source;
    source.commit("k", "a").await;
    let id = format!("oncebox.{}", source.name);

    // Whom we do not trust, and who does not trust us.
    let (code, said) = scene.relay(&scene.url, RELAY, "other-ca.pem").await;
    assert_ne!(code, Some(0), "{said}");
    assert!(
        said.contains("certificate") && said.contains("ssl"),
        "{said}"
    );
    let elsewhere = scene.url.replace("ca.pem", "other-ca.pem");
    let (code, said) = scene.relay(&elsewhere, RELAY, "ca.pem").await;
    assert_ne!(code, Some(0), "{said}");
    assert!(said.contains("certificate"), "{said}");
    let (code, said) = scene
        .relay(&scene.url, (RELAY.0, "s3cret-wrong"), "ca.pem")
        .await;
    assert_ne!(code, Some(0), "{said}");
    assert!(said.contains("sasl."), "{said}");

    let rights: [(&[&str], [&str; 2]); 4] = [
        (&["Write", "Describe"], ["--transactional-id", &id]),
        (&["Read"], ["--group", &id]),
        (&["Read", "Write"], ["--topic", "oncebox.checkpoints"]),
        (&["Write", "Describe"], ["--topic", &source.topic]),
    ];
    for (operations, resource) in rights {
        scene.acl("--add", (RELAY.0, operations), resource).await;
    }
    let (code, said) = scene.relay(&scene.url, RELAY, "ca.pem").await;
    assert_eq!(code, Some(0), "{said}");
    source.expect(&["a"]).await;

    // Each right in turn is taken away: the relay says which kind of thing it may not use, and nothing is lost.
    let expected = [
        "transactional",
        "group",
        "oncebox.checkpoints",
        &source.topic,
    ];
    let mut published = vec!["a".to_owned()];
    for (n, ((operations, resource), word)) in rights.into_iter().zip(expected).enumerate() {
        scene.acl("--remove", (RELAY.0, operations), resource).await;
        let text = format!("b{n}");
        source.commit("k", &text).await;
        let (code, said) = scene.relay(&scene.url, RELAY, "ca.pem").await;
        // A topic in trouble waits alone; everything else ends the relay.
        assert_eq!(code == Some(0), n == 3, "{said}");
        assert!(
            said.contains(word) && said.to_lowercase().contains("grant"),
            "{word}:\n{said}"
        );
        scene.acl("--add", (RELAY.0, operations), resource).await;
        let (code, said) = scene.relay(&scene.url, RELAY, "ca.pem").await;
        assert_eq!(code, Some(0), "{said}");
        published.push(text);
        source
            .expect(&published.iter().map(String::as_str).collect::<Vec<_>>())
            .await;
    }

    consume(&scene, published.len()).await;
}

/// The inbox, with TLS on both sides and the documented rights.
async fn consume(scene: &Scene, messages: usize) {
    let source = &scene.source;
    scene
        .acl("--add", (STOCK.0, &["Read"]), ["--topic", &source.topic])
        .await;
    scene
        .acl("--add", (STOCK.0, &["Read"]), ["--group", "stock"])
        .await;
    let mut admin = source.database.connect().await;
    let setup = "CREATE TABLE stock (n bigserial); GRANT INSERT ON stock TO oncebox_consumer; GRANT USAGE ON SEQUENCE stock_n_seq TO oncebox_consumer";
    sqlx::raw_sql(setup).execute(&mut admin).await.unwrap();
    let url = scene.url.replace("oncebox_relay", "oncebox_consumer");
    let pool = sqlx::PgPool::connect(&url).await.unwrap();
    let encrypted: bool =
        sqlx::query_scalar("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")
            .fetch_one(&pool)
            .await
            .unwrap();
    assert!(encrypted);
    let mut kafka = oncebox_kafka::Config::new(scene.kafka.sasl_bootstrap().unwrap());
    for (key, value) in properties(STOCK, &scene.certificates.path("ca.pem")) {
        kafka = kafka.set(key, value);
    }
    let shutdown = CancellationToken::new();
    let consumer = Inbox::new(pool, kafka)
        .consumer("stock")
        .topic(&source.topic)
        .handle(|tx, _| {
            Box::pin(async move {
                sqlx::query("INSERT INTO stock DEFAULT VALUES")
                    .execute(&mut **tx)
                    .await?;
                Ok(())
            })
        })
        .run(shutdown.clone());
    let running = tokio::spawn(consumer);
    for _ in 0..600 {
        let count: i64 = sqlx::query_scalar("SELECT count(*) FROM stock")
            .fetch_one(&mut admin)
            .await
            .unwrap();
        if count == messages as i64 {
            break;
        }
        assert!(
            !running.is_finished(),
            "the consumer ended: {:?}",
            running.await
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    shutdown.cancel();
    running.await.unwrap().unwrap();
    let count: i64 = sqlx::query_scalar("SELECT count(*) FROM stock")
        .fetch_one(&mut admin)
        .await
        .unwrap();
    assert_eq!(count, messages as i64);
}
