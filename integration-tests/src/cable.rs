//! A TCP proxy that understands nothing: the network between a process and its database, which can freeze, break or lead elsewhere.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use anyhow::Result;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// What the network does; the number counts the breaks.
#[derive(Clone, Copy, Debug)]
struct State {
    target: SocketAddr,
    frozen: bool,
    breaks: usize,
}

/// A cable to one server. Dropped = broken for good.
#[derive(Debug)]
pub struct Cable {
    address: SocketAddr,
    state: watch::Sender<State>,
    open: Open,
    _connections: JoinSet<()>,
}

impl Cable {
    /// Listens on a free port of 127.0.0.1.
    ///
    /// # Errors
    /// No port can be bound.
    pub async fn start(target: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let (state, seen) = watch::channel(State {
            target,
            frozen: false,
            breaks: 0,
        });
        let mut connections = JoinSet::new();
        let open = Open::default();
        connections.spawn(accept(listener, seen, open.clone()));
        Ok(Self {
            address,
            state,
            open,
            _connections: connections,
        })
    }

    /// Where to connect instead of the server.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connections stay and nothing passes: neither side is told.
    pub fn freeze(&self) {
        self.state.send_modify(|state| state.frozen = true);
    }

    /// What waited arrives.
    pub fn thaw(&self) {
        self.state.send_modify(|state| state.frozen = false);
    }

    /// New connections go to another server, as after a failover behind a virtual address; open ones stay.
    pub fn redirect(&self, target: SocketAddr) {
        self.state.send_modify(|state| state.target = target);
    }

    /// Every connection ends; new ones are accepted. Returns how many there were.
    pub fn cut(&self) -> usize {
        let open = self.open.count();
        self.state.send_modify(|state| state.breaks += 1);
        open
    }
}

/// Counts connections: each holds a [`Guard`] while it lives.
#[derive(Clone, Debug, Default)]
pub(crate) struct Open(Arc<AtomicUsize>);

/// See [`Open`].
pub(crate) struct Guard(Open);

impl Open {
    pub(crate) fn guard(&self) -> Guard {
        self.0.fetch_add(1, Relaxed);
        Guard(self.clone())
    }

    pub(crate) fn count(&self) -> usize {
        self.0.load(Relaxed)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Relaxed);
    }
}

async fn accept(listener: TcpListener, state: watch::Receiver<State>, open: Open) {
    // Dropped with this task, and all connections with it.
    let mut connections = JoinSet::new();
    while let Ok((near, _)) = listener.accept().await {
        let (state, guard) = (state.clone(), open.guard());
        connections.spawn(async move {
            let _open = guard;
            let target = state.borrow().target;
            if let Ok(far) = TcpStream::connect(target).await {
                connect(near, far, state).await;
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn connect(near: TcpStream, far: TcpStream, mut state: watch::Receiver<State>) {
    let breaks = state.borrow().breaks;
    let (near_read, near_write) = near.into_split();
    let (far_read, far_write) = far.into_split();
    tokio::select! {
        () = carry(near_read, far_write, state.clone()) => {}
        () = carry(far_read, near_write, state.clone()) => {}
        _ = state.wait_for(|now| now.breaks > breaks) => {}
    }
}

/// Carries one direction until it ends.
async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut state: watch::Receiver<State>) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let Ok(read @ 1..) = from.read(&mut buffer).await else {
            return;
        };
        let thawed = state.wait_for(|now| !now.frozen).await.is_ok();
        if !thawed || to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use super::*;

    /// A server that sends back what it gets.
    async fn echo() -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            loop {
                let (mut connection, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    let (mut read, mut write) = connection.split();
                    let _ = tokio::io::copy(&mut read, &mut write).await;
                });
            }
        });
        address
    }

    #[tokio::test]
    async fn it_carries_freezes_thaws_and_breaks() {
        let cable = Cable::start(echo().await).await.unwrap();
        let mut client = TcpStream::connect(cable.address()).await.unwrap();
        let mut answer = [0; 2];
        client.write_all(b"hi").await.unwrap();
        client.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"hi");

        cable.freeze();
        client.write_all(b"yo").await.unwrap();
        let waiting =
            tokio::time::timeout(Duration::from_millis(200), client.read_exact(&mut answer));
        assert!(waiting.await.is_err(), "nothing passes");
        cable.thaw();
        client.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"yo");

        assert_eq!(cable.cut(), 1);
        assert_eq!(client.read(&mut answer).await.unwrap_or(0), 0);
        let mut client = TcpStream::connect(cable.address()).await.unwrap();
        client.write_all(b"ok").await.unwrap();
        client.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"ok");

        let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        cable.redirect(other.local_addr().unwrap());
        let _client = TcpStream::connect(cable.address()).await.unwrap();
        other.accept().await.unwrap();
    }
}
