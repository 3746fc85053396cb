//! A row, read from left to right.

use time::OffsetDateTime;
use uuid::Uuid;

use super::{Ask, time};

/// Reads the columns of a row one after the other.
pub(crate) struct Columns<'r, D: Ask> {
    row: &'r D::Row,
    next: usize,
}

impl<'r, D: Ask> Columns<'r, D> {
    pub(crate) fn new(row: &'r D::Row) -> Self {
        Self { row, next: 0 }
    }

    fn at(&mut self) -> usize {
        self.next += 1;
        self.next - 1
    }

    fn there<T>(&self, value: Option<T>) -> Result<T, sqlx::Error> {
        value.ok_or_else(|| sqlx::Error::ColumnDecode {
            index: (self.next - 1).to_string(),
            source: "unexpected NULL".into(),
        })
    }

    pub(crate) fn int_or_none(&mut self) -> Result<Option<i64>, sqlx::Error> {
        let at = self.at();
        D::int(self.row, at)
    }

    pub(crate) fn int(&mut self) -> Result<i64, sqlx::Error> {
        let value = self.int_or_none()?;
        self.there(value)
    }

    /// A number that fits: a partition, a count of attempts.
    pub(crate) fn small(&mut self) -> Result<i32, sqlx::Error> {
        i32::try_from(self.int()?).map_err(|e| sqlx::Error::Decode(e.into()))
    }

    /// A number of rows.
    pub(crate) fn count(&mut self) -> Result<u64, sqlx::Error> {
        u64::try_from(self.int()?).map_err(|e| sqlx::Error::Decode(e.into()))
    }

    pub(crate) fn text_or_none(&mut self) -> Result<Option<String>, sqlx::Error> {
        let at = self.at();
        D::text(self.row, at)
    }

    pub(crate) fn text(&mut self) -> Result<String, sqlx::Error> {
        let value = self.text_or_none()?;
        self.there(value)
    }

    pub(crate) fn bytes_or_none(&mut self) -> Result<Option<Vec<u8>>, sqlx::Error> {
        let at = self.at();
        D::bytes(self.row, at)
    }

    pub(crate) fn bytes(&mut self) -> Result<Vec<u8>, sqlx::Error> {
        let value = self.bytes_or_none()?;
        self.there(value)
    }

    pub(crate) fn uuid(&mut self) -> Result<Uuid, sqlx::Error> {
        let at = self.at();
        let value = D::uuid(self.row, at)?;
        self.there(value)
    }

    pub(crate) fn flag(&mut self) -> Result<bool, sqlx::Error> {
        let at = self.at();
        let value = D::flag(self.row, at)?;
        self.there(value)
    }

    pub(crate) fn time_or_none(&mut self) -> Result<Option<OffsetDateTime>, sqlx::Error> {
        self.int_or_none()?.map(time).transpose()
    }

    pub(crate) fn time(&mut self) -> Result<OffsetDateTime, sqlx::Error> {
        time(self.int()?)
    }
}
