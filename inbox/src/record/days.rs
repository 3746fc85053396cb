//! Partitions of coming days (PostgreSQL).

use std::fmt;
use std::time::Duration;

use sqlx::Pool;
use time::Date;

use super::Records;
use crate::error::Error;
use crate::operator::{self, OperatorStore};

/// How often a partition is tried while somebody holds a lock.
const ATTEMPTS: u32 = 12;

/// What became of the coming days' partitions. `Display` is the command's text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ahead {
    /// Whether the table is partitioned at all: on SQLite it is not.
    pub partitioned: bool,
    /// Days whose partition was made.
    pub made: Vec<Date>,
    /// Days whose partition was there.
    pub there: Vec<Date>,
    /// Days that have none, and why. Their rows go to the default partition: nothing is lost, [`Records::clean`] deletes them row by
    /// row.
    pub left: Vec<(Date, Left)>,
}

/// Why a day has no partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Left {
    /// The default partition holds rows of that day already. It stays so.
    Rows,
    /// A reader holds the default partition for longer than the server may be kept waiting. Try again later.
    Busy,
    /// The user does not own the table. Run it as the owner.
    NotOwner,
    /// A table of that name exists and is no partition of that day, or another partition covers the day.
    Taken,
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rows => "the default partition holds rows of that day already; it is left to it",
            Self::Busy => {
                "somebody reads the default partition in a long transaction; try again later"
            }
            Self::NotOwner => "this user does not own the table; run it as the owner",
            Self::Taken => {
                "a table of that name is no partition of that day, or another partition covers it"
            }
        })
    }
}

impl fmt::Display for Ahead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.partitioned {
            return writeln!(
                f,
                "the record is not partitioned in this database: nothing to do"
            );
        }
        for day in &self.made {
            writeln!(f, "{day}  made")?;
        }
        for (day, why) in &self.left {
            writeln!(f, "{day}  none: {why}")?;
        }
        writeln!(
            f,
            "{} made, {} there before, {} left to the default partition",
            self.made.len(),
            self.there.len(),
            self.left.len()
        )
    }
}

impl<D: OperatorStore> Records<D> {
    /// The days from today to `days` days ahead that [`Records::partitions_ahead`] would make a partition of.
    ///
    /// # Errors
    ///
    /// [`Error::Schema`], [`Error::Database`].
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    pub async fn missing_partitions(&self, days: u16) -> Result<Vec<Date>, Error> {
        operator::check(&self.pool, &self.names).await?;
        if !D::PARTITIONED {
            return Ok(Vec::new());
        }
        let known = D::days(&self.pool, &self.names)
            .await
            .map_err(|e| Error::database("look at the partitions of the record", e))?;
        let coming = coming(self.today().await?, days);
        Ok(coming.filter(|day| !known.contains(day)).collect())
    }

    /// Makes the partitions of today and the next `days` days (UTC, by the database's clock), where they are missing. Needs the
    /// owner of the table.
    ///
    /// Nobody waits for it for longer than a tenth of a second: a partition is made beside the table and attached, and the attempt is given
    /// up and repeated while somebody holds the default partition. Any number of processes may do it at once.
    ///
    /// # Errors
    ///
    /// [`Error::Schema`], [`Error::Database`]. A day that cannot have a partition is no error: [`Ahead::left`] says why.
    ///
    /// # Cancel safety
    ///
    /// One transaction per day: repeat it.
    pub async fn partitions_ahead(&self, days: u16) -> Result<Ahead, Error> {
        operator::check(&self.pool, &self.names).await?;
        let mut ahead = Ahead {
            partitioned: D::PARTITIONED,
            ..Ahead::default()
        };
        if !D::PARTITIONED {
            return Ok(ahead);
        }
        let failed = |e| Error::database("make a partition of the record", e);
        let known = D::days(&self.pool, &self.names).await.map_err(failed)?;
        for day in coming(self.today().await?, days) {
            if known.contains(&day) {
                ahead.there.push(day);
            } else {
                match self.make(&self.pool, day).await.map_err(failed)? {
                    None => ahead.made.push(day),
                    // Another process made it.
                    Some(Left::Taken) if self.has(day).await.map_err(failed)? => {
                        ahead.there.push(day);
                    }
                    Some(why) => ahead.left.push((day, why)),
                }
            }
        }
        Ok(ahead)
    }

    async fn has(&self, day: Date) -> Result<bool, sqlx::Error> {
        Ok(D::days(&self.pool, &self.names).await?.contains(&day))
    }

    async fn make(&self, pool: &Pool<D>, day: Date) -> Result<Option<Left>, sqlx::Error> {
        let mut pause = Duration::from_millis(20);
        for _ in 1..ATTEMPTS {
            match D::attach(pool, &self.names, day).await? {
                Some(Left::Busy) => tokio::time::sleep(pause).await,
                other => return Ok(other),
            }
            pause = (pause * 2).min(Duration::from_millis(500));
        }
        D::attach(pool, &self.names, day).await
    }
}

/// A day and so many after it.
fn coming(today: Date, days: u16) -> impl Iterator<Item = Date> {
    std::iter::successors(Some(today), |day| day.next_day()).take(usize::from(days) + 1)
}
