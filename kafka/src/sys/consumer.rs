//! A group consumer that decides nothing by itself, and the questions that need one.

use std::borrow::Cow;
use std::collections::{BTreeSet, VecDeque};
use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rdkafka_sys as rdsys;

use super::client::{CallError, Client, Shared, lock, millis, take_error};
use super::code::{Code, raw, text};
use super::list::{self, List};
use crate::classify::Flags;
use crate::config::{Config, Role};
use crate::consumer::Message;
use crate::error::Error;
use crate::headers::{self, Headers};

const NO_OFFSET: i64 = -1001;

type NativeList = rdsys::rd_kafka_topic_partition_list_t;

/// What the rebalance callback was told.
pub(crate) enum Rebalance {
    Assigned(Vec<(String, i32)>),
    Revoked(Vec<(String, i32)>),
}

/// What the group has told this member.
#[derive(Default)]
pub(crate) struct Group {
    /// What is to be reported.
    rebalances: VecDeque<Rebalance>,
    /// The partitions that are ours.
    granted: BTreeSet<(String, i32)>,
}

/// What one poll brought.
pub(crate) enum Polled {
    Nothing,
    Message(Message),
    Rebalance(Rebalance),
    OutOfRange {
        topic: String,
        partition: i32,
        offset: Option<i64>,
        reason: String,
    },
    End {
        topic: Arc<str>,
        partition: i32,
        offset: i64,
    },
    Error(Error),
}

/// What is kept from message to message, so that not each of them allocates it.
#[derive(Default)]
struct Scratch {
    /// The topic of the last one.
    topic: Arc<str>,
    /// Where the next one is put together.
    bytes: Vec<u8>,
}

/// A consumer client.
pub(crate) struct ConsumerClient {
    client: Client,
    scratch: Mutex<Scratch>,
}

impl ConsumerClient {
    /// Creates the client; nothing is sent yet. `read_committed` also decides whether a committed
    /// offset waits for the transaction that is about to change it (`RequireStable`, KIP-447).
    pub(crate) fn create(
        config: &Config,
        group: &str,
        read_committed: bool,
    ) -> Result<Self, Error> {
        let isolation = if read_committed {
            "read_committed"
        } else {
            "read_uncommitted"
        };
        let decided = [
            ("group.id", group.to_owned()),
            ("isolation.level", isolation.to_owned()),
            ("enable.auto.commit", "false".to_owned()),
            ("enable.auto.offset.store", "false".to_owned()),
            ("auto.offset.reset", "error".to_owned()),
            ("enable.partition.eof", "true".to_owned()),
            ("group.protocol", "classic".to_owned()),
            (
                "partition.assignment.strategy",
                "cooperative-sticky".to_owned(),
            ),
        ];
        // librdkafka would fetch 100 000 messages or 64 MiB of each partition ahead, whichever comes first, and
        // keeps some 250 bytes besides for each.
        let defaults = [
            ("queued.min.messages", "10000".to_owned()),
            ("queued.max.messages.kbytes", "4096".to_owned()),
            // When it has so much it looks again after this time. A second, as it would, is far more than that lasts.
            ("fetch.queue.backoff.ms", "10".to_owned()),
        ];
        let client = Client::create(
            config,
            Role::Consumer,
            &defaults,
            &decided,
            Shared::default(),
        )?;
        // From here on the consumer queue is the only one to poll.
        // SAFETY: the handle is live.
        unsafe { raw::rd_kafka_poll_set_consumer(client.rk()) };
        Ok(Self {
            client,
            scratch: Mutex::default(),
        })
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    pub(crate) fn subscribe(&self, topics: &[String]) -> Result<(), Error> {
        self.with(
            topics.iter().map(|t| (t, -1, NO_OFFSET)),
            "subscribe",
            |rk, list| {
                // SAFETY: both live during the call.
                unsafe { raw::rd_kafka_subscribe(rk, list) }
            },
        )
    }

    /// Fetches these partitions and no others, outside of a group.
    pub(crate) fn assign(&self, partitions: &[(String, i32, i64)]) -> Result<(), Error> {
        self.with(
            partitions.iter().map(|(t, p, o)| (t, *p, *o)),
            "assign",
            |rk, list| {
                // SAFETY: both live during the call.
                unsafe { raw::rd_kafka_assign(rk, list) }
            },
        )
    }

    /// Fetches these partitions of the group's from these offsets on, also those that are fetched already; the others go on.
    /// Partitions that the group has not given us, or has taken back, are left out.
    pub(crate) fn start(&self, partitions: &[(String, i32, i64)]) -> Result<(), Error> {
        const OPERATION: &str = "start to fetch";
        let start = Instant::now();
        let rk = self.client.rk();
        let (mut old, mut new) = (Vec::new(), Vec::new());
        {
            // The callback runs in this thread too, inside of `poll`: nothing is taken back meanwhile.
            let granted = &lock(&self.client.shared().group).granted;
            // SAFETY: the handle is live.
            let fetched = unsafe { fetched(rk) };
            for (topic, partition, offset) in partitions {
                let id = (topic.clone(), *partition);
                if granted.contains(&id) {
                    new.push((topic, *partition, *offset));
                    if fetched.contains(&id) {
                        old.push((topic, *partition, NO_OFFSET));
                    }
                }
            }
        }
        let explain = |error| self.client.explain(OPERATION, &error, start, None);
        if !old.is_empty() {
            change(rk, rdsys::rd_kafka_incremental_unassign, old.into_iter()).map_err(explain)?;
        }
        change(rk, rdsys::rd_kafka_incremental_assign, new.into_iter()).map_err(explain)
    }

    pub(crate) fn pause(&self, partitions: &[(String, i32)]) -> Result<(), Error> {
        self.with(
            partitions.iter().map(|(t, p)| (t, *p, NO_OFFSET)),
            "pause",
            |rk, list| {
                // SAFETY: both live during the call.
                unsafe { raw::rd_kafka_pause_partitions(rk, list) }
            },
        )
    }

    pub(crate) fn resume(&self, partitions: &[(String, i32)]) -> Result<(), Error> {
        self.with(
            partitions.iter().map(|(t, p)| (t, *p, NO_OFFSET)),
            "resume",
            |rk, list| {
                // SAFETY: both live during the call.
                unsafe { raw::rd_kafka_resume_partitions(rk, list) }
            },
        )
    }

    /// Stores the offset as it is: the next one to read, which is also what Kafka commits.
    pub(crate) fn store(&self, topic: &str, partition: i32, next: i64) -> Result<(), Error> {
        self.with(
            [(topic, partition, next)].into_iter(),
            "store an offset",
            |rk, list| {
                // SAFETY: both live during the call.
                unsafe { raw::rd_kafka_offsets_store(rk, list) }
            },
        )
    }

    /// Commits the stored offsets and waits for the answer; nothing stored is fine.
    pub(crate) fn commit_stored(&self) -> Result<(), Error> {
        let start = Instant::now();
        // SAFETY: the handle is live; a null list means the stored offsets, 0 means wait.
        let code = Code(unsafe { raw::rd_kafka_commit(self.client.rk(), ptr::null(), 0) });
        if code.is_error() && code != Code::LOCAL_NO_OFFSET {
            return Err(self
                .client
                .explain_code("commit offsets", code, start, None));
        }
        Ok(())
    }

    pub(crate) fn seek(
        &self,
        topic: &str,
        partition: i32,
        offset: i64,
        timeout: Duration,
    ) -> Result<(), Error> {
        const OPERATION: &str = "seek";
        let start = Instant::now();
        let list = self.list([(topic, partition, offset)].into_iter(), OPERATION)?;
        // SAFETY: both live during the call; the error is ours.
        let result = unsafe {
            take_error(rdsys::rd_kafka_seek_partitions(
                self.client.rk(),
                list.ptr(),
                millis(timeout),
            ))
        };
        result.map_err(|error| self.client.explain(OPERATION, &error, start, Some(topic)))?;
        match list.first_error() {
            Some(code) => Err(self
                .client
                .explain_code(OPERATION, code, start, Some(topic))),
            None => Ok(()),
        }
    }

    /// Low and high watermark. Under `read_committed` the high one is the end of the log, not the
    /// last stable offset.
    pub(crate) fn watermarks(
        &self,
        topic: &str,
        partition: i32,
        timeout: Duration,
    ) -> Result<(i64, i64), Error> {
        const OPERATION: &str = "read the watermarks";
        let start = Instant::now();
        let name =
            CString::new(topic).map_err(|_| Error::config("topic", "contains a NUL byte"))?;
        let (mut low, mut high) = (0, 0);
        // SAFETY: all live during the call.
        let code = Code(unsafe {
            raw::rd_kafka_query_watermark_offsets(
                self.client.rk(),
                name.as_ptr(),
                partition,
                &raw mut low,
                &raw mut high,
                millis(timeout),
            )
        });
        if code.is_error() {
            return Err(self
                .client
                .explain_code(OPERATION, code, start, Some(topic)));
        }
        Ok((low, high))
    }

    /// The first offset whose record is not older than the time; `None` = there is none.
    pub(crate) fn offset_for_time(
        &self,
        topic: &str,
        partition: i32,
        timestamp_ms: i64,
        timeout: Duration,
    ) -> Result<Option<i64>, Error> {
        const OPERATION: &str = "find the offset of a time";
        let start = Instant::now();
        let list = self.list([(topic, partition, timestamp_ms)].into_iter(), OPERATION)?;
        // SAFETY: both live during the call.
        let code = Code(unsafe {
            raw::rd_kafka_offsets_for_times(self.client.rk(), list.ptr(), millis(timeout))
        });
        let code = if code.is_error() {
            Some(code)
        } else {
            list.first_error()
        };
        if let Some(code) = code {
            return Err(self
                .client
                .explain_code(OPERATION, code, start, Some(topic)));
        }
        Ok(list
            .elements()
            .first()
            .map(|e| e.offset)
            .filter(|offset| *offset >= 0))
    }

    /// The group's committed offset and its metadata; `None` = there is none. An element with an
    /// error of its own means unknown, never none.
    pub(crate) fn committed(
        &self,
        topic: &str,
        partition: i32,
        timeout: Duration,
    ) -> Result<Option<(i64, String)>, Error> {
        const OPERATION: &str = "read the committed offset";
        let start = Instant::now();
        let list = self.list([(topic, partition, NO_OFFSET)].into_iter(), OPERATION)?;
        // SAFETY: both live during the call.
        let code =
            Code(unsafe { raw::rd_kafka_committed(self.client.rk(), list.ptr(), millis(timeout)) });
        let code = if code.is_error() {
            Some(code)
        } else {
            list.first_error()
        };
        if let Some(code) = code {
            return Err(self
                .client
                .explain_code(OPERATION, code, start, Some(topic)));
        }
        Ok(list
            .elements()
            .into_iter()
            .next()
            .filter(|e| e.offset >= 0)
            .map(|e| (e.offset, e.metadata)))
    }

    /// Polls once. Must be called at least every `max.poll.interval.ms`.
    pub(crate) fn poll(&self, timeout: Duration) -> Polled {
        if let Some(waiting) = self.waiting() {
            return waiting;
        }
        // SAFETY: the handle is live; the message is ours, copied, and freed here.
        let polled = unsafe {
            let message = rdsys::rd_kafka_consumer_poll(self.client.rk(), millis(timeout));
            if message.is_null() {
                Polled::Nothing
            } else {
                let polled = self.read(message);
                rdsys::rd_kafka_message_destroy(message);
                polled
            }
        };
        match polled {
            Polled::Nothing => self.waiting().unwrap_or(Polled::Nothing),
            polled => polled,
        }
    }

    /// What a callback has left behind.
    fn waiting(&self) -> Option<Polled> {
        let shared = self.client.shared();
        if let Some(rebalance) = lock(&shared.group).rebalances.pop_front() {
            return Some(Polled::Rebalance(rebalance));
        }
        let (code, reason) = shared.complaints.take()?;
        let error = CallError {
            code,
            reason,
            flags: Flags {
                fatal: code == Code::LOCAL_FATAL,
                ..Flags::default()
            },
        };
        let error = match self.client.fatal() {
            Some((code, reason)) => CallError {
                code,
                reason,
                flags: Flags {
                    fatal: true,
                    ..Flags::default()
                },
            },
            None => error,
        };
        Some(Polled::Error(crate::classify::describe(
            "consume",
            error.code,
            &error.reason,
            error.flags,
            self.client.bootstrap(),
            None,
        )))
    }

    /// # Safety
    /// `message` is live during the call.
    unsafe fn read(&self, message: *const rdsys::rd_kafka_message_t) -> Polled {
        // SAFETY: fields and headers are copied; the error is read as an integer, it may be a code
        // that the binding does not know.
        unsafe {
            let code = Code((&raw const (*message).err).cast::<i32>().read());
            let topic = if (*message).rkt.is_null() {
                Cow::Borrowed("")
            } else {
                CStr::from_ptr(rdsys::rd_kafka_topic_name((*message).rkt)).to_string_lossy()
            };
            let partition = (*message).partition;
            if !code.is_error() {
                let topic = self.shared_name(&topic);
                return Polled::Message(copied(message, topic, &mut lock(&self.scratch).bytes));
            }
            if code == Code::LOCAL_PARTITION_EOF {
                return Polled::End {
                    topic: self.shared_name(&topic),
                    partition,
                    offset: (*message).offset,
                };
            }
            let reason = text(rdsys::rd_kafka_message_errstr(message));
            if code == Code::LOCAL_AUTO_OFFSET_RESET || code == Code::OFFSET_OUT_OF_RANGE {
                let offset = Some((*message).offset).filter(|offset| *offset >= 0);
                return Polled::OutOfRange {
                    topic: topic.into_owned(),
                    partition,
                    offset,
                    reason,
                };
            }
            let flags = Flags {
                // Records with a wrong checksum, or of an unknown format: librdkafka goes on behind them.
                fatal: self.client.fatal().is_some()
                    || code == Code::LOCAL_BAD_MSG
                    || code == Code::LOCAL_NOT_IMPLEMENTED,
                ..Flags::default()
            };
            let topic = Some(&*topic).filter(|t| !t.is_empty());
            Polled::Error(crate::classify::describe(
                "consume",
                code,
                &reason,
                flags,
                self.client.bootstrap(),
                topic,
            ))
        }
    }

    fn shared_name(&self, topic: &str) -> Arc<str> {
        let mut last = lock(&self.scratch);
        if *last.topic != *topic {
            last.topic = Arc::from(topic);
        }
        Arc::clone(&last.topic)
    }

    fn list<'a, S: AsRef<str> + 'a>(
        &self,
        partitions: impl ExactSizeIterator<Item = (S, i32, i64)>,
        operation: &str,
    ) -> Result<List, Error> {
        List::of(partitions).map_err(|code| {
            self.client
                .explain_code(operation, code, Instant::now(), None)
        })
    }

    /// A call with a list of partitions; an error of an element is an error of the call.
    fn with<'a, S: AsRef<str> + 'a>(
        &self,
        partitions: impl ExactSizeIterator<Item = (S, i32, i64)>,
        operation: &'static str,
        call: impl FnOnce(*mut rdsys::rd_kafka_t, *mut NativeList) -> c_int,
    ) -> Result<(), Error> {
        let start = Instant::now();
        let list = self.list(partitions, operation)?;
        let code = Code(call(self.client.rk(), list.ptr()));
        let code = if code.is_error() {
            Some(code)
        } else {
            list.first_error()
        };
        match code {
            Some(code) => Err(self.client.explain_code(operation, code, start, None)),
            None => Ok(()),
        }
    }
}

/// A message of its own. Key, payload and headers lie in one piece of memory: three slices of it cost less than an allocation for each.
///
/// # Safety
/// `message` is live during the call.
unsafe fn copied(
    message: *const rdsys::rd_kafka_message_t,
    topic: Arc<str>,
    bytes: &mut Vec<u8>,
) -> Message {
    bytes.clear();
    // SAFETY: by this function's contract; what it points to is copied.
    let (partition, offset, timestamp_ms, key, payload) = unsafe {
        let mut part = |first: *mut c_void, size: usize| {
            let part = slice(first, size)?;
            bytes.extend_from_slice(part);
            Some(bytes.len() - size..bytes.len())
        };
        let key = part((*message).key, (*message).key_len);
        let payload = part((*message).payload, (*message).len);
        (
            (*message).partition,
            (*message).offset,
            rdsys::rd_kafka_message_timestamp(message, ptr::null_mut()),
            key,
            payload,
        )
    };
    let headers = bytes.len();
    // SAFETY: by this function's contract.
    unsafe { push_headers(message, bytes) };
    let bytes = Bytes::copy_from_slice(bytes);
    Message {
        topic,
        partition,
        offset,
        timestamp_ms,
        key: key.map(|part| bytes.slice(part)),
        payload: payload.map(|part| bytes.slice(part)),
        headers: Headers::of(bytes.slice(headers..)),
    }
}

/// # Safety
/// `first` is null or points to `size` bytes, which stay what they are for as long as the slice is used.
unsafe fn slice<'a>(first: *const c_void, size: usize) -> Option<&'a [u8]> {
    // SAFETY: by this function's contract.
    (!first.is_null()).then(|| unsafe { std::slice::from_raw_parts(first.cast(), size) })
}

/// # Safety
/// `message` is live during the call.
unsafe fn push_headers(message: *const rdsys::rd_kafka_message_t, bytes: &mut Vec<u8>) {
    // SAFETY: the list belongs to the message; names and values are copied.
    unsafe {
        let mut list = ptr::null_mut();
        if rdsys::rd_kafka_message_headers(message, &raw mut list)
            != rdsys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR
        {
            return;
        }
        let (mut name, mut value, mut size) = (ptr::null(), ptr::null(), 0);
        let mut at = 0;
        while rdsys::rd_kafka_header_get_all(list, at, &raw mut name, &raw mut value, &raw mut size)
            == rdsys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR
        {
            let name = CStr::from_ptr(name).to_string_lossy();
            headers::push(bytes, &name, slice(value, size));
            at += 1;
        }
    }
}

/// `rd_kafka_incremental_assign` or `rd_kafka_incremental_unassign`.
type Change =
    unsafe extern "C" fn(*mut rdsys::rd_kafka_t, *const NativeList) -> *mut rdsys::rd_kafka_error_t;

/// Which partitions are fetched. librdkafka's main thread answers, which has carried out every call before.
///
/// # Safety
/// The handle is live.
unsafe fn fetched(rk: *mut rdsys::rd_kafka_t) -> BTreeSet<(String, i32)> {
    let mut current = ptr::null_mut();
    // SAFETY: the handle is live; the list is ours and freed here.
    unsafe {
        rdsys::rd_kafka_assignment(rk, &raw mut current);
        if current.is_null() {
            return BTreeSet::new();
        }
        let fetched = list::elements(current);
        rdsys::rd_kafka_topic_partition_list_destroy(current);
        fetched
            .into_iter()
            .map(|e| (e.topic, e.partition))
            .collect()
    }
}

pub(super) unsafe extern "C" fn on_rebalance(
    rk: *mut rdsys::rd_kafka_t,
    err: c_int,
    partitions: *mut NativeList,
    opaque: *mut c_void,
) {
    // SAFETY: `opaque` is the client's `Shared`; the list lives during the call.
    let (shared, partitions): (_, Vec<_>) = unsafe {
        let partitions = list::elements(partitions)
            .into_iter()
            .map(|e| (e.topic, e.partition))
            .collect();
        (&*opaque.cast::<Shared>(), partitions)
    };
    let mut group = lock(&shared.group);
    if Code(err) == Code::LOCAL_ASSIGN_PARTITIONS {
        group.granted.extend(partitions.iter().cloned());
        // The answer that the group waits for. What is fetched from where is known only after ownership has been taken in
        // the database (G6).
        // librdkafka itself logs an answer that fails.
        let nothing = std::iter::empty::<(&str, i32, i64)>();
        let _ = change(rk, rdsys::rd_kafka_incremental_assign, nothing);
        group.rebalances.push_back(Rebalance::Assigned(partitions));
    } else {
        // SAFETY: the handle is live; a null list means what is stored, without waiting for the answer.
        let fetched = unsafe {
            raw::rd_kafka_commit(rk, ptr::null(), 1);
            fetched(rk)
        };
        for id in &partitions {
            group.granted.remove(id);
        }
        let stop: Vec<_> = partitions
            .iter()
            .filter(|id| fetched.contains(id))
            .map(|(topic, partition)| (topic, *partition, NO_OFFSET))
            .collect();
        let _ = change(rk, rdsys::rd_kafka_incremental_unassign, stop.into_iter());
        group.rebalances.push_back(Rebalance::Revoked(partitions));
    }
}

/// Changes what is fetched.
fn change(
    rk: *mut rdsys::rd_kafka_t,
    change: Change,
    partitions: impl ExactSizeIterator<Item = (impl AsRef<str>, i32, i64)>,
) -> Result<(), CallError> {
    let list = List::of(partitions).map_err(CallError::of)?;
    // SAFETY: both live during the call; the error is ours.
    unsafe { take_error(change(rk, list.ptr())) }
}
