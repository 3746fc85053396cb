//! Orders: replay, and taking them back.

use std::collections::HashSet;

use sqlx::Pool;

use super::{CancelPlan, Filter, Letters, Rate, ReplayPlan, Share};
use crate::error::Error;
use crate::operator::{self, Columns, OperatorStore, Sql, Value, tables};

/// A letter that was replayed in vain so often is refused: something replays it in a loop, or nothing was repaired.
pub const LOOPS: i64 = 3;

/// How letters are replayed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replay {
    /// How fast: the i-th letter, in offset order, becomes due i/rate after now, by the database's clock. Defaults to all at once.
    pub rate: Option<Rate>,
    /// Order also what was replayed in vain [`LOOPS`] times or more. Defaults to false.
    pub force: bool,
}

/// What is to become of each letter that is meant, and of every parked letter of a key of which one is meant. Joins only: an `IN` beside
/// an `OR` is looked up row by row when there are many letters.
const VERDICTS: &str = "keys AS (SELECT DISTINCT consumer, topic, key FROM matched WHERE parked AND key IS NOT NULL), \
    chosen AS (SELECT id, consumer, topic, partition, record_offset, key, parked, delayed, replay_at, replays, 1 AS named FROM matched \
    UNION ALL SELECT d.id, d.consumer, d.topic, d.partition, d.record_offset, d.key, d.parked, d.delayed, d.replay_at, d.replays, 0 \
    FROM {dead_letter} d \
    JOIN keys k ON k.consumer = d.consumer AND k.topic = d.topic AND k.key = d.key LEFT JOIN matched m ON m.id = d.id \
    WHERE d.parked AND m.id IS NULL), \
    guarded AS (SELECT DISTINCT consumer, topic, key FROM chosen WHERE parked AND key IS NOT NULL AND replays >= {guard}), \
    verdicts AS (SELECT c.id, c.consumer, c.topic, c.partition, c.record_offset, c.key, c.parked, c.named, \
    CASE WHEN c.delayed THEN 'order' WHEN c.replay_at IS NOT NULL THEN 'ordered' WHEN c.replays >= {guard} OR (c.parked AND g.key IS NOT NULL) THEN 'refused' \
    ELSE 'order' END AS verdict FROM chosen c \
    LEFT JOIN guarded g ON g.consumer = c.consumer AND g.topic = c.topic AND g.key = c.key)";

const SHARES: &str = " SELECT verdict, consumer, topic, count(*), count(DISTINCT key) FILTER (WHERE parked), count(*) FILTER (WHERE named = 0) \
    FROM verdicts GROUP BY verdict, consumer, topic ORDER BY verdict, consumer, topic";

const IDS: &str = " SELECT id FROM verdicts WHERE verdict = '{verdict}' ORDER BY record_offset, partition, topic, consumer, id";

impl<D: OperatorStore> Letters<D> {
    /// What [`Letters::replay`] would order.
    ///
    /// # Errors
    ///
    /// [`Error::Schema`], [`Error::Database`].
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    pub async fn plan_replay(&self, filter: &Filter, replay: &Replay) -> Result<ReplayPlan, Error> {
        operator::check(&self.pool, &self.names).await?;
        let failed = |e| Error::database("plan a replay", e);
        let mut tx = operator::reading(&self.pool).await?;
        let plan = self.plan(&mut tx, filter, replay).await.map_err(failed)?;
        tx.rollback().await.map_err(failed)?;
        Ok(plan)
    }

    /// Orders the letters that the filter means, and all parked letters of a blocked key of which it means one. The running consumer
    /// carries the order out. A letter that is ordered already keeps its order. A delayed one has its next attempt at that time, and
    /// goes on being tried if that fails.
    ///
    /// # Errors
    ///
    /// [`Error::Schema`], [`Error::Database`].
    ///
    /// # Cancel safety
    ///
    /// One transaction: all of it happened or none; [`Letters::list`] with [`Filter::ordered`] shows which.
    pub async fn replay(&self, filter: &Filter, replay: &Replay) -> Result<ReplayPlan, Error> {
        let failed = |e| Error::database("order a replay", e);
        // Before the transaction that writes, which is to be short: on SQLite it keeps every other writer waiting.
        let mut plan = self.plan_replay(filter, replay).await?;
        let (micros, count) = replay.rate.map_or((0, 1), |r| (r.micros(), r.count()));
        let text = D::LETTERS
            .order
            .replace("{micros}", &micros.to_string())
            .replace("{count}", &count.to_string());
        let sql = self.verdicts(filter, replay.force, &text);
        let mut tx = operator::writing(&self.pool).await?;
        let done = ids::<D>(&D::rows(&mut tx, sql).await.map_err(failed)?).map_err(failed)?;
        tx.commit().await.map_err(failed)?;
        (plan.letters, plan.busy) = meet(&plan.letters, done);
        plan.applied = true;
        Ok(plan)
    }

    /// What [`Letters::cancel`] would take back.
    ///
    /// # Errors
    ///
    /// As [`Letters::plan_replay`].
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    pub async fn plan_cancel(&self, filter: &Filter) -> Result<CancelPlan, Error> {
        operator::check(&self.pool, &self.names).await?;
        let failed = |e| Error::database("plan to take orders back", e);
        let mut tx = operator::reading(&self.pool).await?;
        let (letters, shares) = self.ordered(&mut tx, filter).await.map_err(failed)?;
        tx.rollback().await.map_err(failed)?;
        Ok(CancelPlan {
            letters,
            shares,
            ..CancelPlan::default()
        })
    }

    /// Takes back the orders that were not carried out yet; of a blocked key all, as they were given.
    ///
    /// # Errors
    ///
    /// As [`Letters::replay`].
    ///
    /// # Cancel safety
    ///
    /// As [`Letters::replay`].
    pub async fn cancel(&self, filter: &Filter) -> Result<CancelPlan, Error> {
        let failed = |e| Error::database("take orders back", e);
        let plan = self.plan_cancel(filter).await?;
        let mut tx = operator::writing(&self.pool).await?;
        let sql = self.verdicts(filter, true, D::LETTERS.cancel);
        let done = ids::<D>(&D::rows(&mut tx, sql).await.map_err(failed)?).map_err(failed)?;
        tx.commit().await.map_err(failed)?;
        let (letters, busy) = meet(&plan.letters, done);
        Ok(CancelPlan {
            letters,
            busy,
            applied: true,
            ..plan
        })
    }

    /// `WITH … {verdicts}` in front of the rest of a statement.
    fn verdicts(&self, filter: &Filter, force: bool, rest: &str) -> Sql {
        let mut sql = Sql::new(tables::<D>(
            "WITH matched AS (SELECT id, consumer, topic, partition, record_offset, key, parked, delayed, replay_at, replays FROM {dead_letter} WHERE ",
            &self.names,
        ));
        filter.push::<D>(&mut sql);
        let guard = sql.bind(Value::Int(if force { i64::MAX } else { LOOPS }));
        let text = rest.replace("{verdicts}", VERDICTS);
        let text = text.replace("{guard}", &guard);
        sql.push("), ").push(&tables::<D>(&text, &self.names));
        sql
    }

    async fn shares(
        &self,
        conn: &mut D::Connection,
        filter: &Filter,
        force: bool,
    ) -> Result<Vec<(String, Share)>, sqlx::Error> {
        let sql = self.verdicts(filter, force, &format!("{{verdicts}}{SHARES}"));
        let rows = D::rows(conn, sql).await?;
        let shares = rows.iter().map(|row| {
            let mut columns = Columns::<D>::new(row);
            let verdict = columns.text()?;
            let share = Share {
                consumer: columns.text()?,
                topic: columns.text()?,
                letters: columns.count()?,
                keys: columns.count()?,
                drawn_in: columns.count()?,
            };
            Ok((verdict, share))
        });
        shares.collect()
    }

    async fn chosen(
        &self,
        conn: &mut D::Connection,
        filter: &Filter,
        force: bool,
        verdict: &str,
    ) -> Result<Vec<i64>, sqlx::Error> {
        let text = format!("{{verdicts}}{}", IDS.replace("{verdict}", verdict));
        ids::<D>(&D::rows(conn, self.verdicts(filter, force, &text)).await?)
    }

    async fn plan(
        &self,
        conn: &mut D::Connection,
        filter: &Filter,
        replay: &Replay,
    ) -> Result<ReplayPlan, sqlx::Error> {
        let shares = self.shares(conn, filter, replay.force).await?;
        let sum = |wanted: &str| -> u64 {
            let of = shares.iter().filter(|(verdict, _)| verdict == wanted);
            of.map(|(_, share)| share.letters).sum()
        };
        Ok(ReplayPlan {
            letters: self.chosen(conn, filter, replay.force, "order").await?,
            ordered_before: sum("ordered"),
            refused: sum("refused"),
            shares: of_verdict(shares, "order"),
            rate: replay.rate,
            ..ReplayPlan::default()
        })
    }

    async fn ordered(
        &self,
        conn: &mut D::Connection,
        filter: &Filter,
    ) -> Result<(Vec<i64>, Vec<Share>), sqlx::Error> {
        let shares = self.shares(conn, filter, true).await?;
        let letters = self.chosen(conn, filter, true, "ordered").await?;
        Ok((letters, of_verdict(shares, "ordered")))
    }

    pub(super) fn pool(&self) -> &Pool<D> {
        &self.pool
    }
}

fn of_verdict(shares: Vec<(String, Share)>, wanted: &str) -> Vec<Share> {
    let of = shares.into_iter().filter(|(verdict, _)| verdict == wanted);
    of.map(|(_, share)| share).collect()
}

pub(super) fn ids<D: OperatorStore>(rows: &[D::Row]) -> Result<Vec<i64>, sqlx::Error> {
    rows.iter()
        .map(|row| Columns::<D>::new(row).int())
        .collect()
}

/// What was done in the order of the plan, and how many of the plan were not.
fn meet(planned: &[i64], done: Vec<i64>) -> (Vec<i64>, u64) {
    let mut done: HashSet<i64> = done.into_iter().collect();
    let mut letters: Vec<i64> = planned
        .iter()
        .copied()
        .filter(|id| done.remove(id))
        .collect();
    let busy = (planned.len() - letters.len()) as u64;
    // They came between the plan and the statement.
    let mut late: Vec<i64> = done.into_iter().collect();
    late.sort_unstable();
    letters.append(&mut late);
    (letters, busy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_done_keeps_the_order_of_the_plan() {
        assert_eq!(meet(&[3, 1, 2], vec![9, 2, 8, 3]), (vec![3, 2, 8, 9], 1));
    }
}
