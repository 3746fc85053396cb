//! An in-memory log whose transactions may happen or not, and be reported or not.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncebox_kafka::Stability;
use tokio::sync::Notify;
use uuid::Uuid;

use crate::error::Error;
use crate::log::{How, Log, NotPublished, Producer, Refused, Silent, TopicRefused};
use crate::position::Checkpoint;
use crate::session::Row;

/// What the next transaction does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    HappensUnreported,
    DoesNotHappen,
    Taints,
    /// Nobody knows until the next producer is opened: then it happens.
    SettledByTheFence,
    /// Neither happens nor ends.
    NeverAnswered,
}

#[derive(Debug, Default)]
pub(super) struct State {
    published: Vec<(i64, Uuid)>,
    pub(super) checkpoint: Option<Checkpoint>,
    pub(super) epoch: u64,
    pub(super) fates: Vec<(usize, Fate)>,
    pub(super) transactions: usize,
    pub(super) in_doubt: Option<(Vec<(i64, Uuid)>, Checkpoint)>,
    /// Epoch of the producer whose next transaction a late request would end.
    pub(super) tainted: Option<u64>,
    pub(super) cluster: String,
    /// Rows that the brokers refuse; the refusal comes back for every record of the topic in the transaction.
    pub(super) refused: BTreeSet<i64>,
    /// Topics that do not exist.
    pub(super) missing: BTreeSet<String>,
    /// Topics that never acknowledge.
    pub(super) silent: BTreeSet<String>,
    /// Most records of a batch.
    pub(super) largest_batch: Option<usize>,
    pub(super) rehearsals: usize,
    /// The next transaction says that it has begun, and waits.
    pub(super) gate: Option<Arc<(Notify, Notify)>>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct FakeLog(Arc<Mutex<State>>);

pub(super) struct FakeProducer {
    state: Arc<Mutex<State>>,
    epoch: u64,
}

impl FakeLog {
    pub(super) fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub(super) fn ids(&self) -> Vec<i64> {
        self.lock().published.iter().map(|(id, _)| *id).collect()
    }

    /// The gaps of the checkpoint.
    pub(super) fn gaps(&self) -> String {
        let checkpoint = self.lock().checkpoint.clone();
        checkpoint.map_or_else(String::new, |c| c.position.gaps.to_string())
    }

    /// The n-th transaction from now, claims included.
    pub(super) fn fate(&self, n: usize, fate: Fate) {
        let mut state = self.lock();
        let at = state.transactions + n;
        state.fates.push((at, fate));
    }
}

fn lost(text: &str) -> Error {
    Error::Kafka(oncebox_kafka::Error::Unreachable {
        bootstrap: "fake".to_owned(),
        reason: text.to_owned(),
    })
}

impl Log for FakeLog {
    type Producer = FakeProducer;

    async fn cluster_id(&self) -> Result<String, Error> {
        Ok(self.lock().cluster.clone())
    }

    async fn prepare(&self) -> Result<(), Error> {
        Ok(())
    }

    async fn checkpoint(&self, _: Stability) -> Result<Option<Checkpoint>, Error> {
        let text = self.lock().checkpoint.as_ref().map(Checkpoint::encode);
        Ok(text.map(|text| Checkpoint::decode(&text).unwrap()))
    }

    async fn open(&self) -> Result<FakeProducer, Error> {
        let mut state = self.lock();
        if let Some((rows, checkpoint)) = state.in_doubt.take() {
            state.published.extend(rows);
            state.checkpoint = Some(checkpoint);
        }
        state.epoch += 1;
        Ok(FakeProducer {
            state: Arc::clone(&self.0),
            epoch: state.epoch,
        })
    }
}

impl Producer for FakeProducer {
    async fn publish(
        &self,
        _: i64,
        rows: &[&Row],
        checkpoint: &Checkpoint,
        how: How,
    ) -> Result<Option<String>, NotPublished> {
        tokio::task::yield_now().await;
        let gate = self.state.lock().unwrap().gate.take();
        if let Some(gate) = gate {
            gate.0.notify_one();
            gate.1.notified().await;
        }
        let fate = self.fate()?;
        self.look(rows, how.records_per_batch)?;
        if fate == Some(Fate::NeverAnswered) {
            std::future::pending::<()>().await;
        }
        let mut state = self.state.lock().unwrap();
        if fate == Some(Fate::DoesNotHappen) {
            return Err(lost("aborted").into());
        }
        let rows = rows.iter().map(|row| (row.id, row.message_id));
        if fate == Some(Fate::SettledByTheFence) {
            state.in_doubt = Some((rows.collect(), checkpoint.clone()));
            return Err(lost("no answer").into());
        }
        // Measured on a broker: a late request ends the next transaction of the producer, which then reports success,
        // has its checkpoint stored and its records aborted.
        if state.tainted != Some(self.epoch) {
            state.published.extend(rows);
        }
        state.checkpoint = Some(checkpoint.clone());
        match fate {
            Some(Fate::HappensUnreported) => Err(lost("no answer").into()),
            Some(Fate::Taints) => {
                state.tainted = Some(self.epoch);
                Ok(Some("EndTxn sent twice".to_owned()))
            }
            _ => Ok(None),
        }
    }

    async fn rehearse(
        &self,
        _: i64,
        rows: &[&Row],
        _: Option<Duration>,
    ) -> Result<Option<String>, NotPublished> {
        self.state.lock().unwrap().rehearsals += 1;
        self.look(rows, None)?;
        Ok(None)
    }

    fn last_step(&self) -> Instant {
        Instant::now()
    }

    async fn close(self) {}
}

impl From<Error> for NotPublished {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

impl FakeProducer {
    /// What the brokers think of these rows.
    fn look(&self, rows: &[&Row], per_batch: Option<NonZeroUsize>) -> Result<(), NotPublished> {
        let state = self.state.lock().unwrap();
        let of = |topics: &BTreeSet<String>| {
            let mut found: Vec<_> = topics.iter().cloned().collect();
            found.retain(|topic| rows.iter().any(|row| *row.record.topic == **topic));
            found
        };
        if !of(&state.missing).is_empty() {
            // The client does not know which topic it was.
            let mut suspects: Vec<_> = rows
                .iter()
                .map(|row| row.record.topic.to_string())
                .collect();
            suspects.dedup();
            let reason = "not there".to_owned();
            return Err(NotPublished::Topic(TopicRefused { suspects, reason }));
        }
        let batch = per_batch.map_or(rows.len(), NonZeroUsize::get).max(1);
        for (n, rows) in rows.chunks(batch).enumerate() {
            let guilty = rows.iter().find(|row| state.refused.contains(&row.id));
            let guilty = guilty.or(rows
                .first()
                .filter(|_| state.largest_batch.is_some_and(|most| rows.len() > most)));
            if let Some(guilty) = guilty {
                let mut suspects: Vec<_> = (n * batch..n * batch + rows.len()).collect();
                suspects
                    .retain(|index| rows[index - n * batch].record.topic == guilty.record.topic);
                let likely = suspects[0];
                let reason = "too large".to_owned();
                return Err(NotPublished::Refused(Refused {
                    suspects,
                    likely,
                    reason,
                }));
            }
        }
        let topics = of(&state.silent);
        if !topics.is_empty() {
            let (reason, error) = ("no answer".to_owned(), lost("no answer"));
            return Err(NotPublished::Silent(Silent {
                topics,
                reason,
                error,
            }));
        }
        Ok(())
    }

    /// The fate of the transaction that begins now, unless it is refused.
    fn fate(&self) -> Result<Option<Fate>, Error> {
        let mut state = self.state.lock().unwrap();
        if self.epoch != state.epoch {
            return Err(lost("fenced"));
        }
        state.transactions += 1;
        let at = state.transactions;
        let fate = state.fates.iter().find(|(n, _)| *n == at);
        Ok(fate.map(|(_, fate)| *fate))
    }
}
