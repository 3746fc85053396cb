//! The hints on a real Redis. What only needs a server takes the one of `ONCEBOX_TEST_REDIS_URL`; what kills, stops or empties
//! it starts one of its own, from the program `redis-server` of the path.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

mod a13_local_cache;
mod a3_redis_gate;
mod a4_lease;
mod a7_reserve;
mod server;
