//! Is this still the outbox that the position speaks of? Decided before anything is published (G10).

use crate::config::Config;
use crate::error::{Error, Stop};
use crate::position::Checkpoint;
use crate::session::{Facts, Mark, Server};

/// One outbox has one name: another `--source` on it is a mistake.
pub(crate) fn check_source(config: &Config, mark: &Mark) -> Result<(), Error> {
    match &mark.source {
        Some(owner) if *owner != config.source => Err(Stop::OtherSource {
            owner: owner.clone(),
            asked: config.source.clone(),
        }
        .into()),
        _ => Ok(()),
    }
}

/// An old primary that was never told of the promotion must not fence the relay of the new one.
pub(crate) fn check_timeline(
    server: &Server,
    checkpoint: Option<&Checkpoint>,
) -> Result<(), Error> {
    match checkpoint {
        Some(c) if c.system == server.system && server.timeline < c.timeline => {
            Err(Stop::OlderTimeline {
                server: server.timeline,
                checkpoint: c.timeline,
            }
            .into())
        }
        _ => Ok(()),
    }
}

/// Refuses what can be refused without looking at a row, and before anybody is fenced.
pub(crate) fn check_names(
    config: &Config,
    server: &Server,
    cluster_id: &str,
    mark: &Mark,
    checkpoint: Option<&Checkpoint>,
) -> Result<(), Error> {
    check_source(config, mark)?;
    if let Some(other) = checkpoint.filter(|c| c.source_id != mark.source_id) {
        let source_name = config.source.clone();
        return Err(Stop::OtherDatabase {
            source_name,
            checkpoint: other.source_id,
            database: mark.source_id,
        }
        .into());
    }
    check_timeline(server, checkpoint)?;
    let seen = checkpoint.map_or(0, |c| c.seq);
    if let Some(mark_cluster) = mark
        .cluster_id
        .as_ref()
        .filter(|id| **id != cluster_id && mark.seq > seen)
    {
        let (mark_cluster, cluster) = (mark_cluster.clone(), cluster_id.to_owned());
        return Err(Stop::OtherCluster {
            mark: mark.seq,
            checkpoint: seen,
            mark_cluster,
            cluster,
        }
        .into());
    }
    Ok(())
}

/// The epoch of whoever leads next: above every one that was written.
pub(crate) fn next_epoch(mark: &Mark, checkpoint: Option<&Checkpoint>) -> i64 {
    mark.epoch.max(checkpoint.map_or(0, |c| c.epoch)) + 1
}

/// The newer of both: larger seq, not larger number. A late-only batch moves the gaps and not the number.
pub(crate) fn newer<'a>(
    mark: &'a Mark,
    checkpoint: Option<&'a Checkpoint>,
) -> Option<&'a Checkpoint> {
    match (mark.checkpoint.as_ref(), checkpoint) {
        (Some(mark), Some(checkpoint)) if mark.seq > checkpoint.seq => Some(mark),
        (mark, None) => mark,
        (_, checkpoint) => checkpoint,
    }
}

/// [`check_rows`], if the facts are of the position's time. `false` = the mark is newer: a leader has moved on since the
/// position was read, and what is missing or too much says nothing.
pub(crate) fn check_facts(position: &Checkpoint, facts: &Facts) -> Result<bool, Error> {
    let comparable = newer(&facts.mark, Some(position)) == Some(position);
    if comparable {
        check_rows(position, facts)?;
    }
    Ok(comparable)
}

/// Compares a position with facts that were collected for it in one snapshot: the row `high` is there, and the rows that
/// the position settled are there, all of them and no other.
pub(crate) fn check_rows(position: &Checkpoint, facts: &Facts) -> Result<(), Error> {
    if position.incomplete {
        return Err(Stop::BaseMissing.into());
    }
    let p = &position.position;
    let expected = p.settled.without(facts.mark.deleted);
    if p.high > 0 && facts.high_message_id != p.high_message_id {
        let found = facts
            .high_message_id
            .map_or("no row".to_owned(), |id| format!("message {id}"));
        let wanted = p.high_message_id.unwrap_or_default();
        let detail = format!("row {} is message {wanted}, found {found}", p.high);
        return Err(Stop::RowsMissing { detail }.into());
    }
    let range = format!(
        "ids {} to {}, gaps excluded",
        facts.mark.low_water + 1,
        p.high
    );
    if facts.rows.count < expected.count {
        let detail = format!(
            "{range}: {} rows were published and not deleted, {} are there",
            expected.count, facts.rows.count
        );
        return Err(Stop::RowsMissing { detail }.into());
    }
    if facts.rows.count > expected.count {
        let detail = format!(
            "{range}: {} rows were published and not deleted, {} are there",
            expected.count, facts.rows.count
        );
        return Err(Stop::ForeignRows { detail }.into());
    }
    if facts.rows.fingerprint != expected.fingerprint {
        let detail = format!(
            "{range}: {} rows, as many as were published, but not the same ones",
            facts.rows.count
        );
        return Err(Stop::RowsMissing { detail }.into());
    }
    if facts.parked != position.parked {
        let detail = format!(
            "{} parked rows are settled by the position, {} are there{}",
            position.parked.count,
            facts.parked.count,
            match position.parked.count == facts.parked.count {
                true => ", but not the same ones",
                false => "",
            }
        );
        return Err(Stop::ParkedRows { detail }.into());
    }
    if facts.rows_below_low_water {
        let detail = format!(
            "there is a row at or below {}, where everything was deleted",
            facts.mark.low_water
        );
        return Err(Stop::ForeignRows { detail }.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::config::Database;
    use crate::position::{Gaps, Position, Tally};

    fn config() -> Config {
        Config::new(
            "shop",
            Database::parse("sqlite::memory:").unwrap(),
            oncebox_kafka::Config::new("127.0.0.1:9"),
        )
    }

    fn tally(ids: &[i64]) -> Tally {
        let mut tally = Tally::default();
        ids.iter().for_each(|id| tally.add(*id));
        tally
    }

    fn checkpoint(seq: i64, high: i64, ids: &[i64]) -> Checkpoint {
        Checkpoint {
            format: 1,
            seq,
            epoch: 1,
            source_id: Uuid::from_u128(1),
            system: "7".to_owned(),
            timeline: 2,
            position: Position {
                high,
                high_message_id: Some(Uuid::from_u128(9)),
                gaps: Gaps::default(),
                settled: tally(ids),
            },
            parked: Tally::default(),
            released: Gaps::default(),
            incomplete: false,
        }
    }

    fn mark(seq: i64, checkpoint: Option<Checkpoint>) -> Mark {
        Mark {
            format: 1,
            source_id: Uuid::from_u128(1),
            source: Some("shop".to_owned()),
            source_epoch: 1,
            epoch: 1,
            owner: None,
            renewal: 0,
            seq,
            checkpoint,
            cluster_id: Some("here".to_owned()),
            low_water: 0,
            deleted: Tally::default(),
        }
    }

    fn server(timeline: u32) -> Server {
        Server {
            system: "7".to_owned(),
            timeline,
            instance: String::new(),
        }
    }

    fn stop(result: Result<(), Error>) -> Stop {
        match result {
            Err(Error::Stop(stop)) => *stop,
            other => panic!("expected a stop, got {other:?}"),
        }
    }

    #[test]
    fn g10_another_source_database_timeline_or_cluster_is_refused() {
        let stored = checkpoint(5, 3, &[1, 2, 3]);
        let good = mark(5, Some(stored.clone()));
        let check = |mark: &Mark, stored: Option<&Checkpoint>, server: &Server, cluster: &str| {
            check_names(&config(), server, cluster, mark, stored)
        };
        check(&good, Some(&stored), &server(2), "here").unwrap();
        check(&good, Some(&stored), &server(3), "here").unwrap();
        check(&good, None, &server(2), "here").unwrap();

        let other = Mark {
            source: Some("cart".to_owned()),
            ..good.clone()
        };
        assert!(matches!(
            stop(check(&other, None, &server(2), "here")),
            Stop::OtherSource { .. }
        ));
        let other = Mark {
            source_id: Uuid::from_u128(2),
            ..good.clone()
        };
        assert!(matches!(
            stop(check(&other, Some(&stored), &server(2), "here")),
            Stop::OtherDatabase { .. }
        ));
        assert!(matches!(
            stop(check(&good, Some(&stored), &server(1), "here")),
            Stop::OlderTimeline { .. }
        ));
        let ahead = Mark {
            seq: 6,
            ..good.clone()
        };
        assert!(matches!(
            stop(check(&ahead, Some(&stored), &server(2), "there")),
            Stop::OtherCluster { .. }
        ));
        assert!(matches!(
            stop(check(&good, None, &server(2), "there")),
            Stop::OtherCluster { .. }
        ));
        // A dump restored elsewhere has another system identifier: its timeline means nothing.
        let elsewhere = Server {
            system: "8".to_owned(),
            ..server(1)
        };
        check(&good, Some(&stored), &elsewhere, "here").unwrap();
    }

    #[test]
    fn g3_the_larger_seq_wins_not_the_larger_number() {
        let late_only = checkpoint(6, 3, &[1, 2, 3]);
        let before = mark(5, Some(checkpoint(5, 9, &[1, 3])));
        assert_eq!(newer(&before, Some(&late_only)), Some(&late_only));
        let ahead = mark(7, Some(checkpoint(7, 1, &[1])));
        assert_eq!(newer(&ahead, Some(&late_only)).map(|c| c.seq), Some(7));
        assert_eq!(newer(&ahead, None).map(|c| c.seq), Some(7));
        assert_eq!(newer(&mark(0, None), None), None);
    }

    #[test]
    fn g10_missing_and_foreign_rows_are_told_apart() {
        let position = checkpoint(5, 3, &[1, 2, 3]);
        let facts = |ids: &[i64]| Facts {
            mark: mark(5, None),
            high_message_id: Some(Uuid::from_u128(9)),
            rows_below_low_water: false,
            rows: tally(ids),
            parked: Tally::default(),
        };
        check_rows(&position, &facts(&[1, 2, 3])).unwrap();
        assert!(matches!(
            stop(check_rows(&position, &facts(&[1, 3]))),
            Stop::RowsMissing { .. }
        ));
        assert!(matches!(
            stop(check_rows(&position, &facts(&[1, 2, 3, 4]))),
            Stop::ForeignRows { .. }
        ));
        // One lost and one foreign row: the count alone compensates.
        assert!(matches!(
            stop(check_rows(&position, &facts(&[1, 3, 4]))),
            Stop::RowsMissing { .. }
        ));
        let other_row = Facts {
            high_message_id: Some(Uuid::from_u128(8)),
            ..facts(&[1, 2, 3])
        };
        assert!(matches!(
            stop(check_rows(&position, &other_row)),
            Stop::RowsMissing { .. }
        ));
        let revived = Facts {
            rows_below_low_water: true,
            ..facts(&[1, 2, 3])
        };
        assert!(matches!(
            stop(check_rows(&position, &revived)),
            Stop::ForeignRows { .. }
        ));
        let mut parked = Tally::default();
        parked.add_message(Uuid::from_u128(2));
        let lost = Checkpoint {
            parked,
            ..position.clone()
        };
        assert!(matches!(
            stop(check_rows(&lost, &facts(&[1, 2, 3]))),
            Stop::ParkedRows { .. }
        ));
        let there = Facts {
            parked,
            ..facts(&[1, 2, 3])
        };
        check_rows(&lost, &there).unwrap();
        let mut cleaned = facts(&[3]);
        cleaned.mark.deleted = tally(&[1, 2]);
        cleaned.mark.low_water = 2;
        check_rows(&position, &cleaned).unwrap();
    }
}
