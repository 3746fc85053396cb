//! States and the ways between them: the way is a condition of the UPDATE.

use sqlx::Transaction;

use crate::name::{self, broken_rule};
use crate::row::{Column, Row};
use crate::statement::{Statement, Values};
use crate::{Dialect, Error};

const DOING: &str = "change the state of";

/// What a transition found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "the transition may not have happened"]
pub enum Transition {
    /// The row has the new state.
    Applied,
    /// The row had the state before. None of the values was written.
    AlreadyThere,
    /// No declared way leads from the row's state to the new one. Nothing was written.
    Illegal {
        /// The state of the row.
        from: String,
    },
    /// The row has seen a later message than this one ([`Sequenced`] only). Nothing was written.
    Stale,
    /// No row has the key.
    Missing,
}

/// The states of a row and the legal ways between them, declared once.
///
/// A state that no way leads to, from where the row is, cannot be reached: a late `pending` never takes back a `paid`. That is
/// a condition of the UPDATE and holds however many transactions try at once.
///
/// Declared as a constant, a mistake in it does not compile. The column may be text or, on PostgreSQL, an enum.
///
/// ```
/// # use oncebox_guard as guard;
/// # async fn example(tx: &mut sqlx::Transaction<'_, sqlx::Postgres>, id: i64, now: time::OffsetDateTime) -> Result<(), guard::Error> {
/// use oncebox_guard::{StateMachine, Transition, key};
///
/// const ORDER: StateMachine = StateMachine::new("orders", "status", &[
///     ("pending", &["paid", "cancelled"]),
///     ("paid", &["shipped", "refunded"]),
///     ("shipped", &["refunded"]),
///     ("cancelled", &[]),
///     ("refunded", &[]),
/// ]);
///
/// match ORDER.transition(tx, key("id", id).set("paid_at", now), "paid").await? {
///     Transition::Applied => {} // the first time: what follows from a payment belongs here
///     Transition::AlreadyThere => {} // repeated
///     other => println!("order {id} cannot be paid: {other:?}"),
/// }
/// # Ok(()) }
/// ```
///
/// If the ways form a circle (`active`, `held`, `active`), a repeated or late message can be legal again. Then the row needs a
/// [`sequence`](Self::sequence).
#[derive(Debug, Clone, Copy)]
pub struct StateMachine {
    table: &'static str,
    column: &'static str,
    states: States,
}

/// Each state with those that may follow it.
type States = &'static [(&'static str, &'static [&'static str])];

impl StateMachine {
    /// The machine of the rows of `table`, whose state is in `column`: each state with those that may follow it, final states
    /// with none.
    ///
    /// # Panics
    ///
    /// A name that is not allowed, a state that is empty or contains a quote, backslash or control character, a state that is
    /// declared or named twice, one that follows itself, and one that is named but not declared. In a constant each of them is an
    /// error of the compiler:
    ///
    /// ```compile_fail,E0080
    /// use oncebox_guard::StateMachine;
    ///
    /// const ORDER: StateMachine = StateMachine::new("orders", "status", &[("pending", &["payed"]), ("paid", &[])]);
    /// # let _ = ORDER;
    /// ```
    #[must_use]
    #[track_caller]
    pub const fn new(table: &'static str, column: &'static str, states: States) -> Self {
        assert!(
            is_table(table),
            "the name of the table is not allowed: a-z, A-Z, 0-9, _ and one dot after a schema"
        );
        assert!(
            broken_rule(column).is_none(),
            "the name of the column is not allowed: a-z, A-Z, 0-9 and _"
        );
        let mut i = 0;
        while i < states.len() {
            let (state, next) = states[i];
            assert!(
                is_state(state),
                "a state must not be empty or contain a quote, a backslash or a control character"
            );
            assert!(count(states, state) == 1, "a state is declared twice");
            let mut j = 0;
            while j < next.len() {
                assert!(
                    count(states, next[j]) > 0,
                    "a state is named but not declared"
                );
                assert!(!equal(next[j], state), "a state follows itself");
                let mut k = 0;
                while k < j {
                    assert!(
                        !equal(next[j], next[k]),
                        "a state is named twice after the same one"
                    );
                    k += 1;
                }
                j += 1;
            }
            i += 1;
        }
        Self {
            table,
            column,
            states,
        }
    }

    /// The same with a column that says how new the row's knowledge is: a message that is older than it is
    /// [`Transition::Stale`].
    ///
    /// # Panics
    ///
    /// If the name is not allowed.
    #[must_use]
    #[track_caller]
    pub const fn sequence(self, column: &'static str) -> Sequenced {
        assert!(
            broken_rule(column).is_none(),
            "the name of the sequence's column is not allowed: a-z, A-Z, 0-9 and _"
        );
        Sequenced {
            machine: self,
            sequence: column,
        }
    }

    /// Brings the row to the state `to` if a declared way leads there from where it is, and writes the values that come with
    /// the key.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownState`], [`Error::Name`], [`Error::NullKey`], [`Error::ManyRows`], [`Error::Suppressed`], or the
    /// database's answer.
    ///
    /// # Cancel safety
    ///
    /// When the future is dropped, the row may or may not be changed: roll the transaction back.
    pub async fn transition<'v, D: Dialect>(
        &self,
        tx: &mut Transaction<'_, D>,
        row: impl Into<Row<'v, D>>,
        to: &str,
    ) -> Result<Transition, Error> {
        let sql = self.sql(&row.into(), to, None)?;
        self.run(tx, &sql, to).await
    }

    /// `sequence`: its column, and the value of the message.
    fn sql<D: Dialect>(
        &self,
        row: &Row<'_, D>,
        to: &str,
        sequence: Option<&Column<'_, D>>,
    ) -> Result<Sql<D>, Error> {
        let table = name::table::<D>(self.table)?;
        let state = name::column::<D>(self.column)?;

        let mut values = Values::<D>::new(self.table);
        let mut set = vec![format!("{state} = {}", literal(to))];
        for value in &row.values {
            set.push(values.equals(value)?);
        }
        let mut conditions = vec![values.key(&row.key)?, self.legal(&state, to)?];
        if let Some(sequence) = sequence {
            let column = name::column::<D>(sequence.name)?;
            let value = values.bind_column(sequence)?;
            set.push(format!("{column} = {value}"));
            conditions.push(format!("({column} IS NULL OR {column} <= {value})"));
        }
        let (set, conditions) = (set.join(", "), conditions.join(" AND "));
        let change = values.statement(format!(
            "UPDATE {table} SET {set} WHERE {conditions} RETURNING 1"
        ));

        let mut values = Values::<D>::new(self.table);
        let key = values.key(&row.key)?;
        let above = match sequence {
            Some(sequence) => D::above(
                &name::column::<D>(sequence.name)?,
                &values.bind_column(sequence)?,
            ),
            None => "CAST(0 AS BIGINT)".to_owned(),
        };
        let look = values.statement(format!(
            "SELECT CAST({state} AS TEXT), {above} FROM {table} WHERE {key}{}",
            D::FOR_UPDATE
        ));

        let advance = match sequence {
            Some(sequence) => {
                let mut values = Values::<D>::new(self.table);
                let key = values.key(&row.key)?;
                let column = name::column::<D>(sequence.name)?;
                let value = values.bind_column(sequence)?;
                Some(values.statement(format!(
                    "UPDATE {table} SET {column} = {value} WHERE {key} AND ({column} IS NULL OR {column} < {value})"
                )))
            }
            None => None,
        };
        Ok(Sql {
            change,
            look,
            advance,
        })
    }

    /// The condition that a way leads from the row's state to `to`.
    fn legal(&self, column: &str, to: &str) -> Result<String, Error> {
        if count(self.states, to) == 0 {
            return Err(Error::UnknownState {
                table: self.table,
                state: to.to_owned(),
            });
        }
        let from: Vec<_> = self.before(to).map(literal).collect();
        Ok(match from.is_empty() {
            // A beginning. Still a statement that writes: see SQLite.
            true => "1 = 0".to_owned(),
            false => format!("{column} IN ({})", from.join(", ")),
        })
    }

    /// The states that `to` may follow.
    fn before<'a>(&'a self, to: &'a str) -> impl Iterator<Item = &'static str> + 'a {
        let followed = self
            .states
            .iter()
            .filter(move |(_, next)| next.contains(&to));
        followed.map(|(state, _)| *state)
    }

    async fn run<D: Dialect>(
        &self,
        tx: &mut Transaction<'_, D>,
        sql: &Sql<D>,
        to: &str,
    ) -> Result<Transition, Error> {
        let table = self.table;
        for _ in 0..2 {
            if sql.change.row(tx, DOING).await?.is_some() {
                return Ok(Transition::Applied);
            }
            // The row is locked by this look, and stays as it is reported.
            let Some(row) = sql.look.row(tx, DOING).await? else {
                return Ok(Transition::Missing);
            };
            let from = D::text(&row, 0).map_err(Error::database(DOING, table))?;
            let stale = D::integer(&row, 1).map_err(Error::database(DOING, table))? != 0;
            drop(row);
            // Before anything else: what a late message says is no longer of interest.
            if stale {
                return Ok(Transition::Stale);
            }
            if from == to {
                // The row now knows that it is in this state at this time; a message from before is stale.
                if let Some(advance) = &sql.advance {
                    advance.row(tx, DOING).await?;
                }
                return Ok(Transition::AlreadyThere);
            }
            if !self.before(to).any(|state| state == from) {
                return Ok(Transition::Illegal { from });
            }
            // Somebody changed the row between the two statements, and now the way is there.
        }
        Err(Error::Suppressed { table })
    }
}

struct Sql<D: Dialect> {
    change: Statement<D>,
    look: Statement<D>,
    advance: Option<Statement<D>>,
}

/// A [`StateMachine`] whose rows know how new they are, so that a message that was overtaken is dropped.
///
/// Each message carries the sequence number or update time that its sender gave it, ascending per row. A message below the
/// row's is [`Transition::Stale`], whatever it says; one that equals it is judged by the state alone. A row whose column is NULL has
/// seen nothing.
///
/// ```
/// # use oncebox_guard as guard;
/// # struct Paid { id: i64, version: i64 }
/// # async fn example(tx: &mut sqlx::Transaction<'_, sqlx::Postgres>, message: Paid) -> Result<(), guard::Error> {
/// use oncebox_guard::{Sequenced, StateMachine, Transition, key};
///
/// const ACCOUNT: Sequenced = StateMachine::new("account", "status", &[
///     ("active", &["held"]),
///     ("held", &["active"]),
/// ])
/// .sequence("seen");
///
/// let found = ACCOUNT.transition(tx, key("id", message.id), "held", message.version).await?;
/// if found == Transition::Stale {
///     return Ok(()); // overtaken
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Sequenced {
    machine: StateMachine,
    sequence: &'static str,
}

impl Sequenced {
    /// As [`StateMachine::transition`], for a message with this sequence number or update time. Unless the message is stale or
    /// illegal, the row remembers it, also where the state is already there.
    ///
    /// # Errors
    ///
    /// As [`StateMachine::transition`].
    ///
    /// # Cancel safety
    ///
    /// As [`StateMachine::transition`].
    pub async fn transition<'v, D: Dialect>(
        &self,
        tx: &mut Transaction<'_, D>,
        row: impl Into<Row<'v, D>>,
        to: &str,
        sequence: impl Sequence<D>,
    ) -> Result<Transition, Error> {
        let sequence = Column::new(self.sequence, sequence);
        let sql = self.machine.sql(&row.into(), to, Some(&sequence))?;
        drop(sequence);
        self.machine.run(tx, &sql, to).await
    }
}

/// What says how new a message is: `i64` for an integer column, and on PostgreSQL `sqlx::types::time::OffsetDateTime` for a
/// `timestamptz`.
///
/// SQLite keeps times as text, and texts of different precision do not compare as times do: store an integer there, such as
/// microseconds since 1970.
pub trait Sequence<D: Dialect>: sealed::Value<D> {}

#[cfg(feature = "postgres")]
impl Sequence<sqlx::Postgres> for i64 {}
#[cfg(feature = "postgres")]
impl Sequence<sqlx::Postgres> for sqlx::types::time::OffsetDateTime {}
#[cfg(feature = "sqlite")]
impl Sequence<sqlx::Sqlite> for i64 {}

mod sealed {
    use sqlx::Type;
    use sqlx::encode::Encode;

    use crate::Dialect;

    pub trait Value<D: Dialect>: for<'s> Encode<'s, D> + Type<D> + Send + Sync + 'static {}

    #[cfg(feature = "postgres")]
    impl Value<sqlx::Postgres> for i64 {}
    #[cfg(feature = "postgres")]
    impl Value<sqlx::Postgres> for sqlx::types::time::OffsetDateTime {}
    #[cfg(feature = "sqlite")]
    impl Value<sqlx::Sqlite> for i64 {}
}

/// A state in the text of a statement, where PostgreSQL takes it for the column's type, also for an enum. States have no quotes.
fn literal(state: &str) -> String {
    format!("'{state}'")
}

const fn is_table(name: &str) -> bool {
    let bytes = name.as_bytes();
    let mut i = 0;
    while i < bytes.len() {
        if bytes[i] == b'.' {
            let (schema, rest) = name.split_at(i);
            return broken_rule(schema).is_none() && broken_rule(rest.split_at(1).1).is_none();
        }
        i += 1;
    }
    broken_rule(name).is_none()
}

const fn is_state(state: &str) -> bool {
    let bytes = state.as_bytes();
    let mut i = 0;
    while i < bytes.len() {
        if bytes[i].is_ascii_control() || bytes[i] == b'\'' || bytes[i] == b'\\' {
            return false;
        }
        i += 1;
    }
    !bytes.is_empty()
}

/// How often a state is declared.
const fn count(states: States, state: &str) -> usize {
    let mut found = 0;
    let mut i = 0;
    while i < states.len() {
        if equal(states[i].0, state) {
            found += 1;
        }
        i += 1;
    }
    found
}

/// `==`, which a constant may not call.
const fn equal(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len() != b.len() {
        return false;
    }
    let mut i = 0;
    while i < a.len() {
        if a[i] != b[i] {
            return false;
        }
        i += 1;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(states: States, text: &str) {
        let panic = std::panic::catch_unwind(|| StateMachine::new("t", "s", states)).unwrap_err();
        let said = panic.downcast_ref::<&str>().copied().unwrap_or_default();
        assert!(said.contains(text), "{said:?} does not say {text:?}");
    }

    #[test]
    fn a_machine_with_a_mistake_is_refused() {
        refused(&[("a", &["b"])], "not declared");
        refused(&[("a", &[]), ("a", &[])], "declared twice");
        refused(&[("a", &["b", "b"]), ("b", &[])], "named twice");
        refused(&[("a", &["a"])], "follows itself");
        for state in ["", "a'", "a\\", "a\n"] {
            refused(
                Box::leak(Box::new([(state.to_owned().leak() as &str, &[] as &[_])])),
                "must not be empty",
            );
        }
    }

    #[test]
    fn a_machine_with_a_name_that_is_not_allowed_is_refused() {
        for (table, column) in [
            ("a b", "s"),
            ("", "s"),
            ("a.b.c", "s"),
            (".b", "s"),
            ("t", "s;"),
            ("t", "a.b"),
        ] {
            assert!(
                std::panic::catch_unwind(|| StateMachine::new(table, column, &[])).is_err(),
                "{table} {column}"
            );
        }
        let _ = StateMachine::new("shop.orders", "status", &[("a", &[])]).sequence("seen");
        assert!(
            std::panic::catch_unwind(|| StateMachine::new("t", "s", &[]).sequence("x y")).is_err()
        );
    }
}
