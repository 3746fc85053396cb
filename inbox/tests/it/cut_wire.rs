//! The answer to a COMMIT is lost (G5): the position row tells what happened. The wire runs through a small proxy that cuts it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use oncebox_inbox::{Inbox, Step};
use sqlx::postgres::PgPoolOptions;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::scene::{Running, Scene, at, effect};

/// What happens to the next COMMIT once the wire is armed.
#[derive(Clone, Copy, PartialEq)]
enum Cut {
    /// The request does not arrive.
    Request,
    /// It arrives and takes effect; the answer does not come back.
    Answer,
}

/// Listens for PostgreSQL clients; returns the port.
async fn wire(server: String, cut: Cut, armed: Arc<AtomicBool>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(&server).await.unwrap();
            tokio::spawn(carry(client, server, cut, Arc::clone(&armed)));
        }
    });
    port
}

async fn carry(mut client: TcpStream, mut server: TcpStream, cut: Cut, armed: Arc<AtomicBool>) {
    let (mut from_client, mut from_server) = (vec![0; 65_536], vec![0; 65_536]);
    let mut swallow = false;
    loop {
        tokio::select! {
            n = client.read(&mut from_client) => {
                let Ok(n @ 1..) = n else { return };
                let request = &from_client[..n];
                if request.windows(6).any(|w| w == b"COMMIT") && armed.swap(false, Ordering::SeqCst) {
                    if cut == Cut::Request {
                        return;
                    }
                    swallow = true;
                }
                if server.write_all(request).await.is_err() {
                    return;
                }
            }
            n = server.read(&mut from_server) => {
                let Ok(n @ 1..) = n else { return };
                if swallow || client.write_all(&from_server[..n]).await.is_err() {
                    return;
                }
            }
        }
    }
}

async fn lose(cut: Cut) {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    scene.publish_numbers(0..6).await;
    let (head, database) = scene.url.rsplit_once('/').unwrap();
    let (user, server) = head.rsplit_once('@').unwrap();
    let armed = Arc::new(AtomicBool::new(false));
    let port = wire(server.to_owned(), cut, Arc::clone(&armed)).await;
    let url = format!("{user}@127.0.0.1:{port}/{database}");
    let pool = PgPoolOptions::new()
        .max_connections(4)
        .connect(&url)
        .await
        .unwrap();
    let trigger = Arc::clone(&armed);
    let running = Running::new(
        Inbox::new(pool, scene.kafka.clone())
            .consumer(&scene.consumer)
            .topic(&scene.topic)
            .batch(1)
            .on_step(at(Step::BeforeCommit, 3, move || {
                trigger.store(true, Ordering::SeqCst)
            }))
            .handle(|tx, delivery| Box::pin(effect(tx, delivery))),
    );
    scene.effects_reach(6).await;
    let stats = running.stats.clone();
    running.stop().await.unwrap();
    assert!(!armed.load(Ordering::SeqCst), "the wire was cut");
    let expected: Vec<String> = (0..6).map(|n| n.to_string()).collect();
    assert_eq!(scene.effects().await, expected);
    assert!(scene.next(0).await >= 6);
    // The one whose answer was lost is not counted as an effect of ours; the one that never arrived is done again.
    assert_eq!(stats.effects(), if cut == Cut::Answer { 5 } else { 6 });
    assert_eq!(stats.ownership(), 1, "the partition was not lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_a_commit_whose_answer_was_lost_is_not_repeated() {
    lose(Cut::Answer).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_a_commit_that_never_arrived_is_repeated() {
    lose(Cut::Request).await;
}
