//! Stock taken in advance: never more than there is, given back once, and corrected by the database.

use std::time::Duration;

use oncebox_gate::{
    Confirmation, End, Error, Reconciled, Redis, RedisConfig, Release, Reservation, Reserve,
    ReserveConfig,
};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::server::{Place, Server};

fn reserve(redis: Redis) -> Reserve {
    Reserve::new(redis, ReserveConfig::default()).unwrap()
}

/// Holds for `hold`.
fn forgetful(redis: Redis, hold: Duration) -> Reserve {
    let config = ReserveConfig {
        hold,
        ..ReserveConfig::default()
    };
    Reserve::new(redis, config).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a7_stock_never_goes_below_zero_under_concurrency() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let stock = reserve(place.redis());
    stock.reconcile("sku", 100).await.unwrap();
    let mut buyers = JoinSet::new();
    for buyer in 0..20 {
        let mine = reserve(place.redis());
        buyers.spawn(async move {
            let mut got = 0;
            for order in 0..10 {
                let n = 1 + (buyer + order) % 3;
                let id = format!("{buyer}-{order}");
                if mine.reserve("sku", n, &id).await.unwrap() == Reservation::Held {
                    got += n;
                }
                let left = mine.available("sku").await.unwrap().unwrap();
                assert!(left >= 0, "{left} in stock");
            }
            got
        });
    }
    let got: u32 = buyers.join_all().await.into_iter().sum();
    assert!(got <= 100, "{got} of 100 sold");
    let left = stock.available("sku").await.unwrap().unwrap();
    assert_eq!(left, 100 - i64::from(got));
    // whoever wanted one more got it, as long as there was one
    assert_eq!(left, 0);
}

#[tokio::test]
async fn a7_a_repeated_reserve_answers_the_same_and_takes_once() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let (stock, other) = (reserve(place.redis()), reserve(place.redis()));
    stock.reconcile("sku", 5).await.unwrap();
    for again in [&stock, &other, &stock] {
        let answer = again.reserve("sku", 3, "order").await.unwrap();
        assert_eq!(answer, Reservation::Held);
        assert_eq!(
            again.available("sku").await.unwrap(),
            Some(2),
            "taken twice"
        );
    }
    assert_eq!(
        stock.reserve("sku", 2, "order").await.unwrap(),
        Reservation::OtherNumber { reserved: 3 }
    );
    assert_eq!(
        stock.reserve("sku", 3, "next").await.unwrap(),
        Reservation::NotEnough { available: 2 }
    );
    assert_eq!(stock.available("sku").await.unwrap(), Some(2));
    // one order, two kinds of goods
    stock.reconcile("sku:2", 3).await.unwrap();
    assert_eq!(
        stock.reserve("sku:2", 3, "order").await.unwrap(),
        Reservation::Held
    );
    let none = stock.reserve("sku", 0, "nothing").await;
    assert!(matches!(none, Err(Error::Invalid { name: "n", .. })));
}

#[tokio::test]
async fn a7_a_double_release_gives_back_once() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let stock = reserve(place.redis());
    stock.reconcile("sku", 5).await.unwrap();
    stock.reserve("sku", 3, "order").await.unwrap();
    for _ in 0..3 {
        let answer = stock.release("sku", "order").await.unwrap();
        assert_eq!(answer, Release::Released);
        assert_eq!(
            stock.available("sku").await.unwrap(),
            Some(5),
            "given back twice"
        );
    }
    // a late repetition of the first call does not take it again
    assert_eq!(
        stock.reserve("sku", 3, "order").await.unwrap(),
        Reservation::Ended(End::Released)
    );
    assert_eq!(
        stock.confirm("sku", "order").await.unwrap(),
        Confirmation::Released
    );
    assert_eq!(
        stock.release("sku", "nobody's").await.unwrap(),
        Release::Unknown
    );
    assert_eq!(stock.available("sku").await.unwrap(), Some(5));
}

#[tokio::test]
async fn a7_a_confirmed_reservation_is_never_given_back() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let hold = Duration::from_millis(1_500);
    let stock = forgetful(place.redis(), hold);
    stock.reconcile("sku", 5).await.unwrap();
    stock.reserve("sku", 3, "order").await.unwrap();
    for _ in 0..2 {
        let answer = stock.confirm("sku", "order").await.unwrap();
        assert_eq!(answer, Confirmation::Confirmed);
    }
    assert_eq!(
        stock.release("sku", "order").await.unwrap(),
        Release::Confirmed
    );
    sleep(hold * 2).await;
    assert_eq!(
        stock.available("sku").await.unwrap(),
        Some(2),
        "sold stock was given back"
    );
    assert_eq!(
        stock.reserve("sku", 3, "order").await.unwrap(),
        Reservation::Ended(End::Confirmed)
    );
}

#[tokio::test]
async fn a7_a_forgotten_reservation_expires() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let hold = Duration::from_millis(300);
    let stock = forgetful(place.redis(), hold);
    stock.reconcile("sku", 5).await.unwrap();
    stock.reserve("sku", 5, "order").await.unwrap();
    sleep(hold * 2).await;
    assert_eq!(
        stock.available("sku").await.unwrap(),
        Some(5),
        "a forgotten reservation holds for ever"
    );
    assert_eq!(
        stock.release("sku", "order").await.unwrap(),
        Release::Expired
    );
    assert_eq!(
        stock.confirm("sku", "order").await.unwrap(),
        Confirmation::Expired
    );
    assert_eq!(stock.available("sku").await.unwrap(), Some(5));
}

/// The database has 10, an order takes 3 of them, and its process dies at each place between reserve and confirm.
#[tokio::test]
async fn a7_a_crash_between_reserve_and_confirm_is_reconciled() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let hold = Duration::from_secs(2);
    let stock = forgetful(place.redis(), hold);
    let held = |available| Reconciled { available, held: 3 };
    let none = |available| Reconciled { available, held: 0 };

    // before the COMMIT: the database still has 10
    stock.reconcile("before", 10).await.unwrap();
    stock.reserve("before", 3, "order").await.unwrap();
    assert_eq!(stock.reconcile("before", 10).await.unwrap(), held(7));
    // after the COMMIT: it has 7, and the 3 count twice as long as they are held
    stock.reconcile("after", 10).await.unwrap();
    stock.reserve("after", 3, "order").await.unwrap();
    assert_eq!(stock.reconcile("after", 7).await.unwrap(), held(4));

    sleep(hold * 2).await;
    assert_eq!(stock.available("before").await.unwrap(), Some(10));
    assert_eq!(stock.available("after").await.unwrap(), Some(7));
    assert_eq!(stock.reconcile("before", 10).await.unwrap(), none(10));
    assert_eq!(stock.reconcile("after", 7).await.unwrap(), none(7));
}

#[tokio::test]
async fn a7_more_held_than_the_database_has_lets_nobody_reserve() {
    let Some(place) = Place::shared().await else {
        return;
    };
    let stock = reserve(place.redis());
    stock.reconcile("sku", 10).await.unwrap();
    stock.reserve("sku", 8, "order").await.unwrap();
    let short = stock.reconcile("sku", 5).await.unwrap();
    assert_eq!(
        short,
        Reconciled {
            available: -3,
            held: 8
        }
    );
    assert_eq!(
        stock.reserve("sku", 1, "next").await.unwrap(),
        Reservation::NotEnough { available: 0 }
    );
    stock.release("sku", "order").await.unwrap();
    assert_eq!(stock.available("sku").await.unwrap(), Some(5));
}

#[tokio::test]
async fn a7_an_emptied_redis_knows_no_stock_until_it_is_reconciled() {
    let Some(mut server) = Server::start().await else {
        return;
    };
    let stock = reserve(server.redis());
    assert_eq!(
        stock.reserve("sku", 1, "early").await.unwrap(),
        Reservation::UnknownStock
    );
    stock.reconcile("sku", 5).await.unwrap();
    stock.reserve("sku", 3, "order").await.unwrap();
    server.flush().await;
    assert_eq!(
        stock.reserve("sku", 1, "late").await.unwrap(),
        Reservation::UnknownStock
    );
    assert_eq!(
        stock.release("sku", "order").await.unwrap(),
        Release::Unknown
    );
    assert_eq!(stock.available("sku").await.unwrap(), None);
    server.kill();
    let down = stock.reserve("sku", 1, "late").await.unwrap_err();
    assert!(down.is_unavailable(), "{down}");
    server.start_again().await;
    // the first request may still meet the broken connection
    let mut reconciled = stock.reconcile("sku", 2).await;
    if reconciled.is_err() {
        reconciled = stock.reconcile("sku", 2).await;
    }
    assert_eq!(reconciled.unwrap().available, 2);
    assert_eq!(
        stock.reserve("sku", 2, "late").await.unwrap(),
        Reservation::Held
    );
}

#[tokio::test]
async fn a7_a_stopped_redis_is_unavailable_after_the_time_out() {
    let Some(server) = Server::start().await else {
        return;
    };
    let config = RedisConfig {
        request_timeout: Duration::from_millis(300),
        ..RedisConfig::new(server.url(), "test")
    };
    let stock = reserve(Redis::new(config).unwrap());
    while stock.reconcile("sku", 5).await.is_err() {}
    server.stop();
    for _ in 0..4 {
        let asked = timeout(Duration::from_secs(10), stock.reserve("sku", 1, "order")).await;
        assert!(asked.unwrap().unwrap_err().is_unavailable());
    }
    server.cont();
    while stock.reconcile("sku", 5).await.is_err() {}
}
