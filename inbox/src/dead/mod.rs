//! What an operator does with messages that could not be handled (`oncebox dead`): look, replay, take back, discard.
//!
//! A **dead** letter was given up; its partition went on. A **parked** one waits with every later message of its key, because
//! they would overtake it (G4); the key is *blocked*. A **delayed** one has attempts left, which its consumer makes by itself
//! ([`Inbox::delayed_retries`](crate::Inbox::delayed_retries)).
//!
//! * [`Letters::replay`] is an *order*. The handler is the service's code, so the running consumer carries it out: it deletes the
//!   letter and calls the handler in one transaction, not before the order's time. A letter is therefore replayed once (G8), however
//!   many operators order it and however often the consumer restarts.
//! * A blocked key is the unit of its parked letters: they are released in offset order, and ordering one orders all of the key.
//! * Each change has a plan that reads only: [`Letters::plan_replay`], [`Letters::plan_cancel`], [`Letters::plan_discard`].
//! * Any number of operators may work at once. Every change is a statement, or a transaction, that says what it expects to find:
//!   what somebody else did in the meantime is left alone and counted as such.
//!
//! ```no_run
//! use oncebox_inbox::dead::{Filter, Letters, Rate, Replay};
//! # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
//! let letters = Letters::new(pool);
//! let timeouts = Filter { consumer: Some("inventory".into()), error: Some("timed out".into()), ..Filter::default() };
//! let replay = Replay { rate: Some("10/s".parse::<Rate>()?), ..Replay::default() };
//! println!("{}", letters.plan_replay(&timeouts, &replay).await?);
//! letters.replay(&timeouts, &replay).await?;
//! # Ok(()) }
//! ```

#[cfg(test)]
mod conformance;
mod discard;
mod filter;
mod letter;
mod order;
mod plan;
#[cfg(feature = "postgres")]
mod postgres;
mod rate;
#[cfg(feature = "sqlite")]
mod sqlite;
mod texts;

use oncebox_migrations::Names;
use sqlx::Pool;

use crate::error::Error;
use crate::operator::{self, OperatorStore, Sql, Value, tables};

pub use filter::{Direction, Filter, Kind};
pub use letter::{Group, Letter, Listed, Page};
pub use order::{LOOPS, Replay};
pub use plan::{CancelPlan, DiscardPlan, ReplayPlan, Share};
pub use rate::{Rate, UnknownRate};
pub(crate) use texts::Texts;

/// The dead and parked letters of one database.
#[derive(Clone, Debug)]
pub struct Letters<D: OperatorStore> {
    pool: Pool<D>,
    names: Names,
}

impl<D: OperatorStore> Letters<D> {
    /// Letters in this database.
    #[must_use]
    pub fn new(pool: Pool<D>) -> Self {
        Self {
            pool,
            names: Names::default(),
        }
    }

    /// Schema and prefix of the Oncebox tables. Defaults to `public` and `oncebox_`.
    #[must_use]
    pub fn names(mut self, names: Names) -> Self {
        self.names = names;
        self
    }

    /// One page of letters without their payloads, by id: the order in which they failed first. [`Page::next`] is the `after` of
    /// the next page; letters that come or go in between move no page.
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
        after: Option<i64>,
        limit: usize,
    ) -> Result<Page, Error> {
        operator::check(&self.pool, &self.names).await?;
        let mut sql = self.select(D::LETTERS.columns);
        filter.push::<D>(&mut sql);
        let (beyond, order) = match direction {
            Direction::Newest => (" AND id < ?", "DESC"),
            Direction::Oldest => (" AND id > ?", "ASC"),
        };
        if let Some(after) = after {
            sql.push_with(beyond, Value::Int(after));
        }
        // One more tells whether there is a next page.
        let most = i64::try_from(limit).unwrap_or(i64::MAX).saturating_add(1);
        sql.push(&format!(" ORDER BY id {order}"));
        sql.push_with(" LIMIT ?", Value::Int(most));
        let rows = operator::rows(&self.pool, "list the letters", sql).await?;
        let letters = rows
            .iter()
            .take(limit)
            .map(letter::listed::<D>)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| Error::database("read a letter", e))?;
        let next = letters.last().map(|last| last.id);
        Ok(Page {
            next: next.filter(|_| rows.len() > limit),
            letters,
        })
    }

    /// How many letters there are by consumer and topic.
    ///
    /// # Errors
    ///
    /// As [`Letters::list`].
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    pub async fn groups(&self, filter: &Filter) -> Result<Vec<Group>, Error> {
        operator::check(&self.pool, &self.names).await?;
        let mut sql = self.select(D::LETTERS.groups);
        filter.push::<D>(&mut sql);
        sql.push(" GROUP BY consumer, topic ORDER BY consumer, topic");
        let rows = operator::rows(&self.pool, "count the letters", sql).await?;
        rows.iter()
            .map(letter::group::<D>)
            .collect::<Result<_, _>>()
            .map_err(|e| Error::database("read a count of letters", e))
    }

    /// One letter with its payload and headers; `None` when there is none of that id (any more).
    ///
    /// # Errors
    ///
    /// As [`Letters::list`].
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    pub async fn show(&self, id: i64) -> Result<Option<Letter>, Error> {
        operator::check(&self.pool, &self.names).await?;
        let mut sql = self.select(&format!("{}, payload, headers", D::LETTERS.columns));
        sql.push_with("id = ?", Value::Int(id));
        let rows = operator::rows(&self.pool, "read a letter", sql).await?;
        rows.first()
            .map(letter::letter::<D>)
            .transpose()
            .map_err(|e| Error::database("read a letter", e))
    }

    fn select(&self, columns: &str) -> Sql {
        Sql::new(tables::<D>(
            &format!("SELECT {columns} FROM {{dead_letter}} WHERE "),
            &self.names,
        ))
    }
}
