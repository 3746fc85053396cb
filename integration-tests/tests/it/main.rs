//! The integration tests of Oncebox: one module per promise.

mod proxy_faults;
mod services_come_and_go;
