//! An existing Kafka group is not adopted without a decision (G10).

use oncebox_inbox::resume::{self, From, Request};
use oncebox_inbox::{Error, Refusal};
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use crate::scene::Scene;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g10_an_existing_group_is_refused_until_somebody_decides() {
    let Some(scene) = Scene::new(1).await else {
        return;
    };
    scene.publish_numbers(0..10).await;
    let (bootstrap, group, topic) = (
        scene.kafka.bootstrap.clone(),
        scene.consumer.clone(),
        scene.topic.clone(),
    );
    tokio::task::spawn_blocking(move || {
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", bootstrap)
            .set("group.id", group)
            .create()
            .unwrap();
        let mut offsets = TopicPartitionList::new();
        offsets
            .add_partition_offset(&topic, 0, Offset::Offset(6))
            .unwrap();
        consumer.commit(&offsets, CommitMode::Sync).unwrap();
    })
    .await
    .unwrap();

    let error = scene.start().error().await;
    assert!(
        matches!(
            &error,
            Error::Position {
                refusal: Refusal::ExistingGroup { committed: 6 },
                ..
            }
        ),
        "{error}"
    );
    assert!(error.is_stop());
    assert!(
        error.to_string().contains("oncebox inbox resume"),
        "{error}"
    );
    assert!(scene.effects().await.is_empty());

    let request = Request::new(scene.pool.clone(), scene.kafka.clone())
        .consumer(&scene.consumer)
        .topic(&scene.topic);
    let plan = resume::plan(&request, From::Committed).await.unwrap();
    assert!(plan.to_string().contains("no position -> 6"), "{plan}");
    assert_eq!(scene.next(0).await, -1, "a plan writes nothing");
    resume::apply(&request, From::Committed).await.unwrap();
    let running = scene.start();
    scene.effects_reach(4).await;
    running.stop().await.unwrap();
    assert_eq!(scene.effects().await, ["6", "7", "8", "9"]);
}
