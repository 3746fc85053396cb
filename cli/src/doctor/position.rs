//! Do the database's mark and Kafka's checkpoint belong together? Pure.

use std::time::Duration;

use oncebox_relay::position::{Checkpoint, Stored};
use uuid::Uuid;

use super::report::Checks;

/// The mark row, as far as the doctor reads it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mark {
    /// The database's random id.
    pub source_id: Uuid,
    /// The outbox's name, once a relay has led it.
    pub source: Option<String>,
    /// The leader's epoch.
    pub epoch: i64,
    /// The leader, for people.
    pub owner: Option<String>,
    /// The lease's counter.
    pub renewal: i64,
    /// The confirmed position, in the relay's text format; empty = none.
    pub position: String,
    /// The position's number.
    pub seq: i64,
    /// The Kafka cluster it was published to.
    pub cluster_id: Option<String>,
    /// Seconds since the row was last written, by the database's clock.
    pub age_seconds: f64,
}

impl Mark {
    /// The highest settled id; 0 when there is no position or it cannot be read.
    pub fn high(&self) -> i64 {
        Checkpoint::decode(&self.position).map_or(0, |c| c.position.high)
    }
}

/// Judges mark and checkpoint. `source` is the name that was asked for, `cluster_id` the cluster that answered.
pub fn judge(
    checks: &mut Checks,
    source: &str,
    mark: &Mark,
    checkpoint: Option<&(i64, String)>,
    cluster_id: &str,
) {
    match &mark.source {
        Some(owner) if owner != source => {
            checks.fail(
                "source",
                format!("this outbox belongs to source {owner:?}, not to {source:?}"),
                format!("use --source {owner}"),
            );
            checks.skip("checkpoint", "it would be another source's");
            return;
        }
        Some(owner) => checks.ok("source", format!("this outbox belongs to source {owner:?}")),
        None => checks.ok("source", "no relay has led this outbox yet"),
    }
    let stored = match checkpoint {
        None => None,
        Some((_, text)) => match Stored::decode(text) {
            Ok(stored) => Some(stored.head),
            Err(error) => {
                checks.fail(
                    "checkpoint",
                    format!("group oncebox.{source} holds a checkpoint that cannot be read: {error}"),
                    "use the Oncebox version that wrote it; nobody else may commit offsets for this group",
                );
                return;
            }
        },
    };
    match &stored {
        Some(stored) if stored.source_id != mark.source_id => checks.fail(
            "checkpoint",
            format!(
                "the checkpoint of source {source:?} belongs to another database (its id {}, this database {})",
                stored.source_id, mark.source_id
            ),
            "choose another --source, or the database it belongs to, or take its name over with `oncebox relay resume --from mark`",
        ),
        Some(stored) if stored.seq < mark.seq => match &mark.cluster_id {
            Some(of_mark) if of_mark != cluster_id => checks.fail(
                "checkpoint",
                format!("the mark (seq {}) is ahead of the checkpoint (seq {}) and was written for another Kafka cluster, {of_mark}", mark.seq, stored.seq),
                "correct --kafka; for a new cluster: `oncebox relay resume --from mark` (dry run first)",
            ),
            _ => checks.warn(
                "checkpoint",
                format!("the mark (seq {}) is ahead of the checkpoint (seq {})", mark.seq, stored.seq),
                "the relay goes on from the mark; find out who reset the group's offsets",
            ),
        },
        Some(stored) => checks.ok(
            "checkpoint",
            format!("seq {} up to id {}; the mark is {} behind", stored.seq, stored.position.high, stored.seq - mark.seq),
        ),
        None if mark.seq == 0 => checks.ok("checkpoint", "none yet: nothing was published"),
        None => checks.warn(
            "checkpoint",
            format!("none in Kafka, the mark is at seq {}: expired, deleted, or another cluster", mark.seq),
            "the relay goes on from the mark and may repeat what was published after it; check --kafka and offsets.retention.minutes",
        ),
    }
    if let Some(of_mark) = &mark.cluster_id
        && of_mark != cluster_id
    {
        checks.warn(
            "cluster",
            format!("last published to Kafka cluster {of_mark}, this is {cluster_id}"),
            "check --kafka",
        );
    }
}

/// Says who leads. `later` is the mark read again after a moment; a leader is believed for as long as its `lease`.
pub fn leader(checks: &mut Checks, mark: &Mark, later: &Mark, lease: Duration) {
    let renewed = (mark.epoch, mark.renewal) != (later.epoch, later.renewal);
    match &later.owner {
        Some(name) if renewed => {
            checks.ok(
                "leader",
                format!("{name} leads (epoch {}), renewed just now", later.epoch),
            );
        }
        Some(name) if later.age_seconds <= lease.as_secs_f64() => checks.ok(
            "leader",
            format!(
                "{name} leads (epoch {}), renewed {:.1} s ago",
                later.epoch, later.age_seconds
            ),
        ),
        Some(name) => checks.warn(
            "leader",
            format!(
                "nobody renews the lease: the last leader was {name} (epoch {}), {:.0} s ago",
                later.epoch, later.age_seconds
            ),
            "start `oncebox relay`, or look at its log",
        ),
        None if later.epoch == 0 => {
            checks.warn(
                "leader",
                "no relay has led this outbox yet",
                "start `oncebox relay`",
            );
        }
        None => checks.warn(
            "leader",
            format!(
                "nobody leads: the lease was given back {:.0} s ago",
                later.age_seconds
            ),
            "start `oncebox relay`",
        ),
    }
}

#[cfg(test)]
mod tests {
    use oncebox_relay::position::{Gaps, Position, Tally};

    use super::super::report::Status;
    use super::*;

    fn checkpoint(source_id: Uuid, seq: i64) -> (i64, String) {
        let position = Position {
            high: 5,
            high_message_id: Some(Uuid::from_u128(9)),
            ..Position::default()
        };
        let checkpoint = Checkpoint {
            format: 1,
            seq,
            epoch: 1,
            source_id,
            system: "x".into(),
            timeline: 1,
            position,
            parked: Tally::default(),
            released: Gaps::default(),
            incomplete: false,
        };
        (5, checkpoint.encode())
    }

    fn mark(seq: i64) -> Mark {
        Mark {
            source_id: Uuid::from_u128(1),
            source: Some("orders".into()),
            seq,
            epoch: 1,
            cluster_id: Some("c1".into()),
            ..Mark::default()
        }
    }

    fn worst(mark: &Mark, checkpoint: Option<&(i64, String)>, cluster: &str) -> (Status, String) {
        let mut checks = Checks::default();
        judge(&mut checks, "orders", mark, checkpoint, cluster);
        let rank = |s: Status| match s {
            Status::Ok | Status::Skip => 0,
            Status::Warn => 1,
            Status::Fail => 2,
        };
        let worst = checks
            .iter()
            .map(|c| c.status)
            .max_by_key(|s| rank(*s))
            .unwrap();
        (worst, checks.text())
    }

    #[test]
    fn a_checkpoint_of_this_database_is_fine() {
        let ours = Uuid::from_u128(1);
        assert_eq!(
            worst(&mark(7), Some(&checkpoint(ours, 7)), "c1").0,
            Status::Ok
        );
        assert_eq!(worst(&mark(0), None, "c1").0, Status::Ok);
    }

    #[test]
    fn a_checkpoint_of_another_database_fails_with_a_way_out() {
        let (status, text) = worst(&mark(7), Some(&checkpoint(Uuid::from_u128(2), 7)), "c1");
        assert_eq!(status, Status::Fail);
        assert!(
            text.contains("another database") && text.contains("resume"),
            "{text}"
        );
    }

    #[test]
    fn another_source_unreadable_and_another_cluster_fail() {
        let ours = Uuid::from_u128(1);
        let other = Mark {
            source: Some("shop".into()),
            ..mark(7)
        };
        assert_eq!(
            worst(&other, Some(&checkpoint(ours, 7)), "c1").0,
            Status::Fail
        );
        assert_eq!(
            worst(&mark(7), Some(&(5, "v9 x".into())), "c1").0,
            Status::Fail
        );
        assert_eq!(
            worst(&mark(8), Some(&checkpoint(ours, 7)), "c2").0,
            Status::Fail
        );
    }

    #[test]
    fn an_expired_or_older_checkpoint_is_a_warning() {
        let ours = Uuid::from_u128(1);
        assert_eq!(worst(&mark(7), None, "c1").0, Status::Warn);
        assert_eq!(
            worst(&mark(8), Some(&checkpoint(ours, 7)), "c1").0,
            Status::Warn
        );
    }

    #[test]
    fn the_leader_is_who_renews_or_did_within_the_lease() {
        let status = |a: &Mark, b: &Mark| {
            let mut checks = Checks::default();
            leader(&mut checks, a, b, Duration::from_secs(3));
            checks.iter().next().unwrap().status
        };
        let led = |renewal, age_seconds| Mark {
            owner: Some("a".into()),
            renewal,
            age_seconds,
            ..mark(7)
        };
        assert_eq!(status(&led(1, 0.0), &led(2, 9.0)), Status::Ok);
        assert_eq!(status(&led(1, 0.0), &led(1, 1.6)), Status::Ok);
        assert_eq!(status(&led(1, 8.0), &led(1, 9.6)), Status::Warn);
        assert_eq!(status(&mark(7), &mark(7)), Status::Warn);
        assert_eq!(status(&Mark::default(), &Mark::default()), Status::Warn);
    }
}
