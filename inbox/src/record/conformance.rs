//! What the record's commands promise, on every database.

use std::collections::HashSet;
use std::time::Duration;

use sqlx::Pool;
use time::OffsetDateTime;
use uuid::Uuid;

use super::*;
use crate::operator::testing::{number, on_both, run};

on_both!(
    a16_rows_are_found_by_every_condition,
    a16_pages_are_stable_and_complete,
    a16_the_summary_counts_and_measures,
    a16_retention_deletes_in_chunks_what_is_too_old,
);

const DAY: Duration = Duration::from_secs(86_400);

struct New<'a> {
    offset: i64,
    status: &'a str,
    business: Option<&'a str>,
    settled_at: OffsetDateTime,
    duration_us: i64,
}

fn new(offset: i64, settled_at: OffsetDateTime) -> New<'static> {
    New {
        offset,
        status: "effect",
        business: None,
        settled_at,
        duration_us: 1_000,
    }
}

async fn insert<D: OperatorStore>(pool: &Pool<D>, row: New<'_>) -> Uuid {
    let id = Uuid::now_v7();
    let business = row
        .business
        .map_or("NULL".to_owned(), |id| format!("'{id}'"));
    let attempts = 1 + row.offset % 2;
    let (time, status) = (D::TIME, row.status);
    run(
        pool,
        &format!(
            "INSERT INTO {{record}} (consumer, topic, partition, record_offset, message_id, business_id, status, attempts, first_at, \
             settled_at, duration_us) VALUES ('inventory', 'orders', 0, ?, ?, {business}, '{status}', {attempts}, {time}, {time}, ?)"
        ),
        vec![
            Value::Int(row.offset),
            Value::Uuid(id),
            row.settled_at.into(),
            row.settled_at.into(),
            Value::Int(row.duration_us),
        ],
    )
    .await;
    id
}

async fn count<D: OperatorStore>(pool: &Pool<D>) -> i64 {
    number(pool, "SELECT count(*) FROM {record}", vec![]).await
}

async fn a16_rows_are_found_by_every_condition<D: OperatorStore>(pool: &Pool<D>) {
    let now = OffsetDateTime::now_utc();
    let first = insert(
        pool,
        New {
            business: Some("order-1"),
            ..new(1, now - DAY)
        },
    )
    .await;
    let second = insert(
        pool,
        New {
            status: "dead",
            ..new(2, now)
        },
    )
    .await;
    let records = Records::new(pool.clone());
    for (filter, expected) in [
        (
            Filter {
                message_id: Some(first),
                ..Filter::default()
            },
            vec![first],
        ),
        (
            Filter {
                business_id: Some("order-1".into()),
                ..Filter::default()
            },
            vec![first],
        ),
        (
            Filter {
                business_id: Some("order-2".into()),
                ..Filter::default()
            },
            vec![],
        ),
        (
            Filter {
                consumer: Some("inventory".into()),
                ..Filter::default()
            },
            vec![second, first],
        ),
        (
            Filter {
                consumer: Some("other".into()),
                ..Filter::default()
            },
            vec![],
        ),
        (
            Filter {
                topic: Some("orders".into()),
                partition: Some(0),
                ..Filter::default()
            },
            vec![second, first],
        ),
        (
            Filter {
                partition: Some(1),
                ..Filter::default()
            },
            vec![],
        ),
        (
            Filter {
                status: Some(Status::Dead),
                ..Filter::default()
            },
            vec![second],
        ),
        (
            Filter {
                since: Some(now - DAY / 2),
                ..Filter::default()
            },
            vec![second],
        ),
        (
            Filter {
                until: Some(now - DAY / 2),
                ..Filter::default()
            },
            vec![first],
        ),
    ] {
        let page = records
            .list(&filter, Direction::Newest, None, 10)
            .await
            .unwrap();
        let ids: Vec<Uuid> = page.rows.iter().map(|row| row.message_id).collect();
        assert_eq!(ids, expected, "{filter:?}");
    }
    let filter = Filter {
        message_id: Some(first),
        ..Filter::default()
    };
    let page = records
        .list(&filter, Direction::Oldest, None, 1)
        .await
        .unwrap();
    let row = &page.rows[0];
    assert_eq!(
        (row.offset, row.attempts, row.status),
        (1, 2, Status::Effect)
    );
    assert_eq!(row.business_id.as_deref(), Some("order-1"));
    assert_eq!(row.duration, Duration::from_millis(1));
    assert_eq!(
        row.settled_at.unix_timestamp(),
        (now - DAY).unix_timestamp()
    );
    assert_eq!(page.next, None);
}

async fn a16_pages_are_stable_and_complete<D: OperatorStore>(pool: &Pool<D>) {
    let now = OffsetDateTime::now_utc();
    // A batch shares its time; the offset orders it.
    for offset in 0..35 {
        insert(
            pool,
            new(offset, now - Duration::from_secs(offset as u64 / 10)),
        )
        .await;
    }
    let records = Records::new(pool.clone());
    for direction in [Direction::Newest, Direction::Oldest] {
        let (mut seen, mut after) = (Vec::new(), None);
        loop {
            let page = records
                .list(&Filter::default(), direction, after.as_ref(), 10)
                .await
                .unwrap();
            seen.extend(page.rows.iter().map(|row| (row.settled_at, row.offset)));
            let Some(next) = page.next else { break };
            after = Some(next.to_string().parse::<Cursor>().unwrap());
        }
        let distinct: HashSet<i64> = seen.iter().map(|(_, offset)| *offset).collect();
        assert_eq!((seen.len(), distinct.len()), (35, 35), "{direction:?}");
        if direction == Direction::Newest {
            seen.reverse();
        }
        assert!(seen.is_sorted(), "{direction:?}");
    }
}

async fn a16_the_summary_counts_and_measures<D: OperatorStore>(pool: &Pool<D>) {
    let now = OffsetDateTime::now_utc();
    for (offset, duration_us) in [(0, 100), (1, 200), (2, 600)] {
        insert(
            pool,
            New {
                duration_us,
                ..new(offset, now)
            },
        )
        .await;
    }
    insert(
        pool,
        New {
            status: "parked",
            ..new(4, now)
        },
    )
    .await;
    let groups = Records::new(pool.clone())
        .summary(&Filter::default())
        .await
        .unwrap();
    assert_eq!(groups.len(), 2);
    let effects = &groups[0];
    assert_eq!(
        (effects.status, effects.count, effects.retried),
        (Status::Effect, 3, 1)
    );
    assert_eq!(effects.average, Duration::from_micros(300));
    assert_eq!(effects.longest, Duration::from_micros(600));
    assert_eq!(effects.first, effects.last);
    assert_eq!((groups[1].status, groups[1].count), (Status::Parked, 1));
}

async fn a16_retention_deletes_in_chunks_what_is_too_old<D: OperatorStore>(pool: &Pool<D>) {
    let today = OffsetDateTime::now_utc().date().midnight().assume_utc();
    for offset in 0..250 {
        insert(
            pool,
            new(
                offset,
                today - 31 * DAY + Duration::from_secs(offset as u64),
            ),
        )
        .await;
    }
    let first_kept = insert(pool, new(250, today - 30 * DAY)).await;
    insert(pool, new(251, today)).await;
    let records = Records::new(pool.clone()).chunk(100);
    let plan = records.plan_clean(30).await.unwrap();
    assert_eq!((plan.rows, plan.applied), (250, false));
    assert_eq!(plan.before, today - 30 * DAY);
    assert_eq!(count(pool).await, 252, "a plan changes nothing");
    let (deleted, next) = D::delete_some(
        pool,
        &Names::default(),
        operator::micros(plan.before),
        0,
        100,
    )
    .await
    .unwrap();
    assert!(
        (1..=150).contains(&deleted),
        "a chunk is a chunk: {deleted}"
    );
    assert!(next.is_some());
    let done = records.clean(30).await.unwrap();
    assert_eq!((done.rows + deleted, done.applied), (250, true));
    assert_eq!(count(pool).await, 2);
    let filter = Filter {
        message_id: Some(first_kept),
        ..Filter::default()
    };
    let page = records
        .list(&filter, Direction::Newest, None, 1)
        .await
        .unwrap();
    assert_eq!(
        page.rows.len(),
        1,
        "the last day that is kept is kept whole"
    );
    assert_eq!(records.clean(30).await.unwrap().rows, 0);
}

#[cfg(feature = "sqlite")]
#[tokio::test]
async fn a16_sqlite_has_no_partitions_and_says_so() {
    let (_dir, pool) = crate::operator::testing::sqlite().await;
    let ahead = Records::new(pool).partitions_ahead(7).await.unwrap();
    assert!(!ahead.partitioned && ahead.made.is_empty());
    assert!(ahead.to_string().contains("nothing to do"));
}

#[cfg(feature = "postgres")]
mod partitions {
    use std::time::Instant;

    use sqlx::PgPool;

    use super::*;
    use crate::operator::testing::postgres;

    async fn today(pool: &PgPool) -> Date {
        Records::new(pool.clone()).today().await.unwrap()
    }

    fn midnight(day: Date) -> OffsetDateTime {
        day.midnight().assume_utc()
    }

    #[tokio::test]
    async fn a16_partitions_are_made_ahead_and_used() {
        let Some(pool) = postgres().await else { return };
        let records = Records::new(pool.clone());
        let ahead = records.partitions_ahead(3).await.unwrap();
        assert_eq!(
            (ahead.made.len(), ahead.left.len()),
            (4, 0),
            "today and three more: {ahead}"
        );
        let again = records.partitions_ahead(3).await.unwrap();
        assert_eq!((again.made.len(), again.there.len()), (0, 4));
        let today = today(&pool).await;
        insert(&pool, new(1, midnight(today) + Duration::from_secs(1))).await;
        insert(&pool, new(2, midnight(today) + 2 * DAY)).await;
        insert(&pool, new(3, midnight(today) + 9 * DAY)).await;
        let rest = number(&pool, "SELECT count(*) FROM oncebox_record_rest", vec![]).await;
        assert_eq!(
            rest, 1,
            "only the day without a partition goes to the default one"
        );
        let indexes = number(
            &pool,
            "SELECT count(*) FROM pg_index i JOIN pg_inherits h ON h.inhrelid = i.indrelid \
             WHERE h.inhparent = '{record}'::regclass",
            vec![],
        )
        .await;
        assert_eq!(indexes, 15, "three for each of five partitions");
    }

    #[tokio::test]
    async fn a16_two_processes_make_partitions_at_once() {
        let Some(pool) = postgres().await else { return };
        let records = Records::new(pool.clone());
        let (a, b, c) = tokio::join!(
            records.partitions_ahead(5),
            records.partitions_ahead(5),
            records.partitions_ahead(5)
        );
        let all = [a.unwrap(), b.unwrap(), c.unwrap()];
        assert_eq!(all.iter().map(|a| a.made.len()).sum::<usize>(), 6);
        assert!(all.iter().all(|a| a.left.is_empty()), "{all:?}");
    }

    #[tokio::test]
    async fn a16_a_day_with_rows_in_the_default_partition_is_left_to_it() {
        let Some(pool) = postgres().await else { return };
        let today = today(&pool).await;
        let tomorrow = today.next_day().unwrap();
        insert(&pool, new(1, midnight(tomorrow) + Duration::from_secs(1))).await;
        let records = Records::new(pool.clone());
        for _ in 0..2 {
            let ahead = records.partitions_ahead(2).await.unwrap();
            assert_eq!(ahead.left, [(tomorrow, Left::Rows)], "and it stays so");
            assert_eq!(
                ahead.made.len() + ahead.there.len(),
                2,
                "the other days get theirs"
            );
            assert!(ahead.to_string().contains("left to it"), "{ahead}");
        }
    }

    #[tokio::test]
    async fn a16_partitions_ahead_do_not_hold_up_writers_behind_an_open_reader() {
        let Some(pool) = postgres().await else { return };
        let records = Records::new(pool.clone());
        let today = today(&pool).await;
        records.partitions_ahead(0).await.unwrap();
        let mut reader = pool.begin().await.unwrap();
        sqlx::query("SELECT count(*) FROM oncebox_record")
            .fetch_one(&mut *reader)
            .await
            .unwrap();
        let write = async {
            let mut slowest = Duration::ZERO;
            for offset in 0..100 {
                let begun = Instant::now();
                insert(&pool, new(offset, midnight(today) + Duration::from_secs(1))).await;
                slowest = slowest.max(begun.elapsed());
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            slowest
        };
        let (ahead, slowest) = tokio::join!(records.partitions_ahead(1), write);
        let ahead = ahead.unwrap();
        assert_eq!(
            ahead.left,
            [(today.next_day().unwrap(), Left::Busy)],
            "{ahead}"
        );
        println!("slowest insert {slowest:?}");
        // A reader that stays open for seconds would hold up an ATTACH, and everybody behind it, for as long.
        assert!(slowest < Duration::from_secs(2), "{slowest:?}");
        reader.rollback().await.unwrap();
        let ahead = records.partitions_ahead(1).await.unwrap();
        assert_eq!(ahead.made.len(), 1, "{ahead}");
    }

    #[tokio::test]
    async fn a16_old_partitions_are_dropped_and_the_default_one_is_emptied() {
        let Some(pool) = postgres().await else { return };
        let today = today(&pool).await;
        let records = Records::new(pool.clone());
        let day = |ago: u32| midnight(today) - ago * DAY;
        for ago in [40, 31, 30] {
            let day = day(ago).date();
            assert_eq!(
                Postgres::attach(&pool, &Names::default(), day)
                    .await
                    .unwrap(),
                None
            );
            insert(&pool, new(i64::from(ago), midnight(day))).await;
        }
        insert(&pool, new(35, day(35))).await;
        // Somebody's table with the name of a day that does not cover it is not ours to drop.
        sqlx::query(
            "CREATE TABLE oncebox_record_20010101 (LIKE oncebox_record INCLUDING CONSTRAINTS)",
        )
        .execute(&pool)
        .await
        .unwrap();
        sqlx::query(
            "ALTER TABLE oncebox_record ATTACH PARTITION oncebox_record_20010101 FOR VALUES FROM ('2000-01-01') TO ('2001-01-01')",
        )
        .execute(&pool)
        .await
        .unwrap();
        let plan = records.plan_clean(30).await.unwrap();
        assert_eq!(plan.days, [day(40).date(), day(31).date()]);
        assert_eq!(plan.rows, 1);
        // Who reads an old partition keeps it, for now.
        let mut reader = pool.begin().await.unwrap();
        sqlx::query("SELECT count(*) FROM oncebox_record")
            .fetch_one(&mut *reader)
            .await
            .unwrap();
        let begun = Instant::now();
        let kept = records.clean(30).await.unwrap();
        assert_eq!(
            (kept.days.len(), kept.busy.len(), kept.rows),
            (0, 2, 1),
            "{kept}"
        );
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "{:?}",
            begun.elapsed()
        );
        reader.rollback().await.unwrap();
        let done = records.clean(30).await.unwrap();
        assert_eq!((done.days.len(), done.busy.len()), (2, 0), "{done}");
        assert_eq!(count(&pool).await, 1);
        let foreign = number(
            &pool,
            "SELECT count(*) FROM pg_class WHERE relname = 'oncebox_record_20010101'",
            vec![],
        )
        .await;
        assert_eq!(foreign, 1);
    }

    #[tokio::test]
    async fn a16_who_does_not_own_the_table_is_told_so() {
        let Some(pool) = postgres().await else { return };
        let role = format!("admin_{}", Uuid::now_v7().simple());
        let mut conn = pool.acquire().await.unwrap();
        for text in [
            format!("CREATE ROLE {role}"),
            format!("GRANT CREATE, USAGE ON SCHEMA public TO {role}"),
            format!("GRANT SELECT, INSERT, DELETE ON oncebox_record TO {role}"),
        ] {
            sqlx::query(sqlx::AssertSqlSafe(text))
                .execute(&mut *conn)
                .await
                .unwrap();
        }
        drop(conn);
        let set = format!("SET ROLE {role}");
        let options = (*pool.connect_options()).clone();
        let limited = sqlx::postgres::PgPoolOptions::new()
            .after_connect(move |conn, _| {
                let set = set.clone();
                Box::pin(async move {
                    sqlx::query(sqlx::AssertSqlSafe(set)).execute(conn).await?;
                    Ok(())
                })
            })
            .connect_with(options)
            .await
            .unwrap();
        let today = today(&pool).await;
        let left = Postgres::attach(&limited, &Names::default(), today)
            .await
            .unwrap();
        assert_eq!(left, Some(Left::NotOwner));
    }

    use sqlx::Postgres;
}
