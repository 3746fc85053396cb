//! Everything that touches librdkafka.
#![allow(unsafe_code)]

/// Names of the optional parts of librdkafka in this build (`ssl`, `sasl_scram`, `zstd`, …).
pub(crate) fn builtin_features() -> Vec<String> {
    Vec::new()
}
