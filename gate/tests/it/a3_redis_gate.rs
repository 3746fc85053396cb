//! The Redis gate is a first, fast look: losing it costs speed, never correctness, and it never costs more than its time-out.

use std::time::{Duration, Instant};

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use oncebox_gate::{BreakerState, Error, GateConfig, Hint, Redis, RedisConfig, RedisGate, Scope};
use redis::cmd;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use crate::server::{Place, Server};

const HOUR: Duration = Duration::from_secs(3600);
/// Longer than a machine under load needs for an answer.
const PATIENT: Duration = Duration::from_secs(20);

fn gate(redis: Redis) -> RedisGate {
    let config = GateConfig {
        timeout: PATIENT,
        ..GateConfig::new(2 * HOUR, HOUR)
    };
    RedisGate::new(redis, config).unwrap()
}

/// Gives up soon, and tries again soon.
fn quick(url: &str) -> RedisGate {
    let redis = Redis::new(RedisConfig::new(url, "test")).unwrap();
    let config = GateConfig {
        timeout: Duration::from_millis(300),
        failures: 2,
        cool_down: Duration::from_millis(400),
        ..GateConfig::new(2 * HOUR, HOUR)
    };
    RedisGate::new(redis, config).unwrap()
}

fn scope() -> Scope {
    Scope::new("7/1", "inventory")
}

fn ids(n: usize) -> Vec<Uuid> {
    (0..n).map(|_| Uuid::now_v7()).collect()
}

/// Settles and asks until the gate works again.
async fn wait_until_in_use(gate: &RedisGate) {
    let (deadline, ids) = (Instant::now() + Duration::from_secs(60), ids(1));
    loop {
        gate.settled(&scope(), &ids).await;
        if gate.known(&scope(), &ids).await == [true] {
            return;
        }
        assert!(Instant::now() < deadline, "the gate does not come back");
        sleep(Duration::from_millis(50)).await;
    }
}

async fn wait_until_open(gate: &RedisGate) {
    let (deadline, ids) = (Instant::now() + Duration::from_secs(30), ids(1));
    while gate.breaker() != BreakerState::Open {
        assert_eq!(gate.known(&scope(), &ids).await, [false]);
        assert!(Instant::now() < deadline, "the breaker does not open");
    }
}

#[tokio::test]
async fn a3_a_settled_message_is_known_to_every_process_of_the_consumer() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let (one, other) = (gate(place.redis()), gate(place.redis()));
    let ids = ids(500);
    assert_eq!(one.known(&scope(), &ids).await, [false; 500]);
    one.settled(&scope(), &ids[..250]).await;
    let known = other.known(&scope(), &ids).await;
    assert_eq!(known[..250], [true; 250]);
    assert_eq!(known[250..], [false; 250]);
    assert_eq!(one.known(&scope(), &[]).await, [false; 0]);
    other.forget(&scope(), &ids[..1]).await;
    assert_eq!(one.known(&scope(), &ids[..2]).await, [false, true]);
}

#[tokio::test]
async fn a3_two_environments_or_consumers_with_one_id_share_no_mark() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let patient = |environment: &str| RedisConfig {
        connect_timeout: PATIENT,
        ..RedisConfig::new(&place.url, environment)
    };
    let id = ids(1);
    let here = gate(place.redis());
    let there = format!("{}-2", place.environment);
    let there = gate(Redis::new(patient(&there)).unwrap());
    here.settled(&scope(), &id).await;
    assert_eq!(here.known(&scope(), &id).await, [true]);
    assert_eq!(there.known(&scope(), &id).await, [false]);
    // names that would be one text when they are only put together
    here.settled(&Scope::new("7", "1:inventory"), &id).await;
    for other in [
        Scope::new("7/1", "billing"),
        Scope::new("7:1", "inventory"),
        Scope::new("", "7:1:inventory"),
    ] {
        assert_eq!(here.known(&other, &id).await, [false], "{other:?}");
    }
}

#[tokio::test]
async fn a3_another_database_epoch_voids_every_mark() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let (gate, id) = (gate(place.redis()), ids(1));
    gate.settled(&scope(), &id).await;
    let promoted = Scope::new("7/2", "inventory");
    assert_eq!(gate.known(&promoted, &id).await, [false]);
    gate.settled(&promoted, &id).await;
    assert_eq!(gate.known(&promoted, &id).await, [true]);
}

#[tokio::test]
async fn a3_only_a_done_mark_of_this_epoch_is_a_hit() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let (gate, id) = (gate(place.redis()), ids(1));
    gate.settled(&scope(), &id).await;
    let pattern = format!("oncebox:{}:done:*", place.environment);
    let keys: Vec<String> = place.ask(cmd("KEYS").arg(pattern)).await;
    let [key] = &keys[..] else {
        panic!("one mark: {keys:?}")
    };
    let value: String = place.ask(cmd("GET").arg(key)).await;
    assert_eq!(value, "D:7/1");
    for other in ["D:7/2", "D:", "P:7/1", "1", ""] {
        let () = place.ask(cmd("SET").arg(key).arg(other)).await;
        assert_eq!(
            gate.known(&scope(), &id).await,
            [false],
            "{other:?} is no mark of a commit"
        );
    }
    let () = place.ask(cmd("SET").arg(key).arg(value)).await;
    assert_eq!(gate.known(&scope(), &id).await, [true]);
}

#[tokio::test]
async fn a3_a_cleared_scope_knows_nothing_and_the_others_are_left() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let (one, other) = (gate(place.redis()), gate(place.redis()));
    let (ids, billing) = (ids(20), Scope::new("7/1", "billing"));
    one.settled(&scope(), &ids).await;
    one.settled(&billing, &ids).await;
    other.clear(&scope()).await;
    assert_eq!(
        one.known(&scope(), &ids).await,
        [false; 20],
        "known after the database lost commits"
    );
    assert_eq!(one.known(&billing, &ids).await, [true; 20]);
    one.settled(&scope(), &ids[..1]).await;
    assert_eq!(other.known(&scope(), &ids[..2]).await, [true, false]);
}

#[tokio::test]
async fn a3_marks_live_as_long_as_the_window() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let gate = gate(place.redis());
    gate.settled(&scope(), &ids(3)).await;
    let pattern = format!("oncebox:{}:*", place.environment);
    let keys: Vec<String> = place.ask(cmd("KEYS").arg(pattern)).await;
    assert_eq!(keys.len(), 3);
    for key in keys {
        let left: i64 = place.ask(cmd("PTTL").arg(key)).await;
        let (window, tolerance) = (2 * 3_600_000, 120_000);
        assert!((window - tolerance..=window).contains(&left), "{left} ms");
    }
}

#[test]
fn a3_a_window_shorter_than_the_retry_horizon_is_refused() {
    let redis = || Redis::new(RedisConfig::new("redis://127.0.0.1:1", "test")).unwrap();
    let (half, day) = (HOUR / 2, 24 * HOUR);
    let refused = RedisGate::new(redis(), GateConfig::new(half, HOUR));
    let Err(error) = refused else {
        panic!("a window that is too short was accepted")
    };
    assert!(
        matches!(error, Error::WindowTooShort { window, horizon } if window == half && horizon == HOUR),
        "{error:?}"
    );
    let text = error.to_string();
    assert!(text.contains("raise the window"), "{text}");
    RedisGate::new(redis(), GateConfig::new(day, day)).unwrap();
    let never = GateConfig {
        timeout: Duration::ZERO,
        ..GateConfig::new(day, HOUR)
    };
    assert!(matches!(
        RedisGate::new(redis(), never),
        Err(Error::Invalid {
            name: "timeout",
            ..
        })
    ));
}

#[tokio::test]
async fn a3_a_killed_redis_costs_speed_only_and_comes_back_by_itself() {
    let Some(mut server) = Server::start().await else {
        return;
    };
    let (gate, ids) = (quick(&server.url()), ids(5));
    wait_until_in_use(&gate).await;
    gate.settled(&scope(), &ids).await;
    server.kill();
    wait_until_open(&gate).await;
    gate.settled(&scope(), &ids).await; // into the void
    assert_eq!(gate.known(&scope(), &ids).await, [false; 5]);
    server.start_again().await;
    wait_until_in_use(&gate).await;
    assert_eq!(gate.breaker(), BreakerState::Closed);
    assert_eq!(
        gate.known(&scope(), &ids).await,
        [false; 5],
        "it came back empty"
    );
}

#[tokio::test]
async fn a3_a_stopped_redis_costs_at_most_the_time_out() {
    let Some(server) = Server::start().await else {
        return;
    };
    let gate = quick(&server.url());
    wait_until_in_use(&gate).await;
    server.stop();
    for _ in 0..4 {
        let ids = ids(100);
        let asked = timeout(Duration::from_secs(10), gate.known(&scope(), &ids)).await;
        assert_eq!(asked, Ok(vec![false; 100]), "the gate waits for Redis");
        let told = timeout(Duration::from_secs(10), gate.settled(&scope(), &ids)).await;
        assert_eq!(told, Ok(()), "the gate waits for Redis");
    }
    server.cont();
    wait_until_in_use(&gate).await;
}

#[tokio::test]
async fn a3_the_breaker_opens_and_a_probe_closes_it() {
    let Some(server) = Server::start().await else {
        return;
    };
    let redis = Redis::new(RedisConfig::new(server.url(), "test")).unwrap();
    let config = GateConfig {
        timeout: Duration::from_millis(500),
        failures: 2,
        cool_down: Duration::from_secs(3),
        ..GateConfig::new(2 * HOUR, HOUR)
    };
    let gate = RedisGate::new(redis, config).unwrap();
    wait_until_in_use(&gate).await;
    server.stop();
    wait_until_open(&gate).await;
    let (asked, ids) = (Instant::now(), ids(1));
    for _ in 0..100 {
        gate.known(&scope(), &ids).await;
    }
    // 100 time-outs would take 50 s
    assert!(
        asked.elapsed() < Duration::from_secs(10),
        "an open breaker asks nobody"
    );
    assert_ne!(gate.breaker(), BreakerState::Closed);
    server.cont();
    wait_until_in_use(&gate).await;
    assert_eq!(gate.breaker(), BreakerState::Closed);
}

#[tokio::test]
async fn a3_a_redis_that_was_never_there_stops_nobody() {
    let (gate, ids) = (quick("redis://127.0.0.1:1"), ids(2));
    for _ in 0..5 {
        gate.settled(&scope(), &ids).await;
        assert_eq!(gate.known(&scope(), &ids).await, [false; 2]);
    }
    assert_eq!(gate.breaker(), BreakerState::Open);
}

#[tokio::test]
async fn a3_a_flush_in_the_middle_costs_speed_only() {
    let Some(server) = Server::start().await else {
        return;
    };
    let (gate, ids) = (gate(server.redis()), ids(5));
    gate.settled(&scope(), &ids).await;
    server.flush().await;
    assert_eq!(gate.known(&scope(), &ids).await, [false; 5]);
    gate.settled(&scope(), &ids[..2]).await;
    assert_eq!(
        gate.known(&scope(), &ids).await,
        [true, true, false, false, false]
    );
}

/// The connections that the server has, without the one that asks.
async fn connections(server: &Server) -> Vec<String> {
    let listed: String = server.ask(cmd("CLIENT").arg("LIST")).await;
    let others = listed
        .lines()
        .filter(|line| !line.contains("cmd=client|list"));
    others
        .filter_map(|line| Some(line.split_once(' ')?.0.to_owned()))
        .collect()
}

#[tokio::test]
async fn a3_a_demoted_redis_is_looked_for_anew() {
    let Some(server) = Server::start().await else {
        return;
    };
    let (gate, ids) = (gate(server.redis()), ids(1));
    gate.settled(&scope(), &ids).await;
    let before = connections(&server).await;
    let mut demote = cmd("REPLICAOF");
    let () = server.ask(demote.arg("127.0.0.1").arg("1")).await;
    gate.settled(&scope(), &ids).await; // READONLY
    gate.known(&scope(), &ids).await;
    let after = connections(&server).await;
    assert!(
        before.iter().all(|id| !after.contains(id)),
        "still connected to a demoted server: {before:?}, {after:?}"
    );
}

#[test]
fn a3_what_the_gate_does_is_counted() {
    let recorder = DebuggingRecorder::new();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let gate = quick("redis://127.0.0.1:1");
            for _ in 0..3 {
                gate.known(&scope(), &ids(2)).await;
            }
        });
    });
    let seen = recorder.snapshotter().snapshot().into_vec();
    let value = |name: &str, label: &str| {
        let found = seen.iter().find(|(key, ..)| {
            let key = key.key();
            let mut labels = key.labels();
            key.name() == name && (label.is_empty() || labels.any(|l| l.value() == label))
        });
        found.map(|(_, _, _, value)| match value {
            DebugValue::Counter(count) => *count as f64,
            DebugValue::Gauge(gauge) => gauge.0,
            DebugValue::Histogram(_) => f64::NAN,
        })
    };
    assert_eq!(value("oncebox_gate_known_total", "miss"), Some(6.0));
    assert_eq!(value("oncebox_gate_known_total", "hit"), Some(0.0));
    assert_eq!(value("oncebox_gate_failures_total", "known"), Some(2.0));
    assert_eq!(value("oncebox_gate_breaker_open", ""), Some(1.0));
}
