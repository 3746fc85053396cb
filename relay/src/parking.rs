//! Which rows of a batch are published and which are parked: pure. What it decides is written before a checkpoint passes
//! the rows (G8).

use crate::error::Stop;
use crate::position::Tally;
use crate::session::{Among, Cause, Parking, Paused, Row};

/// What becomes of one row.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Fate {
    Publish,
    /// To be parked.
    Park(Parking),
    /// Stands in the table.
    Parked,
}

/// What becomes of the rows of one batch.
#[derive(Debug)]
pub(crate) struct Plan {
    fates: Vec<Fate>,
}

impl Plan {
    /// Everything is published: nothing is parked or paused.
    pub(crate) fn publish_all(rows: &[Row]) -> Self {
        Self {
            fates: vec![Fate::Publish; rows.len()],
        }
    }

    /// A row that is parked already, of a paused topic or key, or behind a parked row of its key is not published. Only a
    /// row with a smaller id blocks: after a rewind, the earlier rows of the key were published before it was parked.
    ///
    /// # Errors
    /// A parked row has the id of another message: ids were issued twice.
    pub(crate) fn new(rows: &[Row], among: &Among, paused: &[Paused]) -> Result<Self, Stop> {
        let fate = |row: &Row| {
            if let Some(parked) = among.ids.get(&row.id) {
                return match *parked == row.message_id {
                    true => Ok(Fate::Parked),
                    false => Err(Stop::ParkedRows {
                        detail: format!(
                            "outbox row {} is message {}, the parked row of that id is message {parked}",
                            row.id, row.message_id
                        ),
                    }),
                };
            }
            let record = &row.record;
            let mine =
                |p: &&Paused| p.topic == *record.topic && (p.key.is_none() || p.key == record.key);
            if let Some(paused) = paused.iter().find(mine) {
                let (cause, what) = match paused.key {
                    None => (Cause::Topic, "topic"),
                    Some(_) => (Cause::Key, "key"),
                };
                return Ok(park(
                    row,
                    cause,
                    format!("the {what} is paused: {}", paused.reason),
                ));
            }
            let key = record.key.clone();
            let first = key.and_then(|key| among.first.get(&(record.topic.clone(), key)));
            Ok(match first {
                Some(first) if *first < row.id => park(row, Cause::Key, behind(*first)),
                _ => Fate::Publish,
            })
        };
        let fates = rows.iter().map(fate).collect::<Result<_, _>>()?;
        Ok(Self { fates })
    }

    /// Kafka refuses this row: it is parked, and so are the later rows of its key.
    pub(crate) fn refuse(&mut self, rows: &[Row], index: usize, reason: &str) {
        let refused = &rows[index];
        self.fates[index] = park(refused, Cause::Refused, reason.to_owned());
        for (row, fate) in rows.iter().zip(&mut self.fates) {
            let blocked = row.id > refused.id
                && row.record.key.is_some()
                && row.record.key == refused.record.key
                && row.record.topic == refused.record.topic;
            if blocked && *fate == Fate::Publish {
                *fate = park(row, Cause::Key, behind(refused.id));
            }
        }
    }

    /// A topic is paused: its rows are parked.
    pub(crate) fn pause(&mut self, rows: &[Row], topic: &str, reason: &str) {
        for (row, fate) in rows.iter().zip(&mut self.fates) {
            if *row.record.topic == *topic && *fate == Fate::Publish {
                *fate = park(row, Cause::Topic, format!("the topic is paused: {reason}"));
            }
        }
    }

    /// Indexes of the rows to publish, in the order of the batch.
    pub(crate) fn publishable(&self) -> Vec<usize> {
        let all = self.fates.iter().enumerate();
        all.filter(|(_, fate)| **fate == Fate::Publish)
            .map(|(index, _)| index)
            .collect()
    }

    /// What must be written into the table first.
    pub(crate) fn unwritten(&self) -> Vec<Parking> {
        let all = self.fates.iter();
        all.filter_map(|fate| match fate {
            Fate::Park(parking) => Some(parking.clone()),
            _ => None,
        })
        .collect()
    }

    /// It is written.
    pub(crate) fn written(&mut self) {
        for fate in &mut self.fates {
            if matches!(fate, Fate::Park(_)) {
                *fate = Fate::Parked;
            }
        }
    }

    /// The rows that the position after this batch counts as parked.
    pub(crate) fn parked(&self, rows: &[Row]) -> Tally {
        let mut tally = Tally::default();
        for (row, fate) in rows.iter().zip(&self.fates) {
            if *fate != Fate::Publish {
                tally.add_message(row.message_id);
            }
        }
        tally
    }
}

fn park(row: &Row, cause: Cause, reason: String) -> Fate {
    Fate::Park(Parking {
        id: row.id,
        cause,
        reason,
    })
}

fn behind(id: i64) -> String {
    format!("behind parked row {id} of its key")
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use oncebox_kafka::Record;
    use uuid::Uuid;

    use super::*;

    fn row(id: i64, topic: &str, key: Option<&'static str>) -> Row {
        Row {
            id,
            message_id: Uuid::from_u128(id as u128),
            created_at_micros: 0,
            record: Record {
                topic: topic.into(),
                key: key.map(|key| Bytes::from_static(key.as_bytes())),
                payload: None,
                headers: Bytes::new(),
                envelope: None,
            },
        }
    }

    fn causes(plan: &Plan) -> Vec<(i64, Cause)> {
        plan.unwritten().iter().map(|p| (p.id, p.cause)).collect()
    }

    #[test]
    fn g8_a_refused_row_blocks_the_later_rows_of_its_key_and_no_other() {
        let rows = [
            row(4, "a", Some("k")),
            row(5, "a", Some("k")),
            row(6, "a", Some("other")),
            row(7, "b", Some("k")),
            row(8, "a", Some("k")),
            row(9, "a", None),
        ];
        let mut plan = Plan::publish_all(&rows);
        plan.refuse(&rows, 1, "too large");
        assert_eq!(causes(&plan), [(5, Cause::Refused), (8, Cause::Key)]);
        assert_eq!(plan.publishable(), [0, 2, 3, 5]);
        assert_eq!(plan.parked(&rows).count, 2);
        plan.written();
        assert!(plan.unwritten().is_empty());
        assert_eq!(plan.publishable(), [0, 2, 3, 5]);
        assert_eq!(plan.parked(&rows).count, 2);
    }

    #[test]
    fn g8_a_refused_row_without_a_key_blocks_nobody() {
        let rows = [row(1, "a", None), row(2, "a", None), row(3, "a", Some(""))];
        let mut plan = Plan::publish_all(&rows);
        plan.refuse(&rows, 0, "no");
        assert_eq!(causes(&plan), [(1, Cause::Refused)]);
    }

    #[test]
    fn g4_only_a_smaller_parked_id_blocks_a_key() {
        let rows = [row(3, "a", Some("k")), row(7, "a", Some("k"))];
        let key = ("a".into(), Bytes::from_static(b"k"));
        let among = Among {
            first: [(key, 5)].into(),
            ..Among::default()
        };
        let plan = Plan::new(&rows, &among, &[]).unwrap();
        assert_eq!(causes(&plan), [(7, Cause::Key)]);
        assert_eq!(plan.publishable(), [0]);
    }

    #[test]
    fn a_parked_id_is_settled_without_being_published_and_another_message_of_that_id_stops() {
        let rows = [row(3, "a", Some("k"))];
        let mut among = Among {
            ids: [(3, Uuid::from_u128(3))].into(),
            ..Among::default()
        };
        let plan = Plan::new(&rows, &among, &[]).unwrap();
        assert!(plan.publishable().is_empty() && plan.unwritten().is_empty());
        assert_eq!(plan.parked(&rows).count, 1);
        among.ids.insert(3, Uuid::from_u128(4));
        let stop = Plan::new(&rows, &among, &[]).unwrap_err();
        assert!(matches!(stop, Stop::ParkedRows { .. }), "{stop}");
    }

    #[test]
    fn paused_topics_and_keys_hold_their_rows_only() {
        let paused = |topic: &str, key: Option<&'static str>| Paused {
            topic: topic.to_owned(),
            key: key.map(|key| Bytes::from_static(key.as_bytes())),
            by_relay: false,
            reason: "audit".to_owned(),
        };
        let rows = [
            row(1, "a", Some("k")),
            row(2, "b", Some("k")),
            row(3, "b", None),
            row(4, "b", Some("x")),
        ];
        let plan = Plan::new(
            &rows,
            &Among::default(),
            &[paused("a", None), paused("b", Some("k"))],
        );
        let plan = plan.unwrap();
        assert_eq!(causes(&plan), [(1, Cause::Topic), (2, Cause::Key)]);
        assert_eq!(plan.publishable(), [2, 3]);
    }
}
