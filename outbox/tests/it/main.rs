//! Enqueue on real databases. PostgreSQL tests need `ONCEBOX_TEST_POSTGRES_URL`, the URL of a superuser.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

mod conformance;
#[allow(dead_code, reason = "shared with the tests of the migrations")]
#[path = "../../../migrations/tests/it/database.rs"]
mod database;
mod order_of_a_key_on_postgres;
mod order_of_a_key_on_sqlite;
mod what_a_producer_may;
