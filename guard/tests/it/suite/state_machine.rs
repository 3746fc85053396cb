//! A5, and the pitfall of the state that goes back (A24).

use oncebox_guard::{self as guard, Error, Sequenced, StateMachine, Transition, key};

use super::Shop;

pub(super) const ORDER: StateMachine = StateMachine::new(
    "orders",
    "status",
    &[
        ("pending", &["paid", "cancelled"]),
        ("paid", &["shipped", "refunded"]),
        ("shipped", &["refunded"]),
        ("cancelled", &[]),
        ("refunded", &[]),
    ],
);

/// It goes in circles.
const HOLD: Sequenced = StateMachine::new(
    "orders",
    "status",
    &[
        ("pending", &["active"]),
        ("active", &["held"]),
        ("held", &["active"]),
    ],
)
.sequence("seen");

pub(super) const STATUS: &str = "SELECT status FROM orders WHERE order_no = 'a'";
const SEEN: &str = "SELECT coalesce(seen, -1) FROM orders WHERE order_no = 'a'";

pub(super) async fn order(store: &Shop) {
    let mut tx = store.begin().await;
    let _ = guard::insert_once(&mut tx, "orders", key("order_no", "a"))
        .await
        .unwrap();
    tx.commit().await.unwrap();
}

pub(super) async fn goes(store: &Shop, to: &str) -> Result<Transition, Error> {
    let mut tx = store.begin().await;
    let found = ORDER
        .transition(&mut tx, key("order_no", "a").set("note", to), to)
        .await?;
    tx.commit().await.unwrap();
    Ok(found)
}

pub(super) async fn goes_at(store: &Shop, to: &str, sequence: i64) -> Transition {
    let mut tx = store.begin().await;
    let found = HOLD
        .transition(&mut tx, key("order_no", "a"), to, sequence)
        .await
        .unwrap();
    tx.commit().await.unwrap();
    found
}

pub(super) fn illegal(from: &str) -> Transition {
    Transition::Illegal { from: from.into() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a5_only_declared_ways_are_taken() {
    Shop::run(async |store| {
        assert_eq!(goes(&store, "paid").await.unwrap(), Transition::Missing);
        order(&store).await;
        assert_eq!(goes(&store, "shipped").await.unwrap(), illegal("pending"));
        assert_eq!(
            goes(&store, "pending").await.unwrap(),
            Transition::AlreadyThere
        );
        assert_eq!(goes(&store, "paid").await.unwrap(), Transition::Applied);
        assert_eq!(store.text("SELECT note FROM orders").await, "paid");
        assert_eq!(
            goes(&store, "paid").await.unwrap(),
            Transition::AlreadyThere
        );
        assert_eq!(goes(&store, "cancelled").await.unwrap(), illegal("paid"));
        assert_eq!(goes(&store, "refunded").await.unwrap(), Transition::Applied);
        assert_eq!(goes(&store, "shipped").await.unwrap(), illegal("refunded"));
        assert_eq!(store.text("SELECT note FROM orders").await, "refunded");
        let found = goes(&store, "payed").await;
        assert!(
            matches!(found, Err(Error::UnknownState { .. })),
            "{found:?}"
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a5_a_state_that_nobody_declared_is_left_alone() {
    Shop::run(async |store| {
        order(&store).await;
        store.sql("UPDATE orders SET status = 'lost'").await;
        assert_eq!(goes(&store, "paid").await.unwrap(), illegal("lost"));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a24_state_never_regresses() {
    Shop::run(async |store| {
        order(&store).await;
        // Every message of the order, six times over and all at once; no transaction may take a way back.
        let messages: Vec<_> = (0..6)
            .flat_map(|_| ["pending", "paid", "shipped", "refunded", "cancelled"])
            .map(|to| {
                let store = store.clone();
                tokio::spawn(async move {
                    // Until the message has had its effect, or cannot have it any more.
                    for _ in 0..10 {
                        if goes(&store, to).await.unwrap() == Transition::Applied {
                            return Some(to);
                        }
                        tokio::task::yield_now().await;
                    }
                    None
                })
            })
            .collect();
        let mut applied = Vec::new();
        for message in messages {
            applied.extend(message.await.unwrap());
        }
        applied.sort_unstable();
        let before = applied.len();
        applied.dedup();
        assert_eq!(
            applied.len(),
            before,
            "each state was reached at most once: {applied:?}"
        );
        assert!(
            !applied.contains(&"pending"),
            "nothing leads back to the beginning"
        );
        assert!(
            !(applied.contains(&"cancelled") && applied.contains(&"paid")),
            "either of the two: {applied:?}"
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a24_a_late_message_does_not_take_the_state_back() {
    Shop::run(async |store| {
        order(&store).await;
        for to in ["paid", "shipped"] {
            assert_eq!(goes(&store, to).await.unwrap(), Transition::Applied);
        }
        for late in ["pending", "paid"] {
            assert_eq!(
                goes(&store, late).await.unwrap(),
                illegal("shipped"),
                "{late}"
            );
        }
        assert_eq!(store.text(STATUS).await, "shipped", "the state stays");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a5_a_stale_message_is_dropped() {
    Shop::run(async |store| {
        order(&store).await;
        assert_eq!(goes_at(&store, "active", 5).await, Transition::Applied);
        assert_eq!(
            goes_at(&store, "held", 4).await,
            Transition::Stale,
            "legal, but older"
        );
        assert_eq!(goes_at(&store, "active", 4).await, Transition::Stale);
        assert_eq!(
            goes_at(&store, "pending", 1).await,
            Transition::Stale,
            "older before illegal"
        );
        assert_eq!(
            (store.text(STATUS).await.as_str(), store.number(SEEN).await),
            ("active", 5)
        );
        assert_eq!(
            goes_at(&store, "held", 5).await,
            Transition::Applied,
            "of the same time"
        );
        assert_eq!(goes_at(&store, "pending", 9).await, illegal("held"));
        assert_eq!(
            (store.text(STATUS).await.as_str(), store.number(SEEN).await),
            ("held", 5)
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a5_a_late_message_of_a_circle_is_stale() {
    Shop::run(async |store| {
        order(&store).await;
        assert_eq!(goes_at(&store, "active", 5).await, Transition::Applied);
        // held (6) was overtaken by active (7).
        assert_eq!(goes_at(&store, "active", 7).await, Transition::AlreadyThere);
        assert_eq!(goes_at(&store, "held", 6).await, Transition::Stale);
        assert_eq!(
            (store.text(STATUS).await.as_str(), store.number(SEEN).await),
            ("active", 7)
        );
        assert_eq!(goes_at(&store, "active", 7).await, Transition::AlreadyThere);
    })
    .await;
}
