//! The SQL of one database, built once from its templates.

use std::sync::Arc;

use oncebox_migrations::{Dialect, Names};

/// Declares the statements: one list for the templates, the texts, and the way from these to those.
macro_rules! statements {
    ($($name:ident),* $(,)?) => {
        /// The SQL of one database: table names are checked identifiers, everything else is bound.
        #[derive(Clone, Debug)]
        pub struct Statements {
            pub(super) begin: Arc<str>,
            pub(super) begin_brief: Arc<str>,
            $(pub(super) $name: Arc<str>,)*
        }

        /// The texts of one database, with `{inbox}`, `{position}` and so on for the tables.
        pub(super) struct Templates {
            $(pub(super) $name: &'static str,)*
        }

        impl Statements {
            /// Fills the table names into the templates.
            pub(super) fn new(
                dialect: Dialect,
                names: &Names,
                begin: &str,
                begin_brief: &str,
                templates: &Templates,
            ) -> Self {
                let fill = |template| tables(dialect, names, template).into();
                Self {
                    begin: begin.into(),
                    begin_brief: begin_brief.into(),
                    $($name: fill(templates.$name),)*
                }
            }
        }
    };
}

statements! {
    mark,
    advance_marked,
    advance,
    take,
    create,
    read,
    put,
    bury,
    buried,
    block,
    blocked,
    any_blocked,
    note,
    forget,
    forget_below,
    attempts,
    record,
    known,
    trip,
    tripped,
    accept,
    pause,
    unpause,
    paused,
    depths,
    due_letter,
    count_replay,
    take_letter,
    first_parked,
    release_next,
    unblock,
    refuse_letter,
    delay_again,
    give_up,
    refuse_key,
    sweep,
}

/// `text` with the names of the tables in place of `{outbox}`, `{dead_letter}` and so on.
pub(crate) fn tables(dialect: Dialect, names: &Names, text: &str) -> String {
    text.replace("{outbox}", &names.outbox(dialect))
        .replace("{mark}", &names.mark(dialect))
        .replace("{parked}", &names.parked(dialect))
        .replace("{inbox}", &names.inbox(dialect))
        .replace("{position}", &names.position(dialect))
        .replace("{dead_letter}", &names.dead_letter(dialect))
        .replace("{blocked_key}", &names.blocked_key(dialect))
        .replace("{attempt}", &names.attempt(dialect))
        .replace("{inbox_paused}", &names.inbox_paused(dialect))
        .replace("{breaker}", &names.breaker(dialect))
        .replace("{record}", &names.record(dialect))
}
