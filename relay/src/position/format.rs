//! The text that carries a position: metadata of the checkpoint in Kafka, and the `position` column of the mark.
//!
//! `v1 seq=7 epoch=2 src=<uuid> sys=<text> tl=1 high=42 msg=<uuid> n=40 fp=<hex> pn=2 pfp=<hex> rel=12 gaps=17,3+5`: n, fp
//! are the settled rows, pn, pfp the parked ones among them, rel the released ids; the first gap begins
//! at its id, every other at the number of ids after the end of the one before; `+5` = five further ids. Gaps that do not
//! fit stand in a base record: `base=0:77 closed=17 gaps=25`, changes since the record at offset 77 of partition 0.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU32, Ordering};

use uuid::Uuid;

use super::{Gaps, Interval, Position, Tally};

/// The newest format of this build.
const NEWEST: u32 = 1;

static KNOWN: AtomicU32 = AtomicU32::new(NEWEST);

/// The newest format that this build can read and write. It writes the one that the mark asks for: so an older and a newer
/// build may take turns during a rolling deploy.
#[must_use]
pub fn newest_format() -> u32 {
    KNOWN.load(Ordering::Relaxed)
}

/// For tests of a rolling deploy: this process is a build that knows this format too.
#[doc(hidden)]
pub fn know_format(format: u32) {
    KNOWN.store(format, Ordering::Relaxed);
}

/// A position with everything that is needed to trust it again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// The format that it was, or will be, written in: the mark's.
    pub format: u32,
    /// Counts positions: of two stored ones, the larger is the newer.
    pub seq: i64,
    /// Epoch of the leader that wrote it.
    pub epoch: i64,
    /// The database's random id, from the migration.
    pub source_id: Uuid,
    /// The server's system identifier (PostgreSQL), or the kind of database. No spaces.
    pub system: String,
    /// The server's timeline: grows at every promotion.
    pub timeline: u32,
    /// The position.
    pub position: Position,
    /// Of the settled rows, those that are parked, by message id, and not named in `released`.
    pub parked: Tally,
    /// Parked rows that this checkpoint's transaction published or dropped: they may still stand in the table.
    pub released: Gaps,
    /// Its base record is gone, so that gaps are missing. Not part of the text.
    pub incomplete: bool,
}

/// A position as it stands in Kafka: in full, or as the changes since a base record in the checkpoint's topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Given a base, its gaps are only those that are new since then.
    pub head: Checkpoint,
    /// Where the rest is.
    pub base: Option<Base>,
}

/// A record that holds a whole position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    /// Partition of the checkpoint's topic.
    pub partition: i32,
    /// Offset.
    pub offset: i64,
    /// Ids that were gaps then and are none now.
    pub closed: Gaps,
}

impl Stored {
    /// Reads the text of a checkpoint.
    ///
    /// # Errors
    /// As [`Checkpoint::decode`].
    pub fn decode(text: &str) -> Result<Self, FormatError> {
        decode(text)
    }

    /// The position in full, given the gaps of its base.
    #[must_use]
    pub fn complete(self, base_gaps: &Gaps) -> Checkpoint {
        let mut head = self.head;
        if let Some(base) = &self.base {
            let still = base_gaps.minus(&base.closed);
            head.position.gaps = still.union(&head.position.gaps);
        }
        head
    }
}

/// Why a stored position cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Another format.
    #[error("its format is {0:?}, this build knows none above v{known}: run a newer build", known = newest_format())]
    Unknown(String),
    /// A field is missing or does not parse.
    #[error("field {0} is missing or damaged")]
    Field(&'static str),
}

impl Checkpoint {
    /// The text.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut text = self.encode_head();
        encode_intervals(&mut text, &self.position.gaps);
        text
    }

    /// The text as the changes since a base record, which is at `place` (`partition:offset`) and has these gaps.
    #[must_use]
    pub fn encode_since(&self, place: &str, base_gaps: &Gaps) -> String {
        let now = &self.position.gaps;
        let mut text = self.encode_head();
        // `gaps=` is the last word of the head.
        text.truncate(text.len() - "gaps=".len());
        let _ = write!(text, "base={place} closed=");
        encode_intervals(&mut text, &base_gaps.minus(now));
        text.push_str(" gaps=");
        encode_intervals(&mut text, &now.minus(base_gaps));
        text
    }

    /// Everything but the gaps, with every number at its widest: what is left of the limit belongs to the gaps.
    #[must_use]
    pub fn head_bytes(&self) -> usize {
        let widest = Self {
            seq: i64::MAX,
            epoch: i64::MAX,
            position: Position {
                high: i64::MAX,
                high_message_id: Some(Uuid::nil()),
                settled: Tally {
                    count: i64::MAX,
                    fingerprint: -1,
                },
                gaps: Gaps::default(),
            },
            parked: Tally {
                count: i64::MAX,
                fingerprint: -1,
            },
            // A release can always name one id.
            released: Gaps::single(i64::MAX),
            ..self.clone()
        };
        widest.encode_head().len()
    }

    fn encode_head(&self) -> String {
        let p = &self.position;
        let mut text = format!(
            "v{} seq={} epoch={} src={} sys={} tl={} high={}",
            self.format,
            self.seq,
            self.epoch,
            self.source_id.simple(),
            self.system,
            self.timeline,
            p.high
        );
        if let Some(id) = p.high_message_id {
            let _ = write!(text, " msg={}", id.simple());
        }
        let _ = write!(
            text,
            " n={} fp={:x} pn={} pfp={:x} rel=",
            p.settled.count, p.settled.fingerprint, self.parked.count, self.parked.fingerprint
        );
        encode_intervals(&mut text, &self.released);
        text.push_str(" gaps=");
        text
    }

    /// Reads the text of a position in full.
    ///
    /// # Errors
    /// [`FormatError`] when the format is unknown or a field is damaged. Nothing is guessed (G10).
    pub fn decode(text: &str) -> Result<Self, FormatError> {
        let stored = decode(text)?;
        match stored.base {
            None => Ok(stored.head),
            Some(_) => Err(FormatError::Field("base")),
        }
    }
}

fn decode(text: &str) -> Result<Stored, FormatError> {
    let mut words = text.split(' ');
    let word = words.next().unwrap_or_default();
    let format = word.strip_prefix('v').and_then(|n| n.parse().ok());
    let known = format.filter(|format| (1..=newest_format()).contains(format));
    let format = known.ok_or_else(|| FormatError::Unknown(word.to_owned()))?;
    let seq = number(field(&mut words, "seq")?, "seq")?;
    let epoch = number(field(&mut words, "epoch")?, "epoch")?;
    let source_id =
        Uuid::try_parse(field(&mut words, "src")?).map_err(|_| FormatError::Field("src"))?;
    let system = field(&mut words, "sys")?.to_owned();
    let timeline = field(&mut words, "tl")?
        .parse()
        .map_err(|_| FormatError::Field("tl"))?;
    let high = number(field(&mut words, "high")?, "high")?;
    let high_message_id = if high == 0 {
        None
    } else {
        Some(Uuid::try_parse(field(&mut words, "msg")?).map_err(|_| FormatError::Field("msg"))?)
    };
    let settled =
        tally(field(&mut words, "n")?, field(&mut words, "fp")?).ok_or(FormatError::Field("n"))?;
    let parked = tally(field(&mut words, "pn")?, field(&mut words, "pfp")?)
        .ok_or(FormatError::Field("pn"))?;
    let released = decode_intervals(field(&mut words, "rel")?).ok_or(FormatError::Field("rel"))?;
    let rest = words.clone().next().unwrap_or_default();
    let base = if rest.starts_with("base=") {
        let damaged = || FormatError::Field("base");
        let (partition, offset) = field(&mut words, "base")?
            .split_once(':')
            .ok_or_else(damaged)?;
        let closed = field(&mut words, "closed").ok().and_then(decode_intervals);
        Some(Base {
            partition: partition.parse().map_err(|_| damaged())?,
            offset: offset.parse().map_err(|_| damaged())?,
            closed: closed.ok_or_else(damaged)?,
        })
    } else {
        None
    };
    let gaps = decode_intervals(field(&mut words, "gaps")?).ok_or(FormatError::Field("gaps"))?;
    let inside = gaps.intervals().last().is_none_or(|g| g.high < high);
    if words.next().is_some() || !inside || seq < 0 || high < 0 {
        return Err(FormatError::Field("gaps"));
    }
    let position = Position {
        high,
        high_message_id,
        gaps,
        settled,
    };
    let head = Checkpoint {
        format,
        seq,
        epoch,
        source_id,
        system,
        timeline,
        position,
        parked,
        released,
        incomplete: false,
    };
    Ok(Stored { head, base })
}

/// The value of the next word, which must have this name.
fn field<'a>(
    words: &mut std::str::Split<'a, char>,
    name: &'static str,
) -> Result<&'a str, FormatError> {
    let word = words.next().and_then(|word| word.split_once('='));
    let named = word.filter(|(key, _)| *key == name);
    named
        .map(|(_, value)| value)
        .ok_or(FormatError::Field(name))
}

fn number(text: &str, name: &'static str) -> Result<i64, FormatError> {
    text.parse().map_err(|_| FormatError::Field(name))
}

/// A count and its fingerprint.
fn tally(count: &str, fingerprint: &str) -> Option<Tally> {
    let count = count.parse().ok().filter(|count| *count >= 0)?;
    let fingerprint = u64::from_str_radix(fingerprint, 16).ok()?.cast_signed();
    Some(Tally { count, fingerprint })
}

fn encode_intervals(text: &mut String, intervals: &Gaps) {
    let mut end = 0;
    for interval in intervals.intervals() {
        if end != 0 {
            text.push(',');
        }
        let _ = write!(text, "{}", interval.low - end);
        if interval.high > interval.low {
            let _ = write!(text, "+{}", interval.high - interval.low);
        }
        end = interval.high;
    }
}

/// Bytes that a gap takes when the one before it ends at `end` (0 = it is the first).
pub(super) fn gap_bytes(gap: Interval, end: i64) -> usize {
    let digits = |n: i64| n.checked_ilog10().map_or(1, |d| d as usize + 1);
    let comma = usize::from(end != 0);
    let length = if gap.high > gap.low {
        1 + digits(gap.high - gap.low)
    } else {
        0
    };
    comma + digits(gap.low - end) + length
}

fn decode_intervals(text: &str) -> Option<Gaps> {
    let mut intervals = Vec::new();
    let mut end = 0_i64;
    for word in text.split(',').filter(|w| !w.is_empty()) {
        let (start, length) = word.split_once('+').unwrap_or((word, "0"));
        let (start, length): (i64, i64) = (start.parse().ok()?, length.parse().ok()?);
        let low = end.checked_add(start)?;
        let high = low.checked_add(length)?;
        intervals.push(Interval { low, high });
        end = high;
    }
    Gaps::new(intervals)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn checkpoint(gaps: Gaps, high: i64) -> Checkpoint {
        Checkpoint {
            format: 1,
            seq: 7,
            epoch: 2,
            source_id: Uuid::from_u128(5),
            system: "7430000000000000001".to_owned(),
            timeline: 1,
            position: Position {
                high,
                high_message_id: (high != 0).then(|| Uuid::from_u128(9)),
                gaps,
                settled: Tally {
                    count: 4,
                    fingerprint: -3,
                },
            },
            parked: Tally {
                count: 2,
                fingerprint: -8,
            },
            released: Gaps::single(3),
            incomplete: false,
        }
    }

    proptest! {
        #[test]
        fn every_position_round_trips(steps in prop::collection::vec((1_i64..1_000_000, 0_i64..1_000), 0..200)) {
            let mut end = 0;
            let intervals: Vec<_> = steps.iter().map(|&(skip, length)| {
                let low = end + skip + i64::from(end != 0);
                end = low + length;
                Interval { low, high: end }
            }).collect();
            let stored = checkpoint(Gaps::new(intervals.clone()).unwrap(), end + 1);
            let text = stored.encode();
            prop_assert_eq!(Checkpoint::decode(&text).unwrap(), stored.clone());
            let mut before = 0;
            let gap_total: usize = intervals.iter().map(|g| { let n = gap_bytes(*g, before); before = g.high; n }).sum();
            prop_assert_eq!(stored.encode_head().len() + gap_total, text.len());
            prop_assert!(stored.head_bytes() + gap_total >= text.len());
        }

        #[test]
        fn changes_since_a_base_round_trip(
            before in prop::collection::btree_set(1_i64..400, 0..200),
            now in prop::collection::btree_set(1_i64..400, 0..200),
        ) {
            let (before, now) = (Gaps::of(before), Gaps::of(now));
            let current = checkpoint(now, 500);
            let text = current.encode_since("0:77", &before);
            let stored = Stored::decode(&text).unwrap();
            prop_assert_eq!(stored.base.as_ref().map(|b| (b.partition, b.offset)), Some((0, 77)));
            prop_assert_eq!(stored.complete(&before), current);
            // Whoever cannot read the base must not take it for the whole.
            prop_assert!(Checkpoint::decode(&text).is_err());
        }

        #[test]
        fn damaged_text_is_refused_and_never_panics(text in ".{0,200}") {
            prop_assert!(Checkpoint::decode(&text).is_err());
        }
    }

    #[test]
    fn an_unknown_format_is_named() {
        let text = checkpoint(Gaps::default(), 0)
            .encode()
            .replacen("v1", "v9", 1);
        assert_eq!(
            Checkpoint::decode(&text).unwrap_err(),
            FormatError::Unknown("v9".to_owned())
        );
    }

    #[test]
    fn a_gap_above_high_is_damage() {
        let text = checkpoint(Gaps::default(), 3).encode() + "7";
        assert_eq!(
            Checkpoint::decode(&text).unwrap_err(),
            FormatError::Field("gaps")
        );
    }
}
