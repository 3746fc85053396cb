//! A topic that is not the one we know, and a range that is gone (G10).

use std::time::Duration;

use oncebox_inbox::resume::{self, From, Request};
use oncebox_inbox::{Error, Refusal};
use oncebox_kafka::admin::{self, TopicSpec};
use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use crate::scene::{Scene, until};

fn admin_client(scene: &Scene) -> AdminClient<DefaultClientContext> {
    ClientConfig::new()
        .set("bootstrap.servers", &scene.kafka.bootstrap)
        .create()
        .unwrap()
}

async fn recreate(scene: &Scene, partitions: i32) {
    let old = oncebox_kafka::topic_id(&scene.kafka, &scene.topic)
        .await
        .unwrap();
    let client = admin_client(scene);
    client
        .delete_topics(&[&scene.topic], &AdminOptions::new())
        .await
        .unwrap();
    until(async || {
        let created =
            admin::ensure_topic(&scene.kafka, &scene.topic, &TopicSpec::new(partitions)).await;
        let id = oncebox_kafka::topic_id(&scene.kafka, &scene.topic).await;
        created.is_ok() && id.is_ok_and(|id| id.is_some() && id != old)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g10_a_recreated_topic_stops_the_consumer_and_resume_is_the_way_out() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    scene.publish_numbers(0..5).await;
    let running = scene.start();
    scene.effects_reach(5).await;
    running.stop().await.unwrap();

    recreate(&scene, 1).await;
    scene.publish_numbers(100..110).await;
    let error = scene.start().error().await;
    let Error::Position {
        refusal: Refusal::TopicRecreated { next: 5, .. },
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(
        scene.effects().await.len(),
        5,
        "offsets of the new topic are not mistaken for the old one's"
    );

    let request = Request::new(scene.pool.clone(), scene.kafka.clone())
        .consumer(&scene.consumer)
        .topic(&scene.topic);
    let plan = resume::apply(&request, From::Earliest).await.unwrap();
    assert!(plan.to_string().contains("another topic"), "{plan}");
    let running = scene.start();
    scene.effects_reach(15).await;
    running.stop().await.unwrap();
    assert_eq!(scene.effects().await.len(), 15);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g10_a_topic_that_is_recreated_under_a_running_consumer_stops_it() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    scene.publish_numbers(0..5).await;
    let running = scene.start();
    scene.effects_reach(5).await;
    recreate(&scene, 1).await;
    let error = running.error().await;
    assert!(
        matches!(
            &error,
            Error::Position {
                refusal: Refusal::TopicRecreated { .. },
                ..
            } | Error::UnknownTopic { .. }
        ),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g10_records_that_were_deleted_unread_stop_the_consumer_with_their_range() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    scene.publish_numbers(0..5).await;
    let running = scene.start();
    scene.effects_reach(5).await;
    running.stop().await.unwrap();
    let next = scene.next(0).await;
    scene.publish_numbers(5..20).await;
    let low = next + 6;
    let mut offsets = TopicPartitionList::new();
    offsets
        .add_partition_offset(&scene.topic, 0, Offset::Offset(low))
        .unwrap();
    admin_client(&scene)
        .delete_records(&offsets, &AdminOptions::new())
        .await
        .unwrap();

    let error = scene.start().error().await;
    let Error::Position { refusal, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(*refusal, Refusal::Deleted { next, low });
    assert!(
        error.to_string().contains(&format!("{next}..{low}")),
        "{error}"
    );

    let request = Request::new(scene.pool.clone(), scene.kafka.clone())
        .consumer(&scene.consumer)
        .topic(&scene.topic);
    resume::apply(&request, From::Earliest).await.unwrap();
    let running = scene.start();
    until(async || {
        scene
            .effects()
            .await
            .last()
            .is_some_and(|last| last == "19")
    })
    .await;
    running.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_is_added_later_is_read_from_its_first_record() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    scene.publish_numbers(0..5).await;
    let running = scene.start();
    scene.effects_reach(5).await;
    running.stop().await.unwrap();
    let client = admin_client(&scene);
    let more = rdkafka::admin::NewPartitions::new(&scene.topic, 4);
    client
        .create_partitions([&more], &AdminOptions::new())
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    scene.publish_numbers(5..60).await;
    let running = scene.start();
    // The producer learns of the new partitions in its own time: whatever it wrote, and wherever, arrives.
    scene.effects_reach(60).await;
    running.stop().await.unwrap();
    assert_eq!(scene.effects().await.len(), 60);
    assert_eq!(
        scene.count("SELECT count(*) FROM oncebox_position").await,
        4
    );
}
