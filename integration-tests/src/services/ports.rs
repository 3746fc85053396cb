//! Free ports of 127.0.0.1.

use std::collections::HashSet;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::Mutex;

use anyhow::{Result, bail};

/// Below the range from which the kernel takes the source ports of outgoing connections: a stopped server finds its port
/// free when it is started again.
const RANGE: std::ops::Range<u16> = 20_000..32_000;

static GIVEN: Mutex<Option<HashSet<u16>>> = Mutex::new(None);

/// `n` ports that nobody listens on and that this process has not given out before.
pub(crate) fn free(n: usize) -> Result<Vec<u16>> {
    let mut given = GIVEN
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let given = given.get_or_insert_with(HashSet::new);
    let mut found = Vec::with_capacity(n);
    for _ in 0..10_000 {
        if found.len() == n {
            return Ok(found);
        }
        let port = RANGE.start + random() % RANGE.len() as u16;
        if !given.contains(&port) && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            given.insert(port);
            found.push(port);
        }
    }
    bail!("no {n} free ports in {RANGE:?} on 127.0.0.1")
}

fn random() -> u16 {
    let bytes = uuid::Uuid::new_v4();
    u16::from_be_bytes([bytes.as_bytes()[0], bytes.as_bytes()[1]])
}
