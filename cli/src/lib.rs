//! The `oncebox` command: `migrate`, `relay`, `inbox resume`, `dead`, `record`, `reconcile`, `doctor` and `demo`.
//!
//! It is a library so that the integration tests run the very same program ([`main`]) and the very
//! same audit ([`demo::audit`]). Where things are:
//!
//! | module | what |
//! |---|---|
//! | [`args`] | the command line |
//! | [`config`] | defaults < file < variables < flags, and whose fault a bad value is |
//! | [`redact`] | what may be printed of URLs, properties and texts |
//! | [`exit`] | exit codes |
//! | [`http`] | `/live`, `/ready`, `/metrics` |
//! | [`doctor`] | what is wrong, and what to type |
//! | [`demo`] | the shop, the faults and the audit |
//! | [`embedded`] | the in-process broker (feature `embedded`) |
//! | [`kill_at`] | SIGKILL at a named point |

pub mod args;
mod commands;
pub mod config;
pub mod demo;
pub mod doctor;
#[cfg(feature = "embedded")]
pub mod embedded;
pub mod exit;
pub mod http;
pub mod kill_at;
mod logs;
mod program;
pub mod redact;
mod signals;

pub use program::main;
