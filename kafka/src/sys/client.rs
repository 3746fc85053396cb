//! A librdkafka client of any kind: creation, callbacks, destruction.

use std::collections::VecDeque;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rdkafka_sys as rdsys;

use super::code::{Code, raw, text};
use super::consumer::Group;
use super::producer::Acks;
use super::tap::Tap;
use crate::classify;
use crate::config::{Config, Role, is_secret};
use crate::error::Error;
use crate::thread;

/// What librdkafka's callbacks write and this crate reads. Lives until after the client is
/// destroyed.
#[derive(Default)]
pub(crate) struct Shared {
    pub(super) tap: Tap,
    pub(super) acks: Acks,
    /// Payloads that librdkafka points to.
    pub(super) in_flight: Mutex<Vec<Bytes>>,
    pub(super) group: Mutex<Group>,
    pub(super) complaints: Complaints,
}

/// The last words of the client's error callback: why nothing answers.
#[derive(Default)]
pub(super) struct Complaints(Mutex<Last>);

#[derive(Default)]
struct Last {
    refused: Option<(Instant, String)>,
    transport: Option<(Instant, String)>,
    events: VecDeque<(Code, String)>,
}

impl Complaints {
    fn hear(&self, code: Code, reason: String) {
        let code = classify::event(code, &reason);
        let mut last = lock(&self.0);
        let now = Instant::now();
        if classify::is_refused_connection(code) {
            last.refused = Some((now, reason.clone()));
        } else if code != Code::LOCAL_ALL_BROKERS_DOWN || last.transport.is_none() {
            // "1/1 brokers are down" says less than "Connect to 127.0.0.1:9092 failed: Connection
            // refused".
            last.transport = Some((now, reason.clone()));
        }
        if last.events.len() < 16 {
            last.events.push_back((code, reason));
        }
    }

    /// The broker refused us (credentials, TLS) since `start`.
    pub(super) fn refused_since(&self, start: Instant) -> Option<String> {
        lock(&self.0)
            .refused
            .as_ref()
            .filter(|(at, _)| *at >= start)
            .map(|(_, reason)| reason.clone())
    }

    /// The connection failed since `start`.
    pub(super) fn transport_since(&self, start: Instant) -> Option<String> {
        lock(&self.0)
            .transport
            .as_ref()
            .filter(|(at, _)| *at >= start)
            .map(|(_, reason)| reason.clone())
    }

    /// The next event not yet taken.
    pub(super) fn take(&self) -> Option<(Code, String)> {
        lock(&self.0).events.pop_front()
    }
}

/// A failed call: librdkafka's code, words and flags.
#[derive(Debug)]
pub(crate) struct CallError {
    pub(crate) code: Code,
    pub(crate) reason: String,
    pub(crate) flags: classify::Flags,
}

impl CallError {
    /// Of a call that returned a code only.
    pub(super) fn of(code: Code) -> Self {
        Self {
            code,
            reason: code.sentence(),
            flags: classify::Flags::default(),
        }
    }
}

/// An owned client.
pub(crate) struct Client {
    rk: *mut rdsys::rd_kafka_t,
    shared: *mut Shared,
    bootstrap: String,
}

// SAFETY: a librdkafka handle may be used from any thread; `Shared` is made of locks and atomics.
unsafe impl Send for Client {}
// SAFETY: as above.
unsafe impl Sync for Client {}

impl Client {
    /// Creates a client. Nothing is sent yet.
    pub(crate) fn create(
        config: &Config,
        role: Role,
        defaults: &[(&str, String)],
        decided: &[(&str, String)],
        shared: Shared,
    ) -> Result<Self, Error> {
        let properties = config.resolve(role, defaults, decided)?;
        let shared = Box::into_raw(Box::new(shared));
        // SAFETY: `conf` is fresh and owned here; it goes to `rd_kafka_new` or is destroyed.
        // `shared` outlives the client: it is freed only after `rd_kafka_destroy`, or here if there
        // is no client.
        unsafe {
            let conf = rdsys::rd_kafka_conf_new();
            let fail = |error: Error| {
                rdsys::rd_kafka_conf_destroy(conf);
                drop(Box::from_raw(shared));
                Err(error)
            };
            for (key, value) in &properties {
                if let Err(error) = set(conf, key, value) {
                    return fail(error);
                }
            }
            rdsys::rd_kafka_conf_set_opaque(conf, shared.cast());
            rdsys::rd_kafka_conf_set_error_cb(conf, Some(on_error));
            rdsys::rd_kafka_conf_set_log_cb(conf, Some(on_log));
            let kind = match role {
                Role::Producer => {
                    rdsys::rd_kafka_conf_set_dr_msg_cb(conf, Some(super::producer::on_delivery));
                    super::tap::install(conf, shared);
                    rdsys::rd_kafka_type_t::RD_KAFKA_PRODUCER
                }
                Role::Consumer => {
                    raw::rd_kafka_conf_set_rebalance_cb(conf, Some(super::consumer::on_rebalance));
                    rdsys::rd_kafka_type_t::RD_KAFKA_CONSUMER
                }
                Role::Admin => rdsys::rd_kafka_type_t::RD_KAFKA_PRODUCER,
            };
            let mut words = [0; 512];
            let rk = rdsys::rd_kafka_new(kind, conf, words.as_mut_ptr(), words.len());
            if rk.is_null() {
                let words = text(words.as_ptr());
                // Properties that contradict each other are quoted: "`a` must be set <= `b`".
                let property = words.split('`').nth(1).unwrap_or("*").to_owned();
                return fail(Error::config(
                    property,
                    format!("is refused by librdkafka: {words}"),
                ));
            }
            Ok(Self {
                rk,
                shared,
                bootstrap: config.bootstrap.clone(),
            })
        }
    }

    pub(super) fn rk(&self) -> *mut rdsys::rd_kafka_t {
        self.rk
    }

    pub(crate) fn shared(&self) -> &Shared {
        // SAFETY: valid until `drop`, never mutably borrowed.
        unsafe { &*self.shared }
    }

    /// Serves callbacks: returns after the first ones, or after the time-out.
    pub(crate) fn poll(&self, timeout: Duration) {
        // SAFETY: the handle is live.
        unsafe { rdsys::rd_kafka_poll(self.rk, millis(timeout)) };
    }

    /// The fatal error that this client has raised, if any.
    pub(crate) fn fatal(&self) -> Option<(Code, String)> {
        let mut words = [0; 512];
        // SAFETY: the handle is live, the buffer is as long as we say.
        let code =
            Code(unsafe { raw::rd_kafka_fatal_error(self.rk, words.as_mut_ptr(), words.len()) });
        // SAFETY: librdkafka terminates what it writes.
        code.is_error()
            .then(|| (code, unsafe { text(words.as_ptr()) }))
    }

    /// The words for a failed call. A time-out whose cause the client has complained about gets
    /// that cause.
    pub(crate) fn explain(
        &self,
        operation: &str,
        error: &CallError,
        since: Instant,
        topic: Option<&str>,
    ) -> Error {
        let waited = matches!(
            error.code,
            Code::LOCAL_TIMED_OUT
                | Code::LOCAL_TRANSPORT
                | Code::LOCAL_ALL_BROKERS_DOWN
                | Code::LOCAL_WAIT_COORD
                | Code::LOCAL_MSG_TIMED_OUT
        );
        let complaints = &self.shared().complaints;
        if waited && let Some(reason) = complaints.refused_since(since) {
            return Error::Authentication {
                bootstrap: self.bootstrap.clone(),
                reason,
            };
        }
        if waited && let Some(reason) = complaints.transport_since(since) {
            return Error::Unreachable {
                bootstrap: self.bootstrap.clone(),
                reason,
            };
        }
        classify::describe(
            operation,
            error.code,
            &error.reason,
            error.flags,
            &self.bootstrap,
            topic,
        )
    }

    /// The same for a call that returned a code only.
    pub(crate) fn explain_code(
        &self,
        operation: &str,
        code: Code,
        since: Instant,
        topic: Option<&str>,
    ) -> Error {
        self.explain(operation, &CallError::of(code), since, topic)
    }

    pub(crate) fn bootstrap(&self) -> &str {
        &self.bootstrap
    }

    /// Waits until some broker has answered. Credentials that are refused end the wait at once: no
    /// time-out cures them.
    pub(crate) fn connect(&self, timeout: Duration) -> Result<(), Error> {
        let start = Instant::now();
        loop {
            let left = timeout
                .saturating_sub(start.elapsed())
                .min(Duration::from_millis(500));
            let mut metadata = ptr::null();
            // SAFETY: the handle is live; the result is freed below.
            let code = unsafe {
                Code(raw::rd_kafka_metadata(
                    self.rk,
                    0,
                    ptr::null_mut(),
                    &raw mut metadata,
                    millis(left).max(1),
                ))
            };
            if !code.is_error() {
                // SAFETY: filled by the call above.
                unsafe { rdsys::rd_kafka_metadata_destroy(metadata) };
                return Ok(());
            }
            self.poll(Duration::ZERO);
            if let Some(reason) = self.shared().complaints.refused_since(start) {
                return Err(Error::Authentication {
                    bootstrap: self.bootstrap.clone(),
                    reason,
                });
            }
            if start.elapsed() >= timeout {
                return Err(Error::Unreachable {
                    bootstrap: self.bootstrap.clone(),
                    reason: self
                        .shared()
                        .complaints
                        .transport_since(start)
                        .unwrap_or_else(|| code.sentence()),
                });
            }
        }
    }
}

impl Drop for Client {
    /// A consumer leaves its group; nothing is committed. Waits at most ten seconds.
    fn drop(&mut self) {
        let last = LastUse {
            rk: self.rk,
            shared: self.shared,
        };
        // SAFETY: the handle is live, the name belongs to it and is copied.
        let name = unsafe { text(rdsys::rd_kafka_name(self.rk)) };
        thread::destroy(&name, move || last.destroy());
    }
}

/// What is left of a client whose owner has let go of it.
struct LastUse {
    rk: *mut rdsys::rd_kafka_t,
    shared: *mut Shared,
}

// SAFETY: as for `Client`.
unsafe impl Send for LastUse {}

impl LastUse {
    fn destroy(self) {
        // SAFETY: the last use of the handle; all of librdkafka's threads are joined when
        // `rd_kafka_destroy` returns, so nothing can write to `shared`, or read a payload that it
        // keeps alive, afterwards.
        unsafe {
            rdsys::rd_kafka_destroy(self.rk);
            drop(Box::from_raw(self.shared));
        }
    }
}

/// Takes the error out of librdkafka's object and frees it; null is no error.
///
/// # Safety
/// `error` is null or owned by the caller.
pub(super) unsafe fn take_error(error: *mut rdsys::rd_kafka_error_t) -> Result<(), CallError> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: owned and live until the destroy below.
    unsafe {
        let taken = CallError {
            code: Code(raw::rd_kafka_error_code(error)),
            reason: text(rdsys::rd_kafka_error_string(error)),
            flags: classify::Flags {
                fatal: rdsys::rd_kafka_error_is_fatal(error) != 0,
                abortable: rdsys::rd_kafka_error_txn_requires_abort(error) != 0,
                retriable: rdsys::rd_kafka_error_is_retriable(error) != 0,
            },
        };
        rdsys::rd_kafka_error_destroy(error);
        Err(taken)
    }
}

unsafe fn set(conf: *mut rdsys::rd_kafka_conf_t, key: &str, value: &str) -> Result<(), Error> {
    let name = CString::new(key).map_err(|_| Error::config(key, "contains a NUL byte"))?;
    let content =
        CString::new(value).map_err(|_| Error::config(key, "has a value with a NUL byte"))?;
    let mut words = [0; 512];
    // SAFETY: all pointers live during the call, the buffer is as long as we say.
    let result = unsafe {
        rdsys::rd_kafka_conf_set(
            conf,
            name.as_ptr(),
            content.as_ptr(),
            words.as_mut_ptr(),
            words.len(),
        )
    };
    if result == rdsys::rd_kafka_conf_res_t::RD_KAFKA_CONF_OK {
        return Ok(());
    }
    // librdkafka quotes the value in its words.
    let reason = if is_secret(key) {
        "has a value that librdkafka refuses".to_owned()
    } else {
        // SAFETY: librdkafka terminates what it writes.
        format!("is refused by librdkafka: {}", unsafe {
            text(words.as_ptr())
        })
    };
    Err(Error::config(key, reason))
}

/// Names of the optional parts of librdkafka in this build (`ssl`, `sasl_scram`, `zstd`, …).
pub(crate) fn builtin_features() -> Vec<String> {
    let mut value = [0; 512];
    let mut size = value.len();
    // SAFETY: a fresh configuration, a buffer as long as we say, and librdkafka terminates what it
    // writes.
    let list = unsafe {
        let conf = rdsys::rd_kafka_conf_new();
        rdsys::rd_kafka_conf_get(
            conf,
            c"builtin.features".as_ptr(),
            value.as_mut_ptr(),
            &raw mut size,
        );
        rdsys::rd_kafka_conf_destroy(conf);
        text(value.as_ptr())
    };
    list.split(',').map(|f| f.trim().to_owned()).collect()
}

/// Milliseconds as librdkafka wants them; never its −1 (= for ever).
pub(super) fn millis(duration: Duration) -> c_int {
    c_int::try_from(duration.as_millis()).unwrap_or(c_int::MAX)
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while holding one of these locks; if something ever does, the data are still
    // whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

unsafe extern "C" fn on_error(
    _: *mut rdsys::rd_kafka_t,
    err: c_int,
    reason: *const c_char,
    opaque: *mut c_void,
) {
    // SAFETY: `opaque` is the client's `Shared`; `reason` lives during the call.
    let (shared, reason) = unsafe { (&*opaque.cast::<Shared>(), text(reason)) };
    tracing::debug!(code = Code(err).name(), reason, "kafka client reports");
    shared.complaints.hear(Code(err), reason);
}

unsafe extern "C" fn on_log(
    _: *const rdsys::rd_kafka_t,
    level: c_int,
    fac: *const c_char,
    line: *const c_char,
) {
    // SAFETY: both strings live during the call.
    let (fac, line) = unsafe {
        (
            CStr::from_ptr(fac).to_string_lossy(),
            CStr::from_ptr(line).to_string_lossy(),
        )
    };
    // "a consumer property is ignored by this producer": the properties are shared on purpose.
    let level = if fac == "CONFWARN" { 7 } else { level };
    match level {
        0..=4 => tracing::warn!(target: "oncebox_kafka::librdkafka", %fac, "{line}"),
        5..=6 => tracing::info!(target: "oncebox_kafka::librdkafka", %fac, "{line}"),
        _ => tracing::debug!(target: "oncebox_kafka::librdkafka", %fac, "{line}"),
    }
}
