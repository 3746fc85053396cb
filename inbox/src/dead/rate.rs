//! How fast letters are replayed.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

/// So many letters per second, minute or hour. `FromStr` reads `10/s`, `30/m`, `100/h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    count: NonZeroU32,
    unit: Unit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Second,
    Minute,
    Hour,
}

impl Rate {
    /// Letters per second.
    #[must_use]
    pub fn per_second(count: NonZeroU32) -> Self {
        Self {
            count,
            unit: Unit::Second,
        }
    }

    /// How many in [`Rate::micros`].
    pub(super) fn count(self) -> i64 {
        self.count.get().into()
    }

    /// The length of the unit.
    pub(super) fn micros(self) -> i64 {
        match self.unit {
            Unit::Second => 1_000_000,
            Unit::Minute => 60_000_000,
            Unit::Hour => 3_600_000_000,
        }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = match self.unit {
            Unit::Second => "s",
            Unit::Minute => "m",
            Unit::Hour => "h",
        };
        write!(f, "{}/{unit}", self.count)
    }
}

/// The text is no rate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no rate: expected a number from 1 and /s, /m or /h, for example 10/s")]
pub struct UnknownRate {
    text: String,
}

impl FromStr for Rate {
    type Err = UnknownRate;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unknown = || UnknownRate {
            text: text.to_owned(),
        };
        let (count, unit) = text.split_once('/').ok_or_else(unknown)?;
        Ok(Self {
            count: count.trim().parse().map_err(|_| unknown())?,
            unit: match unit.trim() {
                "s" => Unit::Second,
                "m" | "min" => Unit::Minute,
                "h" => Unit::Hour,
                _ => return Err(unknown()),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rate_has_a_text() {
        for (text, micros) in [
            ("10/s", 1_000_000),
            ("1/m", 60_000_000),
            ("100/h", 3_600_000_000),
        ] {
            let rate: Rate = text.parse().unwrap();
            assert_eq!(rate.to_string(), text);
            assert_eq!(rate.micros(), micros);
        }
        for text in ["", "10", "0/s", "-1/s", "1/d", "x/s", "1.5/s"] {
            let error = text.parse::<Rate>().unwrap_err();
            assert!(error.to_string().contains("10/s"), "{error}");
        }
    }
}
