//! `oncebox inbox resume`: the way out, while the consumer runs and while it does not.

use oncebox_inbox::resume::{self, From, Request};
use oncebox_inbox::{Error, resume::Plan};
use time::{Duration, OffsetDateTime};

use crate::scene::{Scene, until};

fn request(scene: &Scene) -> Request<sqlx::Postgres> {
    Request::new(scene.pool.clone(), scene.kafka.clone())
        .consumer(&scene.consumer)
        .topic(&scene.topic)
}

fn places(plan: &Plan) -> Vec<i64> {
    plan.partitions.iter().map(|c| c.next).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resume_finds_every_place() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    let before = OffsetDateTime::now_utc();
    scene.publish_numbers(0..4).await;
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    let between = OffsetDateTime::now_utc();
    scene.publish_numbers(4..8).await;
    let request = request(&scene);
    let plan = async |from| resume::plan(&request, from).await;
    assert_eq!(places(&plan(From::Earliest).await.unwrap()), [0]);
    assert_eq!(
        places(&plan(From::Latest).await.unwrap()),
        [10],
        "two markers of transactions"
    );
    assert_eq!(places(&plan(From::Offset(3)).await.unwrap()), [3]);
    assert_eq!(
        places(&plan(From::Time(before - Duration::HOUR)).await.unwrap()),
        [0]
    );
    assert_eq!(places(&plan(From::Time(between)).await.unwrap()), [5]);
    assert_eq!(
        places(&plan(From::Time(between + Duration::HOUR)).await.unwrap()),
        [10]
    );
    let error = plan(From::Committed).await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::Config {
                setting: "from",
                ..
            }
        ),
        "{error}"
    );
    let error = plan(From::Offset(11)).await.unwrap_err();
    assert!(error.to_string().contains("0..10"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_offset_needs_a_partition_when_there_are_several() {
    let Some(scene) = Scene::new(3).await else {
        return;
    };
    let error = resume::plan(&request(&scene), From::Offset(0))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("partition"), "{error}");
    let error = resume::plan(&request(&scene).partition(3), From::Earliest)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("3 partitions"), "{error}");
    let plan = resume::plan(&request(&scene).partition(1), From::Offset(0))
        .await
        .unwrap();
    assert_eq!(plan.partitions.len(), 1);
    assert_eq!(
        resume::plan(&request(&scene), From::Latest)
            .await
            .unwrap()
            .partitions
            .len(),
        3
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_consumer_notices_a_resume() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    scene.publish_numbers(0..10).await;
    let running = scene.start();
    scene.effects_reach(10).await;
    // As if the window of the marks were over.
    sqlx::query("DELETE FROM oncebox_inbox")
        .execute(&scene.pool)
        .await
        .unwrap();
    let plan = resume::apply(&request(&scene), From::Offset(7))
        .await
        .unwrap();
    assert!(plan.to_string().contains("10 -> 7"), "{plan}");
    scene.effects_reach(13).await;
    until(async || scene.next(0).await >= 10).await;
    running.stop().await.unwrap();
    assert_eq!(scene.effects().await[10..], ["7", "8", "9"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_consumer_may_be_told_to_begin_at_the_end() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    scene.publish_numbers(0..10).await;
    let plan = resume::apply(&request(&scene), From::Latest).await.unwrap();
    assert!(plan.to_string().contains("skips 11 offsets"), "{plan}");
    let running = scene.start();
    scene.publish_numbers(10..12).await;
    scene.effects_reach(2).await;
    running.stop().await.unwrap();
    assert_eq!(scene.effects().await, ["10", "11"]);
}
