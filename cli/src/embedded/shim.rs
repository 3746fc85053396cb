//! A loopback TCP proxy before the in-process broker that upgrades old `EndTxn` requests; everything else passes as it is.

use std::collections::HashSet;
use std::io::{Error, ErrorKind, Result};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

use super::end_txn;

/// Correlation ids of the upgraded requests of one connection that are not answered yet.
type Upgraded = Arc<Mutex<HashSet<i32>>>;

/// Listens on a free port of 127.0.0.1 for the broker at `target`.
pub(super) async fn start(target: SocketAddr) -> Result<(u16, AbortHandle)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let port = listener.local_addr()?.port();
    Ok((port, tokio::spawn(accept(listener, target)).abort_handle()))
}

async fn accept(listener: TcpListener, target: SocketAddr) {
    // ends with every connection when this task is aborted
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Some(_) = connections.join_next() => {}
            Ok((client, _)) = listener.accept() => {
                connections.spawn(serve(client, target));
            }
        }
    }
}

async fn serve(client: TcpStream, target: SocketAddr) -> Result<()> {
    let broker = TcpStream::connect(target).await?;
    client.set_nodelay(true)?;
    broker.set_nodelay(true)?;
    let (client_read, client_write) = client.into_split();
    let (broker_read, broker_write) = broker.into_split();
    let upgraded = Upgraded::default();
    tokio::select! {
        ended = requests(client_read, broker_write, &upgraded) => ended,
        ended = responses(broker_read, client_write, &upgraded) => ended,
    }
}

async fn requests(
    client: impl AsyncRead + Unpin,
    mut broker: impl AsyncWrite + Unpin,
    upgraded: &Upgraded,
) -> Result<()> {
    let mut client = BufReader::new(client);
    while let Some(request) = read_frame(&mut client).await? {
        match end_txn::upgrade(&request) {
            None => write_frame(&mut broker, &request).await?,
            Some((request, correlation)) => {
                upgraded
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .insert(correlation);
                write_frame(&mut broker, &request).await?;
            }
        }
    }
    Ok(())
}

async fn responses(
    broker: impl AsyncRead + Unpin,
    mut client: impl AsyncWrite + Unpin,
    upgraded: &Upgraded,
) -> Result<()> {
    let mut broker = BufReader::new(broker);
    while let Some(mut response) = read_frame(&mut broker).await? {
        if let Some(correlation) = response.first_chunk().map(|id| i32::from_be_bytes(*id))
            && upgraded
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&correlation)
        {
            end_txn::downgrade(&mut response);
        }
        write_frame(&mut client, &response).await?;
    }
    Ok(())
}

/// A frame without its length; `None` at the end of the stream.
async fn read_frame(stream: &mut (impl AsyncRead + Unpin)) -> Result<Option<Vec<u8>>> {
    let length = match stream.read_i32().await {
        Ok(length) => usize::try_from(length)
            .map_err(|_| Error::new(ErrorKind::InvalidData, "negative length"))?,
        Err(end) if end.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        Err(other) => return Err(other),
    };
    let mut frame = vec![0; length];
    stream.read_exact(&mut frame).await?;
    Ok(Some(frame))
}

/// Length and frame in one write.
async fn write_frame(stream: &mut (impl AsyncWrite + Unpin), frame: &[u8]) -> Result<()> {
    let length = u32::try_from(frame.len()).map_err(Error::other)?;
    let mut bytes = Vec::with_capacity(4 + frame.len());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(frame);
    stream.write_all(&bytes).await
}
