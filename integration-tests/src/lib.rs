//! What the tests of Oncebox stand on: real services and the means to disturb and to read them.
//!
//! * [`services`]: PostgreSQL, Apache Kafka and Redis, shared or private, from the environment, from containers or as local
//!   processes; [`services::Database`] is a fresh database per test.
//! * [`proxy`]: a TCP proxy that knows Kafka's frames and can hold, drop, delay, duplicate or cut chosen requests.
//! * [`cable`]: a TCP proxy that understands nothing and can freeze or break: the network to a database.
//! * [`kafka_cli`]: Kafka's own command-line tools, as an independent witness.
//! * [`source`]: an outbox, its topic, and relays for it as separate processes.
//! * [`history`]: what was committed, seen and done, and a checker that says which promise was broken.
//! * [`reader`]: a topic read to its end, `read_committed` or `read_uncommitted`.

pub mod cable;
pub mod history;
pub mod kafka_cli;
pub mod proxy;
pub mod reader;
pub mod services;
pub mod source;
