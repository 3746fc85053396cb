//! What is too old goes.

use std::fmt;
use std::time::Duration;

use time::{Date, OffsetDateTime};

use super::Records;
use crate::error::Error;
use crate::operator::{self, OperatorStore, micros};

/// How often a partition is tried while somebody holds it.
const ATTEMPTS: u32 = 10;

/// What cleaning up removes. `Display` is the dry run's text.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CleanPlan {
    /// Everything that was settled before this time goes: the beginning of a day, UTC.
    pub before: OffsetDateTime,
    /// Days whose partition goes (PostgreSQL).
    pub days: Vec<Date>,
    /// Days whose partition should have gone, but somebody holds it: the next run drops it.
    pub busy: Vec<Date>,
    /// Rows outside of these partitions that go one by one.
    pub rows: u64,
    /// Whether it was done.
    pub applied: bool,
}

impl fmt::Display for CleanPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (drop, delete) = match self.applied {
            true => ("dropped", "deleted"),
            false => ("to drop", "to delete"),
        };
        writeln!(f, "what was settled before {}", self.before.date())?;
        for day in &self.days {
            writeln!(f, "{day}  partition {drop}")?;
        }
        for day in &self.busy {
            writeln!(
                f,
                "{day}  partition kept: somebody uses it; the next run drops it"
            )?;
        }
        writeln!(
            f,
            "{} partitions {drop}, {} rows {delete}",
            self.days.len(),
            self.rows
        )
    }
}

impl<D: OperatorStore> Records<D> {
    /// What [`Records::clean`] would remove.
    ///
    /// # Errors
    ///
    /// [`Error::Schema`], [`Error::Database`].
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    pub async fn plan_clean(&self, days: u16) -> Result<CleanPlan, Error> {
        operator::check(&self.pool, &self.names).await?;
        let failed = |e| Error::database("look for old rows of the record", e);
        let before = self.before(days).await?;
        let mut old = D::days(&self.pool, &self.names).await.map_err(failed)?;
        old.retain(|day| day.midnight().assume_utc() < before);
        old.sort_unstable();
        let mut tx = operator::reading(&self.pool).await?;
        let rows = D::old(&mut tx, &self.names, micros(before))
            .await
            .map_err(failed)?;
        tx.rollback().await.map_err(failed)?;
        Ok(CleanPlan {
            before,
            days: old,
            busy: Vec::new(),
            rows,
            applied: false,
        })
    }

    /// Removes what was settled more than `days` days ago (whole days, UTC, by the database's clock): drops the partitions of these days
    /// (PostgreSQL, needs the owner of the table) and deletes the other rows in short transactions ([`Records::chunk`]).
    ///
    /// Nobody waits for it for longer than a tenth of a second: a partition that somebody uses stays until the next run.
    ///
    /// # Errors
    ///
    /// [`Error::Schema`], [`Error::Database`]; what was removed until then is removed.
    ///
    /// # Cancel safety
    ///
    /// Many short transactions: repeat it.
    pub async fn clean(&self, days: u16) -> Result<CleanPlan, Error> {
        let failed = |e| Error::database("clean up the record", e);
        let mut plan = self.plan_clean(days).await?;
        plan.applied = true;
        for day in std::mem::take(&mut plan.days) {
            if self.drop_day(day).await.map_err(failed)? {
                plan.days.push(day);
            } else {
                plan.busy.push(day);
            }
        }
        plan.rows = 0;
        let mut place = Some(0);
        while let Some(from) = place {
            let before = micros(plan.before);
            let (deleted, next) = D::delete_some(&self.pool, &self.names, before, from, self.chunk)
                .await
                .map_err(failed)?;
            plan.rows += deleted;
            place = next;
        }
        Ok(plan)
    }

    async fn drop_day(&self, day: Date) -> Result<bool, sqlx::Error> {
        for attempt in 0..ATTEMPTS {
            if D::drop_day(&self.pool, &self.names, day).await? {
                return Ok(true);
            }
            // Whoever writes waited behind this attempt: let them go first.
            tokio::time::sleep(Duration::from_millis(100 + u64::from(attempt) * 50)).await;
        }
        Ok(false)
    }

    async fn before(&self, days: u16) -> Result<OffsetDateTime, Error> {
        let today = self.today().await?.midnight().assume_utc();
        Ok(today - Duration::from_secs(86_400 * u64::from(days)))
    }
}
