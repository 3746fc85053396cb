//! The publisher: sends batch after batch, each with the position that belongs to it, parks what Kafka refuses, and
//! releases it again. It runs on the leader's task, one thing after the other.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroUsize;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, watch};

use crate::config::Config;
use crate::error::Error;
use crate::health::Health;
use crate::keeper::Pulse;
use crate::log::{How, NotPublished, Producer};
use crate::parking::Plan;
use crate::position::{Checkpoint, Gaps, Position, Tally};
use crate::reader::Batch;
use crate::session::{
    Cause, Limit, Overview, ParkedRow, Parking, ParkingSession, Paused, Request, Row,
};
use crate::step::Step;

/// Rows of one transaction that parks, and of one that releases.
const PARKING_ROWS: usize = 500;

/// How often the operators' requests and pauses are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// First pause before a paused topic is tried again, and the longest.
const PROBE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));

/// How long one try of a topic that was paused for its silence may take: the others wait meanwhile (G9).
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the second try of a batch may take, of which one topic alone got no acknowledgement.
const SECOND_TRY: Duration = Duration::from_secs(10);

/// Attempts of a rehearsal: after an abort because of a refused record, the next transaction may fail once by itself
/// (OUT_OF_ORDER_SEQUENCE_NUMBER).
const REHEARSALS: usize = 3;

/// What is remembered over a rebuild.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// Topics that alone got no acknowledgement in the last attempt, and how often in a row.
    silent: HashMap<String, u32>,
    /// When to try a paused topic again, and how long to wait after that.
    probes: HashMap<String, (Instant, Duration)>,
}

impl Memory {
    fn due(&self) -> Vec<String> {
        let now = Instant::now();
        let due = self.probes.iter().filter(|(_, (at, _))| *at <= now);
        due.map(|(topic, _)| topic.clone()).collect()
    }
}

/// Publishes as the leader of one term.
pub(crate) struct Publisher<S, P> {
    pub(crate) config: Config,
    pub(crate) health: Health,
    pub(crate) producer: Arc<P>,
    /// The keeper's session: what is written is written as the leader of `epoch`.
    pub(crate) session: Arc<Mutex<S>>,
    pub(crate) epoch: i64,
    pub(crate) cluster_id: String,
    pub(crate) source_epoch: i64,
    pub(crate) pulse: Pulse,
    pub(crate) acknowledged: watch::Sender<Option<Checkpoint>>,
    /// The acknowledged position.
    pub(crate) last: Checkpoint,
    pub(crate) last_at: Instant,
    pub(crate) memory: Arc<std::sync::Mutex<Memory>>,
    pub(crate) desk: Desk,
}

/// What the publisher knows about parked rows and paused topics.
#[derive(Debug, Default)]
pub(crate) struct Desk {
    overview: Overview,
    /// Something may be releasable.
    due: bool,
    looked_at: Option<Instant>,
    /// Topics that take each record but no large batch: records per batch.
    small_batches: HashMap<Arc<str>, NonZeroUsize>,
}

impl Desk {
    /// Parked rows may be releasable when a term begins.
    pub(crate) fn new() -> Self {
        Self {
            due: true,
            ..Self::default()
        }
    }

    fn is_empty(&self) -> bool {
        self.overview.parked.is_empty() && self.overview.paused.is_empty()
    }
}

impl<S: ParkingSession, P: Producer> Publisher<S, P> {
    /// Publishes a batch, or what of it can be published; the rest is parked first (G8).
    pub(crate) async fn publish(&mut self, batch: Batch) -> Result<(), Error> {
        let rows = &batch.rows;
        let count = rows.len() as u64;
        let oldest = rows.iter().map(|row| row.created_at_micros).min();
        self.health.lag(count + batch.behind);
        self.health.oldest(oldest);
        let mut plan = self.plan(rows).await?;
        let mut how = How::default();
        let published = loop {
            self.park(&mut plan).await?;
            let wanted = plan.publishable();
            let next = Checkpoint {
                seq: self.last.seq + 1,
                position: batch.position.clone(),
                parked: self.last.parked.with(plan.parked(rows)),
                released: Gaps::default(),
                ..self.last.clone()
            };
            let sent: Vec<&Row> = wanted.iter().map(|index| &rows[*index]).collect();
            how.records_per_batch = self.records_per_batch(&sent);
            match self.send(&sent, &next, how).await {
                Ok(tainted) => {
                    self.acknowledge(next);
                    taint(tainted)?;
                    break sent.len() as u64;
                }
                Err(NotPublished::Refused(refused)) => {
                    for index in self
                        .culprits(&sent, &refused.suspects, refused.likely)
                        .await?
                    {
                        plan.refuse(rows, wanted[index], &refused.reason);
                    }
                    if plan.unwritten().is_empty() {
                        self.shrink_batches(
                            &sent[refused.likely].record.topic,
                            refused.suspects.len(),
                        );
                    }
                }
                Err(NotPublished::Topic(refused)) => {
                    let topic = self.guilty_topic(&sent, refused.suspects).await?;
                    self.pause(&topic, &refused.reason).await?;
                    plan.pause(rows, &topic, &refused.reason);
                }
                Err(NotPublished::Silent(silent)) => {
                    let twice = self.silent_again(silent.topics, silent.error)?;
                    how.timeout = twice.is_empty().then_some(SECOND_TRY);
                    for topic in twice {
                        self.pause(&topic, &silent.reason).await?;
                        plan.pause(rows, &topic, &silent.reason);
                    }
                }
                Err(NotPublished::Other(error)) => return Err(error),
            }
        };
        self.quiet();
        self.health.update(|s| {
            s.published += published;
            s.last_error = None;
        });
        metrics::counter!("oncebox_relay_published_total").increment(published);
        self.health.lag(batch.behind);
        self.health.oldest(None);
        Ok(())
    }

    /// Commits the position again: Kafka forgets the offsets of a group that is idle for too long.
    pub(crate) async fn heartbeat(&mut self) -> Result<(), Error> {
        if self.last_at.elapsed() < self.config.heartbeat {
            return Ok(());
        }
        let next = Checkpoint {
            seq: self.last.seq + 1,
            released: Gaps::default(),
            ..self.last.clone()
        };
        let tainted = self.send(&[], &next, How::default()).await?;
        self.acknowledge(next);
        taint(tainted)
    }

    /// Whether [`Publisher::tend`] has something to do.
    pub(crate) fn is_due(&self) -> bool {
        let looked = self.desk.looked_at;
        self.desk.due || looked.is_none_or(|at| at.elapsed() >= LOOK)
    }

    /// How long [`Publisher::tend`] need not be called when no batch comes.
    pub(crate) fn next_look(&self) -> Duration {
        let looked = self.desk.looked_at.filter(|_| !self.desk.due);
        looked.map_or(Duration::ZERO, |at| LOOK.saturating_sub(at.elapsed()))
    }

    /// Whether parked rows may still be releasable.
    pub(crate) fn may_release(&self) -> bool {
        self.desk.due
    }

    /// Looks for what operators want, tries paused topics again, and releases a chunk of parked rows.
    pub(crate) async fn tend(&mut self) -> Result<(), Error> {
        if self.desk.looked_at.is_none_or(|at| at.elapsed() >= LOOK) {
            self.look().await?;
        }
        let due = self.memory().due();
        for topic in due {
            self.probe(&topic).await?;
        }
        if self.desk.due {
            self.release().await?;
        }
        Ok(())
    }

    /// Reads what is parked and paused.
    async fn look(&mut self) -> Result<(), Error> {
        let overview = self.session.lock().await.overview().await?;
        let desk = &mut self.desk;
        desk.looked_at = Some(Instant::now());
        let over = |before: &Paused| {
            let mut now = overview.paused.iter();
            !now.any(|p| (&p.topic, &p.key) == (&before.topic, &before.key))
        };
        desk.due |= overview.requests || desk.overview.paused.iter().any(over);
        let by_relay = overview.paused.iter().filter(|p| p.by_relay);
        let by_relay: HashSet<&str> = by_relay.map(|p| &*p.topic).collect();
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.probes.retain(|topic, _| by_relay.contains(&**topic));
        for topic in by_relay {
            let probe = memory.probes.entry(topic.to_owned());
            probe.or_insert_with(|| (Instant::now(), PROBE.0));
        }
        drop(memory);
        desk.overview = overview;
        self.show();
        Ok(())
    }

    fn show(&self) {
        let overview = &self.desk.overview;
        let parked = overview
            .parked
            .iter()
            .map(|(_, n)| u64::try_from(*n).unwrap_or(0))
            .sum();
        #[allow(clippy::cast_precision_loss, reason = "gauges")]
        {
            metrics::gauge!("oncebox_relay_parked_messages").set(parked as f64);
            metrics::gauge!("oncebox_relay_paused_topics").set(overview.paused.len() as f64);
        }
        self.health.update(|s| {
            s.parked = parked;
            s.paused = overview.paused.iter().map(|p| p.topic.clone()).collect();
        });
    }

    async fn plan(&mut self, rows: &[Row]) -> Result<Plan, Error> {
        if self.desk.looked_at.is_none() {
            self.look().await?;
        }
        if self.desk.is_empty() {
            return Ok(Plan::publish_all(rows));
        }
        let among = self.session.lock().await.parked_among(rows).await?;
        // Parked before, settled with this batch: only then may they be released.
        self.desk.due |= !among.ids.is_empty();
        Ok(Plan::new(rows, &among, &self.desk.overview.paused)?)
    }

    /// Writes what the plan parks: before any checkpoint passes it, so that nothing passes a row that is not recorded (G8).
    async fn park(&mut self, plan: &mut Plan) -> Result<(), Error> {
        let unwritten = plan.unwritten();
        if unwritten.is_empty() {
            return Ok(());
        }
        for chunk in unwritten.chunks(PARKING_ROWS) {
            self.session
                .lock()
                .await
                .park(self.epoch, chunk)
                .await?
                .led()?;
            self.config.step(Step::Parked);
        }
        plan.written();
        report(&unwritten);
        self.look().await
    }

    async fn pause(&mut self, topic: &str, reason: &str) -> Result<(), Error> {
        tracing::error!(
            topic,
            reason,
            "topic paused: its messages are parked until it takes them; trying again by itself"
        );
        self.session
            .lock()
            .await
            .pause(self.epoch, topic, reason)
            .await?
            .led()?;
        let mut memory = self.memory();
        let (at, pause) = memory
            .probes
            .entry(topic.to_owned())
            .or_insert((Instant::now(), PROBE.0));
        (*at, *pause) = (Instant::now() + *pause, (*pause * 2).min(PROBE.1));
        Ok(())
    }

    /// Tries a paused topic with its first parked row, in a transaction that is aborted; takes it again if Kafka does.
    async fn probe(&mut self, topic: &str) -> Result<(), Error> {
        let first = Limit { rows: 1, bytes: 0 };
        let high = self.last.position.high;
        let rows = self
            .session
            .lock()
            .await
            .releasable(high, first, Some(topic))
            .await?;
        // When no row of it waits, the next one is the test.
        if let Some(parked) = rows.first() {
            match self.rehearse(&[&parked.row], Some(PROBE_TIMEOUT)).await? {
                Ok(()) | Err(NotPublished::Refused(_)) => {}
                Err(NotPublished::Topic(refused)) => {
                    return self.pause(topic, &refused.reason).await;
                }
                Err(NotPublished::Silent(silent)) => {
                    return self.pause(topic, &silent.reason).await;
                }
                Err(NotPublished::Other(error)) => {
                    self.pause(topic, &error.to_string()).await?;
                    return if error.may_go_on() {
                        Ok(())
                    } else {
                        Err(error)
                    };
                }
            }
        }
        tracing::info!(topic, "topic resumed");
        self.session
            .lock()
            .await
            .resume_topic(self.epoch, topic)
            .await?
            .led()?;
        self.memory().probes.remove(topic);
        self.look().await
    }

    /// Releases parked rows that nothing holds any more, in id order and only those that the acknowledged position has
    /// settled.
    async fn release(&mut self) -> Result<(), Error> {
        loop {
            let chunk = self.releasable().await?;
            if chunk.is_empty() {
                self.desk.due = false;
                return Ok(());
            }
            let ids = Gaps::of(chunk.iter().map(|parked| parked.row.id));
            let skipped = |parked: &&ParkedRow| parked.request == Some(Request::Skip);
            let rows: Vec<&Row> = chunk
                .iter()
                .filter(|p| !skipped(p))
                .map(|p| &p.row)
                .collect();
            let mut gone = Tally::default();
            chunk
                .iter()
                .for_each(|parked| gone.add_message(parked.row.message_id));
            let next = Checkpoint {
                seq: self.last.seq + 1,
                parked: self.last.parked.without(gone),
                released: ids,
                ..self.last.clone()
            };
            let how = How {
                records_per_batch: self.records_per_batch(&rows),
                timeout: None,
            };
            match self.send(&rows, &next, how).await {
                Ok(tainted) => {
                    self.config.step(Step::Released);
                    let mut session = self.session.lock().await;
                    session
                        .finish_release(self.epoch, &next, &self.cluster_id)
                        .await?
                        .led()?;
                    drop(session);
                    self.acknowledge(next);
                    self.config.step(Step::Unparked);
                    let (published, skipped) = (rows.len(), chunk.len() - rows.len());
                    tracing::info!(published, skipped, "parked messages released");
                    metrics::counter!("oncebox_relay_released_total").increment(published as u64);
                    metrics::counter!("oncebox_relay_skipped_total").increment(skipped as u64);
                    self.health.update(|s| s.published += published as u64);
                    taint(tainted)?;
                    return self.look().await;
                }
                Err(NotPublished::Refused(refused)) => {
                    let culprits = self
                        .culprits(&rows, &refused.suspects, refused.likely)
                        .await?;
                    for index in &culprits {
                        let id = rows[*index].id;
                        tracing::error!(
                            id,
                            reason = refused.reason,
                            "parked message is refused again"
                        );
                        let mut session = self.session.lock().await;
                        session
                            .refuse(self.epoch, id, &refused.reason)
                            .await?
                            .led()?;
                    }
                    if culprits.is_empty() {
                        let topic = rows[refused.likely].record.topic.clone();
                        self.shrink_batches(&topic, refused.suspects.len());
                    }
                }
                Err(NotPublished::Topic(refused)) => {
                    let topic = self.guilty_topic(&rows, refused.suspects).await?;
                    self.pause(&topic, &refused.reason).await?;
                }
                Err(NotPublished::Silent(silent)) => {
                    for topic in self.silent_again(silent.topics, silent.error)? {
                        self.pause(&topic, &silent.reason).await?;
                    }
                }
                Err(NotPublished::Other(error)) => return Err(error),
            }
        }
    }

    /// The next chunk: settled rows only, and as many as the checkpoint can name.
    async fn releasable(&mut self) -> Result<Vec<ParkedRow>, Error> {
        let limit = Limit {
            rows: PARKING_ROWS,
            bytes: self.config.max_batch_bytes,
        };
        let position = &self.last.position;
        let mut session = self.session.lock().await;
        let mut chunk = session.releasable(position.high, limit, None).await?;
        drop(session);
        // G8: what the position has not settled is still on its way through the normal path; nothing overtakes it.
        let unsettled = |parked: &ParkedRow| position.gaps.contains(parked.row.id);
        if let Some(first) = chunk.iter().position(unsettled) {
            chunk.truncate(first);
        }
        let bytes = |count: usize| {
            let ids = chunk[..count].iter().map(|parked| parked.row.id);
            let named = Checkpoint {
                released: Gaps::of(ids),
                position: Position::default(),
                ..self.last.clone()
            };
            named.encode().len()
        };
        // The gaps have the other half, or a base record.
        let room = self.config.checkpoint_bytes / 2;
        let mut count = chunk.len();
        while count > 1 && bytes(count) > room {
            count /= 2;
        }
        chunk.truncate(count);
        Ok(chunk)
    }

    /// Which of the suspects Kafka refuses, each of them by itself, found by rehearsals that are aborted. None = it is the
    /// batch that is too large.
    async fn culprits(
        &mut self,
        rows: &[&Row],
        suspects: &[usize],
        likely: usize,
    ) -> Result<Vec<usize>, Error> {
        if let [certain] = *suspects {
            return Ok(vec![certain]);
        }
        tracing::warn!(
            suspects = suspects.len(),
            "Kafka refuses a batch; looking for the record"
        );
        let mut culprits = Vec::new();
        let mut open = Vec::new();
        if self.is_refused(rows, &[likely]).await? {
            culprits.push(likely);
            open.push(
                suspects
                    .iter()
                    .copied()
                    .filter(|index| *index != likely)
                    .collect(),
            );
        } else {
            open.push(suspects.to_vec());
        }
        while let Some(part) = open.pop() {
            let part: Vec<usize> = part;
            if !self.is_refused(rows, &part).await? {
                continue;
            }
            if let [culprit] = *part {
                culprits.push(culprit);
                continue;
            }
            let (left, right) = part.split_at(part.len() / 2);
            open.push(right.to_vec());
            open.push(left.to_vec());
        }
        culprits.sort_unstable();
        Ok(culprits)
    }

    async fn is_refused(&mut self, rows: &[&Row], part: &[usize]) -> Result<bool, Error> {
        let part: Vec<&Row> = part.iter().map(|index| rows[*index]).collect();
        match self.rehearse(&part, None).await? {
            Ok(()) => Ok(false),
            Err(NotPublished::Refused(_)) => Ok(true),
            Err(other) => Err(other.into()),
        }
    }

    /// The topic that was refused: librdkafka does not always say which.
    async fn guilty_topic(
        &mut self,
        rows: &[&Row],
        mut suspects: Vec<String>,
    ) -> Result<String, Error> {
        while suspects.len() > 1 {
            let topic = &suspects[suspects.len() - 1];
            let sample: Vec<&Row> = rows
                .iter()
                .copied()
                .filter(|row| *row.record.topic == **topic)
                .take(1)
                .collect();
            match self.rehearse(&sample, None).await? {
                Err(NotPublished::Topic(refused)) => return Ok(refused.suspects.concat()),
                Ok(()) | Err(NotPublished::Refused(_)) => suspects.pop(),
                Err(other) => return Err(other.into()),
            };
        }
        Ok(suspects.concat())
    }

    async fn rehearse(
        &mut self,
        rows: &[&Row],
        timeout: Option<Duration>,
    ) -> Result<Result<(), NotPublished>, Error> {
        let mut left = REHEARSALS;
        loop {
            left -= 1;
            self.pulse.busy(true);
            let result = self
                .producer
                .rehearse(self.source_epoch, rows, timeout)
                .await;
            self.pulse.busy(false);
            match result {
                Err(NotPublished::Other(error))
                    if left > 0 && timeout.is_none() && error.may_go_on() =>
                {
                    tracing::debug!(%error, "rehearsal again");
                }
                Ok(tainted) => {
                    taint(tainted)?;
                    return Ok(Ok(()));
                }
                Err(other) => return Ok(Err(other)),
            }
        }
    }

    /// The topic takes each record, but not a batch of so many.
    fn shrink_batches(&mut self, topic: &Arc<str>, refused: usize) {
        let records = NonZeroUsize::new(refused / 2).unwrap_or(NonZeroUsize::MIN);
        tracing::warn!(
            topic = &**topic,
            records,
            "the topic refuses large batches of small records (max.message.bytes below kafka.batch.size): publishing in small batches"
        );
        self.desk.small_batches.insert(Arc::clone(topic), records);
    }

    fn records_per_batch(&self, rows: &[&Row]) -> Option<NonZeroUsize> {
        let limits = &self.desk.small_batches;
        if limits.is_empty() {
            return None;
        }
        rows.iter()
            .filter_map(|row| limits.get(&row.record.topic))
            .min()
            .copied()
    }

    /// Topics that alone got no acknowledgement twice in a row; once may be a broker that restarts.
    fn silent_again(&self, topics: Vec<String>, error: Error) -> Result<Vec<String>, Error> {
        let silent = &mut self.memory().silent;
        silent.retain(|topic, _| topics.contains(topic));
        for topic in &topics {
            *silent.entry(topic.clone()).or_default() += 1;
        }
        let twice: Vec<_> = topics
            .into_iter()
            .filter(|topic| silent[topic] > 1)
            .collect();
        if twice.is_empty() && !error.may_go_on() {
            return Err(error);
        }
        Ok(twice)
    }

    fn quiet(&self) {
        self.memory().silent.clear();
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn send(
        &mut self,
        rows: &[&Row],
        next: &Checkpoint,
        how: How,
    ) -> Result<Option<String>, NotPublished> {
        self.pulse.busy(true);
        let committed = self
            .producer
            .publish(self.source_epoch, rows, next, how)
            .await;
        self.pulse.busy(false);
        committed
    }

    /// G3: only after the commit is known is the position acknowledged; the keeper writes it into the mark.
    fn acknowledge(&mut self, next: Checkpoint) {
        self.health
            .update(|s| (s.seq, s.high) = (next.seq, next.position.high));
        self.acknowledged.send_replace(Some(next.clone()));
        self.last = next;
        self.last_at = Instant::now();
        self.health.progress();
        metrics::counter!("oncebox_relay_transactions_total").increment(1);
    }
}

fn taint(tainted: Option<String>) -> Result<(), Error> {
    tainted.map_or(Ok(()), |reason| Err(Error::Tainted(reason)))
}

/// Says what was parked: each refused row, and how many wait behind something.
fn report(parked: &[Parking]) {
    for row in parked.iter().filter(|row| row.cause == Cause::Refused) {
        tracing::error!(
            id = row.id,
            reason = row.reason,
            "message parked: Kafka refuses it; `oncebox relay park show {}`, then requeue or skip",
            row.id
        );
    }
    for cause in [Cause::Refused, Cause::Key, Cause::Topic] {
        let count = parked.iter().filter(|row| row.cause == cause).count() as u64;
        metrics::counter!("oncebox_relay_parked_total", "cause" => cause.as_str()).increment(count);
        if count > 0 && cause != Cause::Refused {
            tracing::warn!(
                count,
                cause = cause.as_str(),
                "messages parked behind others"
            );
        }
    }
}
