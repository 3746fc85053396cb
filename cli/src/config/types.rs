//! Value types of the configuration: they check themselves and print no secret.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{self, Deserialize, Deserializer, Visitor};

use crate::redact;

/// Which database a URL names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// `postgres://` or `postgresql://`.
    Postgres,
    /// `sqlite:`.
    Sqlite,
}

/// A database URL. `Debug` and `Display` hide the password.
#[derive(Clone, PartialEq, Eq)]
pub struct DatabaseUrl(String);

impl DatabaseUrl {
    /// The URL with its password, for connecting only.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// The database that the scheme names.
    pub fn backend(&self) -> Backend {
        if self.0.starts_with("sqlite:") {
            Backend::Sqlite
        } else {
            Backend::Postgres
        }
    }
}

impl FromStr for DatabaseUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = ["postgres://", "postgresql://", "sqlite:"];
        if !known.iter().any(|scheme| text.starts_with(scheme)) {
            // The value itself stays out of the message: it may hold a password.
            return Err(
                "expected a URL that starts with postgres://, postgresql:// or sqlite:".into(),
            );
        }
        for secret in redact::secrets_of_url(text) {
            redact::remember(&secret);
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&redact::url(&self.0))
    }
}

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DatabaseUrl({self})")
    }
}

/// The name of an outbox, `[a-z0-9][a-z0-9._-]{0,99}`: part of the transactional id, the
/// checkpoint's group and every envelope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceName(String);

impl SourceName {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SourceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let first = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        let legal = text.len() <= 100
            && text.starts_with(first)
            && text
                .chars()
                .all(|c| first(c) || matches!(c, '.' | '_' | '-'));
        if !legal {
            return Err(format!(
                "{text:?} is not a source name: 1 to 100 characters of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit"
            ));
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for SourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A schema name or table prefix, `[a-z_][a-z0-9_]{0,62}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identifier(String);

impl Identifier {
    /// The identifier, unquoted.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Identifier {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let first = |c: char| c.is_ascii_lowercase() || c == '_';
        if text.len() > 63
            || !text.starts_with(first)
            || !text.chars().all(|c| first(c) || c.is_ascii_digit())
        {
            return Err(format!(
                "{text:?} is not an identifier: 1 to 63 characters of a-z, 0-9 and '_', not beginning with a digit"
            ));
        }
        Ok(Self(text.to_owned()))
    }
}

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// One line of text per event.
    #[default]
    Text,
    /// One JSON object per event.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!("{other:?} is not a log format: text or json")),
        }
    }
}

/// Properties for librdkafka, without the `kafka.` prefix. `Debug` hides secret values.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Properties(BTreeMap<String, String>);

impl Properties {
    /// The properties with their secrets, for the client only.
    pub fn expose(&self) -> &BTreeMap<String, String> {
        &self.0
    }
}

impl fmt::Debug for Properties {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.0.iter().map(|(name, value)| {
            let value = if redact::is_secret_property(name) {
                redact::HIDDEN
            } else {
                value
            };
            (name, value)
        });
        f.debug_map().entries(shown).finish()
    }
}

impl<'de> Deserialize<'de> for Properties {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let given = BTreeMap::<String, Text>::deserialize(deserializer)?;
        let mut properties = BTreeMap::new();
        for (name, Text(value)) in given {
            if redact::is_secret_property(&name) {
                redact::remember(&value);
            }
            properties.insert(name.trim_start_matches("kafka.").to_owned(), value);
        }
        Ok(Self(properties))
    }
}

/// Any scalar as text: files say `5`, variables and flags say `"5"`, both mean the same.
struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Scalar;
        impl Visitor<'_> for Scalar {
            type Value = Text;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a number or a boolean")
            }
            fn visit_str<E: de::Error>(self, v: &str) -> Result<Text, E> {
                Ok(Text(v.to_owned()))
            }
            fn visit_bool<E: de::Error>(self, v: bool) -> Result<Text, E> {
                Ok(Text(v.to_string()))
            }
            fn visit_i64<E: de::Error>(self, v: i64) -> Result<Text, E> {
                Ok(Text(v.to_string()))
            }
            fn visit_u64<E: de::Error>(self, v: u64) -> Result<Text, E> {
                Ok(Text(v.to_string()))
            }
            fn visit_f64<E: de::Error>(self, v: f64) -> Result<Text, E> {
                Ok(Text(v.to_string()))
            }
        }
        deserializer.deserialize_any(Scalar)
    }
}

/// `deserialize_with` for values that are parsed from text.
pub(super) fn parsed<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: fmt::Display>,
{
    Text::deserialize(deserializer)?
        .0
        .parse()
        .map_err(de::Error::custom)
}

/// [`parsed`] for optional values.
pub(super) fn parsed_option<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: fmt::Display>,
{
    parsed(deserializer).map(Some)
}

/// `deserialize_with` for durations such as `500ms`, `3s`, `24h`.
pub(super) fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = Text::deserialize(deserializer)?.0;
    humantime::parse_duration(&text).map_err(|_| {
        de::Error::custom(format!(
            "{text:?} is not a duration such as 500ms, 3s or 24h"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_names_follow_the_contract() {
        for good in ["orders", "a", "0", "orders.eu-west_1"] {
            assert!(good.parse::<SourceName>().is_ok(), "{good}");
        }
        for bad in [
            "",
            "Orders",
            ".orders",
            "-x",
            "or ders",
            "ü",
            &"x".repeat(101),
        ] {
            assert!(bad.parse::<SourceName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_database_url_never_shows_its_password() {
        let url: DatabaseUrl = "postgres://app:s3cret-word@db/shop".parse().unwrap();
        for shown in [format!("{url}"), format!("{url:?}"), format!("{url:#?}")] {
            assert!(!shown.contains("s3cret"), "{shown}");
            assert!(shown.contains("app:***@db/shop"), "{shown}");
        }
        let error = "mysql://app:s3cret-word@db/shop"
            .parse::<DatabaseUrl>()
            .unwrap_err();
        assert!(!error.contains("s3cret"), "{error}");
    }
}
