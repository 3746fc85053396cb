//! Database work, each piece in a task of its own. It may be dropped at any point: a transaction is rolled back then, and a
//! COMMIT that is on its way is judged by its compare-and-set.

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use uuid::Uuid;

use super::Id;
use super::pump::Command;
use crate::InboxStore;
use crate::chain::Term;
use crate::error::Error;
use crate::lane::{Batch, Task};
use crate::partition::Attempt;
use crate::position::{Key, Known, Row};
use crate::process::{Neighbours, Outcome, Prepared, Processor};
use crate::start::{Start, decide};

/// What a piece of work is about.
pub(super) struct Job<D: InboxStore> {
    pub(super) id: Id,
    pub(super) key: Key,
    pub(super) term: Arc<Term>,
    pub(super) processor: Arc<Processor<D>>,
}

/// How it ended, and what it was about.
pub(super) struct Report {
    pub(super) id: Id,
    pub(super) term: Arc<Term>,
    pub(super) result: Ended,
}

pub(super) enum Ended {
    Taken(Taken),
    Read(Known, Result<Option<Row>, sqlx::Error>),
    Done {
        /// The lane and its messages; `None`: the position alone was written.
        lane: Option<(usize, Batch)>,
        outcome: Outcome,
        took: Duration,
    },
}

/// What came of taking the row of a partition.
pub(super) enum Taken {
    /// It is ours, with what was tried in vain before.
    Row {
        row: Row,
        attempts: BTreeMap<i64, Attempt>,
        /// Where the partition ended then.
        high: i64,
    },
    /// Somebody else was faster; try again.
    Later,
    Outage(&'static str, sqlx::Error),
    Kafka(oncebox_kafka::Error),
    Stop(Box<Error>),
}

impl<D: InboxStore> Job<D> {
    fn report(self, result: Ended) -> Report {
        Report {
            id: self.id,
            term: self.term,
            result,
        }
    }

    /// Takes the row of the partition, and decides where it starts.
    pub(super) async fn take(self, commands: mpsc::Sender<Command>) -> Report {
        let taken = match self.try_take(commands).await {
            Ok(taken) | Err(taken) => taken,
        };
        self.report(Ended::Taken(taken))
    }

    async fn try_take(&self, commands: mpsc::Sender<Command>) -> Result<Taken, Taken> {
        let (processor, key) = (&self.processor, &self.key);
        let outage = |doing| move |e| Taken::Outage(doing, e);
        let taken = processor.take(key).await;
        let taken = taken.map_err(outage("take ownership of a partition"))?;
        // After the token is written: nobody but us can move the position now, so what Kafka says is compared with a
        // position that stands.
        let (answer, facts) = oneshot::channel();
        let _ = commands.send(Command::Facts(self.id.clone(), answer));
        let facts = facts.await.map_err(|_| Taken::Later)?;
        let Some(facts) = facts.map_err(Taken::Kafka)? else {
            return Err(Taken::Stop(Box::new(Error::UnknownTopic {
                topic: key.topic.to_string(),
            })));
        };
        let start = decide(taken.as_ref().map(|(row, _)| row), &facts).map_err(|refusal| {
            Taken::Stop(Box::new(Error::Position {
                consumer: key.consumer.to_string(),
                topic: key.topic.to_string(),
                partition: key.partition,
                refusal,
            }))
        })?;
        let high = facts.high;
        match (start, taken) {
            (Start::AtRow, Some((row, attempts))) => Ok(Taken::Row {
                row,
                attempts,
                high,
            }),
            (Start::First(next), _) => {
                let created = processor.create(key, facts.topic_id, next).await;
                let created = created.map_err(outage("create a position"))?;
                let attempts = BTreeMap::new();
                Ok(created.map_or(Taken::Later, |row| Taken::Row {
                    row,
                    attempts,
                    high,
                }))
            }
            (Start::AtRow, None) => Ok(Taken::Later),
        }
    }

    /// Reads the row, to be believed (G6; lost answers; a database that lost commits).
    pub(super) async fn check(self, known: Known) -> Report {
        let row = self.processor.read(&self.key).await;
        self.report(Ended::Read(known, row))
    }

    /// Writes the position that was reached without a transaction.
    pub(super) async fn advance(self) -> Report {
        let outcome = self.processor.advance(&self.key, &self.term).await;
        self.report(Ended::Done {
            lane: None,
            outcome,
            took: Duration::ZERO,
        })
    }

    /// Opens the transaction of a batch whose turn has not come, after that of the batch before.
    pub(super) async fn prepare(
        self,
        ids: Vec<Uuid>,
        opened: oneshot::Receiver<()>,
    ) -> Result<Prepared<D>, Box<Outcome>> {
        // It is not told when the batch before failed at that, and this one is given up then.
        let _ = opened.await;
        self.processor.prepare(&self.key, &self.term, &ids).await
    }

    /// One transaction of one lane.
    pub(super) async fn lane(self, lane: usize, task: Task, neighbours: Neighbours<D>) -> Report {
        let begun = Instant::now();
        let (key, term, processor) = (&self.key, &self.term, &self.processor);
        let (batch, outcome) = match task {
            Task::Deliver(batch) => {
                let outcome = processor.deliver(key, term, &batch, neighbours).await;
                (batch, outcome)
            }
            Task::Bury(batch) => {
                let outcome = processor.bury(key, term, &batch).await;
                (batch, outcome)
            }
            Task::Note(batch, due) => {
                let outcome = processor.note(key, term, &batch, due).await;
                (batch, outcome)
            }
        };
        let took = begun.elapsed();
        self.report(Ended::Done {
            lane: Some((lane, batch)),
            outcome,
            took,
        })
    }
}
