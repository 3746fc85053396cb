//! Error codes of Kafka and librdkafka as plain numbers.
//!
//! The binding declares `rd_kafka_resp_err_t` as a Rust enum; a code that is newer than the binding
//! (a broker's code is passed through) would be an invalid value of that enum. So functions that
//! return a broker's code are declared here once more, with a C int.

use std::ffi::{CStr, c_char, c_int};

use rdkafka_sys as rdsys;

/// Kafka's error code: positive = from the broker, negative = local to librdkafka, 0 = none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Code(pub(crate) i32);

macro_rules! codes {
    ($($name:ident = $native:ident),* $(,)?) => {
        #[allow(dead_code)]
        impl Code {
            $(pub(crate) const $name: Self = Self(rdsys::rd_kafka_resp_err_t::$native as i32);)*
        }
    };
}

codes! {
    NONE = RD_KAFKA_RESP_ERR_NO_ERROR,
    OFFSET_OUT_OF_RANGE = RD_KAFKA_RESP_ERR_OFFSET_OUT_OF_RANGE,
    UNKNOWN_TOPIC_OR_PART = RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART,
    INVALID_MSG_SIZE = RD_KAFKA_RESP_ERR_INVALID_MSG_SIZE,
    LEADER_NOT_AVAILABLE = RD_KAFKA_RESP_ERR_LEADER_NOT_AVAILABLE,
    NOT_LEADER_FOR_PARTITION = RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION,
    REQUEST_TIMED_OUT = RD_KAFKA_RESP_ERR_REQUEST_TIMED_OUT,
    BROKER_NOT_AVAILABLE = RD_KAFKA_RESP_ERR_BROKER_NOT_AVAILABLE,
    MSG_SIZE_TOO_LARGE = RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE,
    NETWORK_EXCEPTION = RD_KAFKA_RESP_ERR_NETWORK_EXCEPTION,
    COORDINATOR_LOAD_IN_PROGRESS = RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS,
    COORDINATOR_NOT_AVAILABLE = RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE,
    NOT_COORDINATOR = RD_KAFKA_RESP_ERR_NOT_COORDINATOR,
    TOPIC_EXCEPTION = RD_KAFKA_RESP_ERR_TOPIC_EXCEPTION,
    RECORD_LIST_TOO_LARGE = RD_KAFKA_RESP_ERR_RECORD_LIST_TOO_LARGE,
    NOT_ENOUGH_REPLICAS = RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS,
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    INCONSISTENT_GROUP_PROTOCOL = RD_KAFKA_RESP_ERR_INCONSISTENT_GROUP_PROTOCOL,
    ILLEGAL_GENERATION = RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION,
    UNKNOWN_MEMBER_ID = RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID,
    REBALANCE_IN_PROGRESS = RD_KAFKA_RESP_ERR_REBALANCE_IN_PROGRESS,
    TOPIC_AUTHORIZATION_FAILED = RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
    GROUP_AUTHORIZATION_FAILED = RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED,
    CLUSTER_AUTHORIZATION_FAILED = RD_KAFKA_RESP_ERR_CLUSTER_AUTHORIZATION_FAILED,
    INVALID_TIMESTAMP = RD_KAFKA_RESP_ERR_INVALID_TIMESTAMP,
    UNSUPPORTED_SASL_MECHANISM = RD_KAFKA_RESP_ERR_UNSUPPORTED_SASL_MECHANISM,
    ILLEGAL_SASL_STATE = RD_KAFKA_RESP_ERR_ILLEGAL_SASL_STATE,
    TOPIC_ALREADY_EXISTS = RD_KAFKA_RESP_ERR_TOPIC_ALREADY_EXISTS,
    NOT_CONTROLLER = RD_KAFKA_RESP_ERR_NOT_CONTROLLER,
    UNSUPPORTED_FOR_MESSAGE_FORMAT = RD_KAFKA_RESP_ERR_UNSUPPORTED_FOR_MESSAGE_FORMAT,
    POLICY_VIOLATION = RD_KAFKA_RESP_ERR_POLICY_VIOLATION,
    OUT_OF_ORDER_SEQUENCE_NUMBER = RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER,
    INVALID_PRODUCER_EPOCH = RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH,
    CONCURRENT_TRANSACTIONS = RD_KAFKA_RESP_ERR_CONCURRENT_TRANSACTIONS,
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = RD_KAFKA_RESP_ERR_TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    SASL_AUTHENTICATION_FAILED = RD_KAFKA_RESP_ERR_SASL_AUTHENTICATION_FAILED,
    UNSUPPORTED_COMPRESSION_TYPE = RD_KAFKA_RESP_ERR_UNSUPPORTED_COMPRESSION_TYPE,
    INVALID_RECORD = RD_KAFKA_RESP_ERR_INVALID_RECORD,
    UNSTABLE_OFFSET_COMMIT = RD_KAFKA_RESP_ERR_UNSTABLE_OFFSET_COMMIT,
    THROTTLING_QUOTA_EXCEEDED = RD_KAFKA_RESP_ERR_THROTTLING_QUOTA_EXCEEDED,
    PRODUCER_FENCED = RD_KAFKA_RESP_ERR_PRODUCER_FENCED,
    LOCAL_BAD_MSG = RD_KAFKA_RESP_ERR__BAD_MSG,
    LOCAL_NOT_IMPLEMENTED = RD_KAFKA_RESP_ERR__NOT_IMPLEMENTED,
    LOCAL_PARTITION_EOF = RD_KAFKA_RESP_ERR__PARTITION_EOF,
    LOCAL_TRANSPORT = RD_KAFKA_RESP_ERR__TRANSPORT,
    LOCAL_RESOLVE = RD_KAFKA_RESP_ERR__RESOLVE,
    LOCAL_MSG_TIMED_OUT = RD_KAFKA_RESP_ERR__MSG_TIMED_OUT,
    LOCAL_UNKNOWN_PARTITION = RD_KAFKA_RESP_ERR__UNKNOWN_PARTITION,
    LOCAL_UNKNOWN_TOPIC = RD_KAFKA_RESP_ERR__UNKNOWN_TOPIC,
    LOCAL_ALL_BROKERS_DOWN = RD_KAFKA_RESP_ERR__ALL_BROKERS_DOWN,
    LOCAL_TIMED_OUT = RD_KAFKA_RESP_ERR__TIMED_OUT,
    LOCAL_TIMED_OUT_QUEUE = RD_KAFKA_RESP_ERR__TIMED_OUT_QUEUE,
    LOCAL_WAIT_COORD = RD_KAFKA_RESP_ERR__WAIT_COORD,
    LOCAL_QUEUE_FULL = RD_KAFKA_RESP_ERR__QUEUE_FULL,
    LOCAL_SSL = RD_KAFKA_RESP_ERR__SSL,
    LOCAL_ASSIGN_PARTITIONS = RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS,
    LOCAL_NO_OFFSET = RD_KAFKA_RESP_ERR__NO_OFFSET,
    LOCAL_STATE = RD_KAFKA_RESP_ERR__STATE,
    LOCAL_AUTHENTICATION = RD_KAFKA_RESP_ERR__AUTHENTICATION,
    LOCAL_PURGE_QUEUE = RD_KAFKA_RESP_ERR__PURGE_QUEUE,
    LOCAL_PURGE_INFLIGHT = RD_KAFKA_RESP_ERR__PURGE_INFLIGHT,
    LOCAL_FATAL = RD_KAFKA_RESP_ERR__FATAL,
    LOCAL_MAX_POLL_EXCEEDED = RD_KAFKA_RESP_ERR__MAX_POLL_EXCEEDED,
    LOCAL_FENCED = RD_KAFKA_RESP_ERR__FENCED,
    LOCAL_AUTO_OFFSET_RESET = RD_KAFKA_RESP_ERR__AUTO_OFFSET_RESET,
    LOCAL_INVALID_DIFFERENT_RECORD = RD_KAFKA_RESP_ERR__INVALID_DIFFERENT_RECORD,
}

impl Code {
    pub(crate) fn is_error(self) -> bool {
        self.0 != 0
    }

    /// `MSG_SIZE_TOO_LARGE`, `_TIMED_OUT`, …
    pub(crate) fn name(self) -> String {
        // SAFETY: returns a static string, or a thread-local one that is valid until the next call
        // on this thread.
        unsafe { text(rd_kafka_err2name(self.0)) }
    }

    /// librdkafka's sentence for the code.
    pub(crate) fn sentence(self) -> String {
        // SAFETY: as in `name`.
        unsafe { text(rd_kafka_err2str(self.0)) }
    }
}

/// Copies a C string; null is empty.
///
/// # Safety
/// `s` is null or points to a NUL-terminated string that lives during the call.
pub(super) unsafe fn text(s: *const c_char) -> String {
    if s.is_null() {
        return String::new();
    }
    // SAFETY: by this function's contract.
    unsafe { CStr::from_ptr(s) }.to_string_lossy().into_owned()
}

unsafe extern "C" {
    fn rd_kafka_err2name(err: c_int) -> *const c_char;
    fn rd_kafka_err2str(err: c_int) -> *const c_char;
}

/// librdkafka's functions whose result may be a broker's code, with that result as a C int.
pub(super) mod raw {
    use std::ffi::{c_char, c_int, c_void};

    use rdkafka_sys::{
        rd_kafka_ConfigResource_t, rd_kafka_error_t, rd_kafka_event_t, rd_kafka_metadata_t,
        rd_kafka_t, rd_kafka_topic_partition_list_t, rd_kafka_topic_result_t, rd_kafka_topic_t,
    };

    unsafe extern "C" {
        pub(crate) fn rd_kafka_error_code(error: *const rd_kafka_error_t) -> c_int;
        pub(crate) fn rd_kafka_fatal_error(
            rk: *mut rd_kafka_t,
            errstr: *mut c_char,
            size: usize,
        ) -> c_int;
        pub(crate) fn rd_kafka_event_error(event: *mut rd_kafka_event_t) -> c_int;
        pub(crate) fn rd_kafka_topic_result_error(result: *const rd_kafka_topic_result_t) -> c_int;
        pub(crate) fn rd_kafka_ConfigResource_error(
            config: *const rd_kafka_ConfigResource_t,
        ) -> c_int;
        pub(crate) fn rd_kafka_metadata(
            rk: *mut rd_kafka_t,
            all_topics: c_int,
            only_rkt: *mut rd_kafka_topic_t,
            metadatap: *mut *const rd_kafka_metadata_t,
            timeout_ms: c_int,
        ) -> c_int;
        pub(crate) fn rd_kafka_query_watermark_offsets(
            rk: *mut rd_kafka_t,
            topic: *const c_char,
            partition: i32,
            low: *mut i64,
            high: *mut i64,
            timeout_ms: c_int,
        ) -> c_int;
        pub(crate) fn rd_kafka_offsets_for_times(
            rk: *mut rd_kafka_t,
            offsets: *mut rd_kafka_topic_partition_list_t,
            timeout_ms: c_int,
        ) -> c_int;
        pub(crate) fn rd_kafka_committed(
            rk: *mut rd_kafka_t,
            partitions: *mut rd_kafka_topic_partition_list_t,
            timeout_ms: c_int,
        ) -> c_int;
        pub(crate) fn rd_kafka_commit(
            rk: *mut rd_kafka_t,
            offsets: *const rd_kafka_topic_partition_list_t,
            r#async: c_int,
        ) -> c_int;
        pub(crate) fn rd_kafka_offsets_store(
            rk: *mut rd_kafka_t,
            offsets: *mut rd_kafka_topic_partition_list_t,
        ) -> c_int;
        pub(crate) fn rd_kafka_subscribe(
            rk: *mut rd_kafka_t,
            topics: *const rd_kafka_topic_partition_list_t,
        ) -> c_int;
        pub(crate) fn rd_kafka_assign(
            rk: *mut rd_kafka_t,
            partitions: *const rd_kafka_topic_partition_list_t,
        ) -> c_int;
        pub(crate) fn rd_kafka_pause_partitions(
            rk: *mut rd_kafka_t,
            partitions: *mut rd_kafka_topic_partition_list_t,
        ) -> c_int;
        pub(crate) fn rd_kafka_resume_partitions(
            rk: *mut rd_kafka_t,
            partitions: *mut rd_kafka_topic_partition_list_t,
        ) -> c_int;
        pub(crate) fn rd_kafka_poll_set_consumer(rk: *mut rd_kafka_t) -> c_int;
        pub(crate) fn rd_kafka_conf_set_rebalance_cb(
            conf: *mut rdkafka_sys::rd_kafka_conf_t,
            callback: Option<
                unsafe extern "C" fn(
                    *mut rd_kafka_t,
                    c_int,
                    *mut rd_kafka_topic_partition_list_t,
                    *mut c_void,
                ),
            >,
        );
        pub(crate) fn rd_kafka_interceptor_add_on_response_received(
            rk: *mut rd_kafka_t,
            name: *const c_char,
            callback: Option<
                unsafe extern "C" fn(
                    *mut rd_kafka_t,
                    c_int,
                    *const c_char,
                    i32,
                    i16,
                    i16,
                    i32,
                    usize,
                    i64,
                    c_int,
                    *mut c_void,
                ) -> c_int,
            >,
            opaque: *mut c_void,
        ) -> c_int;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_that_librdkafka_does_not_know_still_has_a_name() {
        assert_eq!(Code::MSG_SIZE_TOO_LARGE.name(), "MSG_SIZE_TOO_LARGE");
        assert_eq!(Code::LOCAL_TIMED_OUT.name(), "_TIMED_OUT");
        assert!(Code(12_345).name().contains("12345"));
        assert!(!Code(12_345).sentence().is_empty());
    }
}
