//! The commands, one file each. The demo and the doctor have rooms of their own.

mod bytes;
mod connect;
pub(crate) mod dead;
pub(crate) mod inbox;
pub(crate) mod migrate;
pub(crate) mod park;
pub(crate) mod reconcile;
pub(crate) mod record;
pub(crate) mod relay;
mod when;

use std::io::{self, Write};

use crate::exit::Failure;

/// Writes to standard output; a reader that closed the pipe (`| head`) is no error.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out
        .write_all(crate::redact::scrub(text).as_bytes())
        .and_then(|()| out.flush())
    {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(Failure::error(format!(
            "cannot write to standard output: {e}"
        ))),
        _ => Ok(()),
    }
}
