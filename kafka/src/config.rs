//! What a client is told: the bootstrap list and librdkafka's properties, with the few that Oncebox
//! decides itself.

use std::collections::BTreeMap;
use std::fmt;

use crate::error::Error;

/// Where Kafka is and how to talk to it.
///
/// Every property of librdkafka passes through (TLS, SASL, time-outs, batching): the user's value
/// wins over Oncebox's default. The few properties that the guarantees stand on are refused with an
/// error that names them, see [`Config::check`].
///
/// ```
/// let config = oncebox_kafka::Config::new("broker-1:9093,broker-2:9093")
///     .set("kafka.security.protocol", "SASL_SSL") // the prefix is optional
///     .set("sasl.mechanism", "PLAIN")
///     .set("sasl.username", "relay")
///     .set("sasl.password", "secret");
/// assert!(!format!("{config:?}").contains("secret"));
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Config {
    /// Comma-separated `host:port` list of the first brokers to ask (librdkafka's
    /// `bootstrap.servers`).
    pub bootstrap: String,
    /// Further librdkafka properties. Defaults to none.
    pub properties: BTreeMap<String, String>,
}

/// Which client a set of properties is for; each has its own defaults and its own properties out of
/// bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Producer,
    Consumer,
    Admin,
}

/// Properties that the user may not set, and why. The aliases of librdkafka are listed as well.
const DECIDED_BY_ONCEBOX: &[(&str, &str)] = &[
    (
        "bootstrap.servers",
        "the bootstrap list is an argument of its own",
    ),
    (
        "metadata.broker.list",
        "the bootstrap list is an argument of its own",
    ),
    (
        "transactional.id",
        "it is derived from the source: it is what fences an older relay",
    ),
    (
        "transaction.timeout.ms",
        "use the relay's transaction time-out",
    ),
    ("enable.idempotence", "transactions need it"),
    ("acks", "transactions need acks=all"),
    ("request.required.acks", "transactions need acks=all"),
    (
        "queuing.strategy",
        "another order than first in, first out breaks the order of a key",
    ),
    (
        "delivery.report.only.error",
        "every acknowledgement is counted before a commit",
    ),
    (
        "isolation.level",
        "records of aborted transactions must stay invisible",
    ),
    ("group.id", "it is derived from the consumer's name"),
    (
        "group.protocol",
        "the consumer is written for the classic protocol",
    ),
    (
        "partition.assignment.strategy",
        "the consumer is written for eager assignment",
    ),
    (
        "enable.auto.commit",
        "an offset is committed only after the database transaction",
    ),
    (
        "auto.commit.enable",
        "an offset is committed only after the database transaction",
    ),
    (
        "enable.auto.offset.store",
        "an offset is stored only after the database transaction",
    ),
    (
        "auto.offset.reset",
        "a lost position must stop the consumer, not move it",
    ),
    ("enable.partition.eof", "the consumer does not use it"),
    ("log.queue", "the log goes to the application's log"),
];

impl Config {
    /// A configuration with this bootstrap list and no further property.
    #[must_use]
    pub fn new(bootstrap: impl Into<String>) -> Self {
        Self {
            bootstrap: bootstrap.into(),
            properties: BTreeMap::new(),
        }
    }

    /// Sets one librdkafka property; a leading `kafka.` is dropped.
    #[must_use]
    pub fn set(mut self, key: impl AsRef<str>, value: impl Into<String>) -> Self {
        self.properties
            .insert(plain(key.as_ref()).to_owned(), value.into());
        self
    }

    /// Checks what can be checked without a broker: that the bootstrap list is there, that no
    /// property is set that Oncebox decides itself, and that this build supports the security
    /// protocol.
    ///
    /// # Errors
    /// [`Error::Config`] naming the property and the reason.
    pub fn check(&self) -> Result<(), Error> {
        if self.bootstrap.trim().is_empty() {
            return Err(Error::config(
                "bootstrap.servers",
                "is empty; give at least one host:port",
            ));
        }
        for key in self.properties.keys() {
            if let Some((name, why)) = DECIDED_BY_ONCEBOX
                .iter()
                .find(|(name, _)| *name == plain(key))
            {
                return Err(Error::config(
                    *name,
                    format!("is set by Oncebox and cannot be overridden: {why}"),
                ));
            }
        }
        self.check_build(&crate::sys::builtin_features())
    }

    /// A build without OpenSSL would fail late and with a riddle; say what to type instead.
    fn check_build(&self, features: &[String]) -> Result<(), Error> {
        let has = |feature: &str| features.iter().any(|f| f == feature);
        if let Some(protocol) = self.get("security.protocol")
            && protocol.to_ascii_lowercase().ends_with("ssl")
            && !has("ssl")
        {
            return Err(Error::config(
                "security.protocol",
                format!(
                    "`{protocol}` needs TLS, which this build leaves out; \
                     build with `--features ssl` (or `ssl-vendored`)"
                ),
            ));
        }
        let mechanism = self
            .get("sasl.mechanism")
            .or_else(|| self.get("sasl.mechanisms"));
        if let Some(mechanism) = mechanism {
            let upper = mechanism.to_ascii_uppercase();
            let missing = match upper.as_str() {
                "GSSAPI" if !has("sasl_gssapi") => Some("gssapi"),
                "SCRAM-SHA-256" | "SCRAM-SHA-512" if !has("sasl_scram") => Some("ssl"),
                "OAUTHBEARER" if !has("sasl_oauthbearer") => Some("ssl"),
                _ => None,
            };
            if let Some(feature) = missing {
                return Err(Error::config(
                    "sasl.mechanism",
                    format!(
                        "`{mechanism}` is not part of this build; build with `--features {feature}`"
                    ),
                ));
            }
        }
        Ok(())
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.properties
            .iter()
            .find(|(k, _)| plain(k) == key)
            .map(|(_, v)| v.as_str())
    }

    /// The properties of one client, in the order in which they must be set: Oncebox's defaults,
    /// the user's, and those that correctness needs.
    pub(crate) fn resolve(
        &self,
        role: Role,
        defaults: &[(&str, String)],
        decided: &[(&str, String)],
    ) -> Result<Vec<(String, String)>, Error> {
        self.check()?;
        let mut all: Vec<(String, String)> = Vec::new();
        let mut put = |k: &str, v: &str| all.push((k.to_owned(), v.to_owned()));
        put("client.id", "oncebox");
        // After an outage the brokers are tried again at least once a second, not every ten.
        put("reconnect.backoff.max.ms", "1000");
        if role == Role::Producer {
            // One coordinator answer CONCURRENT_TRANSACTIONS costs one back-off: 2 ms instead of
            // 100 is worth up to ten times the throughput of small transactions. Real outages still
            // back off, up to a second.
            put("retry.backoff.ms", "2");
            put("retry.backoff.max.ms", "1000");
            // A transaction is produced in one go and waited for: lingering only adds latency.
            put("linger.ms", "0");
            put("compression.type", "lz4");
            // Java's choice of a partition: the same key goes to the same partition whoever
            // produces.
            put("partitioner", "murmur2_random");
            put("queue.buffering.max.messages", "1000000");
            // A missing topic is reported after this time, well inside the transaction's deadline.
            put("topic.metadata.propagation.max.ms", "5000");
        }
        for (key, value) in defaults {
            put(key, value);
        }
        for (key, value) in &self.properties {
            put(plain(key), value);
        }
        put("bootstrap.servers", &self.bootstrap);
        for (key, value) in decided {
            put(key, value);
        }
        Ok(all)
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: BTreeMap<&str, &str> = self
            .properties
            .iter()
            .map(|(k, v)| {
                (
                    k.as_str(),
                    if is_secret(k) {
                        "[redacted]"
                    } else {
                        v.as_str()
                    },
                )
            })
            .collect();
        f.debug_struct("Config")
            .field("bootstrap", &self.bootstrap)
            .field("properties", &shown)
            .finish()
    }
}

/// Whether the value of this property must never be printed.
pub(crate) fn is_secret(key: &str) -> bool {
    [
        "password",
        "secret",
        "pem",
        "oauthbearer.config",
        "token",
        "assertion",
        "ssl.key",
        "jaas",
    ]
    .iter()
    .any(|part| key.contains(part))
}

fn plain(key: &str) -> &str {
    key.strip_prefix("kafka.").unwrap_or(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_property_that_the_guarantees_stand_on_is_refused_by_name() {
        for (name, _) in DECIDED_BY_ONCEBOX {
            for key in [(*name).to_owned(), format!("kafka.{name}")] {
                let mut config = Config::new("localhost:9092");
                config.properties.insert(key, "x".into());
                let error = config.check().unwrap_err();
                assert!(error.to_string().contains(name), "{error}");
            }
        }
    }

    #[test]
    fn the_users_value_comes_after_the_default_and_before_what_is_decided() {
        let config = Config::new("localhost:9092").set("kafka.linger.ms", "3");
        let all = config
            .resolve(Role::Producer, &[], &[("acks", "all".into())])
            .unwrap();
        let at = |k: &str, v: &str| all.iter().position(|(a, b)| a == k && b == v).unwrap();
        assert!(at("linger.ms", "0") < at("linger.ms", "3"));
        assert!(at("linger.ms", "3") < at("acks", "all"));
    }

    #[test]
    fn secrets_are_not_printed() {
        let config = Config::new("b:1")
            .set("sasl.password", "hunter2")
            .set("ssl.key.password", "hunter2")
            .set("ssl.key.pem", "hunter2")
            .set("sasl.oauthbearer.client.secret", "hunter2")
            .set("sasl.jaas.config", "password=hunter2")
            .set("sasl.username", "relay");
        let text = format!("{config:?}");
        assert!(
            !text.contains("hunter2") && text.contains("relay"),
            "{text}"
        );
    }

    #[test]
    fn a_build_without_tls_says_which_feature_to_enable() {
        let error = Config::new("b:1")
            .set("security.protocol", "SASL_SSL")
            .check_build(&[])
            .unwrap_err();
        assert!(error.to_string().contains("--features ssl"), "{error}");
        let error = Config::new("b:1")
            .set("sasl.mechanism", "SCRAM-SHA-256")
            .check_build(&[])
            .unwrap_err();
        assert!(error.to_string().contains("--features ssl"), "{error}");
        let error = Config::new("b:1")
            .set("sasl.mechanisms", "GSSAPI")
            .check_build(&["ssl".into()])
            .unwrap_err();
        assert!(error.to_string().contains("--features gssapi"), "{error}");
        assert!(
            Config::new("b:1")
                .set("security.protocol", "ssl")
                .check_build(&["ssl".into()])
                .is_ok()
        );
    }

    #[test]
    fn an_empty_bootstrap_list_is_refused() {
        assert!(Config::new(" ").check().is_err());
    }
}
