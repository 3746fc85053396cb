//! The three layers over the defaults: file, variables, flags. Each value remembers its origin.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use figment::value::{Dict, Map, Value};
use figment::{Metadata, Profile, Provider};

use super::load::ConfigError;

/// One source of values for figment; its metadata names the origin of each key.
pub(super) struct Layer {
    kind: &'static str,
    values: Dict,
    origins: Arc<BTreeMap<String, String>>,
}

impl Layer {
    fn new(kind: &'static str) -> Self {
        Self {
            kind,
            values: Dict::new(),
            origins: Arc::default(),
        }
    }

    fn put(&mut self, path: &[&str], value: Value, origin: String) {
        fn insert(dict: &mut Dict, path: &[&str], value: Value) {
            match path {
                [] => {}
                [last] => {
                    dict.insert((*last).to_owned(), value);
                }
                [first, rest @ ..] => {
                    let inner = dict
                        .entry((*first).to_owned())
                        .or_insert_with(|| Value::from(Dict::new()));
                    if let Value::Dict(_, inner) = inner {
                        insert(inner, rest, value);
                    }
                }
            }
        }
        insert(&mut self.values, path, value);
        Arc::make_mut(&mut self.origins).insert(path.join("."), origin);
    }
}

impl Provider for Layer {
    fn metadata(&self) -> Metadata {
        let origins = Arc::clone(&self.origins);
        Metadata::named(self.kind).interpolater(move |_, keys| {
            let key = keys.join(".");
            origins.get(&key).cloned().unwrap_or(key)
        })
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.values.clone()))
    }
}

/// A TOML text as a layer. `name` is the file's name, or what else to call it.
pub(super) fn toml(text: &str, name: &str) -> Result<Layer, ConfigError> {
    let table: toml::Table = toml::from_str(text).map_err(|e| {
        // `e` prints the offending line, and with it perhaps a password: take only what and where.
        let line = e.span().map_or(1, |span| {
            text[..span.start.min(text.len())].lines().count().max(1)
        });
        ConfigError::Value(format!("{name}, line {line}: {}", e.message()))
    })?;
    let mut layer = Layer::new("file");
    walk(&table, &mut Vec::new(), &mut |path, value| {
        let origin = format!("key {} in {name}", path.join("."));
        let value = Value::serialize(value).map_err(|_| {
            ConfigError::Value(format!(
                "key {} in {name}: not a usable value",
                path.join(".")
            ))
        })?;
        match path {
            // `security.protocol = …` is a nested table for TOML, one property for librdkafka.
            ["kafka", "properties", rest @ ..] => {
                layer.put(&["kafka", "properties", &rest.join(".")], value, origin);
            }
            _ => layer.put(path, value, origin),
        }
        Ok(())
    })?;
    Ok(layer)
}

fn walk<'t>(
    table: &'t toml::Table,
    path: &mut Vec<&'t str>,
    leaf: &mut impl FnMut(&[&str], &toml::Value) -> Result<(), ConfigError>,
) -> Result<(), ConfigError> {
    for (key, value) in table {
        path.push(key);
        match value {
            toml::Value::Table(inner) => walk(inner, path, leaf)?,
            other => leaf(path, other)?,
        }
        path.pop();
    }
    Ok(())
}

/// The configuration file as a layer.
pub(super) fn file(path: &Path) -> Result<Layer, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| ConfigError::Value(format!("cannot read {}: {e}", path.display())))?;
    toml(&text, &path.display().to_string())
}

/// The variables that the process itself reads, and the family that belongs to its tests.
const NOT_OURS: [&str; 1] = ["ONCEBOX_CONFIG"];
const TEST_PREFIX: &str = "ONCEBOX_TEST_";

/// The `ONCEBOX_…` variables as a layer.
pub(super) fn variables(
    vars: impl IntoIterator<Item = (String, String)>,
) -> Result<Layer, ConfigError> {
    let mut layer = Layer::new("variable");
    for (name, value) in vars {
        let Some(rest) = name.strip_prefix("ONCEBOX_") else {
            continue;
        };
        if NOT_OURS.contains(&name.as_str())
            || name.starts_with(TEST_PREFIX)
            || set_by_kubernetes(&name, &value)
        {
            continue;
        }
        let origin = format!("variable {name}");
        let lower = rest.to_ascii_lowercase();
        let value = Value::from(value);
        if lower == "kafka" {
            layer.put(&["kafka", "bootstrap"], value, origin);
        } else if let Some(property) = lower.strip_prefix("kafka_") {
            layer.put(
                &["kafka", "properties", &property.replace('_', ".")],
                value,
                origin,
            );
        } else if let Some(key) = lower.strip_prefix("relay_") {
            layer.put(&["relay", key], value, origin);
        } else {
            layer.put(&[&lower], value, origin);
        }
    }
    Ok(layer)
}

/// The variable that sets a librdkafka property: `sasl.password` is `ONCEBOX_KAFKA_SASL_PASSWORD`.
pub fn kafka_variable(property: &str) -> String {
    format!(
        "ONCEBOX_KAFKA_{}",
        property.replace('.', "_").to_ascii_uppercase()
    )
}

/// Kubernetes gives every pod variables for the services beside it; for services named
/// `oncebox…` they look like ours.
fn set_by_kubernetes(name: &str, value: &str) -> bool {
    let address = value.starts_with("tcp://") || value.starts_with("udp://");
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || (name.ends_with("_PORT") && address)
        || ["_TCP", "_UDP"].iter().any(|protocol| {
            name.split_once("_PORT_")
                .is_some_and(|(_, rest)| rest.contains(protocol))
        })
}

/// The values given as flags, by key (`relay.lease`), as the user wrote them.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    values: Vec<(&'static str, &'static str, Option<String>)>,
    properties: Vec<String>,
}

impl Flags {
    /// Adds the value of `flag` for `key`, when it was given.
    #[must_use]
    pub fn with(mut self, key: &'static str, flag: &'static str, value: &Option<String>) -> Self {
        self.values.push((key, flag, value.clone()));
        self
    }

    /// Adds `--kafka-property key=value` arguments.
    #[must_use]
    pub fn with_properties(mut self, properties: &[String]) -> Self {
        self.properties.extend_from_slice(properties);
        self
    }

    pub(super) fn layer(&self) -> Result<Layer, ConfigError> {
        let mut layer = Layer::new("flag");
        for (key, flag, value) in &self.values {
            if let Some(value) = value {
                let path: Vec<&str> = key.split('.').collect();
                layer.put(&path, Value::from(value.clone()), format!("flag {flag}"));
            }
        }
        for property in &self.properties {
            // Not echoed: what has no `=` may be a password that slipped.
            let (name, value) = property.split_once('=').ok_or_else(|| {
                ConfigError::Value("flag --kafka-property: expected key=value".into())
            })?;
            let origin = format!("flag --kafka-property {name}");
            let name = name.trim_start_matches("kafka.");
            layer.put(
                &["kafka", "properties", name],
                Value::from(value.to_owned()),
                origin,
            );
        }
        Ok(layer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variables_of_kubernetes_services_are_not_ours() {
        for (name, value) in [
            ("ONCEBOX_SERVICE_HOST", "10.0.0.1"),
            ("ONCEBOX_SERVICE_PORT", "9464"),
            ("ONCEBOX_SERVICE_PORT_HTTP", "9464"),
            ("ONCEBOX_PORT", "tcp://10.0.0.1:9464"),
            ("ONCEBOX_PORT_9464_TCP", "tcp://10.0.0.1:9464"),
            ("ONCEBOX_KAFKA_PORT_9092_TCP_ADDR", "10.0.0.1"),
        ] {
            assert!(set_by_kubernetes(name, value), "{name}");
        }
        assert!(!set_by_kubernetes("ONCEBOX_KAFKA_SECURITY_PROTOCOL", "SSL"));
        assert!(!set_by_kubernetes("ONCEBOX_RELAY_HTTP", "127.0.0.1:1"));
    }
}
