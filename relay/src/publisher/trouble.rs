//! What a transaction that failed means: which record is refused, which topic is paused.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::{Publisher, taint};
use crate::error::Error;
use crate::log::{NotPublished, Producer, Refused};
use crate::session::{ParkingSession, Row};

/// First pause before a paused topic is tried again, and the longest.
pub(super) const PROBE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));

/// Attempts of a rehearsal: after an abort because of a refused record, the next transaction may fail once by itself
/// (OUT_OF_ORDER_SEQUENCE_NUMBER).
const REHEARSALS: usize = 3;

/// What is remembered over a rebuild.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// Topics that alone got no acknowledgement in the last attempt, and how often in a row.
    silent: HashMap<String, u32>,
    /// When to try a paused topic again, and how long to wait after that.
    pub(super) probes: HashMap<String, (Instant, Duration)>,
}

impl Memory {
    pub(super) fn due(&self) -> Vec<String> {
        let now = Instant::now();
        let due = self.probes.iter().filter(|(_, (at, _))| *at <= now);
        due.map(|(topic, _)| topic.clone()).collect()
    }
}

/// What is done about a transaction that failed, before it is tried again.
pub(super) enum Lesson {
    /// These rows are refused, by their index, with Kafka's words. None = it was the batch, and the next ones are smaller.
    Refused(Vec<usize>, String),
    /// This topic was paused, with the reason.
    Paused(String, String),
    /// Some topics alone did not acknowledge; those were paused that did so twice in a row.
    Silent(Vec<String>, String),
}

impl<S: ParkingSession, P: Producer> Publisher<S, P> {
    /// Finds out why these rows were not published, pauses the topics and shrinks the batches that are to blame.
    pub(super) async fn learn(
        &mut self,
        failed: NotPublished,
        rows: &[&Row],
    ) -> Result<Lesson, Error> {
        match failed {
            NotPublished::Refused(refused) => {
                let culprits = self.culprits(rows, &refused).await?;
                if culprits.is_empty() {
                    let topic = &rows[refused.likely].record.topic;
                    self.shrink_batches(topic, refused.suspects.len());
                }
                Ok(Lesson::Refused(culprits, refused.reason))
            }
            NotPublished::Topic(refused) => {
                let topic = self.guilty_topic(rows, refused.suspects).await?;
                self.pause(&topic, &refused.reason).await?;
                Ok(Lesson::Paused(topic, refused.reason))
            }
            NotPublished::Silent(silent) => {
                let twice = self.silent_again(silent.topics, silent.error)?;
                for topic in &twice {
                    self.pause(topic, &silent.reason).await?;
                }
                Ok(Lesson::Silent(twice, silent.reason))
            }
            NotPublished::Other(error) => Err(error),
        }
    }

    /// Which of the suspects Kafka refuses, each of them by itself, found by rehearsals that are aborted. None = it is the
    /// batch that is too large.
    async fn culprits(&mut self, rows: &[&Row], refused: &Refused) -> Result<Vec<usize>, Error> {
        let (suspects, likely) = (&refused.suspects, refused.likely);
        if let [certain] = **suspects {
            return Ok(vec![certain]);
        }
        tracing::warn!(
            suspects = suspects.len(),
            "Kafka refuses a batch; looking for the record"
        );
        // The one that Kafka named, if it named any. Mostly it is the size: the largest, until one is taken.
        let mut candidates = suspects.clone();
        candidates.sort_by_key(|index| (*index != likely, Reverse(rows[*index].bytes())));
        let mut culprits = Vec::new();
        for index in candidates {
            if self.is_refused(rows, &[index]).await? {
                culprits.push(index);
            } else if index != likely {
                break;
            }
        }
        let mut rest = suspects.clone();
        rest.retain(|index| !culprits.contains(index));
        let mut open = vec![rest];
        while let Some(part) = open.pop() {
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

    pub(super) async fn rehearse(
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

    pub(super) fn records_per_batch(&self, rows: &[&Row]) -> Option<NonZeroUsize> {
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

    pub(super) async fn pause(&mut self, topic: &str, reason: &str) -> Result<(), Error> {
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
        {
            let mut memory = self.memory();
            let (at, pause) = memory
                .probes
                .entry(topic.to_owned())
                .or_insert((Instant::now(), PROBE.0));
            (*at, *pause) = (Instant::now() + *pause, (*pause * 2).min(PROBE.1));
        }
        // The next batch must know.
        self.look().await
    }

    pub(super) fn quiet(&self) {
        self.memory().silent.clear();
    }

    pub(super) fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
