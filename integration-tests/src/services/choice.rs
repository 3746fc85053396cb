//! Where the services come from.

use std::fmt;

use tokio::sync::OnceCell;

use super::docker;

/// Names the shared PostgreSQL: a URL of a superuser (or a role that may create databases and roles).
pub const POSTGRES_URL: &str = "ONCEBOX_TEST_POSTGRES_URL";
/// Names the shared Kafka: its bootstrap address.
pub const KAFKA: &str = "ONCEBOX_TEST_KAFKA";
/// The proxy routes of the Kafka in [`KAFKA`], as [`super::Kafka::proxy_routes`] prints them. Optional.
pub const KAFKA_PROXY: &str = "ONCEBOX_TEST_KAFKA_PROXY";
/// The SASL/PLAIN bootstrap address of the Kafka in [`KAFKA`]. Optional.
pub const KAFKA_SASL: &str = "ONCEBOX_TEST_KAFKA_SASL";
/// Names the shared Redis: its URL.
pub const REDIS_URL: &str = "ONCEBOX_TEST_REDIS_URL";
/// `containers` or `local`: take that instead of asking for an engine.
pub const SERVICES: &str = "ONCEBOX_TEST_SERVICES";

/// What runs a service that the tests have to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runner {
    /// Containers of the Docker engine that answers, through testcontainers.
    Containers,
    /// Processes of this machine, on free ports of 127.0.0.1.
    Local,
}

impl Runner {
    /// Decided once per process: containers when an engine answers, otherwise local processes.
    pub(crate) async fn choose() -> Self {
        static CHOICE: OnceCell<Runner> = OnceCell::const_new();
        *CHOICE
            .get_or_init(|| async {
                match std::env::var(SERVICES).as_deref() {
                    Ok("containers") => return Self::Containers,
                    Ok("local") => return Self::Local,
                    Ok(other) => panic!("{SERVICES}={other}: expected `containers` or `local`"),
                    Err(_) => {}
                }
                match docker::engine().await {
                    Some(_) => Self::Containers,
                    None => Self::Local,
                }
            })
            .await
    }
}

impl fmt::Display for Runner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Containers => "testcontainers",
            Self::Local => "local processes",
        })
    }
}

/// Says on standard error, past the capture of the test harness, where a service comes from.
pub(crate) fn announce(service: &str, from: impl fmt::Display) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "services: {service} from {from}");
}
