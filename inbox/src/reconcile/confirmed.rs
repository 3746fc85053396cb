//! What the relay's confirmed position says about a row. Pure: no I/O.
//!
//! The position is the text in the mark (`oncebox_relay::position`): every id up to `high` is settled, except those in `gaps`.

/// The newest format of a position that is understood here.
const NEWEST: u32 = 1;

/// The confirmed position, as far as it matters here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Confirmed {
    high: i64,
    /// First and last ids, ascending.
    gaps: Vec<(i64, i64)>,
}

impl Confirmed {
    /// Reads the mark's text. An empty one is an outbox that no relay has led yet.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(Self::default());
        }
        let mut words = text.split(' ');
        let format = words.next().unwrap_or_default();
        let known = format.strip_prefix('v').and_then(|n| n.parse::<u32>().ok());
        if !known.is_some_and(|format| (1..=NEWEST).contains(&format)) {
            return Err(format!(
                "the relay's position has the format {format:?}, this build knows none above v{NEWEST}: run a newer build"
            ));
        }
        let damaged = || "the relay's position is damaged; see `oncebox doctor`".to_owned();
        let field = |name: &str| {
            let word = text
                .split(' ')
                .find_map(|word| word.split_once('=').filter(|(key, _)| *key == name));
            word.map(|(_, value)| value).ok_or_else(damaged)
        };
        if field("base").is_ok() {
            return Err(damaged());
        }
        Ok(Self {
            high: field("high")?.parse().map_err(|_| damaged())?,
            gaps: intervals(field("gaps")?).ok_or_else(damaged)?,
        })
    }

    /// Whether this row was published or parked.
    pub(super) fn settles(&self, id: i64) -> bool {
        let behind = self.gaps.partition_point(|(_, last)| *last < id);
        let in_gap = self.gaps.get(behind).is_some_and(|(first, _)| *first <= id);
        id <= self.high && !in_gap
    }
}

/// `17,3+5`: the first begins at its id, every other at the number of ids after the end of the one before; `+5` = five further ids.
fn intervals(text: &str) -> Option<Vec<(i64, i64)>> {
    let mut end = 0_i64;
    let mut intervals = Vec::new();
    for word in text.split(',').filter(|word| !word.is_empty()) {
        let (start, length) = word.split_once('+').unwrap_or((word, "0"));
        let first = end.checked_add(start.parse().ok()?)?;
        let last = first.checked_add(length.parse().ok()?)?;
        if first <= end || last < first {
            return None;
        }
        intervals.push((first, last));
        end = last;
    }
    Some(intervals)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_settled_up_to_high_and_outside_of_the_gaps() {
        let text = "v1 seq=7 epoch=2 src=0 sys=x tl=1 high=42 msg=0 n=1 fp=0 pn=0 pfp=0 rel=3+1 gaps=17,3+5";
        let confirmed = Confirmed::parse(text).unwrap();
        for (id, settled) in [
            (1, true),
            (16, true),
            (17, false),
            (18, true),
            (19, true),
            (20, false),
            (25, false),
            (26, true),
            (42, true),
            (43, false),
        ] {
            assert_eq!(confirmed.settles(id), settled, "{id}");
        }
        assert!(!Confirmed::parse("").unwrap().settles(1));
    }

    #[test]
    fn what_is_not_understood_is_an_error_and_no_guess() {
        for (text, words) in [
            ("v2 high=1 gaps=", "run a newer build"),
            ("what", "run a newer build"),
            ("v1 high=1", "damaged"),
            ("v1 high=x gaps=", "damaged"),
            ("v1 high=9 gaps=5,0", "damaged"),
            ("v1 high=9 base=0:7 closed= gaps=5", "damaged"),
        ] {
            let error = Confirmed::parse(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
