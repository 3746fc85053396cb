//! What a database has to say about letters.

use crate::operator::Ask;

/// The texts of one database; `{verdicts}` is the common beginning of an order's statements.
#[derive(Debug)]
pub struct Templates {
    pub(super) contains: &'static str,
    pub(super) columns: &'static str,
    pub(super) groups: &'static str,
    pub(super) order: &'static str,
    pub(super) cancel: &'static str,
    pub(super) lock_key: &'static str,
    pub(super) delete_dead: &'static str,
}

/// The SQL of the dead letters in one database.
pub trait Texts: Ask {
    /// The texts.
    const LETTERS: Templates;
}
