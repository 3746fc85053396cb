//! Topics that a consumer leaves alone until an operator lets it go on (`oncebox inbox pause`).
//!
//! The pause is written down, so that a restart keeps it. Every running process of the consumer notices within about a
//! second: what is under way ends, nothing more is begun, and Kafka delivers nothing. Partitions stay assigned and checked;
//! other topics go on. Replays of dead letters that were ordered are not held back.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use oncebox_migrations::Names;
use sqlx::Pool;
use time::OffsetDateTime;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::InboxStore;
use crate::error::Error;
use crate::operator::time;
use crate::process::Processor;
use crate::store::connect_as;

/// How often a consumer looks.
const INTERVAL: Duration = Duration::from_secs(1);

/// A topic that is paused for a consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Paused {
    /// The topic.
    pub topic: String,
    /// Why, by whoever paused it.
    pub reason: String,
    /// Since when.
    pub since: OffsetDateTime,
}

/// Pauses a topic of a consumer. Of one that is paused already, the reason is written. A topic that the consumer does not read
/// has no effect, until it does.
///
/// # Errors
///
/// [`Error::Config`] for a name that is none, [`Error::Schema`], or what the database answered.
///
/// # Cancel safety
///
/// One statement: it happened or it did not.
pub async fn pause<D: InboxStore>(
    pool: &Pool<D>,
    names: &Names,
    consumer: &str,
    topic: &str,
    reason: &str,
) -> Result<(), Error> {
    if topic.is_empty() {
        return Err(Error::config("topic", "is missing: name the one to pause"));
    }
    let (mut conn, statements) = connect_as(pool, names, consumer).await?;
    D::pause(&mut conn, &statements, consumer, topic, reason)
        .await
        .map_err(|e| Error::database("pause a topic", e))
}

/// Lets a consumer go on with a topic, where it was. Whether it was paused.
///
/// # Errors
///
/// As [`pause`].
///
/// # Cancel safety
///
/// One statement: it happened or it did not.
pub async fn unpause<D: InboxStore>(
    pool: &Pool<D>,
    names: &Names,
    consumer: &str,
    topic: &str,
) -> Result<bool, Error> {
    let (mut conn, statements) = connect_as(pool, names, consumer).await?;
    D::unpause(&mut conn, &statements, consumer, topic)
        .await
        .map_err(|e| Error::database("unpause a topic", e))
}

/// What is paused for a consumer, by topic.
///
/// # Errors
///
/// As [`pause`].
///
/// # Cancel safety
///
/// Reads only.
pub async fn list<D: InboxStore>(
    pool: &Pool<D>,
    names: &Names,
    consumer: &str,
) -> Result<Vec<Paused>, Error> {
    let (mut conn, statements) = connect_as(pool, names, consumer).await?;
    let rows = D::paused(&mut conn, &statements, consumer).await;
    let rows = rows.and_then(|rows| {
        let rows = rows.into_iter().map(|(topic, reason, since)| {
            Ok(Paused {
                topic,
                reason,
                since: time(since)?,
            })
        });
        rows.collect()
    });
    rows.map_err(|e| Error::database("look for paused topics", e))
}

/// The topics that are paused; `None` = not known yet.
pub(crate) type Topics = Option<BTreeSet<Arc<str>>>;

impl<D: InboxStore> Processor<D> {
    /// Keeps an eye on the paused topics until the shutdown. While the database is away, what was seen last stands.
    pub(crate) async fn watch_pauses(
        self: Arc<Self>,
        consumer: Arc<str>,
        seen: watch::Sender<Topics>,
        stop: CancellationToken,
    ) {
        loop {
            let look = async {
                let mut conn = self.pool.acquire().await?;
                D::paused(&mut conn, &self.statements, &consumer).await
            };
            match self.limited(look).await {
                Ok(paused) => note(&consumer, &paused, &seen),
                Err(e) => {
                    tracing::warn!(error = %e, "cannot look for paused topics, will be tried again");
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
    }
}

/// Tells what changed.
fn note(consumer: &str, paused: &[(String, String, i64)], seen: &watch::Sender<Topics>) {
    let topics: BTreeSet<Arc<str>> = paused
        .iter()
        .map(|(topic, ..)| topic.as_str().into())
        .collect();
    let before = seen.borrow().clone().unwrap_or_default();
    let gauge = |topic: &str| {
        let labels = [
            ("consumer", consumer.to_owned()),
            ("topic", topic.to_owned()),
        ];
        metrics::gauge!("oncebox_inbox_paused", &labels)
    };
    for (topic, reason, _) in paused.iter().filter(|p| !before.contains(&*p.0)) {
        tracing::warn!(%consumer, topic, reason, "topic paused by an operator");
        gauge(topic).set(1.0);
    }
    for topic in before.difference(&topics) {
        tracing::info!(%consumer, %topic, "topic goes on");
        gauge(topic).set(0.0);
    }
    seen.send_replace(Some(topics));
}
