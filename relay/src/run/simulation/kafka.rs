//! Kafka as a leader sees it: one transactional producer, whose transactions happen or not and are reported or not.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncebox_kafka::Stability;
use rand::RngExt as _;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::world::{Process, World};
use crate::error::Error;
use crate::log::{How, Log, NotPublished, Producer, Refused, Silent, TopicRefused};
use crate::position::Checkpoint;
use crate::session::Row;

/// The broker ends a transaction that is open for longer.
pub(super) const TRANSACTION_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Default)]
pub(super) struct Kafka {
    pub(super) checkpoint: Option<String>,
    /// The producer epoch: another one is fenced.
    epoch: u64,
    transactions: u64,
    open: Option<Open>,
    /// A late request of the producer of this epoch ends its next transaction.
    tainted: Option<u64>,
    /// Nobody answers until then.
    pub(super) down_until: Option<Instant>,
    /// Rows that are refused.
    pub(super) refused: BTreeSet<i64>,
    /// Topics that do not exist.
    pub(super) missing: BTreeSet<&'static str>,
    /// Topics that do not acknowledge.
    pub(super) silent: BTreeSet<&'static str>,
}

/// The transaction that the coordinator knows.
struct Open {
    number: u64,
    process: usize,
    since: Instant,
    rows: Vec<(i64, Uuid)>,
    checkpoint: String,
    /// The commit is decided, its markers are not written.
    prepared: bool,
}

/// What becomes of the end of a transaction.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Commits,
    Aborts,
    /// Commits, and the answer is lost.
    Unreported,
    /// Decided; the next producer sees to it.
    Prepared,
    /// The request never arrives.
    Vanishes,
    /// The client gives up, and the request arrives much later.
    Late,
    /// Commits; a request of it is still on its way.
    Taints,
}

fn lost(text: &str) -> Error {
    Error::Kafka(oncebox_kafka::Error::Unreachable {
        bootstrap: "fake".to_owned(),
        reason: text.to_owned(),
    })
}

fn fenced() -> Error {
    Error::Kafka(oncebox_kafka::Error::Fenced {
        operation: "transact".to_owned(),
        reason: "a newer epoch".to_owned(),
    })
}

impl World {
    /// The coordinator ends what is open for too long, and fences its producer.
    fn expire(&mut self) {
        let kafka = &mut self.kafka;
        let old = |open: &mut Open| !open.prepared && open.since.elapsed() > TRANSACTION_TIMEOUT;
        if kafka.open.take_if(old).is_some() {
            kafka.epoch += 1;
            self.note("kafka: the transaction timed out");
            self.count("transactions timed out");
        }
    }

    fn settle(&mut self) {
        if let Some(open) = self.kafka.open.take_if(|open| open.prepared) {
            self.committed(open.process, &open.rows, &open.checkpoint);
        }
    }

    fn init_transactions(&mut self) -> u64 {
        self.settle();
        if self.kafka.open.take().is_some() {
            self.count("transactions fenced");
        }
        self.kafka.epoch += 1;
        self.kafka.epoch
    }

    fn begin(
        &mut self,
        epoch: u64,
        process: usize,
        rows: Vec<(i64, Uuid)>,
        text: String,
    ) -> Result<u64, Error> {
        self.expire();
        if epoch != self.kafka.epoch {
            self.count("producers fenced");
            return Err(fenced());
        }
        self.kafka.transactions += 1;
        let number = self.kafka.transactions;
        self.kafka.open = Some(Open {
            number,
            process,
            since: Instant::now(),
            rows,
            checkpoint: text,
            prepared: false,
        });
        Ok(number)
    }

    /// Whether this transaction of this producer is still open.
    fn check(&mut self, (epoch, number): (u64, u64)) -> Result<(), Error> {
        self.expire();
        let open = self.kafka.open.as_ref();
        if epoch != self.kafka.epoch || open.is_none_or(|o| o.number != number || o.prepared) {
            self.count("producers fenced");
            return Err(fenced());
        }
        Ok(())
    }

    fn abort(&mut self, id: (u64, u64)) {
        if self.check(id).is_ok() {
            self.kafka.open = None;
        }
    }

    fn prepare(&mut self, id: (u64, u64)) {
        if self.check(id).is_ok()
            && let Some(open) = &mut self.kafka.open
        {
            open.prepared = true;
        }
    }

    fn end(&mut self, id: (u64, u64)) -> Result<(), Error> {
        self.check(id)?;
        let Some(open) = self.kafka.open.take() else {
            return Ok(());
        };
        // Measured on a broker: a late request ends the next transaction of the producer, which then reports success,
        // has its checkpoint stored and its records aborted.
        let rows = if self.kafka.tainted == Some(id.0) {
            &[][..]
        } else {
            &open.rows
        };
        self.committed(open.process, rows, &open.checkpoint);
        Ok(())
    }

    fn fate(&mut self) -> Fate {
        if !self.fault(80.0) {
            return Fate::Commits;
        }
        let (fate, what) = match self.rng.random_range(0..6) {
            0 => (Fate::Aborts, "fate: aborts"),
            1 => (Fate::Unreported, "fate: unreported"),
            2 => (Fate::Prepared, "fate: prepared"),
            3 => (Fate::Vanishes, "fate: vanishes"),
            4 => (Fate::Late, "fate: late"),
            _ => (Fate::Taints, "fate: taints"),
        };
        self.note(what);
        self.count(what);
        fate
    }

    /// What the brokers think of these rows.
    fn judge(&self, rows: &[(i64, Arc<str>)]) -> Result<(), NotPublished> {
        let of = |topics: &BTreeSet<&'static str>| -> Vec<String> {
            let hit = topics
                .iter()
                .filter(|t| rows.iter().any(|(_, topic)| **topic == ***t));
            hit.map(|topic| (*topic).to_owned()).collect()
        };
        if !of(&self.kafka.missing).is_empty() {
            // The client does not know which topic it was.
            let mut suspects: Vec<_> = rows.iter().map(|(_, topic)| topic.to_string()).collect();
            suspects.sort();
            suspects.dedup();
            let reason = "not there".to_owned();
            return Err(NotPublished::Topic(TopicRefused { suspects, reason }));
        }
        let guilty = rows.iter().find(|(id, _)| self.kafka.refused.contains(id));
        if let Some((_, topic)) = guilty {
            // The refusal comes back for every record of the batch on the wire.
            let mut suspects: Vec<_> = (0..rows.len()).collect();
            suspects.retain(|index| rows[*index].1 == *topic);
            return Err(NotPublished::Refused(Refused {
                likely: suspects[0],
                suspects,
                reason: "too large".to_owned(),
            }));
        }
        let topics = of(&self.kafka.silent);
        if topics.is_empty() {
            return Ok(());
        }
        let alone = rows
            .iter()
            .all(|(_, topic)| topics.iter().any(|t| **t == **topic));
        let (reason, error) = ("no acknowledgement".to_owned(), lost("no acknowledgement"));
        Err(if alone {
            NotPublished::Other(error)
        } else {
            NotPublished::Silent(Silent {
                topics,
                reason,
                error,
            })
        })
    }
}

/// The Kafka of one process.
pub(super) struct FakeLog(pub(super) Arc<Process>);

pub(super) struct FakeProducer {
    process: Arc<Process>,
    epoch: u64,
    last_step: Mutex<Instant>,
}

/// A request that may fail before or after it happened.
async fn request<T: Send + 'static>(
    process: &Process,
    work: impl FnOnce(&mut World) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let (there, back, fails, forgets) = {
        let mut world = process.world();
        let down = world
            .kafka
            .down_until
            .map(|at| at.saturating_duration_since(Instant::now()));
        let there = world.hop() + down.unwrap_or_default();
        (there, world.hop(), world.fault(10.0), world.fault(10.0))
    };
    let work = move |world: &mut World| {
        if fails {
            world.count("kafka requests failed");
            return Err(lost("no connection"));
        }
        world.expire();
        let answer = work(world)?;
        if forgets {
            world.count("kafka answers lost");
            return Err(lost("no answer"));
        }
        Ok(answer)
    };
    process.ask(there, back, work).await
}

impl Log for FakeLog {
    type Producer = FakeProducer;

    async fn cluster_id(&self) -> Result<String, Error> {
        request(&self.0, |_| Ok("cluster".to_owned())).await
    }

    async fn prepare(&self) -> Result<(), Error> {
        request(&self.0, |_| Ok(())).await
    }

    async fn checkpoint(&self, stability: Stability) -> Result<Option<Checkpoint>, Error> {
        request(&self.0, move |world| {
            if stability == Stability::Stable && world.kafka.open.is_some() {
                return Err(lost("UNSTABLE_OFFSET_COMMIT"));
            }
            let text = world.kafka.checkpoint.as_deref();
            Ok(text.map(|text| Checkpoint::decode(text).unwrap()))
        })
        .await
    }

    async fn open(&self) -> Result<FakeProducer, Error> {
        let epoch = request(&self.0, |world| Ok(world.init_transactions())).await?;
        Ok(FakeProducer {
            process: Arc::clone(&self.0),
            epoch,
            last_step: Mutex::new(Instant::now()),
        })
    }
}

impl FakeProducer {
    /// Up to the acknowledgement of every record.
    async fn produce(
        &self,
        rows: &[&Row],
        text: String,
        timeout: Option<Duration>,
    ) -> Result<(u64, u64), NotPublished> {
        let sent = rows.iter().map(|row| (row.id, row.message_id)).collect();
        let (epoch, process) = (self.epoch, self.process.number);
        let begin = move |world: &mut World| world.begin(epoch, process, sent, text);
        let number = request(&self.process, begin).await;
        let id = (epoch, number.map_err(NotPublished::Other)?);
        self.step();
        let topics = rows
            .iter()
            .map(|row| (row.id, Arc::clone(&row.record.topic)));
        let topics: Vec<_> = topics.collect();
        let hop = self.process.world().hop();
        let judge = move |world: &mut World| world.check(id).map(|()| world.judge(&topics));
        let judged = self.process.ask(hop, Duration::ZERO, judge).await;
        self.step();
        if let Err(error) = judged.map_err(NotPublished::Other)? {
            if matches!(error, NotPublished::Silent(_) | NotPublished::Other(_)) {
                sleep(timeout.unwrap_or(TRANSACTION_TIMEOUT * 3 / 4)).await;
                self.process.gate().await;
            }
            self.process.world().abort(id);
            return Err(error);
        }
        Ok(id)
    }

    fn step(&self) {
        *self.last_step.lock().unwrap() = Instant::now();
    }

    /// EndTxn: sent, it arrives, whoever lives by then.
    async fn commit(&self, id: (u64, u64), fate: Fate) -> Result<Option<String>, Error> {
        let (there, back) = {
            let mut world = self.process.world();
            (world.hop(), world.hop())
        };
        let ended = match fate {
            Fate::Late => {
                let late = self
                    .process
                    .ask(Duration::from_secs(6), back, move |world| world.end(id));
                let _ = tokio::time::timeout(Duration::from_millis(800), late).await;
                self.process.gate().await;
                return Err(lost("no answer"));
            }
            Fate::Aborts => {
                self.process
                    .ask(there, back, move |world| world.abort(id))
                    .await;
                return Err(lost("aborted"));
            }
            Fate::Prepared => {
                self.process
                    .ask(there, back, move |world| world.prepare(id))
                    .await;
                return Err(lost("no answer"));
            }
            Fate::Vanishes => return Err(lost("no answer")),
            Fate::Unreported | Fate::Taints | Fate::Commits => {
                self.process
                    .ask(there, back, move |world| world.end(id))
                    .await
            }
        };
        self.step();
        ended?;
        match fate {
            Fate::Unreported => Err(lost("no answer")),
            Fate::Taints => Ok(Some(self.taint())),
            _ => Ok(None),
        }
    }

    fn taint(&self) -> String {
        self.process.world().kafka.tainted = Some(self.epoch);
        "EndTxn sent twice".to_owned()
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
        let id = self.produce(rows, checkpoint.encode(), how.timeout).await?;
        let fate = self.process.world().fate();
        self.commit(id, fate).await.map_err(NotPublished::Other)
    }

    async fn rehearse(
        &self,
        _: i64,
        rows: &[&Row],
        timeout: Option<Duration>,
    ) -> Result<Option<String>, NotPublished> {
        self.process.world().count("rehearsals");
        let id = self.produce(rows, String::new(), timeout).await?;
        let taints = self.process.world().fault(3.0);
        self.process.world().abort(id);
        Ok(taints.then(|| self.taint()))
    }

    fn last_step(&self) -> std::time::Instant {
        self.last_step.lock().unwrap().into_std()
    }

    async fn close(self) {}
}
