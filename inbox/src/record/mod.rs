//! What was consumed (`oncebox record`): one row per settled message, written in the transaction that settled it.
//!
//! [`Records::list`] finds rows by message, business id, consumer, topic, status and time; [`Records::summary`] counts them.
//! The table grows with every message: [`Records::clean`] removes what is older than some days, and on PostgreSQL
//! [`Records::partitions_ahead`] makes the partitions of the coming days, so that cleaning up is dropping a table.
//!
//! ```no_run
//! use oncebox_inbox::record::{Filter, Records};
//! # async fn example(pool: sqlx::PgPool) -> Result<(), oncebox_inbox::Error> {
//! let records = Records::new(pool);
//! println!("{}", records.partitions_ahead(7).await?);
//! println!("{}", records.plan_clean(30).await?);
//! let filter = Filter { business_id: Some("order-4711".into()), ..Filter::default() };
//! for row in records.list(&filter, Default::default(), None, 100).await?.rows {
//!     println!("{:?} {}", row.status, row.settled_at);
//! }
//! # Ok(()) }
//! ```

#[cfg(test)]
mod conformance;
mod days;
mod filter;
#[cfg(feature = "postgres")]
mod postgres;
mod retention;
mod row;
#[cfg(feature = "sqlite")]
mod sqlite;
mod texts;

use oncebox_migrations::Names;
use sqlx::Pool;
use time::Date;

use crate::dead::Direction;
use crate::error::Error;
use crate::operator::{self, OperatorStore, Sql, Value, tables};

pub use days::{Ahead, Left};
pub use filter::{Filter, Status, UnknownStatus};
pub use retention::CleanPlan;
pub use row::{Cursor, Group, Page, Row, UnknownCursor};
pub(crate) use texts::Texts;

/// The record of one database.
#[derive(Clone, Debug)]
pub struct Records<D: OperatorStore> {
    pool: Pool<D>,
    names: Names,
    chunk: i64,
}

impl<D: OperatorStore> Records<D> {
    /// The record in this database.
    #[must_use]
    pub fn new(pool: Pool<D>) -> Self {
        Self {
            pool,
            names: Names::default(),
            chunk: 5_000,
        }
    }

    /// Schema and prefix of the Oncebox tables. Defaults to `public` and `oncebox_`.
    #[must_use]
    pub fn names(mut self, names: Names) -> Self {
        self.names = names;
        self
    }

    /// About how many rows one transaction of [`Records::clean`] deletes. Defaults to 5 000.
    #[must_use]
    pub fn chunk(mut self, rows: u32) -> Self {
        self.chunk = i64::from(rows.max(1));
        self
    }

    /// One page of rows by the time at which they were settled. [`Page::next`] is the `after` of the next page.
    ///
    /// Without a message id or business id the rows of the whole time range are sorted: name a narrow one ([`Filter::since`]).
    ///
    /// # Errors
    ///
    /// [`Error::Schema`], [`Error::Database`].
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    pub async fn list(
        &self,
        filter: &Filter,
        direction: Direction,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Result<Page, Error> {
        operator::check(&self.pool, &self.names).await?;
        let mut sql = self.select(D::RECORDS.columns);
        filter.push::<D>(&mut sql);
        let (sign, order) = match direction {
            Direction::Newest => ("<", "DESC"),
            Direction::Oldest => (">", "ASC"),
        };
        if let Some(after) = after {
            after.push::<D>(&mut sql, sign);
        }
        let by = [
            "settled_at",
            "consumer",
            "topic",
            "partition",
            "record_offset",
        ];
        let by = by.map(|column| format!("{column} {order}")).join(", ");
        let most = i64::try_from(limit).unwrap_or(i64::MAX).saturating_add(1);
        sql.push(&format!(" ORDER BY {by}"));
        sql.push_with(" LIMIT ?", Value::Int(most));
        let found = operator::rows(&self.pool, "list the record", sql).await?;
        let rows = found
            .iter()
            .take(limit)
            .map(row::row::<D>)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| Error::database("read the record", e))?;
        let next = rows.last().map(Row::cursor);
        Ok(Page {
            next: next.filter(|_| found.len() > limit),
            rows,
        })
    }

    /// Counts and durations by consumer, topic and status.
    ///
    /// # Errors
    ///
    /// As [`Records::list`].
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    pub async fn summary(&self, filter: &Filter) -> Result<Vec<Group>, Error> {
        operator::check(&self.pool, &self.names).await?;
        let mut sql = self.select(D::RECORDS.groups);
        filter.push::<D>(&mut sql);
        sql.push(" GROUP BY consumer, topic, status ORDER BY consumer, topic, status");
        let rows = operator::rows(&self.pool, "count the record", sql).await?;
        rows.iter()
            .map(row::group::<D>)
            .collect::<Result<_, _>>()
            .map_err(|e| Error::database("read a count of the record", e))
    }

    fn select(&self, columns: &str) -> Sql {
        Sql::new(tables::<D>(
            &format!("SELECT {columns} FROM {{record}} WHERE "),
            &self.names,
        ))
    }

    /// Today by the database's clock, UTC.
    async fn today(&self) -> Result<Date, Error> {
        let failed = |e| Error::database("read the clock", e);
        let mut tx = operator::reading(&self.pool).await?;
        let now = operator::now::<D>(&mut tx).await.map_err(failed)?;
        tx.rollback().await.map_err(failed)?;
        Ok(operator::time(now).map_err(failed)?.date())
    }
}
