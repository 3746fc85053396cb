//! A lease outlives neither its renewals nor its holder's clock, and touches no lock but its own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use oncebox_gate::{Error, Lease, Redis, Released};
use redis::cmd;
use tokio::time::{sleep, timeout};

use crate::server::{Place, Server};

/// Renewed every second: a machine under load is late, but not for two.
const TTL: Duration = Duration::from_secs(3);

async fn take(redis: &Redis) -> Option<Lease> {
    Lease::take(redis, "job", TTL).await.unwrap()
}

/// The lease, as soon as nobody else holds it.
async fn take_when_free(redis: &Redis) -> Lease {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(lease) = take(redis).await {
            return lease;
        }
        assert!(Instant::now() < deadline, "the lease does not become free");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a4_renewal_outlives_a_long_work() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let (redis, other) = (place.redis(), place.redis());
    let lease = take(&redis).await.unwrap();
    let began = Instant::now();
    while began.elapsed() < TTL * 3 {
        assert!(lease.is_held(), "lost after {:?}", began.elapsed());
        assert!(take(&other).await.is_none(), "two holders");
        sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(lease.release().await.unwrap(), Released::Free);
    assert!(take(&other).await.is_some());
}

/// On one thread: while it sleeps, the renewal sleeps, as in a process that was stopped.
#[tokio::test]
async fn a4_a_stalled_holder_knows_before_anybody_else_holds() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let lease = Arc::new(take(&place.redis()).await.unwrap());
    let (redis, first) = (place.redis(), Arc::clone(&lease));
    let other = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let second = take_when_free(&redis).await;
            let both = second.is_held() && first.is_held();
            second.release().await.unwrap();
            both
        })
    });
    let both = other.join().unwrap(); // the stall, as long as the other one needs
    assert!(!both, "two holders at one time");
    assert!(!lease.is_held(), "held after a stall beyond its end");
    assert!(lease.lost().now_or_never().is_some());
    timeout(TTL, lease.signal().cancelled()).await.unwrap();
}

#[tokio::test]
async fn a4_what_is_over_stays_over() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let lease = take(&place.redis()).await.unwrap();
    // Redis would still renew it
    let key = format!("oncebox:{}:lease:job", place.environment);
    let persisted: i64 = place.ask(cmd("PERSIST").arg(&key)).await;
    assert_eq!(persisted, 1);
    std::thread::sleep(TTL + Duration::from_millis(100));
    assert!(!lease.is_held());
    for _ in 0..20 {
        sleep(TTL / 20).await;
        assert!(!lease.is_held(), "an ended lease came back");
    }
}

#[tokio::test]
async fn a4_an_unreachable_redis_ends_the_lease_within_its_time_to_live() {
    let Some(server) = Server::start().await else {
        return;
    };
    let (redis, other) = (server.redis(), server.redis());
    let lease = take(&redis).await.unwrap();
    sleep(TTL / 2).await;
    server.stop();
    let stopped = Instant::now();
    timeout(TTL * 5, lease.lost())
        .await
        .expect("no loss signal");
    // the last renewal was sent before the stop
    let tolerance = Duration::from_secs(2);
    assert!(
        stopped.elapsed() < TTL + tolerance,
        "{:?}",
        stopped.elapsed()
    );
    assert!(!lease.is_held());
    server.cont();
    let second = take_when_free(&other).await;
    assert!(second.is_held() && !lease.is_held());
}

#[tokio::test]
async fn a4_a_lock_that_redis_lost_ends_the_lease_at_the_next_renewal() {
    let Some(mut server) = Server::start().await else {
        return;
    };
    let redis = server.redis();
    let lease = take(&redis).await.unwrap();
    server.flush().await;
    timeout(TTL * 2, lease.lost())
        .await
        .expect("no loss signal");
    drop(lease);
    let lease = take_when_free(&redis).await;
    server.kill();
    server.start_again().await;
    timeout(TTL * 2, lease.lost())
        .await
        .expect("no loss signal");
    assert_eq!(lease.release().await.unwrap(), Released::NotHeld);
}

#[tokio::test]
async fn a4_a_late_release_leaves_the_lock_of_another_alone() {
    let Some(server) = Server::start().await else {
        return;
    };
    let (redis, other) = (server.redis(), server.redis());
    let late = take(&redis).await.unwrap();
    server.flush().await; // as if it had expired
    let second = take(&other).await.unwrap();
    assert_eq!(late.release().await.unwrap(), Released::NotHeld);
    assert!(
        take(&redis).await.is_none(),
        "the lock of another was given away"
    );
    sleep(TTL / 2).await;
    assert!(second.is_held());
    assert_eq!(second.release().await.unwrap(), Released::Free);
}

#[tokio::test]
async fn a4_the_lock_of_another_is_not_renewed() {
    let Some(server) = Server::start().await else {
        return;
    };
    let (redis, other) = (server.redis(), server.redis());
    let lease = take(&redis).await.unwrap();
    server.flush().await; // as if it had expired
    let second = take(&other).await.unwrap();
    let noticed = timeout(TTL * 2, lease.lost()).await;
    assert_eq!(noticed, Ok(()), "two holders");
    assert!(second.is_held());
}

#[tokio::test]
async fn a4_a_dropped_lease_is_renewed_no_more() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let (redis, other) = (place.redis(), place.redis());
    let lease = take(&redis).await.unwrap();
    let signal = lease.signal();
    drop(lease);
    assert!(signal.is_cancelled());
    let dropped = Instant::now();
    take_when_free(&other).await;
    let tolerance = Duration::from_secs(5);
    assert!(dropped.elapsed() < TTL + tolerance, "still renewed");
}

#[tokio::test]
async fn a4_nothing_renews_a_lock_that_was_given_back() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let redis = place.redis();
    let key = format!("oncebox:{}:lease:job", place.environment);
    for _ in 0..20 {
        let lease = take(&redis).await.expect("given back before");
        let signal = lease.signal();
        assert_eq!(lease.release().await.unwrap(), Released::Free);
        assert!(signal.is_cancelled());
    }
    sleep(TTL / 2).await;
    let there: i64 = place.ask(cmd("EXISTS").arg(key)).await;
    assert_eq!(there, 0);
}

#[tokio::test]
async fn a4_too_short_a_time_to_live_is_refused() {
    let redis = Redis::new(oncebox_gate::RedisConfig::new(
        "redis://127.0.0.1:1",
        "test",
    ))
    .unwrap();
    let refused = Lease::take(&redis, "job", Duration::from_millis(99)).await;
    assert!(matches!(refused, Err(Error::Invalid { name: "ttl", .. })));
    let down = Lease::take(&redis, "job", TTL).await.unwrap_err();
    assert!(down.is_unavailable(), "{down}");
}
