//! The tap: an interceptor that sees every request of the producer.
//!
//! librdkafka speaks transactions V1, in which nothing in an `EndTxn` says *which* transaction it
//! ends (KAFKA-17754). It re-sends an `EndTxn` whose answer it does not get and reports success;
//! the late first one may then end the next transaction. So every transaction is watched: one whose
//! requests are not all answered taints the producer, which is then re-created, and the new epoch
//! makes the broker refuse whatever is late (G3).

use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};

use rdkafka_sys as rdsys;

use super::client::Shared;
use super::code::{Code, raw};

const ADD_PARTITIONS_TO_TXN: i16 = 24;
const ADD_OFFSETS_TO_TXN: i16 = 25;
const END_TXN: i16 = 26;
const TXN_OFFSET_COMMIT: i16 = 28;

/// What the requests of the running transaction have gone through. Written on librdkafka's broker
/// threads.
#[derive(Default)]
pub(crate) struct Tap {
    end_txn_sent: AtomicU32,
    offset_commit_sent: AtomicBool,
    /// The first request that ended without an answer: api key + 1 in the upper half, error in the
    /// lower; 0 = none.
    unanswered: AtomicU64,
    committing: AtomicBool,
    on_commit_sent: Option<Box<dyn Fn() + Send + Sync>>,
}

impl Tap {
    /// `on_commit_sent` is called on a librdkafka thread after an `EndTxn` of a commit is written
    /// to the socket.
    pub(crate) fn new(on_commit_sent: Option<Box<dyn Fn() + Send + Sync>>) -> Self {
        Self {
            on_commit_sent,
            ..Self::default()
        }
    }

    /// Forgets the last transaction.
    pub(crate) fn reset(&self) {
        self.end_txn_sent.store(0, SeqCst);
        self.offset_commit_sent.store(false, SeqCst);
        self.unanswered.store(0, SeqCst);
        self.committing.store(false, SeqCst);
    }

    /// The commit begins or ends.
    pub(crate) fn committing(&self, yes: bool) {
        self.committing.store(yes, SeqCst);
    }

    /// An `EndTxn` left this process in the running transaction.
    pub(crate) fn end_txn_was_sent(&self) -> bool {
        self.end_txn_sent.load(SeqCst) > 0
    }

    /// A `TxnOffsetCommit` left this process in the running transaction.
    pub(crate) fn offset_commit_was_sent(&self) -> bool {
        self.offset_commit_sent.load(SeqCst)
    }

    /// Why a request of the running transaction may still be under way, if one may.
    pub(crate) fn taint(&self) -> Option<String> {
        let unanswered = self.unanswered.load(SeqCst);
        if unanswered != 0 {
            #[allow(clippy::cast_possible_truncation)]
            let (key, code) = (
                (unanswered >> 32) as i16 - 1,
                Code(unanswered as u32 as i32),
            );
            return Some(format!(
                "{} ended without the broker's answer ({})",
                name(key),
                code.name()
            ));
        }
        let sent = self.end_txn_sent.load(SeqCst);
        (sent > 1).then(|| format!("EndTxn was sent {sent} times"))
    }

    fn sent(&self, api_key: i16) {
        match api_key {
            END_TXN => {
                self.end_txn_sent.fetch_add(1, SeqCst);
                if self.committing.load(SeqCst)
                    && let Some(call) = &self.on_commit_sent
                {
                    // A panic must not unwind into C.
                    let _ = catch_unwind(AssertUnwindSafe(call));
                }
            }
            TXN_OFFSET_COMMIT => self.offset_commit_sent.store(true, SeqCst),
            _ => {}
        }
    }

    /// Every end of a request comes here, answered or not (an answered one twice). An answer that
    /// is itself an error, such as CONCURRENT_TRANSACTIONS, is an answer; `code` is only about the
    /// connection.
    fn ended(&self, api_key: i16, code: Code) {
        if code.is_error()
            && matches!(
                api_key,
                ADD_PARTITIONS_TO_TXN | ADD_OFFSETS_TO_TXN | END_TXN | TXN_OFFSET_COMMIT
            )
        {
            #[allow(clippy::cast_sign_loss)]
            let value = ((api_key + 1) as u64) << 32 | u64::from(code.0 as u32);
            let _ = self.unanswered.compare_exchange(0, value, SeqCst, SeqCst);
        }
    }
}

fn name(api_key: i16) -> &'static str {
    match api_key {
        ADD_PARTITIONS_TO_TXN => "AddPartitionsToTxn",
        ADD_OFFSETS_TO_TXN => "AddOffsetsToTxn",
        END_TXN => "EndTxn",
        _ => "TxnOffsetCommit",
    }
}

/// Makes the client created from `conf` report its requests to the tap, and the fate of its records
/// to [`super::producer`].
///
/// # Safety
/// `shared` outlives the client.
pub(super) unsafe fn install(conf: *mut rdsys::rd_kafka_conf_t, shared: *mut Shared) {
    // SAFETY: interceptors must be added before `rd_kafka_new` returns; `on_new` runs inside it.
    unsafe {
        rdsys::rd_kafka_conf_interceptor_add_on_new(
            conf,
            c"oncebox-tap".as_ptr(),
            Some(on_new),
            shared.cast(),
        );
    }
}

unsafe extern "C" fn on_new(
    rk: *mut rdsys::rd_kafka_t,
    _: *const rdsys::rd_kafka_conf_t,
    opaque: *mut c_void,
    _: *mut c_char,
    _: usize,
) -> rdsys::rd_kafka_resp_err_t {
    const NAME: &CStr = c"oncebox-tap";
    // SAFETY: called by librdkafka while it creates the client, with what `install` gave it.
    let failed = unsafe {
        let none = rdsys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR;
        let add_sent = rdsys::rd_kafka_interceptor_add_on_request_sent;
        let add_ack = rdsys::rd_kafka_interceptor_add_on_acknowledgement;
        let add_response = raw::rd_kafka_interceptor_add_on_response_received;
        add_sent(rk, NAME.as_ptr(), Some(on_sent), opaque) != none
            || add_ack(
                rk,
                NAME.as_ptr(),
                Some(super::producer::on_acknowledgement),
                opaque,
            ) != none
            || add_response(rk, NAME.as_ptr(), Some(on_response), opaque) != 0
    };
    if failed {
        // Without the tap there is no protection against late requests: do not create the client.
        return rdsys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR__FAIL;
    }
    rdsys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR
}

// The two hooks run on broker threads: they must not block and must not call librdkafka.

unsafe extern "C" fn on_sent(
    _: *mut rdsys::rd_kafka_t,
    _: c_int,
    _: *const c_char,
    _: i32,
    api_key: i16,
    _: i16,
    _: i32,
    _: usize,
    opaque: *mut c_void,
) -> rdsys::rd_kafka_resp_err_t {
    // SAFETY: `opaque` is the `Shared` of `install`, which outlives the client.
    unsafe { &*opaque.cast::<Shared>() }.tap.sent(api_key);
    rdsys::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR
}

unsafe extern "C" fn on_response(
    _: *mut rdsys::rd_kafka_t,
    _: c_int,
    _: *const c_char,
    _: i32,
    api_key: i16,
    _: i16,
    _: i32,
    _: usize,
    _: i64,
    err: c_int,
    opaque: *mut c_void,
) -> c_int {
    // SAFETY: as in `on_sent`.
    unsafe { &*opaque.cast::<Shared>() }
        .tap
        .ended(api_key, Code(err));
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clean_transaction_does_not_taint() {
        let tap = Tap::default();
        for key in [
            ADD_PARTITIONS_TO_TXN,
            ADD_PARTITIONS_TO_TXN,
            ADD_OFFSETS_TO_TXN,
            TXN_OFFSET_COMMIT,
            END_TXN,
        ] {
            tap.sent(key);
            tap.ended(key, Code::NONE);
            tap.ended(key, Code::NONE);
        }
        assert_eq!(tap.taint(), None);
        assert!(tap.end_txn_was_sent() && tap.offset_commit_was_sent());
    }

    #[test]
    fn a_second_end_txn_taints_and_so_does_any_unanswered_request() {
        let tap = Tap::default();
        tap.sent(END_TXN);
        tap.sent(END_TXN);
        assert_eq!(tap.taint().unwrap(), "EndTxn was sent 2 times");
        for key in [
            ADD_PARTITIONS_TO_TXN,
            ADD_OFFSETS_TO_TXN,
            TXN_OFFSET_COMMIT,
            END_TXN,
        ] {
            tap.reset();
            assert_eq!(tap.taint(), None);
            tap.ended(key, Code::LOCAL_TIMED_OUT);
            let reason = tap.taint().unwrap();
            assert!(
                reason.contains(name(key)) && reason.contains("_TIMED_OUT"),
                "{reason}"
            );
        }
        tap.reset();
        tap.ended(0, Code::LOCAL_TRANSPORT); // Produce: sequence numbers protect it
        // A late answer: the request was counted when it was given up.
        tap.ended(-1, Code(-156));
        assert_eq!(tap.taint(), None);
    }
}
