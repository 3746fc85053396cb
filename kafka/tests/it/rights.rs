//! Credentials and rights on a real broker: `ONCEBOX_TEST_KAFKA_SASL` is the bootstrap list of a
//! broker with SASL PLAIN without TLS and an authorizer, the super user `admin` (password
//! `admin-secret`) and a user `alice` (`alice-secret`) without rights.

use std::time::{Duration, Instant};

use oncebox_kafka::{
    Config, Consumer, ConsumerEvent, ProducerOptions, Stability, TopicSpec, TransactionalProducer,
    broker_settings, cluster, committed, ensure_topic, topic_settings,
};

use crate::support::{offsets, records, unique};

const WAIT: Duration = Duration::from_secs(10);

fn kafka(user: &str, password: &str) -> Option<Config> {
    let Ok(bootstrap) = std::env::var("ONCEBOX_TEST_KAFKA_SASL") else {
        println!("skipped: ONCEBOX_TEST_KAFKA_SASL is not set");
        return None;
    };
    let config = Config::new(bootstrap)
        .set("kafka.security.protocol", "SASL_PLAINTEXT")
        .set("kafka.sasl.mechanism", "PLAIN")
        .set("kafka.sasl.username", user)
        .set("kafka.sasl.password", password);
    Some(config)
}

#[tokio::test]
async fn wrong_credentials_are_said_at_once_and_not_printed() {
    let Some(config) = kafka("admin", "hunter2") else {
        return;
    };
    let start = Instant::now();
    let mut errors = vec![
        cluster(&config, WAIT).await.unwrap_err(),
        committed(&config, "g", "t", 0, Stability::Stable, WAIT)
            .await
            .unwrap_err(),
        TransactionalProducer::open(&config, "id", ProducerOptions::default())
            .await
            .unwrap_err(),
    ];
    let consumer = Consumer::subscribe(&config, "g", &["t".to_owned()]).unwrap();
    loop {
        match consumer.poll(Duration::from_millis(200)) {
            Some(ConsumerEvent::Error(error)) if error.is_authentication() => {
                errors.push(error);
                break;
            }
            _ => assert!(start.elapsed() < 2 * WAIT),
        }
    }
    drop(consumer);
    for error in errors {
        println!("{error}");
        assert!(
            error.is_authentication() && !error.is_retriable(),
            "{error}"
        );
        assert!(
            error.to_string().contains("kafka.sasl") && !error.to_string().contains("hunter2"),
            "{error}"
        );
    }
    assert!(start.elapsed() < 2 * WAIT, "{:?}", start.elapsed());
}

#[tokio::test]
async fn the_wrong_security_protocol_is_hinted_at() {
    let Some(config) = kafka("admin", "admin-secret") else {
        return;
    };
    let error = cluster(&Config::new(config.bootstrap), Duration::from_secs(3))
        .await
        .unwrap_err();
    println!("{error}");
    assert!(error.to_string().contains("security.protocol"), "{error}");
}

#[tokio::test]
async fn missing_rights_are_named_with_what_to_grant() {
    let Some(admin) = kafka("admin", "admin-secret") else {
        return;
    };
    let alice = kafka("alice", "alice-secret").unwrap();
    let topic = unique("guarded");
    assert!(
        ensure_topic(&admin, &topic, &TopicSpec::new(1))
            .await
            .unwrap()
    );
    let settings = topic_settings(&admin, &topic).await.unwrap().unwrap();
    assert_eq!(
        (settings.may_write, settings.may_read),
        (Some(true), Some(true))
    );

    let mut errors = vec![
        TransactionalProducer::open(&alice, "oncebox.alice", ProducerOptions::default())
            .await
            .unwrap_err(),
        committed(&alice, "oncebox.alice", &topic, 0, Stability::Stable, WAIT)
            .await
            .unwrap_err(),
        topic_settings(&alice, &topic).await.unwrap_err(),
        ensure_topic(&alice, &unique("new"), &TopicSpec::new(1))
            .await
            .unwrap_err(),
    ];
    // The cluster may be described by anybody, its configuration not.
    let seen = cluster(&alice, WAIT).await.unwrap().topics;
    assert!(seen.iter().all(|t| t.name != topic), "{seen:?}");
    assert_eq!(
        broker_settings(&alice, WAIT)
            .await
            .unwrap()
            .verifies_offset_commits(),
        None
    );
    let consumer = Consumer::subscribe(&alice, "inventory", std::slice::from_ref(&topic)).unwrap();
    let start = Instant::now();
    loop {
        match consumer.poll(Duration::from_millis(200)) {
            Some(ConsumerEvent::Error(error)) if error.is_authorization() => {
                errors.push(error);
                break;
            }
            other => assert!(start.elapsed() < WAIT, "{other:?}"),
        }
    }
    consumer.close();
    for error in errors {
        println!("{error}");
        assert!(
            error.is_authorization() && error.to_string().contains("grant"),
            "{error}"
        );
        assert!(!error.is_retriable(), "{error}");
    }
}

#[tokio::test]
async fn a_principal_with_rights_works() {
    let Some(config) = kafka("admin", "admin-secret") else {
        return;
    };
    let topic = unique("allowed");
    ensure_topic(&config, &topic, &TopicSpec::new(1))
        .await
        .unwrap();
    let id = unique("oncebox.allowed");
    let producer = TransactionalProducer::open(&config, &id, ProducerOptions::default())
        .await
        .unwrap();
    let mut transaction = records(&topic, &["a"]);
    transaction.offsets = Some(offsets(&id, &topic, 1, ""));
    producer.transact(transaction).await.unwrap();
    producer.close().await;
}
