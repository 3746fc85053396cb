//! What a database error means: whose fault it is, and whether repeating can help. No I/O.
//!
//! Sources: PostgreSQL manual, appendix A (SQLSTATE classes); SQLite, "Result and Error Codes".

/// Whose fault a database error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// The data: SQLSTATE class 22 (data exception) or 23 (constraint), SQLite constraint, mismatch, too big. The same
    /// message would fail the same way.
    Data,
    /// The transaction was already broken by an earlier statement whose error the handler swallowed (25P02), or the
    /// server ended it because the handler left it idle for too long (25P03).
    Handler,
    /// The database is away, busy, read-only or in conflict: repeating can help.
    Outage,
    /// Repeating does not help: missing table, missing right, wrong password, closed pool.
    Refusal,
}

/// Classifies an error of sqlx.
pub(crate) fn class(error: &sqlx::Error) -> Class {
    match error {
        sqlx::Error::Database(e) => match e.code() {
            Some(code) => code_class(&code),
            None => Class::Outage,
        },
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::WorkerCrashed
        | sqlx::Error::BeginFailed => Class::Outage,
        _ => Class::Refusal,
    }
}

/// A SQLSTATE has five characters; a SQLite extended result code is a decimal number of at most four digits.
fn code_class(code: &str) -> Class {
    if code.len() == 5 {
        sqlstate(code)
    } else {
        code.parse().map_or(Class::Outage, sqlite)
    }
}

fn sqlstate(code: &str) -> Class {
    match code {
        "25P02" | "25P03" => Class::Handler,
        // read_only_sql_transaction: a standby, until the switchover is over
        "25006" => Class::Outage,
        _ => match &code[..2] {
            "22" | "23" => Class::Data,
            // connection, transaction rollback, resources, object in use, operator intervention, system, internal
            "08" | "40" | "53" | "55" | "57" | "58" | "XX" => Class::Outage,
            _ => Class::Refusal,
        },
    }
}

fn sqlite(extended: i32) -> Class {
    match extended & 0xff {
        // CONSTRAINT, MISMATCH, TOOBIG, RANGE
        19 | 20 | 18 | 25 => Class::Data,
        // BUSY, LOCKED, NOMEM, READONLY, INTERRUPT, IOERR, FULL, CANTOPEN, PROTOCOL, SCHEMA
        5 | 6 | 7 | 8 | 9 | 10 | 13 | 14 | 15 | 17 => Class::Outage,
        _ => Class::Refusal,
    }
}

/// Whether the error says that a table does not exist, so that the remedy can be named.
pub(crate) fn is_missing_table(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(e) => {
            matches!(e.code().as_deref(), Some("42P01" | "3F000" | "42703"))
                || e.message().starts_with("no such table")
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sqlstates_are_sorted_by_whose_fault_they_are() {
        for (code, want) in [
            ("22P02", Class::Data),
            ("23505", Class::Data),
            ("25P02", Class::Handler),
            ("25P03", Class::Handler),
            ("25006", Class::Outage),
            ("40001", Class::Outage),
            ("40P01", Class::Outage),
            ("53300", Class::Outage),
            ("55P03", Class::Outage),
            ("57P01", Class::Outage),
            ("08006", Class::Outage),
            ("42P01", Class::Refusal),
            ("42501", Class::Refusal),
            ("28P01", Class::Refusal),
        ] {
            assert_eq!(code_class(code), want, "{code}");
        }
    }

    #[test]
    fn sqlite_codes_are_masked_to_their_primary_code() {
        for (code, want) in [
            ("2067", Class::Data),  // CONSTRAINT_UNIQUE
            ("787", Class::Data),   // CONSTRAINT_FOREIGNKEY
            ("5", Class::Outage),   // BUSY
            ("517", Class::Outage), // BUSY_SNAPSHOT
            ("13", Class::Outage),  // FULL
            ("1", Class::Refusal),  // ERROR: no such table
            ("11", Class::Refusal), // CORRUPT
        ] {
            assert_eq!(code_class(code), want, "{code}");
        }
    }
}
