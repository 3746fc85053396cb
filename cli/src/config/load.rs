//! Merging the layers and telling the user which of them holds the bad value.

use std::path::Path;

use figment::Figment;
use figment::error::{Actual, Kind};

use super::layers::{self, Flags};
use super::{DEFAULTS, Settings};
use crate::redact;

/// The configuration cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A value is wrong, unknown or unreadable; the text says which and where it came from.
    #[error("{0}")]
    Value(String),
    /// Something that has no default was not given.
    #[error(
        "{what} is needed: give {flag}, set {variable}, or put {key} into the file of --config"
    )]
    Missing {
        /// What is missing.
        what: &'static str,
        /// The flag that gives it.
        flag: &'static str,
        /// The variable that gives it.
        variable: &'static str,
        /// The key of the file that gives it.
        key: &'static str,
    },
}

/// Reads the configuration: defaults < `file` < `variables` < `flags`.
///
/// # Errors
/// A file that cannot be read or parsed, an unknown key or variable, a value that does not fit.
pub fn load(
    file: Option<&Path>,
    variables: impl IntoIterator<Item = (String, String)>,
    flags: &Flags,
) -> Result<Settings, ConfigError> {
    let mut figment = Figment::from(layers::toml(DEFAULTS, "the defaults")?);
    if let Some(path) = file {
        figment = figment.merge(layers::file(path)?);
    }
    let figment = figment
        .merge(layers::variables(variables)?)
        .merge(flags.layer()?);
    figment.extract().map_err(|error: figment::Error| {
        ConfigError::Value(
            error
                .into_iter()
                .map(|e| describe(&figment, &e))
                .collect::<Vec<_>>()
                .join("\n"),
        )
    })
}

/// One line: what is wrong, and where the value came from.
fn describe(figment: &Figment, error: &figment::Error) -> String {
    let mut path = error.path.clone();
    if let Kind::UnknownField(name, _) = &error.kind
        && path.last() != Some(name)
    {
        path.push(name.clone());
    }
    let metadata = figment
        .find_metadata(&path.join("."))
        .or(error.metadata.as_ref());
    let origin = match metadata {
        Some(metadata) => metadata.interpolate(&figment::Profile::Default, &path),
        None => format!("key {}", path.join(".")),
    };
    let secret = path
        .iter()
        .any(|p| p.ends_with("_url") || p == "properties");
    let what = match &error.kind {
        Kind::UnknownField(name, known) => {
            format!("unknown setting {name:?}; known here: {}", known.join(", "))
        }
        Kind::InvalidType(_, expected) if secret => format!("expected {expected}"),
        Kind::InvalidType(Actual::Map | Actual::Seq, expected) => format!("expected {expected}"),
        other => other.to_string(),
    };
    redact::scrub(&format!("{origin}: {what}"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn vars(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    fn flag(key: &'static str, flag: &'static str, value: &str) -> Flags {
        Flags::default().with(key, flag, &Some(value.to_owned()))
    }

    #[test]
    fn the_defaults_are_complete() {
        let settings = load(None, [], &Flags::default()).unwrap();
        assert_eq!(settings.relay.lease, Duration::from_secs(3));
        assert_eq!(settings.prefix.as_str(), "oncebox_");
        let error = settings.database_url().unwrap_err().to_string();
        for way in ["--database-url", "ONCEBOX_DATABASE_URL", "database_url"] {
            assert!(error.contains(way), "{error}");
        }
    }

    #[test]
    fn the_relays_defaults_are_the_librarys() {
        let flags = flag("source", "--source", "orders")
            .with(
                "database_url",
                "--database-url",
                &Some("sqlite:x.db".into()),
            )
            .with("kafka.bootstrap", "--kafka", &Some("127.0.0.1:9".into()));
        let ours = load(None, [], &flags).unwrap().relay().unwrap();
        let theirs =
            oncebox_relay::Config::new("orders", ours.database.clone(), ours.kafka.clone());
        assert_eq!(ours.lease, theirs.lease);
        assert_eq!(ours.retention, theirs.retention);
        assert_eq!(ours.max_batch_rows, theirs.max_batch_rows);
        assert_eq!(ours.max_batch_bytes, theirs.max_batch_bytes);
        assert_eq!(ours.transaction_timeout, theirs.transaction_timeout);
        assert_eq!(ours.mark_interval, theirs.mark_interval);
        assert_eq!(ours.heartbeat, theirs.heartbeat);
        assert_eq!(
            (ours.poll_min, ours.poll_max),
            (theirs.poll_min, theirs.poll_max)
        );
        assert_eq!(ours.checkpoint_topic, theirs.checkpoint_topic);
        assert_eq!(ours.checkpoint_bytes, theirs.checkpoint_bytes);
    }

    #[test]
    fn flags_win_over_variables_over_the_file_over_defaults() {
        let path = file("[relay]\nlease = '4s'\npoll_max = '60ms'\nmax_batch_rows = 7\n");
        let settings = load(
            Some(path.path()),
            vars(&[
                ("ONCEBOX_RELAY_LEASE", "5s"),
                ("ONCEBOX_RELAY_POLL_MAX", "70ms"),
            ]),
            &flag("relay.lease", "--lease", "6s"),
        )
        .unwrap();
        assert_eq!(settings.relay.lease, Duration::from_secs(6));
        assert_eq!(settings.relay.poll_max, Duration::from_millis(70));
        assert_eq!(settings.relay.max_batch_rows, 7);
        assert_eq!(settings.relay.poll_min, Duration::from_millis(2));
    }

    #[test]
    fn an_error_names_the_flag_the_variable_or_the_key() {
        let by_flag = load(None, [], &flag("relay.lease", "--lease", "soon"))
            .unwrap_err()
            .to_string();
        assert!(
            by_flag.contains("flag --lease") && by_flag.contains("\"soon\""),
            "{by_flag}"
        );

        let by_variable = load(
            None,
            vars(&[("ONCEBOX_RELAY_HTTP", "here")]),
            &Flags::default(),
        );
        let by_variable = by_variable.unwrap_err().to_string();
        assert!(
            by_variable.contains("variable ONCEBOX_RELAY_HTTP"),
            "{by_variable}"
        );

        let path = file("[relay]\nmax_batch_rows = 'many'\n");
        let by_file = load(Some(path.path()), [], &Flags::default())
            .unwrap_err()
            .to_string();
        assert!(
            by_file.contains("key relay.max_batch_rows in "),
            "{by_file}"
        );
        assert!(
            by_file.contains(&path.path().display().to_string()),
            "{by_file}"
        );
    }

    #[test]
    fn unknown_keys_and_variables_are_refused_by_name() {
        let path = file("[relay]\nleese = '4s'\n");
        let error = load(Some(path.path()), [], &Flags::default())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("key relay.leese in ") && error.contains("lease"),
            "{error}"
        );

        let error = load(None, vars(&[("ONCEBOX_DATABASE", "x")]), &Flags::default())
            .unwrap_err()
            .to_string();
        assert!(error.contains("variable ONCEBOX_DATABASE:"), "{error}");
        let error = load(
            None,
            vars(&[("ONCEBOX_RELAY_LEESE", "x")]),
            &Flags::default(),
        )
        .unwrap_err()
        .to_string();
        assert!(error.contains("variable ONCEBOX_RELAY_LEESE:"), "{error}");
    }

    #[test]
    fn kafka_properties_come_from_everywhere() {
        let path = file(
            "[kafka.properties]\nsecurity.protocol = 'SSL'\n'linger.ms' = 5\nsasl.username = 'a'\n",
        );
        let settings = load(
            Some(path.path()),
            vars(&[
                ("ONCEBOX_KAFKA_SASL_PASSWORD", "pass-word"),
                ("ONCEBOX_KAFKA", "h:1"),
            ]),
            &Flags::default().with_properties(&["kafka.sasl.username=b=c".into()]),
        )
        .unwrap();
        let properties = settings.kafka.properties.expose();
        assert_eq!(properties["security.protocol"], "SSL");
        assert_eq!(properties["linger.ms"], "5");
        assert_eq!(properties["sasl.username"], "b=c");
        assert_eq!(properties["sasl.password"], "pass-word");
        assert_eq!(settings.kafka.bootstrap.as_deref(), Some("h:1"));
    }

    #[test]
    fn numbers_may_be_names() {
        let settings = load(None, vars(&[("ONCEBOX_SOURCE", "2026")]), &Flags::default()).unwrap();
        assert_eq!(settings.source.unwrap().as_str(), "2026");
    }

    #[test]
    fn no_secret_in_debug_or_errors() {
        let secret = "zq-secret-zq";
        let path = file(&format!(
            "database_url = 'postgres://u:{secret}@h/d'\n[kafka.properties]\nsasl.password = '{secret}2'\n"
        ));
        let settings = load(Some(path.path()), [], &Flags::default()).unwrap();
        let shown = format!("{settings:?} {settings:#?} {:?}", settings.kafka());
        assert!(!shown.contains(secret), "{shown}");

        let broken = [
            file(&format!("database_url = \"postgres://u:{secret}@h/d\n")),
            file(&format!("database_url = 'mysql://u:{secret}@h/d'\n")),
            file(&format!("database_url = ['postgres://u:{secret}@h/d']\n")),
            file(&format!(
                "[kafka.properties]\nsasl.password = ['{secret}']\n"
            )),
        ];
        for path in &broken {
            let error = load(Some(path.path()), [], &Flags::default()).unwrap_err();
            let shown = format!("{error} {error:?}");
            assert!(!shown.contains(secret), "{shown}");
            assert!(
                shown.contains(&path.path().display().to_string()),
                "{shown}"
            );
        }
        let error = load(
            None,
            [],
            &Flags::default().with_properties(&[secret.into()]),
        )
        .unwrap_err();
        assert!(!error.to_string().contains(secret));
    }
}
