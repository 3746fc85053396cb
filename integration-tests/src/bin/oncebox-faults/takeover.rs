//! How long nothing is published when the leader goes.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use crate::crew::signal;
use crate::kind::Stage;
use crate::scene::Scene;

/// The relays' default.
const LEASE: Duration = Duration::from_secs(3);
/// A take-over that has not happened by then never will.
const PATIENCE: Duration = Duration::from_secs(60);

/// How a leader goes, and how long that may take at most.
const CASES: [(&str, Duration); 4] = [
    ("kill", Duration::from_secs(6)),
    ("stop", Duration::from_secs(1)),
    ("pause", Duration::from_secs(6)),
    ("cut off", Duration::from_secs(6)),
];

/// Measures every case, and fails when one takes longer than it may.
pub(crate) async fn measure(runs: usize) -> Result<ExitCode> {
    ensure!(runs > 0, "--takeover needs at least one run");
    let scene = Scene::set(Stage::Plain, LEASE, 0).await?;
    println!(
        "{:<8} {:>5} {:>9} {:>9} {:>9} {:>9}",
        "leader", "runs", "median", "p99", "max", "limit"
    );
    let mut in_time = true;
    for (case, limit) in CASES {
        let mut times = Vec::new();
        for run in 0..runs {
            scene.recovered().await?;
            let taken = take_over(&scene, case).await;
            times.push(taken.with_context(|| format!("{case}, run {run}"))?);
        }
        times.sort_unstable();
        let at =
            |percent: usize| times[(times.len() * percent).div_ceil(100).max(1) - 1].as_secs_f64();
        let limit = limit.as_secs_f64();
        println!(
            "{case:<8} {runs:>5} {:>7.2} s {:>7.2} s {:>7.2} s {limit:>7.2} s",
            at(50),
            at(99),
            at(100)
        );
        in_time &= at(99) <= limit;
    }
    Ok(if in_time {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// From the moment the leader goes until another has published.
async fn take_over(scene: &Scene, case: &str) -> Result<Duration> {
    let leader = scene.leader().await?;
    let slot = scene.relays.slot(leader).context("the leader has ended")?;
    let start = Instant::now();
    let hit = match case {
        "kill" => signal(leader, "KILL"),
        "stop" => signal(leader, "TERM"),
        "pause" => signal(leader, "STOP"),
        _ => {
            scene.cables[slot].freeze();
            true
        }
    };
    ensure!(hit, "the leader has ended before");
    let taken = loop {
        // Its claim is one acknowledged transaction; the next one has rows.
        let owner = scene.watch.owner().await?;
        if owner.is_some_and(|pid| pid != leader) {
            let claimed = scene.watch.seq().await?;
            while scene.watch.seq().await? < claimed + 2 {
                ensure!(
                    start.elapsed() < PATIENCE,
                    "the new leader publishes nothing"
                );
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            break start.elapsed();
        }
        if start.elapsed() > PATIENCE {
            bail!("nobody takes over; {}", scene.relays.log_end());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    match case {
        "pause" => {
            signal(leader, "CONT");
        }
        "cut off" => scene.cables[slot].thaw(),
        _ => {}
    }
    // The old one starts again and stands by.
    tokio::time::sleep(Duration::from_secs(2)).await;
    Ok(taken)
}
