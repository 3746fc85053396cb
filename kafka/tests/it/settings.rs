//! Wrong settings end in a clear error, soon. No broker needed.

use std::time::{Duration, Instant};

use oncebox_kafka::{
    Config, ProducerOptions, Stability, TransactionalProducer, cluster, committed,
};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;

#[tokio::test]
async fn nobody_at_the_address_is_said_with_the_address() {
    let start = Instant::now();
    let error = cluster(&Config::new("127.0.0.1:1"), Duration::from_secs(2))
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("127.0.0.1:1") && error.is_retriable(),
        "{error}"
    );
    assert!(error.to_string().contains("refused"), "{error}");
    assert!(
        start.elapsed() < Duration::from_secs(6),
        "{:?}",
        start.elapsed()
    );
    let read = committed(
        &Config::new("127.0.0.1:1"),
        "g",
        "t",
        0,
        Stability::Stable,
        Duration::from_secs(2),
    )
    .await;
    assert!(read.unwrap_err().is_retriable());
    let options = ProducerOptions {
        transaction_timeout: Duration::from_secs(2),
        ..ProducerOptions::default()
    };
    let error = TransactionalProducer::open(&Config::new("127.0.0.1:1"), "id", options)
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("127.0.0.1:1") && error.is_retriable(),
        "{error}"
    );
}

/// A broker that restarts while a client shakes hands has not refused the password.
#[tokio::test]
async fn a_connection_that_ends_during_the_sasl_handshake_is_no_refusal() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let hang_up = tokio::spawn(async move {
        let mut hung_up = 0;
        loop {
            let (mut connection, _) = listener.accept().await.unwrap();
            // The request is there, so the client is waiting for the answer.
            connection.read_u32().await.unwrap();
            hung_up += 1;
            if hung_up == 3 {
                return;
            }
        }
    });
    let config = Config::new(address.to_string())
        .set("security.protocol", "SASL_PLAINTEXT")
        .set("sasl.mechanism", "PLAIN")
        .set("sasl.username", "relay")
        .set("sasl.password", "secret")
        // straight to the handshake
        .set("api.version.request", "false")
        .set("broker.version.fallback", "1.0.0");
    let error = cluster(&config, Duration::from_secs(3)).await.unwrap_err();
    hang_up.await.unwrap();
    assert!(!error.is_authentication(), "{error}");
    assert!(error.is_retriable(), "{error}");
}

#[tokio::test]
async fn a_property_that_librdkafka_does_not_know_is_named() {
    let config = Config::new("127.0.0.1:1").set("no.such.property", "1");
    let error = cluster(&config, Duration::from_secs(1)).await.unwrap_err();
    assert!(
        error.is_config() && error.to_string().contains("no.such.property"),
        "{error}"
    );
    let config = Config::new("127.0.0.1:1")
        .set("sasl.mechanism", "PLAIN")
        .set("ssl.key.password", "\0hunter2");
    let error = cluster(&config, Duration::from_secs(1)).await.unwrap_err();
    assert!(
        error.is_config() && !error.to_string().contains("hunter2"),
        "{error}"
    );
}

#[tokio::test]
async fn a_transaction_time_out_that_cannot_be_is_refused() {
    let options = ProducerOptions {
        transaction_timeout: Duration::from_millis(10),
        ..ProducerOptions::default()
    };
    let error = TransactionalProducer::open(&Config::new("127.0.0.1:1"), "id", options)
        .await
        .unwrap_err();
    assert!(
        error.is_config() && error.to_string().contains("transaction.timeout.ms"),
        "{error}"
    );
}

#[tokio::test]
async fn properties_that_contradict_each_other_are_named() {
    let config = Config::new("127.0.0.1:1").set("delivery.timeout.ms", "60000");
    let error = TransactionalProducer::open(&config, "id", ProducerOptions::default())
        .await
        .unwrap_err();
    assert!(
        error.is_config() && error.to_string().contains("message.timeout.ms"),
        "{error}"
    );
}

#[cfg(not(feature = "ssl"))]
#[tokio::test]
async fn tls_in_a_build_without_it_names_the_feature() {
    let config = Config::new("127.0.0.1:1").set("kafka.security.protocol", "SASL_SSL");
    let error = cluster(&config, Duration::from_secs(1)).await.unwrap_err();
    assert!(error.to_string().contains("--features ssl"), "{error}");
}
