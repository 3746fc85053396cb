//! The life of one transaction, on the producer's thread.
//!
//! Errors have two answers: the same call again until the transaction's deadline, or abort if
//! possible and else rebuild. There is no third: after a rebuild the checkpoint decides what
//! happened.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::classify::{self, Action, Delivery};
use crate::config::Config;
use crate::diagnosis;
use crate::error::Error;
use crate::producer::{Clock, Committed, ProducerOptions, Step};
use crate::record::{ANCHOR, Offsets, Transaction};
use crate::sys::{CallError, Code, FailedRecord, NotProduced, Producer};
use crate::transact_error::{Cause, Failure, Outcome, Refused, TransactError};

/// The longest wait inside one call of librdkafka, so that callbacks are served in between.
const SLICE: Duration = Duration::from_secs(1);
/// How long an abort may take before the producer is given up instead.
pub(crate) const ABORT: Duration = Duration::from_secs(10);
/// The longest wait inside one call of an abort. librdkafka throws away what is queued when the call begins and then waits for
/// the rest; what a broker thread puts back into the queue after that, because it was to be sent again, would be waited for
/// until it is too old. The next call throws it away.
const PURGE_AGAIN: Duration = Duration::from_millis(200);
/// Records between two looks at delivery reports and clock.
const STRIDE: usize = 256;
/// A transaction with at most so many records is produced before the coordinator has finished with the one before.
const SMALL: usize = 500;
const BEGIN: &str = "begin";
const SEND_OFFSETS: &str = "send the checkpoint";
const ANCHOR_STEP: &str = "write the checkpoint's base record";

pub(crate) struct Driver {
    producer: Producer,
    options: ProducerOptions,
    clock: Arc<Clock>,
    /// Records acknowledged in the running transaction.
    delivered: usize,
    /// Why this producer must not begin another transaction.
    refused: Option<String>,
}

/// What made a transaction fail.
enum Trigger {
    Call(CallError, Action),
    Record(usize, NotProduced),
    /// Delivery reports with errors, or none until the deadline.
    Delivery,
}

impl Driver {
    /// Creates the client and waits for its epoch.
    pub(crate) fn open(
        config: &Config,
        transactional_id: &str,
        options: ProducerOptions,
        clock: Arc<Clock>,
        is_abandoned: impl Fn() -> bool,
    ) -> Result<Self, Error> {
        let start = Instant::now();
        let on_commit_sent = options.on_step.clone().map(|on_step| {
            let call: Box<dyn Fn() + Send + Sync> = Box::new(move || on_step(Step::EndTxnSent));
            call
        });
        let producer = Producer::create(
            config,
            transactional_id,
            options.transaction_timeout,
            on_commit_sent,
        )?;
        const OPERATION: &str = "open the transactional producer";
        loop {
            let left = options.transaction_timeout.saturating_sub(start.elapsed());
            let error = match producer.init(left.min(SLICE)) {
                Ok(()) => break,
                Err(error) => error,
            };
            producer.client().poll(Duration::ZERO);
            let explained = producer.client().explain(OPERATION, &error, start, None);
            let again = classify::transactional(error.flags, producer.client().fatal().is_some())
                == Action::CallAgain;
            if !again
                || explained.is_authentication()
                || explained.is_authorization()
                || left.is_zero()
                || is_abandoned()
            {
                return Err(explained);
            }
        }
        let elapsed = start.elapsed();
        tracing::info!(transactional_id, ?elapsed, "transactional producer is open");
        Ok(Self {
            producer,
            options,
            clock,
            delivered: 0,
            refused: None,
        })
    }

    /// Serves callbacks between transactions.
    pub(crate) fn idle(&self) {
        self.producer.client().poll(Duration::ZERO);
    }

    /// No further transaction, for this reason.
    pub(crate) fn refuse(&mut self, reason: &str) {
        self.refused.get_or_insert_with(|| reason.to_owned());
    }

    pub(crate) fn transact(&mut self, t: &Transaction) -> Result<Committed, TransactError> {
        if let Some(reason) = &self.refused {
            return Err(Failure::refused(reason).into());
        }
        if t.records.is_empty() && t.offsets.is_none() {
            return Ok(Committed {
                tainted: None,
                records: 0,
                anchor: None,
            });
        }
        let start = Instant::now();
        // The rest is for the abort: after its own time-out the broker ends the transaction and fences the producer.
        let limit = self.options.transaction_timeout * 4 / 5;
        let deadline = start + t.timeout.map_or(limit, |wanted| wanted.min(limit));
        let result = self.run(t, deadline);
        let result = match result {
            Ok(()) => {
                let tainted = self.taint();
                if let Some(reason) = &tainted {
                    tracing::warn!(
                        reason,
                        "committed, but a late request may end the next transaction: rebuild"
                    );
                    self.refuse(reason);
                }
                Ok(Committed {
                    tainted,
                    records: t.records.len(),
                    anchor: self.producer.anchor(),
                })
            }
            Err((step, trigger)) => Err(self.fail(step, trigger, t, start)),
        };
        self.producer.client().poll(Duration::ZERO);
        self.producer.release();
        result
    }

    /// The happy path; the caller cleans up.
    fn run(&mut self, t: &Transaction, deadline: Instant) -> Result<(), (&'static str, Trigger)> {
        self.call(deadline, |p, _| p.begin(t.records.len()))
            .map_err(|t| (BEGIN, t))?;
        self.delivered = 0;
        self.step(Step::Begun);
        // Until the coordinator has finished with the transaction before, it answers CONCURRENT_TRANSACTIONS. librdkafka
        // asks again after `retry.backoff.ms` for the offsets, but only after 20 ms for the records (rdkafka_txnmgr.c).
        // So a small transaction begins with its offsets; while a large one is produced, the coordinator gets ready.
        let offsets_first = t.records.len() <= SMALL;
        let offsets = self.anchored(t, deadline)?;
        let offsets = offsets.as_ref().or(t.offsets.as_ref());
        if offsets_first {
            self.send_offsets(offsets, deadline)?;
        }
        self.produce(t, deadline).map_err(|t| ("produce", t))?;
        self.wait_for_acks(t.records.len() + usize::from(t.anchor.is_some()), deadline)
            .map_err(|t| ("wait for acknowledgements", t))?;
        self.step(Step::Acked);
        if t.rehearsal {
            return self.call_abort().map_err(|t| ("abort", t));
        }
        if !offsets_first {
            self.send_offsets(offsets, deadline)?;
        }
        in_time(deadline).map_err(|t| ("commit", t))?;
        self.producer.tap().committing(true);
        let result = self.call(deadline, |p, timeout| p.commit(timeout));
        self.producer.tap().committing(false);
        result.map_err(|t| ("commit", t))?;
        self.step(Step::Committed);
        Ok(())
    }

    /// Writes the anchor, and puts its place into the offsets.
    fn anchored(
        &mut self,
        t: &Transaction,
        deadline: Instant,
    ) -> Result<Option<Offsets>, (&'static str, Trigger)> {
        let (Some(anchor), Some(offsets)) = (&t.anchor, &t.offsets) else {
            return Ok(None);
        };
        let index = t.records.len();
        self.producer
            .produce(index, anchor, None)
            .map_err(|e| (ANCHOR_STEP, Trigger::Record(index, e)))?;
        self.wait_for_acks(1, deadline)
            .map_err(|t| (ANCHOR_STEP, t))?;
        let (partition, offset) = self.producer.anchor().unwrap_or_default();
        let place = format!("{partition}:{offset}");
        Ok(Some(Offsets {
            metadata: offsets.metadata.replace(ANCHOR, &place),
            ..offsets.clone()
        }))
    }

    fn produce(&mut self, t: &Transaction, deadline: Instant) -> Result<(), Trigger> {
        for (index, record) in t.records.iter().enumerate() {
            while let Err(error) = self.producer.produce(index, record, t.source.as_ref()) {
                if !matches!(error, NotProduced::QueueFull) {
                    return Err(Trigger::Record(index, error));
                }
                self.producer.client().poll(Duration::from_millis(10));
                self.look()?;
                in_time(deadline)?;
            }
            if index == t.records.len() / 2 {
                self.step(Step::Producing);
            }
            let done = index + 1;
            let anchor = usize::from(t.anchor.is_some());
            if t.records_per_batch.is_some_and(|n| done % n == 0) {
                self.wait_for_acks(done + anchor, deadline)?;
            }
            if index % STRIDE == STRIDE - 1 {
                self.producer.client().poll(Duration::ZERO);
                self.look()?;
                in_time(deadline)?;
            }
        }
        Ok(())
    }

    /// Every record has a delivery report, and none is an error: only then is anything committed
    /// (G2).
    fn wait_for_acks(&mut self, sent: usize, deadline: Instant) -> Result<(), Trigger> {
        loop {
            self.look()?;
            if self.delivered == sent {
                return Ok(());
            }
            in_time(deadline)?;
            // Returns as soon as there is a report.
            let asked = Instant::now();
            self.producer.client().poll(left(deadline).min(SLICE));
            // A topic that may not be written gets no report: its AddPartitionsToTxn was refused, and librdkafka keeps
            // the records until they are too old.
            if asked.elapsed() >= SLICE && self.producer.why_abortable().is_some() {
                return Err(Trigger::Delivery);
            }
        }
    }

    /// Fails the transaction at the first delivery error; a report is progress.
    fn look(&mut self) -> Result<(), Trigger> {
        let (delivered, failed) = self.producer.acks();
        if delivered != self.delivered {
            self.delivered = delivered;
            self.clock.tick();
        }
        if failed > 0 {
            Err(Trigger::Delivery)
        } else {
            Ok(())
        }
    }

    fn send_offsets(
        &mut self,
        offsets: Option<&Offsets>,
        deadline: Instant,
    ) -> Result<(), (&'static str, Trigger)> {
        if let Some(offsets) = offsets {
            self.call(deadline, |p, timeout| p.send_offsets(offsets, timeout))
                .map_err(|t| (SEND_OFFSETS, t))?;
            self.step(Step::OffsetsSent);
        }
        Ok(())
    }

    /// Makes a call until it succeeds, fails for good, or the deadline has passed.
    fn call(
        &mut self,
        deadline: Instant,
        mut make: impl FnMut(&mut Producer, Duration) -> Result<(), CallError>,
    ) -> Result<(), Trigger> {
        loop {
            let error = match make(&mut self.producer, left(deadline)) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let action =
                classify::transactional(error.flags, self.producer.client().fatal().is_some());
            if action != Action::CallAgain || Instant::now() >= deadline {
                return Err(Trigger::Call(error, action));
            }
            tracing::debug!(
                code = error.code.name(),
                reason = error.reason,
                "call again"
            );
            // Serves callbacks, and keeps an answer that is wrongly called retriable from becoming
            // a busy loop.
            self.producer.client().poll(Duration::from_millis(10));
        }
    }

    fn step(&self, step: Step) {
        self.clock.tick();
        if let Some(on_step) = &self.options.on_step {
            on_step(step);
        }
    }

    fn taint(&self) -> Option<String> {
        self.producer
            .tap()
            .taint()
            .filter(|_| self.options.taint_rule)
    }

    /// Aborts if possible, and says what is known.
    fn fail(
        &mut self,
        step: &'static str,
        trigger: Trigger,
        t: &Transaction,
        start: Instant,
    ) -> TransactError {
        self.producer.client().poll(Duration::ZERO);
        let commit_was_sent = self.producer.tap().end_txn_was_sent();
        let may_abort = match &trigger {
            Trigger::Call(_, Action::Rebuild) => false,
            // A commit that is still in progress at the deadline can only be resumed, not aborted.
            Trigger::Call(_, Action::CallAgain) => step == SEND_OFFSETS,
            _ => step != BEGIN,
        };
        let why = if step == BEGIN {
            None
        } else {
            self.producer.why_abortable()
        };
        // Looked at before the abort: it may take longer than the broker waits, and then there is only a fence to see.
        let silent = match &trigger {
            Trigger::Delivery if self.producer.acks().1 == 0 => {
                diagnosis::silent_topics(&t.records, &self.producer.acknowledged())
            }
            _ => Vec::new(),
        };
        let aborted = may_abort && self.abort();
        let mut tainted = self.taint();
        if step == SEND_OFFSETS
            && self.options.taint_rule
            && self.producer.tap().offset_commit_was_sent()
        {
            // The call was given up; its request goes over another connection than the abort, so
            // that the answer to the abort does not prove that it has arrived.
            tainted = tainted.or_else(|| Some("TxnOffsetCommit may still be under way".to_owned()));
        }
        let cause = self.cause(step, trigger, why, silent, t, start);
        let failure = Failure {
            retriable: match &cause {
                Cause::Refused(_) | Cause::Topic { .. } => false,
                Cause::NotAcknowledged { .. } | Cause::NeedsRebuild { .. } => true,
                Cause::Call(error) => {
                    !(error.is_config()
                        || error.is_authentication()
                        || error.is_authorization()
                        || error.is_fenced())
                }
            },
            cause,
            // An abort that the broker accepted, with nothing left under way, proves that there was
            // no commit.
            outcome: if commit_was_sent && !(aborted && tainted.is_none()) {
                Outcome::Unknown
            } else {
                Outcome::DidNotHappen
            },
            needs_rebuild: !aborted || tainted.is_some(),
        };
        let error = TransactError::from(failure);
        let outcome = error.outcome();
        tracing::warn!(%error, step, aborted, ?tainted, ?outcome, "transaction failed");
        if error.needs_rebuild() {
            let reason = tainted.unwrap_or_else(|| error.to_string());
            self.refuse(&reason);
        }
        error
    }

    fn call_abort(&mut self) -> Result<(), Trigger> {
        let deadline = Instant::now() + ABORT.min(self.options.transaction_timeout);
        self.call(deadline, |p, timeout| p.abort(timeout.min(PURGE_AGAIN)))
    }

    fn abort(&mut self) -> bool {
        match self.call_abort() {
            Ok(()) => true,
            Err(Trigger::Call(error, _)) => {
                tracing::warn!(
                    code = error.code.name(),
                    reason = error.reason,
                    "abort failed: rebuild"
                );
                false
            }
            Err(_) => false,
        }
    }

    /// The delivery reports know better than the call that failed because of them, and librdkafka's
    /// reason for an abort better than the purged records.
    fn cause(
        &self,
        step: &str,
        trigger: Trigger,
        why: Option<CallError>,
        silent: Vec<String>,
        t: &Transaction,
        start: Instant,
    ) -> Cause {
        let mut failures = self.producer.failures();
        // The anchor is nobody's message: what is wrong with it is wrong with the checkpoint.
        let anchor = failures.iter().position(|f| f.index >= t.records.len());
        if let Some(failed) = anchor.map(|at| failures.remove(at)) {
            let error = CallError {
                code: failed.code,
                reason: failed.reason,
                flags: classify::Flags::default(),
            };
            let topic = t.anchor.as_ref().map(|anchor| &*anchor.topic);
            return Cause::Call(
                self.producer
                    .client()
                    .explain(ANCHOR_STEP, &error, start, topic),
            );
        }
        if let Trigger::Record(index, NotProduced::Refused(error)) = &trigger {
            failures.push(FailedRecord {
                index: *index,
                code: error.code,
                reason: error.reason.clone(),
            });
        }
        if let Trigger::Record(index, NotProduced::Unencodable(reason)) = trigger {
            let topic = diagnosis::topic_of(&t.records, index);
            return Cause::Refused(Refused {
                index,
                suspects: vec![index],
                topic,
                code: "LOCAL".into(),
                reason,
            });
        }
        if let Some(cause) = diagnosis::from_reports(&failures, &t.records)
            .or_else(|| diagnosis::from_topic(why.as_ref()?, &t.records))
        {
            return cause;
        }
        let client = self.producer.client();
        let error = match (client.fatal(), trigger) {
            (_, Trigger::Delivery) if !silent.is_empty() => {
                return Cause::NotAcknowledged {
                    sent: t.records.len(),
                    failed: t.records.len() - self.producer.acks().0,
                    code: Code::LOCAL_MSG_TIMED_OUT.name(),
                    reason: format!(
                        "no acknowledgement from {}, all others were acknowledged",
                        silent.join(", ")
                    ),
                    silent_topics: silent,
                };
            }
            // The fatal error, not the call that stumbled over it.
            (Some((code, reason)), _) => CallError {
                code,
                reason,
                flags: classify::Flags {
                    fatal: true,
                    ..Default::default()
                },
            },
            (None, Trigger::Call(error, _)) => error,
            (None, _) => return self.not_acknowledged(step, t, &failures, why, start),
        };
        let topic = t.offsets.as_ref().map(|offsets| offsets.topic.as_str());
        Cause::Call(client.explain(step, &error, start, topic))
    }

    fn not_acknowledged(
        &self,
        step: &str,
        t: &Transaction,
        failures: &[FailedRecord],
        why: Option<CallError>,
        start: Instant,
    ) -> Cause {
        let first = failures
            .iter()
            .find(|f| classify::delivery(f.code) != Delivery::Bystander);
        let error = match (first, why) {
            (Some(first), _) => CallError {
                code: first.code,
                reason: first.reason.clone(),
                flags: classify::Flags::default(),
            },
            (None, Some(why)) => why,
            (None, None) => CallError {
                code: Code::LOCAL_MSG_TIMED_OUT,
                reason: "no acknowledgement until the transaction's deadline".to_owned(),
                flags: classify::Flags::default(),
            },
        };
        // A time-out because the broker refuses us, or is not there, is no riddle.
        let explained = self.producer.client().explain(step, &error, start, None);
        if explained.is_authentication() || explained.is_authorization() || explained.is_fenced() {
            return Cause::Call(explained);
        }
        let reason = match explained {
            Error::Unreachable { reason, .. } if reason != error.reason => {
                format!("{} ({reason})", error.reason)
            }
            _ => error.reason,
        };
        let failed = failures.len().max(t.records.len() - self.producer.acks().0);
        Cause::NotAcknowledged {
            silent_topics: Vec::new(),
            sent: t.records.len(),
            failed,
            code: error.code.name(),
            reason,
        }
    }
}

/// Nothing is begun after the deadline: the broker may end the transaction at any moment.
fn in_time(deadline: Instant) -> Result<(), Trigger> {
    if Instant::now() < deadline {
        Ok(())
    } else {
        Err(Trigger::Delivery)
    }
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}
