//! The builder, and the start of a consumer.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use oncebox_gate::{Hint, Scope};
use oncebox_migrations::Names;
use oncebox_outbox::Outbox;
use sqlx::{Pool, Transaction};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::InboxStore;
use crate::dead_topic::DeadTopic;
use crate::dedup::Dedup;
use crate::delivery::Delivery;
use crate::error::Error;
use crate::feed::KafkaFeed;
use crate::foreign::ForeignId;
use crate::handler::{Handler, HandlerFuture};
use crate::partition::Limits;
use crate::process::{BusinessId, Hinted, Processor};
use crate::retry::{OnFailure, RetryPolicy};
use crate::stats::Stats;
use crate::step::StepHook;
use crate::store::connect;
use crate::worker::{Settings, work};

/// librdkafka's default of `max.poll.interval.ms`.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(300);

const DAY: Duration = Duration::from_secs(86_400);

/// A consumer in the making: what it is called, what it reads, and how it treats failures.
///
/// See the [crate's page](crate) for the whole picture.
#[derive(Clone)]
pub struct Inbox<D: InboxStore> {
    pool: Pool<D>,
    kafka: oncebox_kafka::Config,
    names: Names,
    consumer: String,
    topics: Vec<String>,
    retry: RetryPolicy,
    on_failure: OnFailure,
    delayed_retries: bool,
    dead_topic: Option<DeadTopic>,
    breaker: Option<u32>,
    dedup: Dedup,
    window: Duration,
    outbox_retention: Duration,
    batch: usize,
    lanes: usize,
    connections: Option<usize>,
    record: Option<BusinessId>,
    hint: Option<Arc<dyn Hint>>,
    foreign_id: ForeignId,
    idle_limit: Duration,
    handler_limit: Duration,
    check_interval: Duration,
    shutdown_grace: Duration,
    on_step: Option<StepHook>,
    stats: Stats,
}

impl<D: InboxStore> fmt::Debug for Inbox<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox")
            .field("consumer", &self.consumer)
            .field("topics", &self.topics)
            .field("kafka", &self.kafka)
            .field("names", &self.names)
            .field("retry", &self.retry)
            .field("foreign_id", &self.foreign_id)
            .finish_non_exhaustive()
    }
}

impl<D: InboxStore> Inbox<D> {
    /// A consumer that keeps its marks and positions in the database of `pool`, which is also the database its handler
    /// writes to. How many connections it uses at a time says [`Self::connections`]; one more lets the pool replace a broken
    /// one.
    #[must_use]
    pub fn new(pool: Pool<D>, kafka: oncebox_kafka::Config) -> Self {
        Self {
            pool,
            kafka,
            names: Names::default(),
            consumer: String::new(),
            topics: Vec::new(),
            retry: RetryPolicy::default(),
            on_failure: OnFailure::default(),
            delayed_retries: false,
            dead_topic: None,
            breaker: Some(100),
            dedup: Dedup::default(),
            window: 7 * DAY,
            outbox_retention: DAY,
            batch: 100,
            lanes: 1,
            connections: None,
            record: None,
            hint: None,
            foreign_id: ForeignId::default(),
            idle_limit: Duration::from_secs(60),
            handler_limit: Duration::from_secs(300),
            check_interval: Duration::from_secs(3),
            shutdown_grace: Duration::from_secs(20),
            on_step: None,
            stats: Stats::default(),
        }
    }

    /// The consumer's name: key of its marks and positions, and Kafka's `group.id`. Required;
    /// `^[a-z0-9][a-z0-9._-]{0,99}$`. Processes with the same name share the partitions.
    #[must_use]
    pub fn consumer(mut self, name: impl Into<String>) -> Self {
        self.consumer = name.into();
        self
    }

    /// A topic to read. At least one; call it again for more.
    #[must_use]
    pub fn topic(mut self, topic: impl Into<String>) -> Self {
        self.topics.push(topic.into());
        self
    }

    /// Schema and prefix of the Oncebox tables. Defaults to `public` and `oncebox_`.
    #[must_use]
    pub fn names(mut self, names: Names) -> Self {
        self.names = names;
        self
    }

    /// How often a handler that reports a retriable error is called again. Defaults to [`RetryPolicy::default`].
    #[must_use]
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    /// What becomes of a message after the last attempt. Defaults to [`OnFailure::DeadLetter`].
    #[must_use]
    pub fn on_failure(mut self, policy: OnFailure) -> Self {
        self.on_failure = policy;
        self
    }

    /// Declares that the order of the messages does not matter: one that waits half a second or more for its next attempt does not
    /// hold its lane. It goes aside, as a row with its mark (`oncebox dead list --kind delayed`), and the position passes it; the
    /// consumer tries it again when it is time, to the second, in a transaction that deletes the row (G8). After the last attempt
    /// it is a dead letter. Attempts that follow each other sooner are made in the lane. Not with [`OnFailure::BlockKey`].
    /// Defaults to false: the lane waits, and the order of a key is kept (G4).
    #[must_use]
    pub fn delayed_retries(mut self, delayed: bool) -> Self {
        self.delayed_retries = delayed;
        self
    }

    /// Publishes each dead letter to this topic as well, through the outbox and in the transaction that writes the letter: one
    /// message for each letter, none for what is parked or delayed. It has the content and headers of the original (Oncebox's own as
    /// `dead-oncebox-…`) and `dead-consumer`, `dead-topic`, `dead-partition`, `dead-offset`, `dead-message-id`, `dead-attempts`
    /// and `dead-error` (at most 1 000 bytes). What the outbox refuses goes without content, with the reason in
    /// `dead-shortened`. For those who watch topics: `oncebox dead` and replays need the table only, and a relay has to run.
    /// Defaults to none.
    #[must_use]
    pub fn dead_letter_topic(mut self, outbox: Outbox, topic: impl Into<String>) -> Self {
        let name = topic.into();
        self.dead_topic = Some(DeadTopic { outbox, name });
        self
    }

    /// So many messages of a topic that fail in a row, none of them with an effect in between, are an outage and not poison:
    /// the consumer stops with [`Error::Breaker`] instead of writing them off, and does not start again before
    /// `oncebox inbox resume --accept-failures --apply`. `None` = never. Defaults to 100.
    #[must_use]
    pub fn breaker(mut self, failures: Option<u32>) -> Self {
        self.breaker = failures;
        self
    }

    /// How a duplicate is known. Defaults to [`Dedup::ById`].
    #[must_use]
    pub fn dedup(mut self, dedup: Dedup) -> Self {
        self.dedup = dedup;
        self
    }

    /// How long the mark of a message is kept, from first sight: the dedup window of [`Dedup::ById`]. A duplicate that comes
    /// later is handled again. Must not be shorter than the time for which the same message can come once more: the
    /// retention of the outbox ([`Self::outbox_retention`]) and the longest retry ([`RetryPolicy::horizon`]). Defaults to
    /// 7 days.
    #[must_use]
    pub fn window(mut self, window: Duration) -> Self {
        self.window = window;
        self
    }

    /// How long the outbox keeps published rows (`oncebox relay --retention`): for so long an operator may publish them
    /// again. Compared with the window. Defaults to 1 day.
    #[must_use]
    pub fn outbox_retention(mut self, retention: Duration) -> Self {
        self.outbox_retention = retention;
        self
    }

    /// Most messages of a lane that share a transaction. A batch is what is waiting, up to here; it grows while transactions
    /// take less than a quarter of a second, and a message that fails in one is redone alone. 1 = each message has a
    /// transaction of its own. Defaults to 100.
    #[must_use]
    pub fn batch(mut self, messages: usize) -> Self {
        self.batch = messages;
        self
    }

    /// Lanes of a partition: messages of one key stay in one lane, in their order; lanes run side by side, each with a
    /// transaction of its own. Useful when handlers wait for something; not on SQLite, which writes one transaction at a
    /// time, and not with [`Dedup::ByOffset`]. Defaults to 1.
    #[must_use]
    pub fn lanes(mut self, lanes: usize) -> Self {
        self.lanes = lanes;
        self
    }

    /// Transactions of messages at the same time, over all partitions and lanes; a replay and the clean-up of the marks may use
    /// one connection each besides. Defaults to what the pool has less one, at most 8; 1 on SQLite.
    #[must_use]
    pub fn connections(mut self, connections: usize) -> Self {
        self.connections = Some(connections);
        self
    }

    /// Something in front of the database that may know a settled message faster: a process-local cache, a Redis gate, or both
    /// (`oncebox-gate`). It saves transactions for messages that come again, and is never believed without a look into the
    /// database; losing it costs speed only. With [`Dedup::ById`]. Defaults to none.
    #[must_use]
    pub fn hint(mut self, hint: Arc<dyn Hint>) -> Self {
        self.hint = Some(hint);
        self
    }

    /// Writes a row of `oncebox_record` for every settled message, in the transaction that settles it: message id, the id that
    /// the business calls it by (from `business_id`), status, attempts, times, duration, error. Defaults to none.
    #[must_use]
    pub fn record<F>(mut self, business_id: F) -> Self
    where
        F: Fn(&Delivery) -> Option<String> + Send + Sync + 'static,
    {
        self.record = Some(Arc::new(business_id));
        self
    }

    /// What a service usually wants around its handler, in one call: `hint` in front of the database ([`Self::hint`]), graded
    /// retries ([`RetryPolicy::graded`]), each dead letter as a message of the topic `dead_letters`, too
    /// ([`Self::dead_letter_topic`]), and a record of every message under the id that `business_id` finds ([`Self::record`]).
    /// Marks, effect and position in one transaction, the acknowledgement after it, the breaker and the metrics to alert on
    /// ([`Stats`]) are there in any case; the guard in front of the effect is the handler's ([`guard`](crate::guard)). Each part can
    /// be changed by its own method after this.
    #[must_use]
    pub fn complete<F>(
        self,
        hint: Arc<dyn Hint>,
        outbox: Outbox,
        dead_letters: impl Into<String>,
        business_id: F,
    ) -> Self
    where
        F: Fn(&Delivery) -> Option<String> + Send + Sync + 'static,
    {
        self.hint(hint)
            .retry(RetryPolicy::graded())
            .dead_letter_topic(outbox, dead_letters)
            .record(business_id)
    }

    /// How messages without an Oncebox envelope are known. Defaults to [`ForeignId::PartitionOffset`].
    #[must_use]
    pub fn foreign_id(mut self, policy: ForeignId) -> Self {
        self.foreign_id = policy;
        self
    }

    /// PostgreSQL ends a session of this consumer that is idle inside a transaction for longer than this
    /// (`idle_in_transaction_session_timeout`, set for each transaction): a stopped process cannot keep a row locked that the
    /// partition's next owner needs (G6). Must be below Kafka's `max.poll.interval.ms`, and above the longest time a handler
    /// spends between two statements. Defaults to 60 s. SQLite has no such limit.
    #[must_use]
    pub fn transaction_idle_limit(mut self, limit: Duration) -> Self {
        self.idle_limit = limit;
        self
    }

    /// Longest time for one call of the handler. One that takes longer (a remote call without a time-out, a database that has
    /// vanished without a word) is dropped, rolled back, and counts as a retriable failure. Kafka's
    /// `max.poll.interval.ms` is no limit: the consumer keeps polling meanwhile. Defaults to 5 min.
    #[must_use]
    pub fn handler_limit(mut self, limit: Duration) -> Self {
        self.handler_limit = limit;
        self
    }

    /// How often the position row of an idle partition is read, to notice a restored database or another owner. Defaults
    /// to 3 s.
    #[must_use]
    pub fn check_interval(mut self, interval: Duration) -> Self {
        self.check_interval = interval;
        self
    }

    /// How long a shutdown waits for the running handler before its transaction is rolled back. Defaults to 20 s.
    #[must_use]
    pub fn shutdown_grace(mut self, grace: Duration) -> Self {
        self.shutdown_grace = grace;
        self
    }

    /// Calls `hook` at every [`Step`](crate::Step) of every delivery. For tests and fault injection.
    #[must_use]
    pub fn on_step(mut self, hook: StepHook) -> Self {
        self.on_step = Some(hook);
        self
    }

    /// The function that is called for each message, with the transaction that also holds the dedup mark and the position.
    ///
    /// Write through `tx` and nothing else: what goes elsewhere can happen twice. Its future may be dropped at any await
    /// (revoked partition, end of a shutdown's grace); the transaction is then rolled back. It must not block its thread.
    ///
    /// ```
    /// # use oncebox_inbox::{Delivery, HandlerError, Inbox};
    /// # fn example(pool: sqlx::PgPool, kafka: oncebox_kafka::Config) {
    /// let consumer = Inbox::new(pool, kafka)
    ///     .consumer("points")
    ///     .topic("orders")
    ///     .handle(|tx, delivery| Box::pin(async move {
    ///         sqlx::query("UPDATE points SET total = total + 1").execute(&mut **tx).await?;
    ///         Ok(())
    ///     }));
    /// # let _ = consumer; }
    /// ```
    pub fn handle<F>(self, handler: F) -> Consumer<D>
    where
        F: for<'a> Fn(&'a mut Transaction<'static, D>, Delivery) -> HandlerFuture<'a>
            + Send
            + Sync
            + 'static,
    {
        Consumer {
            inbox: self,
            handler: Handler::Each(Arc::new(handler)),
        }
    }

    /// The same with a function that is called once for all messages of a transaction, to write them with few statements.
    /// They are in the order of the partition; with [`Self::lanes`] those of one lane. When it fails, the batch is halved until
    /// the message that it fails with is alone.
    ///
    /// ```
    /// # use oncebox_inbox::{Delivery, HandlerError, Inbox};
    /// # fn example(pool: sqlx::PgPool, kafka: oncebox_kafka::Config) {
    /// let consumer = Inbox::new(pool, kafka)
    ///     .consumer("points")
    ///     .topic("orders")
    ///     .batch(500)
    ///     .handle_batch(|tx, deliveries| Box::pin(async move {
    ///         let ids: Vec<_> = deliveries.iter().map(|d| d.message_id).collect();
    ///         sqlx::query("INSERT INTO points (message) SELECT unnest($1::uuid[])").bind(ids).execute(&mut **tx).await?;
    ///         Ok(())
    ///     }));
    /// # let _ = consumer; }
    /// ```
    pub fn handle_batch<F>(self, handler: F) -> Consumer<D>
    where
        F: for<'a> Fn(&'a mut Transaction<'static, D>, &'a [Delivery]) -> HandlerFuture<'a>
            + Send
            + Sync
            + 'static,
    {
        Consumer {
            inbox: self,
            handler: Handler::Batch(Arc::new(handler)),
        }
    }

    /// Checks everything that needs no connection.
    fn check(&self) -> Result<(), Error> {
        check_consumer(&self.consumer)?;
        if self.topics.is_empty() {
            return Err(Error::config(
                "topic",
                "is missing: name at least one with `.topic(…)`",
            ));
        }
        if let Some(topic) = self.topics.iter().find(|t| t.is_empty()) {
            return Err(Error::config(
                "topic",
                format!("{topic:?} is no topic name"),
            ));
        }
        if let Some(dead) = &self.dead_topic
            && (dead.name.is_empty() || self.topics.contains(&dead.name))
        {
            return Err(Error::config(
                "dead_letter_topic",
                format!(
                    "is {:?}; it must have a name, and not be read by this consumer",
                    dead.name
                ),
            ));
        }
        if self.delayed_retries && self.on_failure == OnFailure::BlockKey {
            return Err(Error::config(
                "delayed_retries",
                "lets later messages of a key overtake one that failed, and OnFailure::BlockKey keeps their order: choose one",
            ));
        }
        if self.retry.attempts == 0 {
            return Err(Error::config(
                "retry",
                "attempts is 0: the handler is called at least once",
            ));
        }
        for (setting, value) in [("batch", self.batch), ("lanes", self.lanes)] {
            if !(1..=10_000).contains(&value) {
                let problem = format!("is {value}; 1 to 10000 are allowed");
                return Err(Error::config(setting, problem));
            }
        }
        if self.connections == Some(0) {
            return Err(Error::config("connections", "is 0: nothing would be done"));
        }
        if self.dedup == Dedup::ByOffset && self.lanes > 1 {
            return Err(Error::config(
                "lanes",
                format!(
                    "is {}; with Dedup::ByOffset the position alone says what is settled, and that needs one lane",
                    self.lanes
                ),
            ));
        }
        if self.dedup == Dedup::ById {
            self.check_window()?;
        } else if self.hint.is_some() {
            return Err(Error::config(
                "hint",
                "is for Dedup::ById: without marks there is nothing that could confirm it",
            ));
        }
        if self.handler_limit.is_zero() {
            return Err(Error::config(
                "handler_limit",
                "is 0: no handler would finish",
            ));
        }
        if self.check_interval.is_zero() {
            return Err(Error::config(
                "check_interval",
                "is 0: the row would be read without a pause",
            ));
        }
        let max_poll = self.max_poll_interval()?;
        if self.idle_limit.is_zero() || self.idle_limit >= max_poll {
            return Err(Error::config(
                "transaction_idle_limit",
                format!(
                    "is {} ms; it must be above 0 and below Kafka's max.poll.interval.ms ({} ms), or a stopped process could block the next owner of its partition",
                    self.idle_limit.as_millis(),
                    max_poll.as_millis()
                ),
            ));
        }
        self.kafka
            .check()
            .map_err(|e| Error::kafka("use the Kafka configuration", e))
    }

    /// A duplicate that comes after the end of the window is handled again.
    fn check_window(&self) -> Result<(), Error> {
        let horizon = self.retry.horizon();
        for (what, least) in [
            (
                "the outbox keeps published rows (`outbox_retention`)",
                self.outbox_retention,
            ),
            ("a message may be retried (`retry`)", horizon),
        ] {
            if self.window < least {
                return Err(Error::config(
                    "window",
                    format!(
                        "is {} s, shorter than {what}: {} s; a duplicate within that time would have a second effect",
                        self.window.as_secs(),
                        least.as_secs()
                    ),
                ));
            }
        }
        Ok(())
    }

    fn max_poll_interval(&self) -> Result<Duration, Error> {
        const NAME: &str = "max.poll.interval.ms";
        let properties = &self.kafka.properties;
        let set = properties
            .get(NAME)
            .or_else(|| properties.get("kafka.max.poll.interval.ms"));
        let Some(text) = set else {
            return Ok(MAX_POLL_INTERVAL);
        };
        let millis = text
            .parse()
            .map_err(|_| Error::config(NAME, format!("{text:?} is no number")))?;
        Ok(Duration::from_millis(millis))
    }
}

/// `^[a-z0-9][a-z0-9._-]{0,99}$`
pub(crate) fn check_consumer(name: &str) -> Result<(), Error> {
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let problem = if name.is_empty() {
        "is missing: name the consumer, for example `.consumer(\"inventory\")`".to_owned()
    } else if name.len() > 100 {
        format!("is {} characters long, the limit is 100", name.len())
    } else if !legal(name.as_bytes()[0])
        || !name
            .bytes()
            .all(|b| legal(b) || matches!(b, b'.' | b'_' | b'-'))
    {
        format!("{name:?} is not allowed: a-z, 0-9 and after the first character . _ -")
    } else {
        return Ok(());
    };
    Err(Error::config("consumer", problem))
}

/// A consumer that is ready to run.
#[must_use = "nothing happens before `run`"]
pub struct Consumer<D: InboxStore> {
    inbox: Inbox<D>,
    handler: Handler<D>,
}

impl<D: InboxStore> fmt::Debug for Consumer<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inbox.fmt(f)
    }
}

impl<D: InboxStore> Consumer<D> {
    /// The live counters of this consumer.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.inbox.stats.clone()
    }

    /// Consumes until `shutdown` is cancelled: then the running message is finished, offsets are committed, and the group
    /// is left. Outages of the database and of Kafka are waited out.
    ///
    /// # Errors
    ///
    /// What needs somebody's decision or a correction, see [`Error`]. Nothing is lost by an error: what the database has not
    /// settled is delivered again after the next start.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future is a shutdown that nobody waits for: the consumer's thread finishes the running message and
    /// leaves the group.
    pub async fn run(self, shutdown: CancellationToken) -> Result<(), Error> {
        let Self { inbox, handler } = self;
        inbox.check()?;
        let mut conn = connect(&inbox.pool, &inbox.names).await?;
        let statements = D::statements(&inbox.names, inbox.idle_limit);
        let tripped = D::all_tripped(&mut conn, &statements, &inbox.consumer)
            .await
            .map_err(|e| Error::database("look for a stop", e))?;
        let mut ours = tripped.into_iter();
        if let Some((topic, failures, failure)) = ours.find(|(t, ..)| inbox.topics.contains(t)) {
            return Err(Error::Breaker {
                consumer: inbox.consumer,
                topic,
                failures: u32::try_from(failures).unwrap_or_default(),
                failure,
            });
        }
        let any_blocked = D::any_blocked(&mut conn, &statements, &inbox.consumer)
            .await
            .map_err(|e| Error::database("look for blocked keys", e))?;
        let hint = match &inbox.hint {
            Some(hint) => {
                let epoch = D::epoch(&mut conn)
                    .await
                    .map_err(|e| Error::database("ask for the database's epoch", e))?;
                Some(Hinted {
                    hint: Arc::clone(hint),
                    scope: Scope::new(epoch, inbox.consumer.as_str()),
                })
            }
            None => None,
        };
        drop(conn);
        for topic in &inbox.topics {
            let id = oncebox_kafka::topic_id(&inbox.kafka, topic)
                .await
                .map_err(|e| Error::kafka("look for a topic", e))?;
            if id.is_none() {
                return Err(Error::UnknownTopic {
                    topic: topic.clone(),
                });
            }
        }
        let processor = Processor {
            pool: inbox.pool.clone(),
            statements,
            handler,
            dedup: inbox.dedup,
            on_failure: inbox.on_failure,
            dead_topic: inbox.dead_topic.clone(),
            looks_for_blocked_keys: any_blocked || inbox.on_failure == OnFailure::BlockKey,
            hint,
            record: inbox.record.clone(),
            on_step: inbox.on_step.clone(),
            idle_limit: inbox.idle_limit,
            handler_limit: inbox.handler_limit,
        };
        let stop = shutdown.child_token();
        let _stop_when_dropped = stop.clone().drop_guard();
        let worker = tokio::spawn(consume(inbox, processor, stop));
        worker.await.map_err(|_| Error::Thread)?
    }
}

/// The life of the consumer, also when nobody waits for it any more.
async fn consume<D: InboxStore>(
    inbox: Inbox<D>,
    processor: Processor<D>,
    stop: CancellationToken,
) -> Result<(), Error> {
    let Inbox { kafka, topics, .. } = &inbox;
    let feed = KafkaFeed::subscribe(kafka.clone(), &inbox.consumer, topics, Handle::current())
        .map_err(|e| Error::kafka("create the Kafka consumer", e))?;
    let pooled = usize::try_from(inbox.pool.options().get_max_connections()).unwrap_or(1);
    let connections = match inbox.connections {
        Some(connections) => connections,
        None if D::IN_PROCESS => 1,
        None => pooled.saturating_sub(1).clamp(1, 8),
    };
    let settings = Settings {
        consumer: inbox.consumer.into(),
        retry: inbox.retry,
        foreign_id: inbox.foreign_id,
        limits: Limits {
            lanes: inbox.lanes,
            batch: inbox.batch,
            check: inbox.check_interval,
            delayed_retries: inbox.delayed_retries,
        },
        connections,
        breaker: inbox.breaker,
        shutdown_grace: inbox.shutdown_grace,
        window: inbox.dedup.marks().then_some(inbox.window),
    };
    work(feed, processor, settings, stop, inbox.stats).await
}
