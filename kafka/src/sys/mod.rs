//! Everything that touches librdkafka: the only unsafe code of the workspace.
//!
//! The crate `rdkafka` is not used: its producers cannot carry the request interceptor ([`tap`]),
//! waste 100 ms per commit, and its consumer hangs when an offset list outlives it. What is left of
//! a client without them is small.
//!
//! Rules of this module: a handle is destroyed before what its callbacks point to; a list of
//! partitions never leaves the function that made it; payloads are not copied, so the producer
//! holds on to them until they are acknowledged.
#![allow(unsafe_code)]

mod admin;
mod client;
mod code;
mod consumer;
mod list;
mod producer;
mod tap;

pub(crate) use admin::{AdminClient, NativeTopic};
pub(crate) use client::{CallError, builtin_features};
pub(crate) use code::Code;
pub(crate) use consumer::{ConsumerClient, Polled, Rebalance};
pub(crate) use producer::{FailedRecord, NotProduced, Producer};
