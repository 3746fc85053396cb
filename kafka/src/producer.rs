//! The transactional producer: an async handle, and the thread behind it that owns the client.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::config::Config;
use crate::driver::{ABORT, Driver};
use crate::error::Error;
use crate::record::Transaction;
use crate::thread;
use crate::transact_error::{Failure, Outcome, TransactError};

/// A point in the life of a transaction, reported to [`ProducerOptions::on_step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The transaction is open.
    Begun,
    /// About half of the records are handed over.
    Producing,
    /// Every record is acknowledged.
    Acked,
    /// The checkpoint is part of the transaction: before the records of a small one, after those of a large one.
    OffsetsSent,
    /// The commit request is written to the socket, its answer not yet read. Called on a thread of
    /// librdkafka.
    EndTxnSent,
    /// The commit is known.
    Committed,
}

/// How a [`TransactionalProducer`] works.
#[derive(Clone)]
pub struct ProducerOptions {
    /// Kafka's `transaction.timeout.ms`: how long `read_committed` readers wait for a producer that died. A transaction that is
    /// not committed after four fifths of it is aborted. At least 1 s, at most the broker's `transaction.max.timeout.ms` (15 min). Defaults to
    /// 30 s.
    pub transaction_timeout: Duration,
    /// Called at each [`Step`], on the producer's thread or one of librdkafka's. Must return
    /// quickly. Defaults to none.
    pub on_step: Option<Arc<dyn Fn(Step) + Send + Sync>>,
    /// See [`Self::without_taint_rule`]; public only for `..ProducerOptions::default()`.
    #[doc(hidden)]
    pub taint_rule: bool,
}

impl Default for ProducerOptions {
    fn default() -> Self {
        Self {
            transaction_timeout: Duration::from_secs(30),
            on_step: None,
            taint_rule: true,
        }
    }
}

impl ProducerOptions {
    /// Switches off the cure for late requests, to show the damage in tests. Never in production.
    #[doc(hidden)]
    #[must_use]
    pub fn without_taint_rule(mut self) -> Self {
        self.taint_rule = false;
        self
    }
}

impl fmt::Debug for ProducerOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProducerOptions")
            .field("transaction_timeout", &self.transaction_timeout)
            .finish_non_exhaustive()
    }
}

/// A transaction that was committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Why the producer must be re-created before its next transaction, if it must: a request of
    /// this transaction was sent twice or got no answer, and may still arrive.
    /// [`TransactionalProducer::transact`] refuses until then.
    pub tainted: Option<String>,
    /// How many records were published.
    pub records: usize,
    /// Partition and offset of [`Transaction::anchor`].
    pub anchor: Option<(i32, i64)>,
}

/// The async handle of a transactional producer.
///
/// One OS thread owns the client and makes its blocking calls. Transactions run one after the
/// other. A handle that is dropped ends the thread after the running transaction.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use oncebox_kafka::{Config, Offsets, ProducerOptions, Transaction, TransactionalProducer};
///
/// let config = Config::new("localhost:9092");
/// let options = ProducerOptions::default();
/// let producer = TransactionalProducer::open(&config, "oncebox.orders", options).await?;
/// let checkpoint = Offsets {
///     group: "oncebox.orders".into(),
///     topic: "oncebox.checkpoints".into(),
///     partition: 0,
///     offset: 42,
///     metadata: "the position in full".into(),
/// };
/// let transaction = Transaction { offsets: Some(checkpoint), ..Transaction::default() };
/// let committed = producer.transact(transaction).await?;
/// if let Some(reason) = committed.tainted {
///     println!("re-creating the producer: {reason}");
/// }
/// producer.close().await;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct TransactionalProducer {
    jobs: mpsc::Sender<Job>,
    clock: Arc<Clock>,
    /// How long a transaction may take before the thread is given up.
    patience: Duration,
}

/// What the thread gets beyond the deadlines of its calls. librdkafka 2.12 does not always keep them: a group coordinator
/// that is unavailable three times in a row makes `rd_kafka_send_offsets_to_transaction` wait for the next broker that
/// connects or disconnects (rdkafka_coord.c gives its FindCoordinator up without a word), ten minutes on a quiet cluster.
const GRACE: Duration = Duration::from_secs(5);

enum Job {
    Transact(
        Box<Transaction>,
        oneshot::Sender<Result<Committed, TransactError>>,
    ),
    Close(oneshot::Sender<()>),
}

impl TransactionalProducer {
    /// Creates the client and its producer epoch: fences every older producer with this id and
    /// settles the transaction it left open (which takes about a second, if there is one). Gives up
    /// after the transaction time-out, and at once when the broker refuses the credentials.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::Unreachable`], [`Error::Authentication`],
    /// [`Error::Authorization`], or [`Error::Kafka`] when the coordinator does not answer in time.
    ///
    /// # Cancel safety
    /// A dropped future still fences the older producers.
    pub async fn open(
        config: &Config,
        transactional_id: &str,
        options: ProducerOptions,
    ) -> Result<Self, Error> {
        if options.transaction_timeout < Duration::from_secs(1) {
            return Err(Error::config(
                "transaction.timeout.ms",
                "must be at least 1000",
            ));
        }
        let timeout = options.transaction_timeout;
        let patience = timeout + ABORT.min(timeout) + GRACE;
        let (jobs, queue) = mpsc::channel();
        let (opened, answer) = oneshot::channel();
        let clock = Arc::new(Clock::default());
        let (config, id, their_clock) = (
            config.clone(),
            transactional_id.to_owned(),
            Arc::clone(&clock),
        );
        thread::spawn("oncebox-producer", move || {
            their_clock.busy(true);
            match Driver::open(&config, &id, options, Arc::clone(&their_clock), || {
                opened.is_closed()
            }) {
                Ok(driver) => {
                    their_clock.busy(false);
                    if opened.send(Ok(())).is_ok() {
                        serve(driver, &queue, &their_clock);
                    }
                }
                Err(error) => {
                    let _ = opened.send(Err(error));
                }
            }
        })?;
        answer
            .await
            .map_err(|_| Error::closed("open the transactional producer"))??;
        Ok(Self {
            jobs,
            clock,
            patience,
        })
    }

    /// Runs one transaction: begin, produce every record, wait for every acknowledgement, send the
    /// offsets (first, if there are few records), commit. `Ok` means committed: records and offsets
    /// are visible together (G3). On an error the transaction is aborted if that is possible. A
    /// transaction without records and
    /// offsets does nothing.
    ///
    /// Takes at most the transaction time-out, plus at most 10 s for the abort, plus 5 s: then the client is given up.
    ///
    /// # Errors
    /// [`TransactError`], which says what is known about the outcome and whether this producer can
    /// go on.
    ///
    /// # Cancel safety
    /// Not cancel safe: the transaction goes on when the future is dropped, its outcome is lost,
    /// and the producer refuses to go on. The checkpoint decides after a rebuild.
    pub async fn transact(&self, transaction: Transaction) -> Result<Committed, TransactError> {
        let (reply, answer) = oneshot::channel();
        self.jobs
            .send(Job::Transact(Box::new(transaction), reply))
            .map_err(|_| Failure::closed(Outcome::DidNotHappen))?;
        match tokio::time::timeout(self.patience, answer).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(Failure::closed(Outcome::Unknown).into()),
            Err(_) => Err(Failure::hangs(self.patience).into()),
        }
    }

    /// When the producer's thread last completed a step of a transaction (a call, or a delivery
    /// report); now, if no transaction is running. The relay renews its lease only while this is
    /// young.
    #[must_use]
    pub fn last_step(&self) -> Instant {
        self.clock.last()
    }

    /// Destroys the client, off the async threads; returns when that is done, after the running
    /// transaction.
    ///
    /// # Cancel safety
    /// The client is destroyed all the same.
    pub async fn close(self) {
        let (reply, done) = oneshot::channel();
        if self.jobs.send(Job::Close(reply)).is_ok() {
            let _ = done.await;
        }
    }
}

/// How often an idle producer serves its callbacks.
const IDLE_POLL: Duration = Duration::from_millis(200);

fn serve(mut driver: Driver, queue: &mpsc::Receiver<Job>, clock: &Clock) {
    let closed = loop {
        match queue.recv_timeout(IDLE_POLL) {
            Ok(Job::Transact(transaction, reply)) => {
                clock.busy(true);
                let result = driver.transact(&transaction);
                clock.busy(false);
                if reply.send(result).is_err() {
                    driver.refuse("the outcome of the last transaction was not read");
                }
            }
            Ok(Job::Close(reply)) => break Some(reply),
            Err(mpsc::RecvTimeoutError::Timeout) => driver.idle(),
            Err(mpsc::RecvTimeoutError::Disconnected) => break None,
        }
    };
    drop(driver);
    if let Some(reply) = closed {
        let _ = reply.send(());
    }
}

/// When the thread last did something.
#[derive(Debug)]
pub(crate) struct Clock {
    start: Instant,
    last_micros: AtomicU64,
    busy: AtomicBool,
}

impl Default for Clock {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            last_micros: AtomicU64::new(0),
            busy: AtomicBool::new(false),
        }
    }
}

impl Clock {
    /// A step is completed.
    pub(crate) fn tick(&self) {
        let micros = u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.last_micros.store(micros, Ordering::Relaxed);
    }

    fn busy(&self, yes: bool) {
        self.tick();
        // Stays set if the thread panics: then the last step grows old, as it must.
        self.busy.store(yes, Ordering::Release);
    }

    fn last(&self) -> Instant {
        if self.busy.load(Ordering::Acquire) {
            self.start + Duration::from_micros(self.last_micros.load(Ordering::Relaxed))
        } else {
            Instant::now()
        }
    }
}
