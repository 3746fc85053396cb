//! The places a position can be set to.

use std::fmt;
use std::str::FromStr;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Where to go on. `FromStr` reads `earliest`, `latest`, `committed`, an offset, or an RFC 3339 time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    /// The first offset that is still there.
    Earliest,
    /// The end: everything there is now is skipped.
    Latest,
    /// The offset that the Kafka group has committed: adopts an existing group.
    Committed,
    /// This offset; needs a partition, unless the topic has only one.
    Offset(i64),
    /// The first record at or after this time.
    Time(OffsetDateTime),
}

impl fmt::Display for From {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Earliest => f.write_str("earliest"),
            Self::Latest => f.write_str("latest"),
            Self::Committed => f.write_str("committed"),
            Self::Offset(offset) => offset.fmt(f),
            Self::Time(at) => f.write_str(&at.format(&Rfc3339).map_err(|_| fmt::Error)?),
        }
    }
}

/// The text names no place to go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is none of earliest, latest, committed, an offset (a number from 0), a time (2026-11-29T20:21:53Z)"
)]
pub struct UnknownFrom {
    text: String,
}

impl FromStr for From {
    type Err = UnknownFrom;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unknown = || UnknownFrom {
            text: text.to_owned(),
        };
        match text {
            "earliest" => Ok(Self::Earliest),
            "latest" => Ok(Self::Latest),
            "committed" => Ok(Self::Committed),
            _ => match text.parse::<i64>() {
                Ok(offset) if offset >= 0 => Ok(Self::Offset(offset)),
                Ok(_) => Err(unknown()),
                Err(_) => OffsetDateTime::parse(text, &Rfc3339)
                    .map(Self::Time)
                    .map_err(|_| unknown()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_has_a_text() {
        for text in [
            "earliest",
            "latest",
            "committed",
            "17",
            "2026-11-29T20:21:53Z",
        ] {
            assert_eq!(text.parse::<From>().unwrap().to_string(), text);
        }
        for text in ["", "-1", "newest", "2026-11-29"] {
            let error = text.parse::<From>().unwrap_err();
            assert!(error.to_string().contains("earliest"), "{error}");
        }
    }
}
