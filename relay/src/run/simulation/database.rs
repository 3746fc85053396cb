//! The outbox's database: transactions that commit in any order, and what the statements of `session/postgres.rs` do to the
//! tables.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use oncebox_kafka::{Envelope, Record};
use rand::RngExt as _;
use rand::rngs::StdRng;
use uuid::Uuid;

use super::world::World;
use crate::error::{Error, Stop};
use crate::position::model::Db;
use crate::position::{Checkpoint, Gaps, Tally};
use crate::session::{
    Cause, Facts, Limit, Look, Mark, ParkedRow, Parking, Paused, Request, Row, Server, Written,
};

/// Topic and key of the rows, by the number of the lock that their writers hold.
const KINDS: [(&str, Option<&str>); 4] = [
    ("orders", Some("a")),
    ("orders", Some("b")),
    ("payments", Some("a")),
    ("payments", None),
];

/// A row of the outbox.
#[derive(Clone, Copy)]
pub(super) struct Stored {
    pub(super) message_id: Uuid,
    pub(super) kind: usize,
    created_at_micros: i64,
}

impl Stored {
    pub(super) fn topic(&self) -> &'static str {
        KINDS[self.kind].0
    }

    pub(super) fn key(&self) -> Option<&'static str> {
        KINDS[self.kind].1
    }

    fn row(&self, id: i64) -> Row {
        let (message_id, created_at_micros) = (self.message_id, self.created_at_micros);
        let record = Record {
            topic: self.topic().into(),
            key: self.key().map(|key| Bytes::from_static(key.as_bytes())),
            payload: None,
            headers: Bytes::new(),
            envelope: Some(Envelope {
                message_id,
                outbox_id: id,
                created_at_micros,
            }),
        };
        Row {
            id,
            message_id,
            created_at_micros,
            record,
        }
    }
}

#[derive(Clone)]
pub(super) struct Parked {
    pub(super) stored: Stored,
    pub(super) cause: Cause,
    pub(super) reason: String,
    pub(super) attempts: i32,
    pub(super) request: Option<Request>,
    pub(super) ever_refused: bool,
}

#[derive(Clone, Default)]
pub(super) struct MarkRow {
    pub(super) format: u32,
    pub(super) source_id: Uuid,
    pub(super) source: Option<String>,
    pub(super) source_epoch: i64,
    pub(super) epoch: i64,
    pub(super) owner: Option<String>,
    pub(super) renewal: i64,
    pub(super) seq: i64,
    pub(super) position: String,
    pub(super) cluster_id: Option<String>,
    pub(super) low_water: i64,
    pub(super) deleted: Tally,
}

/// What is in the database, and who is connected.
pub(super) struct Tables {
    pub(super) writers: Db,
    pub(super) outbox: BTreeMap<i64, Stored>,
    /// Every row that was ever committed.
    pub(super) written: BTreeMap<i64, Stored>,
    pub(super) mark: MarkRow,
    pub(super) parked: BTreeMap<i64, Parked>,
    pub(super) paused: Vec<Paused>,
    timeline: u32,
    instance: u64,
    pub(super) sessions: BTreeSet<u64>,
    pub(super) opened: u64,
}

impl Tables {
    pub(super) fn new(rng: &mut StdRng) -> Self {
        Self {
            writers: Db::default(),
            outbox: BTreeMap::new(),
            written: BTreeMap::new(),
            mark: MarkRow {
                format: 1,
                source_id: Uuid::from_u128(rng.random()),
                source_epoch: 1,
                ..MarkRow::default()
            },
            parked: BTreeMap::new(),
            paused: Vec::new(),
            timeline: 1,
            instance: 1,
            sessions: BTreeSet::new(),
            opened: 0,
        }
    }

    /// What a standby has received so far. Open transactions are rolled back when it becomes the primary.
    pub(super) fn backup(&self) -> Self {
        let burnt = self.writers.open.iter().flat_map(|tx| tx.ids.clone());
        let writers = Db {
            next_id: self.writers.next_id,
            begun: self.writers.begun,
            restarts: self.writers.restarts,
            rolled_back: burnt.chain(self.writers.rolled_back.clone()).collect(),
            ..Db::default()
        };
        Self {
            writers,
            outbox: self.outbox.clone(),
            written: self.written.clone(),
            mark: self.mark.clone(),
            parked: self.parked.clone(),
            paused: self.paused.clone(),
            sessions: BTreeSet::new(),
            ..*self
        }
    }

    /// The confirmed position.
    pub(super) fn confirmed(&self) -> Option<Checkpoint> {
        (!self.mark.position.is_empty()).then(|| Checkpoint::decode(&self.mark.position).unwrap())
    }

    pub(super) fn is_paused(&self, row: &Stored) -> bool {
        let mine = |p: &Paused| {
            p.topic == row.topic()
                && (p.key.is_none() || p.key.as_deref() == row.key().map(str::as_bytes))
        };
        self.paused.iter().any(mine)
    }

    pub(super) fn server(&self) -> Server {
        Server {
            system: "7".to_owned(),
            timeline: self.timeline,
            instance: self.instance.to_string(),
        }
    }

    pub(super) fn mark(&self) -> Mark {
        let row = self.mark.clone();
        Mark {
            checkpoint: self.confirmed(),
            format: row.format,
            source_id: row.source_id,
            source: row.source,
            source_epoch: row.source_epoch,
            epoch: row.epoch,
            owner: row.owner,
            renewal: row.renewal,
            seq: row.seq,
            cluster_id: row.cluster_id,
            low_water: row.low_water,
            deleted: row.deleted,
        }
    }

    pub(super) fn look(&self, gaps: &Gaps, high: i64, limit: Limit) -> Result<Look, Error> {
        let mut collector = Look::collector(limit);
        let most = limit.rows.saturating_add(1);
        let intervals = gaps.intervals().iter();
        let late = intervals.flat_map(|i| self.outbox.range(i.low..=i.high));
        for (id, stored) in late.take(most) {
            collector.push(true, stored.row(*id))?;
        }
        for (id, stored) in self.outbox.range(high + 1..).take(most) {
            collector.push(false, stored.row(*id))?;
        }
        Ok(collector.finish())
    }

    pub(super) fn facts(&self, high: i64, gaps: &Gaps, released: &Gaps) -> Facts {
        let (mut rows, mut parked) = (Tally::default(), Tally::default());
        let counted = |id: &i64| *id > self.mark.low_water && *id <= high && !gaps.contains(*id);
        self.outbox
            .keys()
            .filter(|id| counted(id))
            .for_each(|id| rows.add(*id));
        let open = gaps.union(released);
        for (id, row) in self.parked.range(..=high) {
            if !open.contains(*id) {
                parked.add_message(row.stored.message_id);
            }
        }
        let mut low = self.outbox.range(..=self.mark.low_water);
        Facts {
            mark: self.mark(),
            high_message_id: self.outbox.get(&high).map(|row| row.message_id),
            rows_below_low_water: low.any(|(id, _)| *id != high),
            rows,
            parked,
        }
    }

    /// `UPDATE mark … WHERE epoch = $1`: a sign of life. `false` = 0 rows.
    pub(super) fn renew(&mut self, epoch: i64) -> bool {
        let mine = self.mark.epoch == epoch;
        self.mark.renewal += i64::from(mine);
        mine
    }

    pub(super) fn releasable(
        &self,
        high: i64,
        limit: Limit,
        probe: Option<&str>,
    ) -> Vec<ParkedRow> {
        let held = |row: &Parked| {
            let key = row.stored.key().map(str::as_bytes);
            self.paused.iter().any(|p| {
                let same_key = p.key.is_some() && p.key.as_deref() == key;
                p.topic == row.stored.topic() && (same_key || p.key.is_none() && probe.is_none())
            })
        };
        let undecided = |row: &Parked| row.cause == Cause::Refused && row.request.is_none();
        let behind = |id: i64, row: &Parked| {
            let mut before = self.parked.range(..id);
            row.stored.key().is_some()
                && before.any(|(_, b)| b.stored.kind == row.stored.kind && undecided(b))
        };
        let rows = self.parked.range(..=high).filter(|(id, row)| {
            probe.is_none_or(|topic| topic == row.stored.topic())
                && !undecided(row)
                && !held(row)
                && !behind(**id, row)
        });
        let mut bytes = 0;
        let fits = |(n, row): &(usize, ParkedRow)| {
            bytes += row.row.bytes();
            *n == 0 || bytes <= limit.bytes
        };
        rows.take(limit.rows)
            .map(|(id, row)| row.parked_row(*id))
            .enumerate()
            .take_while(fits)
            .map(|(_, row)| row)
            .collect()
    }
}

impl Parked {
    pub(super) fn parked_row(&self, id: i64) -> ParkedRow {
        ParkedRow {
            row: self.stored.row(id),
            cause: self.cause,
            reason: self.reason.clone(),
            attempts: self.attempts,
            request: self.request,
            parked_at_micros: 0,
        }
    }
}

impl World {
    fn micros(&self) -> i64 {
        i64::try_from(self.now().as_micros()).unwrap()
    }

    /// Some steps of the writers. A restart of the server ends every session; some of them are switchovers.
    pub(super) fn write(&mut self) {
        let restarts = self.tables.writers.restarts;
        self.tables.writers.steady = !self.fault(100.0);
        // Several at one moment, sometimes many: whole transactions fall between two looks.
        let many = self.rng.random_bool(0.1);
        for _ in 0..self.rng.random_range(1..if many { 30 } else { 6 }) {
            self.tables.writers.step(&mut self.rng);
            if self.rng.random_bool(0.5) {
                self.tables.writers.open.retain(|tx| !tx.visible);
            }
        }
        self.take_rows();
        if self.tables.writers.restarts != restarts {
            self.count("server restarts");
            self.end_sessions();
        }
    }

    /// Ends every transaction.
    pub(super) fn finish_writing(&mut self) {
        self.tables.writers.finish(&mut self.rng);
        self.take_rows();
    }

    fn take_rows(&mut self) {
        for (id, kind) in std::mem::take(&mut self.tables.writers.rows) {
            // Written a while before the commit.
            let age = self.rng.random_range(0..2_000_000);
            let stored = Stored {
                message_id: Uuid::from_u128(self.rng.random()),
                kind,
                created_at_micros: self.micros() - age,
            };
            self.note(format_args!("row {id} of {:?} is committed", KINDS[kind]));
            self.tables.outbox.insert(id, stored);
            self.tables.written.insert(id, stored);
            self.count("rows");
            if self.fault(15.0) {
                self.kafka.refused.insert(id);
            }
        }
    }

    /// A standby that lags becomes the primary: everything since the backup is gone, and every session.
    pub(super) fn fail_over(&mut self, backup: Tables) {
        let position = self.kafka.checkpoint.as_deref();
        let Some(position) = position.map(|text| Checkpoint::decode(text).unwrap()) else {
            return;
        };
        let settled =
            |id: i64| id <= position.position.high && !position.position.gaps.contains(id);
        let rows = |tables: &Tables| -> BTreeSet<Uuid> {
            let settled = tables.written.iter().filter(|(id, _)| settled(**id));
            settled.map(|(_, row)| row.message_id).collect()
        };
        let parked = |tables: &Tables| -> BTreeSet<Uuid> {
            let all = tables.parked.iter();
            let named = all.filter(|(id, _)| settled(**id) && !position.released.contains(**id));
            named.map(|(_, row)| row.stored.message_id).collect()
        };
        let lost_rows = rows(&self.tables) != rows(&backup);
        let lost_parked = parked(&self.tables) != parked(&backup);
        let (timeline, instance) = (self.tables.timeline, self.tables.instance);
        let opened = self.tables.opened;
        self.tables = Tables { opened, ..backup };
        (self.tables.timeline, self.tables.instance) = (timeline + 1, instance + 1);
        self.history.failed_over = true;
        self.history.lost = lost_rows || lost_parked;
        self.count("failovers");
        if self.history.lost {
            self.count("failovers with loss");
        }
        self.note(format_args!(
            "failover; rows lost: {lost_rows}, parked rows lost: {lost_parked}"
        ));
    }

    fn end_sessions(&mut self) {
        self.tables.instance += 1;
        let promoted = self.rng.random_bool(0.3);
        self.tables.timeline += u32::from(promoted);
        self.tables.sessions.clear();
        self.note(format_args!("the server restarts; promoted: {promoted}"));
    }

    /// What an operator sees and wants, through statements of his own.
    pub(super) fn decide(&mut self, id: i64, request: Request) {
        if let Some(row) = self.tables.parked.get_mut(&id) {
            row.request = Some(request);
            self.history.decided.insert(id);
            if request == Request::Skip {
                self.history.dropped.insert(id);
            }
            self.note(format_args!("operator: {request} {id}"));
            self.count("requests");
        }
    }

    pub(super) fn confirm(
        &mut self,
        epoch: i64,
        checkpoint: &Checkpoint,
        cluster_id: &str,
    ) -> bool {
        let mark = &mut self.tables.mark;
        if mark.epoch != epoch || mark.seq >= checkpoint.seq {
            return false;
        }
        mark.seq = checkpoint.seq;
        mark.position = checkpoint.encode();
        mark.cluster_id = Some(cluster_id.to_owned());
        mark.renewal += 1;
        self.marked(&checkpoint.encode());
        true
    }

    pub(super) fn clean_up(
        &mut self,
        epoch: i64,
        retention: Duration,
        limit: usize,
    ) -> (Written, u64) {
        let mark = self.tables.mark();
        if mark.epoch != epoch {
            return (Written::Deposed(mark.epoch), 0);
        }
        let Some((bound, high)) = mark.deletable() else {
            return (Written::Done, 0);
        };
        let young = self.micros() - i64::try_from(retention.as_micros()).unwrap();
        let rows = self.tables.outbox.range(mark.low_water + 1..=bound);
        let chunk = rows.filter(|(id, _)| **id != high).take(limit);
        let old = chunk.take_while(|(_, row)| row.created_at_micros < young);
        let gone: Vec<i64> = old.map(|(id, _)| *id).collect();
        for id in &gone {
            self.tables.outbox.remove(id);
            self.tables.mark.deleted.add(*id);
            self.tables.mark.low_water = *id;
            self.count("rows deleted");
            let failed_over = self.history.failed_over;
            if !failed_over
                && !self.history.done.contains(id)
                && !self.tables.parked.contains_key(id)
            {
                self.violated(format_args!("G2: row {id} is deleted before it is settled"));
            }
        }
        (Written::Done, gone.len() as u64)
    }

    pub(super) fn park(&mut self, rows: &[Parking]) -> Result<(), Error> {
        if rows
            .iter()
            .any(|row| self.tables.parked.contains_key(&row.id))
        {
            self.count("unique violations");
            return Err(broken("duplicate key"));
        }
        for row in rows {
            let Some(stored) = self.tables.outbox.get(&row.id).copied() else {
                return Err(Stop::BadRow(format!("row {} vanished", row.id)).into());
            };
            self.note(format_args!("park {} ({})", row.id, row.cause));
            self.count(match row.cause {
                Cause::Refused => "parked: refused",
                Cause::Key => "parked: key",
                Cause::Topic => "parked: topic",
            });
            let refused = row.cause == Cause::Refused;
            let parked = Parked {
                stored,
                cause: row.cause,
                reason: row.reason.clone(),
                attempts: i32::from(refused),
                request: None,
                ever_refused: refused,
            };
            self.tables.parked.insert(row.id, parked);
        }
        Ok(())
    }
}

pub(super) fn broken(text: &str) -> Error {
    Error::Database(sqlx::Error::Io(std::io::Error::other(text.to_owned())))
}
