//! The guards on real databases. PostgreSQL tests need `ONCEBOX_TEST_POSTGRES_URL`, the URL of a superuser.
//!
//! `suite/` is run by each database: its modules are compiled once in `on_postgres` and once in `on_sqlite`, because which
//! values a database takes is not for a generic function to say.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]
#![allow(clippy::duplicate_mod, reason = "one suite for every database")]

#[allow(dead_code, reason = "shared with the tests of the migrations")]
#[path = "../../../migrations/tests/it/database.rs"]
mod database;
mod on_postgres;
mod on_sqlite;
mod tables;
