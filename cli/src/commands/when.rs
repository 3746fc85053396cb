//! Times on the command line.

use std::time::Duration;

use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::config::ConfigError;

/// `2026-11-29T20:00:00Z`, or how long ago.
pub(crate) fn time(flag: &str, text: Option<&str>) -> Result<Option<OffsetDateTime>, ConfigError> {
    let Some(text) = text else { return Ok(None) };
    if let Ok(ago) = humantime::parse_duration(text) {
        let at =
            OffsetDateTime::now_utc().checked_sub(ago.try_into().unwrap_or(time::Duration::MAX));
        return at.map(Some).ok_or_else(|| wrong(flag, text));
    }
    OffsetDateTime::parse(text, &Rfc3339)
        .map(Some)
        .map_err(|_| wrong(flag, text))
}

fn wrong(flag: &str, text: &str) -> ConfigError {
    ConfigError::Value(format!(
        "flag {flag}: {text:?} is neither a time (2026-11-29T20:00:00Z) nor how long ago (30min, 2h, 7d)"
    ))
}

/// A duration with its unit.
pub(crate) fn duration(flag: &str, text: &str) -> Result<Duration, ConfigError> {
    humantime::parse_duration(text).map_err(|e| {
        ConfigError::Value(format!(
            "flag {flag}: {text:?}: {e}; for example 60s, 10min"
        ))
    })
}

/// As it is printed.
pub(crate) fn text(at: OffsetDateTime) -> String {
    let seconds = at.replace_millisecond(at.millisecond()).unwrap_or(at);
    seconds.format(&Rfc3339).unwrap_or_default()
}

/// As it stands in JSON.
pub(crate) fn value(at: Option<OffsetDateTime>) -> Value {
    at.map_or(Value::Null, |at| {
        json!(at.format(&Rfc3339).unwrap_or_default())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_time_or_how_long_ago() {
        let at = time("--since", Some("2026-11-29T20:00:00Z"))
            .unwrap()
            .unwrap();
        assert_eq!(text(at), "2026-11-29T20:00:00Z");
        let ago = time("--since", Some("2h")).unwrap().unwrap();
        let seconds = (OffsetDateTime::now_utc() - ago).whole_seconds();
        assert!((7_199..=7_260).contains(&seconds), "{seconds}");
        assert_eq!(time("--since", None).unwrap(), None);
        let error = time("--since", Some("yesterday")).unwrap_err().to_string();
        assert!(error.contains("--since") && error.contains("2h"), "{error}");
    }
}
