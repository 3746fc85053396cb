//! What a database has to say about the record, and do with its partitions.

use std::future::Future;

use oncebox_migrations::Names;
use sqlx::Pool;
use time::Date;

use super::Left;
use crate::operator::Ask;

/// The texts of one database.
#[derive(Debug)]
pub struct Templates {
    pub(super) columns: &'static str,
    pub(super) groups: &'static str,
}

/// The record in one database.
pub trait Texts: Ask {
    /// The texts.
    const RECORDS: Templates;
    /// Whether the table is partitioned by day.
    const PARTITIONED: bool;

    /// The days that have a partition.
    fn days(
        pool: &Pool<Self>,
        names: &Names,
    ) -> impl Future<Output = Result<Vec<Date>, sqlx::Error>> + Send;

    /// Makes and attaches the partition of a day; `Some` = why not.
    fn attach(
        pool: &Pool<Self>,
        names: &Names,
        day: Date,
    ) -> impl Future<Output = Result<Option<Left>, sqlx::Error>> + Send;

    /// Drops the partition of a day. `false`: somebody holds it.
    fn drop_day(
        pool: &Pool<Self>,
        names: &Names,
        day: Date,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

    /// How many rows before this time (microseconds) lie in no day's partition.
    fn old(
        conn: &mut Self::Connection,
        names: &Names,
        before: i64,
    ) -> impl Future<Output = Result<u64, sqlx::Error>> + Send;

    /// Deletes some of them in one short transaction, beginning at `place`, which starts at 0; returns how many and the next place.
    fn delete_some(
        pool: &Pool<Self>,
        names: &Names,
        before: i64,
        place: i64,
        rows: i64,
    ) -> impl Future<Output = Result<(u64, Option<i64>), sqlx::Error>> + Send;
}
