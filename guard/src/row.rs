//! Which row, and what to write into it: columns by name, values that are bound.

use std::fmt;

use sqlx::encode::{Encode, IsNull};
use sqlx::error::BoxDynError;
use sqlx::{Arguments as _, Type};

use crate::Dialect;

/// A column and its value.
pub(crate) struct Column<'v, D: Dialect> {
    pub(crate) name: &'static str,
    pub(crate) is_null: bool,
    #[expect(clippy::type_complexity, reason = "named by its field")]
    pub(crate) bind: Box<dyn Fn(&mut D::Arguments) -> Result<(), BoxDynError> + Send + Sync + 'v>,
}

impl<'v, D: Dialect> Column<'v, D> {
    pub(crate) fn new<T>(name: &'static str, value: T) -> Self
    where
        T: Encode<'v, D> + Type<D> + Send + Sync + 'v,
    {
        Self {
            name,
            is_null: matches!(
                value.encode_by_ref(&mut D::ArgumentBuffer::default()),
                Ok(IsNull::Yes)
            ),
            bind: Box::new(move |arguments| arguments.add(&value)),
        }
    }
}

/// The columns that identify one row. Begin with [`key`].
///
/// They must be unique in the table: a guard that finds a second row reports [`Error::ManyRows`](crate::Error::ManyRows).
/// NULL is refused, because NULL equals nothing and a unique index lets any number of them in.
#[must_use]
pub struct Key<'v, D: Dialect> {
    pub(crate) columns: Vec<Column<'v, D>>,
}

/// The row whose `column` has this value: anything that sqlx can encode for the database.
///
/// ```
/// use oncebox_guard::{Key, key};
///
/// let order: Key<'_, sqlx::Postgres> = key("order_no", "2026-0815");
/// let shelf: Key<'_, sqlx::Postgres> = key("warehouse", 7_i64).and("sku", "apple");
/// # let _ = (order, shelf);
/// ```
pub fn key<'v, D: Dialect, T>(column: &'static str, value: T) -> Key<'v, D>
where
    T: Encode<'v, D> + Type<D> + Send + Sync + 'v,
{
    Key {
        columns: vec![Column::new(column, value)],
    }
}

impl<'v, D: Dialect> Key<'v, D> {
    /// A further column of a key that has several.
    pub fn and<T>(mut self, column: &'static str, value: T) -> Self
    where
        T: Encode<'v, D> + Type<D> + Send + Sync + 'v,
    {
        self.columns.push(Column::new(column, value));
        self
    }

    /// A value to write, in a column that does not belong to the key.
    pub fn set<T>(self, column: &'static str, value: T) -> Row<'v, D>
    where
        T: Encode<'v, D> + Type<D> + Send + Sync + 'v,
    {
        Row::from(self).set(column, value)
    }
}

/// A key, and values to write. Made from a [`Key`] by [`Key::set`], or by `into()` where nothing else is written.
#[must_use]
pub struct Row<'v, D: Dialect> {
    pub(crate) key: Key<'v, D>,
    pub(crate) values: Vec<Column<'v, D>>,
}

impl<'v, D: Dialect> Row<'v, D> {
    /// A further value.
    pub fn set<T>(mut self, column: &'static str, value: T) -> Self
    where
        T: Encode<'v, D> + Type<D> + Send + Sync + 'v,
    {
        self.values.push(Column::new(column, value));
        self
    }
}

impl<'v, D: Dialect> From<Key<'v, D>> for Row<'v, D> {
    fn from(key: Key<'v, D>) -> Self {
        Self {
            key,
            values: Vec::new(),
        }
    }
}

// Values stay out of debug output.

impl<D: Dialect> fmt::Debug for Key<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.columns.iter().map(|c| c.name).collect();
        f.debug_tuple("Key").field(&names).finish()
    }
}

impl<D: Dialect> fmt::Debug for Row<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.values.iter().map(|c| c.name).collect();
        f.debug_struct("Row")
            .field("key", &self.key)
            .field("values", &names)
            .finish()
    }
}
