//! The rights of a producer are enough for everything this crate does.

use oncebox_migrations::grants;
use oncebox_outbox::Message;
use sqlx::{ConnectOptions as _, Connection as _};

use crate::conformance::{OnPostgres, Store as _, names, outbox, plain};
use crate::database::{execute, run};

#[tokio::test]
async fn a_producer_with_insert_only_can_enqueue_in_every_way() {
    run(async |db| {
        let store = OnPostgres::new(&db).await;
        let role = db.create_role("producer").await;
        let nobody = db.create_role("consumer").await;
        let mut owner = db.connect().await;
        execute(&mut owner, &grants(&names(), &role, &nobody, &nobody)).await;

        let mut conn = db.options_of(&role).connect().await.unwrap();
        let mut tx = conn.begin().await.unwrap();
        outbox().enqueue(&mut tx, plain("a")).await.unwrap();
        outbox().enqueue_ordered(&mut tx, plain("b")).await.unwrap();
        outbox()
            .enqueue_all(&mut tx, vec![plain("c"), plain("d")])
            .await
            .unwrap();
        tx.commit().await.unwrap();
        assert_eq!(store.rows().await.len(), 4);

        let mut conn = db.options_of(&nobody).connect().await.unwrap();
        execute(
            &mut owner,
            &format!("REVOKE ALL ON shop_outbox FROM {nobody}"),
        )
        .await;
        let mut tx = conn.begin().await.unwrap();
        let error = outbox()
            .enqueue(&mut tx, Message::new("t").payload(""))
            .await
            .unwrap_err();
        assert!(error.to_string().contains("needs INSERT"), "{error}");
    })
    .await;
}
