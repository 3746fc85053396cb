//! What a comparison promises, with every database on either side. Pages of ten rows: nothing is held but a page.

use std::sync::OnceLock;
use std::time::Duration;

use oncebox_migrations::Names;
use sqlx::Pool;
use time::OffsetDateTime;
use uuid::{NoContext, Timestamp, Uuid};

use super::*;
use crate::operator::testing::{postgres, run, sqlite};
use crate::operator::{OperatorStore, Value};

macro_rules! on_every_pair {
    ($($name:ident),* $(,)?) => { $(
        mod $name {
            use super::*;

            #[tokio::test]
            async fn sqlite_to_sqlite() {
                let ((_a, a), (_b, b)) = (sqlite().await, sqlite().await);
                super::$name(&a, &b).await;
            }

            #[tokio::test]
            async fn postgres_to_sqlite() {
                let (Some(a), (_b, b)) = (postgres().await, sqlite().await) else { return };
                super::$name(&a, &b).await;
            }

            #[tokio::test]
            async fn sqlite_to_postgres() {
                let ((_a, a), Some(b)) = (sqlite().await, postgres().await) else { return };
                super::$name(&a, &b).await;
            }

            #[tokio::test]
            async fn one_postgres() {
                let Some(a) = postgres().await else { return };
                super::$name(&a, &a).await;
            }
        }
    )* };
}

on_every_pair!(
    a16_a_clean_pair_has_nothing_to_report,
    a16_one_loss_and_one_extra_are_found,
    a16_what_is_not_published_or_being_retried_is_not_missing,
    a16_what_the_outbox_no_longer_holds_is_not_extra,
    a16_messages_of_other_outboxes_are_not_extra,
    a16_what_is_on_its_way_is_not_missing,
    a16_only_the_asked_time_is_compared,
    g8_what_waits_for_somebody_is_named,
    a16_a_consumer_or_topic_that_is_not_there_is_an_error,
);

/// An hour before the first test, in whole seconds.
fn begin() -> OffsetDateTime {
    static BEGIN: OnceLock<i64> = OnceLock::new();
    let seconds = BEGIN.get_or_init(|| OffsetDateTime::now_utc().unix_timestamp() - 3_600);
    OffsetDateTime::from_unix_timestamp(*seconds).unwrap()
}

fn made(at: OffsetDateTime) -> Uuid {
    let seconds = u64::try_from(at.unix_timestamp()).unwrap();
    Uuid::new_v7(Timestamp::from_unix(NoContext, seconds, at.nanosecond()))
}

async fn enqueue<A: OperatorStore>(pool: &Pool<A>, id: Uuid, topic: &str, at: OffsetDateTime) {
    let time = A::TIME;
    run(
        pool,
        &format!(
            "INSERT INTO {{outbox}} (message_id, topic, headers, created_at) VALUES (?, ?, ?, {time})"
        ),
        vec![
            Value::Uuid(id),
            Value::Text(topic.into()),
            Value::Bytes(Vec::new()),
            at.into(),
        ],
    )
    .await;
}

async fn confirm<A: OperatorStore>(pool: &Pool<A>, high: i64, gaps: &str) {
    let text = format!(
        "v1 seq=1 epoch=1 src=0 sys=x tl=1 high={high} msg=0 n=1 fp=0 pn=0 pfp=0 rel= gaps={gaps}"
    );
    run(
        pool,
        "UPDATE {mark} SET position = ?",
        vec![Value::Text(text)],
    )
    .await;
}

async fn consume<B: OperatorStore>(pool: &Pool<B>, id: Uuid) {
    run(
        pool,
        "INSERT INTO {inbox} (consumer, message_id) VALUES ('inventory', ?)",
        vec![Value::Uuid(id)],
    )
    .await;
}

async fn record<B: OperatorStore>(pool: &Pool<B>, id: Uuid, topic: &str) {
    let now = B::NOW;
    let now = B::TIME.replace('?', now);
    run(
        pool,
        &format!(
            "INSERT INTO {{record}} (consumer, topic, partition, record_offset, message_id, status, attempts, first_at, settled_at, \
             duration_us) VALUES ('inventory', ?, 0, 1, ?, 'effect', 1, {now}, {now}, 5)"
        ),
        vec![Value::Text(topic.into()), Value::Uuid(id)],
    )
    .await;
}

async fn position<B: OperatorStore>(pool: &Pool<B>, topic: &str) {
    run(
        pool,
        "INSERT INTO {position} (consumer, topic, partition, topic_id, next, seq, owner) VALUES ('inventory', ?, 0, 'id', 5, 1, ?)",
        vec![Value::Text(topic.into()), Value::Uuid(Uuid::new_v4())],
    )
    .await;
}

/// So many messages of `orders`, one a second, published and consumed.
async fn pair<A: OperatorStore, B: OperatorStore>(
    a: &Pool<A>,
    b: &Pool<B>,
    count: u32,
) -> Vec<Uuid> {
    position(b, "orders").await;
    let mut ids = Vec::new();
    for i in 0..count {
        let at = begin() + Duration::from_secs(i.into());
        let id = made(at);
        enqueue(a, id, "orders", at + Duration::from_millis(5)).await;
        consume(b, id).await;
        ids.push(id);
    }
    confirm(a, count.into(), "").await;
    ids
}

fn request<A: OperatorStore, B: OperatorStore>(a: &Pool<A>, b: &Pool<B>) -> Request<A, B> {
    Request::new(a.clone(), b.clone())
        .consumer("inventory")
        .grace(Duration::ZERO)
        .page(10)
}

async fn forget<B: OperatorStore>(pool: &Pool<B>, id: Uuid) -> u64 {
    run(
        pool,
        "DELETE FROM {inbox} WHERE message_id = ?",
        vec![Value::Uuid(id)],
    )
    .await
}

async fn a16_a_clean_pair_has_nothing_to_report<A: OperatorStore, B: OperatorStore>(
    a: &Pool<A>,
    b: &Pool<B>,
) {
    let ids = pair(a, b, 95).await;
    // A message of another service in the same outbox.
    enqueue(a, made(begin()), "invoices", begin()).await;
    let report = reconcile(&request(a, b)).await.unwrap();
    assert!(report.complete(), "{report}");
    assert_eq!((report.rows, report.settled), (95, 95), "{report}");
    assert_eq!(report.topics, ["orders"]);
    assert!(!report.extra_by_record);
    // The first message was made before its row was.
    assert_eq!(report.consumed, 94, "{report}");
    assert_eq!(report.covers.from, Some(begin() + Duration::from_millis(5)));

    // The same by the record, as for one topic.
    for id in &ids {
        record(b, *id, "orders").await;
    }
    let report = reconcile(&request(a, b).topic("orders")).await.unwrap();
    assert!(report.complete() && report.extra_by_record, "{report}");
    assert_eq!(report.consumed, 94, "{report}");
}

async fn a16_one_loss_and_one_extra_are_found<A: OperatorStore, B: OperatorStore>(
    a: &Pool<A>,
    b: &Pool<B>,
) {
    let ids = pair(a, b, 95).await;
    let lost = ids[42];
    assert_eq!(forget(b, lost).await, 1);
    let planted = made(begin() + Duration::from_millis(60_500));
    consume(b, planted).await;
    // Ids that are no UUIDv7 are not of an outbox.
    consume(b, Uuid::new_v4()).await;
    let report = reconcile(&request(a, b)).await.unwrap();
    assert!(!report.complete());
    assert_eq!(
        (report.missing_count, report.extra_count),
        (1, 1),
        "{report}"
    );
    let missing = &report.missing[0];
    assert_eq!((missing.message_id, missing.outbox_id), (lost, 43));
    assert!(missing.overtaken, "younger ones were consumed");
    assert_eq!(report.extra[0].message_id, planted);
    assert_eq!(report.extra[0].topic, None);
    let text = report.to_string();
    for words in [
        &lost.to_string(),
        &planted.to_string(),
        "1 missing, 1 extra",
    ] {
        assert!(text.contains(words), "{text}");
    }

    // More losses than are shown are counted.
    for id in &ids[50..] {
        forget(b, *id).await;
    }
    let report = reconcile(&request(a, b).shown(3)).await.unwrap();
    assert_eq!((report.missing_count, report.missing.len()), (46, 3));
    assert!(report.to_string().contains("and 43 more"), "{report}");

    // By the record the extra one is found with its topic.
    for id in ids.iter().chain([&planted]) {
        record(b, *id, "orders").await;
    }
    let report = reconcile(&request(a, b).topic("orders")).await.unwrap();
    assert_eq!(
        (report.missing_count, report.extra_count),
        (0, 1),
        "{report}"
    );
    assert_eq!(report.extra[0].topic.as_deref(), Some("orders"));
}

async fn a16_what_is_not_published_or_being_retried_is_not_missing<
    A: OperatorStore,
    B: OperatorStore,
>(
    a: &Pool<A>,
    b: &Pool<B>,
) {
    let ids = pair(a, b, 30).await;
    // 30 is above the confirmed position and 5 to 6 are in a gap of it; 10 is parked; 12 failed and comes again; 14 is a letter.
    for i in [29, 4, 5, 9, 11, 13] {
        forget(b, ids[i]).await;
    }
    confirm(a, 29, "5+1").await;
    run(
        a,
        "INSERT INTO {parked} (id, message_id, topic, headers, created_at, cause, reason) \
         SELECT id, message_id, topic, headers, created_at, 'refused', 'too large' FROM {outbox} WHERE id = 10",
        vec![],
    )
    .await;
    let now = B::TIME.replace('?', B::NOW);
    run(
        b,
        &format!(
            "INSERT INTO {{attempt}} (consumer, topic, partition, record_offset, message_id, attempts, error, due_at) \
             VALUES ('inventory', 'orders', 0, 12, ?, 2, 'no', {now})"
        ),
        vec![Value::Uuid(ids[11])],
    )
    .await;
    run(
        b,
        "INSERT INTO {dead_letter} (consumer, message_id, topic, partition, record_offset, headers, error, attempts) \
         VALUES ('inventory', ?, 'orders', 0, 14, ?, 'no', 3)",
        vec![Value::Uuid(ids[13]), Value::Bytes(Vec::new())],
    )
    .await;
    let report = reconcile(&request(a, b)).await.unwrap();
    assert!(report.complete(), "{report}");
    let unpublished = &report.unpublished;
    assert_eq!(
        (unpublished.waiting, unpublished.parked),
        (3, 1),
        "{report}"
    );
    assert_eq!(
        unpublished.oldest,
        Some(begin() + Duration::from_millis(4_005))
    );
    assert_eq!((report.settled, report.retrying), (25, 1), "{report}");
}

async fn a16_what_the_outbox_no_longer_holds_is_not_extra<A: OperatorStore, B: OperatorStore>(
    a: &Pool<A>,
    b: &Pool<B>,
) {
    let ids = pair(a, b, 60).await;
    run(a, "DELETE FROM {outbox} WHERE id <= 30", vec![]).await;
    run(a, "UPDATE {mark} SET low_water = 30", vec![]).await;
    forget(b, ids[45]).await;
    let report = reconcile(&request(a, b)).await.unwrap();
    assert_eq!(
        (report.missing_count, report.extra_count),
        (1, 0),
        "{report}"
    );
    assert_eq!(
        report.covers.from,
        Some(begin() + Duration::from_millis(30_005))
    );
    let range = report.extra_covers.unwrap();
    assert_eq!(range.from, Some(begin() + Duration::from_millis(30_005)));
    // The clocks may be apart by the grace period.
    let late = request(a, b).grace(Duration::from_secs(10));
    let range = reconcile(&late).await.unwrap().extra_covers.unwrap();
    assert_eq!(range.from, Some(begin() + Duration::from_millis(40_005)));
    // An empty outbox covers nothing.
    run(a, "DELETE FROM {outbox}", vec![]).await;
    let report = reconcile(&request(a, b)).await.unwrap();
    assert!(
        report.complete() && report.extra_covers.is_none(),
        "{report}"
    );
}

async fn a16_messages_of_other_outboxes_are_not_extra<A: OperatorStore, B: OperatorStore>(
    a: &Pool<A>,
    b: &Pool<B>,
) {
    let ids = pair(a, b, 30).await;
    position(b, "payments").await;
    for id in &ids {
        record(b, *id, "orders").await;
    }
    for i in 0..20 {
        let id = made(begin() + Duration::from_millis(i * 1_000 + 500));
        consume(b, id).await;
        record(b, id, "payments").await;
    }
    let report = reconcile(&request(a, b)).await.unwrap();
    assert!(report.complete() && report.extra_by_record, "{report}");
    assert_eq!((report.rows, report.consumed), (30, 29), "{report}");
    let planted = made(begin() + Duration::from_secs(5));
    record(b, planted, "orders").await;
    let report = reconcile(&request(a, b)).await.unwrap();
    assert_eq!(report.extra_count, 1, "{report}");
    assert_eq!(report.extra[0].message_id, planted);
}

async fn a16_what_is_on_its_way_is_not_missing<A: OperatorStore, B: OperatorStore>(
    a: &Pool<A>,
    b: &Pool<B>,
) {
    pair(a, b, 10).await;
    let now = OffsetDateTime::now_utc();
    enqueue(a, made(now), "orders", now).await;
    confirm(a, 11, "").await;
    let grace = request(a, b).grace(Duration::from_secs(600));
    let report = reconcile(&grace).await.unwrap();
    assert!(report.complete(), "{report}");
    assert_eq!(report.rows, 10);
    let later = grace.until(now + Duration::from_secs(60));
    assert!(
        reconcile(&later).await.unwrap().complete(),
        "never later than now minus grace"
    );
}

async fn a16_only_the_asked_time_is_compared<A: OperatorStore, B: OperatorStore>(
    a: &Pool<A>,
    b: &Pool<B>,
) {
    let ids = pair(a, b, 60).await;
    for i in [5, 30, 55] {
        forget(b, ids[i]).await;
        consume(
            b,
            made(begin() + Duration::from_millis(i as u64 * 1_000 + 500)),
        )
        .await;
    }
    let some = request(a, b)
        .since(begin() + Duration::from_secs(20))
        .until(begin() + Duration::from_secs(40));
    let report = reconcile(&some).await.unwrap();
    assert_eq!(report.rows, 20, "{report}");
    assert_eq!(
        (report.missing_count, report.extra_count),
        (1, 1),
        "{report}"
    );
    assert_eq!(report.missing[0].message_id, ids[30]);
}

async fn g8_what_waits_for_somebody_is_named<A: OperatorStore, B: OperatorStore>(
    a: &Pool<A>,
    b: &Pool<B>,
) {
    pair(a, b, 12).await;
    run(
        a,
        "INSERT INTO {parked} (id, message_id, topic, headers, created_at, cause, reason, request) \
         SELECT id, message_id, topic, headers, created_at, 'refused', 'too large', 'requeue' FROM {outbox} WHERE id = 3",
        vec![],
    )
    .await;
    for (offset, key, parked) in [(1, None, false), (2, Some("k"), true)] {
        crate::operator::testing::letter(b, 0, offset, key, parked).await;
    }
    let long_ago = B::TIME.replace('?', &format!("({} - 3600000000)", B::NOW));
    run(
        b,
        &format!("UPDATE {{dead_letter}} SET replay_at = {long_ago} WHERE record_offset = 2"),
        vec![],
    )
    .await;
    run(
        b,
        &format!("UPDATE {{position}} SET updated_at = {long_ago}"),
        vec![],
    )
    .await;
    run(
        b,
        "INSERT INTO {breaker} (consumer, topic, failures, error) VALUES ('inventory', 'orders', 20, 'no connection')",
        vec![],
    )
    .await;
    let report = reconcile(&request(a, b)).await.unwrap();
    let stuck = &report.stuck;
    assert_eq!(
        (stuck.parked_rows[0].count, stuck.parked_rows[0].requested),
        (1, 1)
    );
    let letters = &stuck.letters[0];
    assert_eq!((letters.dead, letters.parked, letters.overdue), (1, 1, 1));
    assert_eq!((stuck.quiet[0].partition, stuck.quiet[0].next), (0, 5));
    assert_eq!(stuck.breakers[0].failures, 20);
    let text = report.to_string();
    for words in ["parked ", "letters ", "stopped ", "quiet ", "no connection"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let patient = request(a, b).quiet(Duration::from_secs(7_200));
    assert!(reconcile(&patient).await.unwrap().stuck.quiet.is_empty());
}

async fn a16_a_consumer_or_topic_that_is_not_there_is_an_error<
    A: OperatorStore,
    B: OperatorStore,
>(
    a: &Pool<A>,
    b: &Pool<B>,
) {
    pair(a, b, 1).await;
    for (request, words) in [
        (
            request(a, b).consumer("inventroy"),
            "those that have one: inventory",
        ),
        (request(a, b).topic("order"), "it has of: orders"),
        (request(a, b).consumer("No Name"), "not allowed"),
        (
            request(a, b).inbox_names(Names::new("public", "other_").unwrap()),
            "",
        ),
    ] {
        let error = reconcile(&request).await.unwrap_err();
        assert!(error.is_config(), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
    run(a, "UPDATE {mark} SET position = 'v9 high=1 gaps='", vec![]).await;
    let error = reconcile(&request(a, b)).await.unwrap_err();
    assert!(error.to_string().contains("run a newer build"), "{error}");
}
