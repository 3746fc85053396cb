//! A consumer that was stopped in the middle of a message and wakes up after its partition has moved on (G6). The zombie is a
//! process of its own: this test binary, started again and stopped with SIGSTOP.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use oncebox_inbox::{Inbox, Step};
use tokio_util::sync::CancellationToken;

use crate::scene::{Scene, at, effect, until};

const CHILD: &str = "ONCEBOX_INBOX_TEST_CHILD";

/// The zombie's side: consumes until it is killed; pauses at the named step so that it can be stopped there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child_process() {
    let Ok(arguments) = std::env::var(CHILD) else {
        return;
    };
    let [url, bootstrap, topic, consumer, step, idle_limit] =
        arguments.split('|').collect::<Vec<_>>().try_into().unwrap();
    let step: Step = step.parse().unwrap();
    tracing_subscriber::fmt()
        .with_writer(|| HardOfHearing)
        .init();
    let kafka = oncebox_kafka::Config::new(bootstrap)
        .set("session.timeout.ms", "6000")
        .set("heartbeat.interval.ms", "500");
    let pool = sqlx::PgPool::connect(url).await.unwrap();
    Inbox::new(pool, kafka)
        .consumer(consumer)
        .topic(topic)
        .batch(1)
        .transaction_idle_limit(Duration::from_secs(idle_limit.parse().unwrap()))
        // Two are handled, and the third one has come so far.
        .on_step(at(
            step,
            if step == Step::Committed { 2 } else { 3 },
            || {
                println!("\nreached");
                // Stopped in here; the clock goes on.
                std::thread::sleep(Duration::from_secs(2));
            },
        ))
        .handle(|tx, delivery| {
            Box::pin(async move {
                effect(tx, delivery).await?;
                sqlx::query("UPDATE effect SET by = 'zombie' WHERE n = lastval()")
                    .execute(&mut **tx)
                    .await?;
                Ok(())
            })
        })
        .run(CancellationToken::new())
        .await
        .unwrap();
}

/// Where the zombie's log goes: it takes some seconds to write down that its partition was revoked. Until then it works on, so
/// that the database, and not the group, has to stop it.
struct HardOfHearing;

impl Write for HardOfHearing {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        if String::from_utf8_lossy(line).contains("partition revoked") {
            std::thread::sleep(Duration::from_secs(3));
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

struct Zombie(Child);

impl Zombie {
    /// Starts the child and stops it at its third message's step.
    fn stopped_at(scene: &Scene, step: Step, idle_limit: u32) -> Self {
        let (step, idle_limit) = (step.to_string(), idle_limit.to_string());
        let arguments = [
            &scene.url,
            &scene.kafka.bootstrap,
            &scene.topic,
            &scene.consumer,
            &step,
            &idle_limit,
        ]
        .map(String::as_str)
        .join("|");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "zombie::child_process", "--nocapture"])
            .env(CHILD, arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let reached = lines.map_while(Result::ok).any(|line| line == "reached");
        assert!(reached, "the child ended early");
        let zombie = Self(child);
        zombie.signal("STOP");
        zombie
    }

    fn signal(&self, name: &str) {
        // A builtin of the shell; not every machine has a binary of that name.
        let done = Command::new("sh")
            .args(["-c", r#"kill -s "$1" "$2""#, "sh", name])
            .arg(self.0.id().to_string())
            .status();
        assert!(done.unwrap().success());
    }
}

impl Drop for Zombie {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A scene with ten messages, of which the zombie has handled two and has the third in its hands.
async fn stopped(step: Step, idle_limit: u32) -> Option<(Scene, Zombie)> {
    let scene = Scene::new(1).await?;
    scene.publish_numbers(0..10).await;
    let zombie = tokio::task::block_in_place(|| Zombie::stopped_at(&scene, step, idle_limit));
    assert_eq!(scene.effects().await, ["0", "1"]);
    Some((scene, zombie))
}

/// Everything is there, once, in order, and the zombie has done nothing but its first two.
async fn audit(scene: &Scene, count: i32) {
    scene.effects_reach(i64::from(count)).await;
    let expected: Vec<String> = (0..count).map(|n| n.to_string()).collect();
    assert_eq!(scene.effects().await, expected);
    let late = "SELECT count(*) FROM effect WHERE by = 'zombie' AND place BETWEEN 2 AND 9";
    assert_eq!(scene.count(late).await, 0, "the zombie's work was rejected");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g6_zombie_cannot_commit_after_takeover() {
    let Some((scene, zombie)) = stopped(Step::Handled, 120).await else {
        return;
    };
    // The new owner takes the row, and then waits for the zombie's mark: only the compare-and-set decides whose effect counts.
    let owner = scene.start();
    until(async || owner.stats.deliveries() > 0).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(
        owner.stats.effects() + owner.stats.duplicates(),
        0,
        "it waits"
    );
    zombie.signal("CONT");
    audit(&scene, 10).await;
    scene.publish_numbers(10..15).await;
    audit(&scene, 15).await;
    drop(zombie);
    owner.stop().await.unwrap();
}

/// The zombie holds locks that the new owner needs, and nobody wakes it: the database ends its session.
async fn not_blocked(step: Step) {
    let Some((scene, zombie)) = stopped(step, 4).await else {
        return;
    };
    let started = Instant::now();
    let owner = scene.start();
    audit(&scene, 10).await;
    assert!(
        started.elapsed() < Duration::from_secs(40),
        "the zombie does not block the new owner"
    );
    zombie.signal("CONT");
    tokio::time::sleep(Duration::from_secs(2)).await;
    scene.publish_numbers(10..12).await;
    audit(&scene, 12).await;
    drop(zombie);
    owner.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g6_a_zombie_that_holds_a_mark_does_not_block_the_new_owner() {
    not_blocked(Step::Handled).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g6_a_zombie_that_holds_the_position_row_does_not_block_the_new_owner() {
    not_blocked(Step::BeforeCommit).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g6_a_zombie_cannot_move_the_position_back() {
    let Some((scene, zombie)) = stopped(Step::Committed, 4).await else {
        return;
    };
    let owner = scene.start();
    audit(&scene, 10).await;
    until(async || scene.next(0).await >= 10).await;
    // It begins its transaction now, long after everything is done.
    zombie.signal("CONT");
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until {
        assert!(scene.next(0).await >= 10);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    drop(zombie);
    owner.stop().await.unwrap();
    audit(&scene, 10).await;
}
