//! Tests against a real Apache Kafka; `ONCEBOX_TEST_KAFKA` is its bootstrap list.
