//! The migrations on real databases. PostgreSQL tests need `ONCEBOX_TEST_POSTGRES_URL`, the URL of a superuser.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

mod database;
mod grants_are_enough_and_no_more;
mod migrations_on_postgres;
mod migrations_on_sqlite;
