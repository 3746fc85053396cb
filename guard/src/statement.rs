//! A statement and its values.

use std::sync::Arc;

use sqlx::error::BoxDynError;
use sqlx::{Arguments as _, AssertSqlSafe, SqlSafeStr as _, Transaction};

use crate::row::{Column, Key};
use crate::{Dialect, Error, name};

/// The values of a statement in the making. Each `bind` returns the placeholder that stands for it.
pub(crate) struct Values<D: Dialect> {
    table: &'static str,
    arguments: D::Arguments,
}

impl<D: Dialect> Values<D> {
    pub(crate) fn new(table: &'static str) -> Self {
        Self {
            table,
            arguments: D::Arguments::default(),
        }
    }

    pub(crate) fn bind(&mut self, value: i64) -> Result<String, Error> {
        let added = D::bind(&mut self.arguments, value);
        self.placeholder(added)
    }

    /// `column = value`.
    pub(crate) fn equals(&mut self, column: &Column<'_, D>) -> Result<String, Error> {
        let name = name::column::<D>(column.name)?;
        Ok(format!("{name} = {}", self.bind_column(column)?))
    }

    pub(crate) fn bind_column(&mut self, column: &Column<'_, D>) -> Result<String, Error> {
        let added = (column.bind)(&mut self.arguments);
        self.placeholder(added)
    }

    /// The condition that picks the row.
    pub(crate) fn key(&mut self, key: &Key<'_, D>) -> Result<String, Error> {
        check_key(self.table, key)?;
        let equals = key.columns.iter().map(|column| self.equals(column));
        Ok(equals.collect::<Result<Vec<_>, _>>()?.join(" AND "))
    }

    fn placeholder(&self, added: Result<(), BoxDynError>) -> Result<String, Error> {
        added.map_err(|source| {
            Error::database("encode a value for", self.table)(sqlx::Error::Encode(source))
        })?;
        // Both databases know it.
        Ok(format!("${}", self.arguments.len()))
    }

    /// The statement with these values.
    pub(crate) fn statement(self, sql: String) -> Statement<D> {
        Statement {
            table: self.table,
            sql: sql.into(),
            arguments: self.arguments,
            persistent: true,
        }
    }
}

/// NULL is no key: a unique index lets any number of rows with it in.
pub(crate) fn check_key<D: Dialect>(table: &'static str, key: &Key<'_, D>) -> Result<(), Error> {
    match key.columns.iter().find(|column| column.is_null) {
        Some(Column { name: column, .. }) => Err(Error::NullKey { table, column }),
        None => Ok(()),
    }
}

pub(crate) struct Statement<D: Dialect> {
    table: &'static str,
    sql: Arc<str>,
    arguments: D::Arguments,
    persistent: bool,
}

impl<D: Dialect> Statement<D> {
    /// Prepared for this once, because the columns of its result can change between two uses.
    pub(crate) fn prepared_once(mut self) -> Self {
        self.persistent = false;
        self
    }

    /// Runs it; the row it returned, if any. It can be run again.
    pub(crate) async fn row(
        &self,
        tx: &mut Transaction<'_, D>,
        doing: &'static str,
    ) -> Result<Option<D::Row>, Error> {
        let sql = AssertSqlSafe(self.sql.clone()).into_sql_str();
        let rows = D::fetch_all(&mut *tx, sql, self.arguments.clone(), self.persistent).await;
        let mut rows = rows
            .map_err(Error::database(doing, self.table))?
            .into_iter();
        match (rows.next(), rows.next()) {
            (row, None) => Ok(row),
            _ => Err(Error::ManyRows { table: self.table }),
        }
    }
}
