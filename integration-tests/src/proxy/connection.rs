//! One connection through the proxy: two pumps, one per direction.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use bytes::Bytes;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::oneshot;

use super::Cut;
use super::frame::{self, Answer, RequestHead};
use super::rule::{Action, Rules, Side};

/// Requests without a response yet, by correlation id.
type Pending = Arc<Mutex<HashMap<i32, Sent>>>;

#[derive(Debug)]
struct Sent {
    head: RequestHead,
    /// Responses still to come: two when the request was sent twice.
    responses: usize,
    /// One of them has come.
    answered: bool,
    /// Somebody released this request and waits for its answer.
    observer: Option<oneshot::Sender<Answer>>,
}

/// Carries one client's connection until either side ends or it is cut.
pub(super) async fn serve(client: TcpStream, target: u16, rules: Arc<Rules>, cut: Cut) {
    let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, target)).await else {
        return;
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (client_read, client_write) = client.into_split();
    let (server_read, server_write) = server.into_split();
    let pending = Pending::default();
    let requests = requests(client_read, server_write, &rules, &pending, &cut);
    let responses = responses(server_read, client_write, &rules, &pending, &cut);
    tokio::select! {
        _ = cut.cancelled() => {}
        _ = requests => {}
        _ = responses => {}
    }
}

/// Client to broker. Ends with the client, but not before a held request has been released and answered.
async fn requests(
    mut client: OwnedReadHalf,
    mut server: OwnedWriteHalf,
    rules: &Rules,
    pending: &Pending,
    cut: &Cut,
) -> Result<()> {
    while let Some(request) = frame::read(&mut client).await? {
        let head = RequestHead::of(&request)?;
        let rule = rules.matching(Side::Request, head.api_key, &request);
        let mut copies = 1;
        match rule.as_ref().map(|rule| rule.action) {
            None => {}
            Some(Action::Drop) => continue,
            Some(Action::Cut) => {
                cut.cancel();
                return Ok(());
            }
            Some(Action::Delay(by)) => tokio::time::sleep(by).await,
            Some(Action::Duplicate) => copies = 2,
            Some(Action::Hold) => {
                let Some(rule) = rule else { continue };
                let held = rule.held();
                held.released().await;
                let (observer, answer) = oneshot::channel();
                expect(
                    pending,
                    Sent {
                        head,
                        responses: 1,
                        answered: false,
                        observer: Some(observer),
                    },
                );
                frame::write(&mut server, &request).await?;
                held.answered(answer.await.ok());
                continue;
            }
        }
        expect(
            pending,
            Sent {
                head,
                responses: copies,
                answered: false,
                observer: None,
            },
        );
        for _ in 0..copies {
            frame::write(&mut server, &request).await?;
        }
    }
    server.shutdown().await?;
    Ok(())
}

/// Broker to client. Goes on reading when the client is gone: somebody may wait for the answer to a released request.
async fn responses(
    mut server: OwnedReadHalf,
    mut client: OwnedWriteHalf,
    rules: &Rules,
    pending: &Pending,
    cut: &Cut,
) -> Result<()> {
    while let Some(response) = frame::read(&mut server).await? {
        let Some((head, observer, copy)) = take(pending, &response) else {
            continue;
        };
        if copy {
            continue;
        }
        let answer = Answer {
            api_key: head.api_key,
            version: head.version,
            body: response.slice(4..),
        };
        if let Some(observer) = observer {
            let _ = observer.send(answer.clone());
        }
        let rule = rules.matching(Side::Response, head.api_key, &response);
        match rule.as_ref().map(|rule| rule.action) {
            None | Some(Action::Duplicate) => {}
            Some(Action::Drop) => continue,
            Some(Action::Cut) => {
                cut.cancel();
                return Ok(());
            }
            Some(Action::Delay(by)) => tokio::time::sleep(by).await,
            Some(Action::Hold) => {
                let Some(rule) = rule else { continue };
                let held = rule.held();
                held.released().await;
                held.answered(Some(answer));
            }
        }
        let _ = frame::write(&mut client, &response).await;
    }
    // nobody will be answered any more
    pending
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clear();
    Ok(())
}

fn expect(pending: &Pending, sent: Sent) {
    pending
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(sent.head.correlation, sent);
}

/// The request this response belongs to, who waits for it, and whether it is a copy of an earlier response.
fn take(
    pending: &Pending,
    response: &Bytes,
) -> Option<(RequestHead, Option<oneshot::Sender<Answer>>, bool)> {
    let correlation = i32::from_be_bytes(*response.first_chunk()?);
    let mut pending = pending.lock().unwrap_or_else(PoisonError::into_inner);
    let sent = pending.get_mut(&correlation)?;
    let (head, observer, copy) = (sent.head, sent.observer.take(), sent.answered);
    sent.answered = true;
    sent.responses -= 1;
    if sent.responses == 0 {
        pending.remove(&correlation);
    }
    Some((head, observer, copy))
}
