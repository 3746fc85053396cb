//! The thin transactional producer.
//!
//! It never flushes: the driver serves delivery reports with `rd_kafka_poll`, which returns as soon
//! as one is there. (`rd_kafka_flush` sleeps in 10 ms steps: a small transaction takes 12 ms with
//! it and 3 without.)

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use oncebox_migrations::headers;
use rdkafka_sys as rdsys;

use super::client::{CallError, Client, Shared, lock, millis, take_error};
use super::code::{Code, text};
use super::list::List;
use super::tap::Tap;
use crate::classify::Flags;
use crate::config::{Config, Role};
use crate::envelope;
use crate::error::Error;
use crate::record::{Offsets, Record, SourceTag};

const ANY_PARTITION: i32 = -1;

/// Delivery reports of the running transaction. Written by the delivery callback, on the thread
/// that polls.
#[derive(Default)]
pub(super) struct Acks {
    delivered: AtomicUsize,
    failed: AtomicUsize,
    /// One per record of the running transaction: acknowledged.
    which: Mutex<Vec<bool>>,
    /// Partition and offset of the record behind those: the anchor.
    anchor: Mutex<Option<(i32, i64)>>,
    failures: Mutex<Vec<FailedRecord>>,
}

/// A record whose delivery report is an error.
#[derive(Clone, Debug)]
pub(crate) struct FailedRecord {
    pub(crate) index: usize,
    pub(crate) code: Code,
    pub(crate) reason: String,
}

/// Why a record was not taken over by librdkafka.
#[derive(Debug)]
pub(crate) enum NotProduced {
    /// The local queue is full: serve delivery reports and try again.
    QueueFull,
    /// The record cannot be encoded.
    Unencodable(String),
    /// librdkafka refuses it.
    Refused(CallError),
}

/// A transactional producer. Used from one thread.
pub(crate) struct Producer {
    client: Client,
    topics: HashMap<Arc<str>, Topic>,
}

/// A cached topic handle.
struct Topic(*mut rdsys::rd_kafka_topic_t);

// SAFETY: topic handles may be used from any thread.
unsafe impl Send for Topic {}

impl Producer {
    /// Creates the client; nothing is sent yet. `on_commit_sent`: see [`Tap::new`].
    pub(crate) fn create(
        config: &Config,
        transactional_id: &str,
        transaction_timeout: Duration,
        on_commit_sent: Option<Box<dyn Fn() + Send + Sync>>,
    ) -> Result<Self, Error> {
        let timeout = millis(transaction_timeout);
        // A request that gets no answer for a third of the transaction is given up while there is
        // time to try again.
        let socket_timeout = (timeout / 3).clamp(300, 10_000);
        let defaults = [
            ("socket.timeout.ms", socket_timeout.to_string()),
            ("request.timeout.ms", socket_timeout.to_string()),
            ("message.timeout.ms", timeout.to_string()),
        ];
        let decided = [
            ("transactional.id", transactional_id.to_owned()),
            ("transaction.timeout.ms", timeout.to_string()),
            ("enable.idempotence", "true".to_owned()),
            ("acks", "all".to_owned()),
        ];
        let shared = Shared {
            tap: Tap::new(on_commit_sent),
            ..Shared::default()
        };
        let client = Client::create(config, Role::Producer, &defaults, &decided, shared)?;
        Ok(Self {
            client,
            topics: HashMap::new(),
        })
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    pub(crate) fn tap(&self) -> &Tap {
        &self.client.shared().tap
    }

    /// Fences older producers and settles their open transaction. A time-out leaves it in progress:
    /// call again.
    pub(crate) fn init(&self, timeout: Duration) -> Result<(), CallError> {
        // SAFETY: the handle is live; the error is ours.
        unsafe {
            take_error(rdsys::rd_kafka_init_transactions(
                self.client.rk(),
                millis(timeout),
            ))
        }
    }

    /// Opens a transaction of so many records; local.
    pub(crate) fn begin(&mut self, records: usize) -> Result<(), CallError> {
        self.tap().reset();
        self.client.shared().acks.reset(records);
        // SAFETY: as in `init`.
        unsafe { take_error(rdsys::rd_kafka_begin_transaction(self.client.rk())) }
    }

    /// Hands one record over. `index` comes back in the delivery report.
    pub(crate) fn produce(
        &mut self,
        index: usize,
        record: &Record,
        source: Option<&SourceTag>,
    ) -> Result<(), NotProduced> {
        let topic = self.topic(&record.topic)?;
        let headers = HeaderList::of(record, source)?;
        let (key, payload) = (memory(record.key.as_ref()), memory(record.payload.as_ref()));
        // Not copied, so that a record of 1 KiB costs no memcpy: `in_flight` keeps it alive until
        // `release`.
        lock(&self.client.shared().in_flight).extend(record.payload.clone());
        let fields = [
            field(
                rdsys::rd_kafka_vtype_t::RD_KAFKA_VTYPE_RKT,
                rdsys::rd_kafka_vu_s__bindgen_ty_1 { rkt: topic },
            ),
            field(
                rdsys::rd_kafka_vtype_t::RD_KAFKA_VTYPE_PARTITION,
                rdsys::rd_kafka_vu_s__bindgen_ty_1 {
                    i32_: ANY_PARTITION,
                },
            ),
            field(
                rdsys::rd_kafka_vtype_t::RD_KAFKA_VTYPE_KEY,
                rdsys::rd_kafka_vu_s__bindgen_ty_1 { mem: key },
            ),
            field(
                rdsys::rd_kafka_vtype_t::RD_KAFKA_VTYPE_VALUE,
                rdsys::rd_kafka_vu_s__bindgen_ty_1 { mem: payload },
            ),
            field(
                rdsys::rd_kafka_vtype_t::RD_KAFKA_VTYPE_OPAQUE,
                rdsys::rd_kafka_vu_s__bindgen_ty_1 {
                    ptr: index as *mut c_void,
                },
            ),
            field(
                rdsys::rd_kafka_vtype_t::RD_KAFKA_VTYPE_HEADERS,
                rdsys::rd_kafka_vu_s__bindgen_ty_1 { headers: headers.0 },
            ),
        ];
        // SAFETY: the topic handle is live, the key is copied by the call, the payload lives in
        // `in_flight` until its delivery report has been served or the client is destroyed. On
        // success the headers belong to the message.
        let result = unsafe {
            take_error(rdsys::rd_kafka_produceva(
                self.client.rk(),
                fields.as_ptr(),
                fields.len(),
            ))
        };
        match result {
            Ok(()) => {
                headers.now_belongs_to_the_message();
                Ok(())
            }
            Err(error) => {
                if record.payload.is_some() {
                    lock(&self.client.shared().in_flight).pop();
                }
                Err(if error.code == Code::LOCAL_QUEUE_FULL {
                    NotProduced::QueueFull
                } else {
                    NotProduced::Refused(error)
                })
            }
        }
    }

    /// Adds the checkpoint to the transaction. After a time-out call it again with the same
    /// offsets.
    pub(crate) fn send_offsets(
        &self,
        offsets: &Offsets,
        timeout: Duration,
    ) -> Result<(), CallError> {
        let plain = |reason: &str| CallError {
            code: Code::TOPIC_EXCEPTION,
            reason: reason.to_owned(),
            flags: Flags {
                abortable: true,
                ..Flags::default()
            },
        };
        let group = CString::new(offsets.group.as_str())
            .map_err(|_| plain("the group contains a NUL byte"))?;
        let mut list = List::new(1);
        list.add(
            &offsets.topic,
            offsets.partition,
            offsets.offset,
            &offsets.metadata,
        )
        .map_err(|_| plain("the topic contains a NUL byte"))?;
        // SAFETY: all objects live during the call; the metadata object is owned and freed here.
        unsafe {
            let member = rdsys::rd_kafka_consumer_group_metadata_new(group.as_ptr());
            let result = take_error(rdsys::rd_kafka_send_offsets_to_transaction(
                self.client.rk(),
                list.ptr(),
                member,
                millis(timeout),
            ));
            rdsys::rd_kafka_consumer_group_metadata_destroy(member);
            result
        }
    }

    /// Commits. A time-out leaves it in progress: call again.
    pub(crate) fn commit(&self, timeout: Duration) -> Result<(), CallError> {
        // SAFETY: as in `init`.
        unsafe {
            take_error(rdsys::rd_kafka_commit_transaction(
                self.client.rk(),
                millis(timeout),
            ))
        }
    }

    /// Purges what is queued, serves the delivery reports and aborts. A time-out leaves it in
    /// progress: call again.
    pub(crate) fn abort(&self, timeout: Duration) -> Result<(), CallError> {
        // SAFETY: as in `init`.
        unsafe {
            take_error(rdsys::rd_kafka_abort_transaction(
                self.client.rk(),
                millis(timeout),
            ))
        }
    }

    /// Why the running transaction can only be aborted, if that is so. librdkafka tells it to a
    /// second `begin`, which is refused in every state that a running transaction can be in.
    pub(crate) fn why_abortable(&self) -> Option<CallError> {
        // SAFETY: as in `init`.
        let result = unsafe { take_error(rdsys::rd_kafka_begin_transaction(self.client.rk())) };
        result.err().filter(|error| error.flags.abortable)
    }

    /// Lets go of the payloads if librdkafka has no message any more.
    pub(crate) fn release(&mut self) {
        // SAFETY: the handle is live.
        if unsafe { rdsys::rd_kafka_outq_len(self.client.rk()) } == 0 {
            lock(&self.client.shared().in_flight).clear();
        }
    }

    /// Records acknowledged, and records that came back with an error, in the running transaction.
    pub(crate) fn acks(&self) -> (usize, usize) {
        let acks = &self.client.shared().acks;
        (
            acks.delivered.load(Ordering::Relaxed),
            acks.failed.load(Ordering::Relaxed),
        )
    }

    /// Where the record whose index is that of no record was written.
    pub(crate) fn anchor(&self) -> Option<(i32, i64)> {
        *lock(&self.client.shared().acks.anchor)
    }

    /// Which records were acknowledged in the running transaction.
    pub(crate) fn acknowledged(&self) -> Vec<bool> {
        lock(&self.client.shared().acks.which).clone()
    }

    /// The records that came back with an error, in the order of the reports.
    pub(crate) fn failures(&self) -> Vec<FailedRecord> {
        lock(&self.client.shared().acks.failures).clone()
    }

    fn topic(&mut self, name: &Arc<str>) -> Result<*mut rdsys::rd_kafka_topic_t, NotProduced> {
        if let Some(topic) = self.topics.get(name) {
            return Ok(topic.0);
        }
        let c_name = CString::new(&**name)
            .map_err(|_| NotProduced::Unencodable("the topic contains a NUL byte".into()))?;
        // SAFETY: the handle is live; a null configuration is the client's default.
        let topic = unsafe {
            rdsys::rd_kafka_topic_new(self.client.rk(), c_name.as_ptr(), ptr::null_mut())
        };
        if topic.is_null() {
            return Err(NotProduced::Refused(CallError {
                code: Code::TOPIC_EXCEPTION,
                reason: "the topic's name is not valid".into(),
                flags: Flags::default(),
            }));
        }
        self.topics.insert(name.clone(), Topic(topic));
        Ok(topic)
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        for topic in self.topics.values() {
            // SAFETY: ours, last use; the messages that use the topic hold references of their own.
            // The client is destroyed after this, as a field.
            unsafe { rdsys::rd_kafka_topic_destroy(topic.0) };
        }
    }
}

/// Headers on their way into a message.
struct HeaderList(*mut rdsys::rd_kafka_headers_t);

impl HeaderList {
    fn of(record: &Record, source: Option<&SourceTag>) -> Result<Self, NotProduced> {
        // SAFETY: no preconditions.
        let list = Self(unsafe { rdsys::rd_kafka_headers_new(12) });
        if let Some(envelope) = &record.envelope {
            let source = source.ok_or_else(|| {
                NotProduced::Unencodable(
                    "it has an envelope, but the transaction names no source".into(),
                )
            })?;
            envelope::encode(source, envelope, |name, value| list.add(name, Some(value)));
        }
        for header in headers::decode(&record.headers) {
            let (name, value) =
                header.map_err(|error| NotProduced::Unencodable(error.to_string()))?;
            list.add(name, value);
        }
        Ok(list)
    }

    fn now_belongs_to_the_message(mut self) {
        self.0 = ptr::null_mut();
    }

    fn add(&self, name: &str, value: Option<&[u8]>) {
        let (content, size) = value.map_or((ptr::null(), 0), |v| {
            (v.as_ptr().cast(), v.len().cast_signed())
        });
        // SAFETY: the list is live; name and value are copied. Sizes are given, so nothing has to
        // be terminated.
        unsafe {
            rdsys::rd_kafka_header_add(
                self.0,
                name.as_ptr().cast(),
                name.len().cast_signed(),
                content,
                size,
            )
        };
    }
}

impl Drop for HeaderList {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: still ours.
            unsafe { rdsys::rd_kafka_headers_destroy(self.0) };
        }
    }
}

impl Acks {
    fn reset(&self, records: usize) {
        self.delivered.store(0, Ordering::Relaxed);
        self.failed.store(0, Ordering::Relaxed);
        lock(&self.failures).clear();
        *lock(&self.anchor) = None;
        *lock(&self.which) = vec![false; records];
    }
}

fn field(
    vtype: rdsys::rd_kafka_vtype_t,
    u: rdsys::rd_kafka_vu_s__bindgen_ty_1,
) -> rdsys::rd_kafka_vu_t {
    rdsys::rd_kafka_vu_t { vtype, u }
}

/// Null and empty are different: a null payload is a tombstone, a null key goes to any partition.
fn memory(bytes: Option<&Bytes>) -> rdsys::rd_kafka_vu_s__bindgen_ty_1__bindgen_ty_1 {
    let (ptr, size) = bytes.map_or((ptr::null_mut(), 0), |b| {
        (b.as_ptr().cast_mut().cast(), b.len())
    });
    rdsys::rd_kafka_vu_s__bindgen_ty_1__bindgen_ty_1 { ptr, size }
}

/// The delivery report, on the thread that polls: counts.
pub(super) unsafe extern "C" fn on_delivery(
    _: *mut rdsys::rd_kafka_t,
    message: *const rdsys::rd_kafka_message_t,
    opaque: *mut c_void,
) {
    // SAFETY: `opaque` is the client's `Shared`; the message lives during the call.
    let (acks, code) = unsafe { (&(*opaque.cast::<Shared>()).acks, code_of(message)) };
    if code.is_error() {
        acks.failed.fetch_add(1, Ordering::Relaxed);
        return;
    }
    // SAFETY: as above.
    let index = unsafe { (*message)._private as usize };
    match lock(&acks.which).get_mut(index) {
        Some(acknowledged) => *acknowledged = true,
        // SAFETY: as above.
        None => *lock(&acks.anchor) = Some(unsafe { ((*message).partition, (*message).offset) }),
    }
    acks.delivered.fetch_add(1, Ordering::Relaxed);
}

/// The interceptor that sees a record's fate before its delivery report, on a broker thread: keeps
/// what went wrong. Only here may the broker's words be read: librdkafka 2.12 frees them before it
/// serves the report.
pub(super) unsafe extern "C" fn on_acknowledgement(
    _: *mut rdsys::rd_kafka_t,
    message: *mut rdsys::rd_kafka_message_t,
    opaque: *mut c_void,
) -> rdsys::rd_kafka_resp_err_t {
    // SAFETY: `opaque` is the client's `Shared`; the message and its words live during the call.
    unsafe {
        let code = code_of(message);
        if code.is_error() {
            let words = text(rdsys::rd_kafka_message_produce_errstr(message));
            // librdkafka gives the innocent records of a refused batch a code of their own, and
            // overwrites it with the batch's code if only one record is guilty; the sentence stays.
            let innocent =
                words.starts_with("Failed to append record because it was part of a batch");
            lock(&(*opaque.cast::<Shared>()).acks.failures).push(FailedRecord {
                index: (*message)._private as usize,
                code: if innocent {
                    Code::LOCAL_INVALID_DIFFERENT_RECORD
                } else {
                    code
                },
                reason: if words.is_empty() {
                    code.sentence()
                } else {
                    words
                },
            });
        }
    }
    rdsys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR
}

/// Read as an integer: it may be a code that the binding does not know.
///
/// # Safety
/// `message` is live during the call.
unsafe fn code_of(message: *const rdsys::rd_kafka_message_t) -> Code {
    // SAFETY: by this function's contract.
    Code(unsafe { (&raw const (*message).err).cast::<i32>().read() })
}
