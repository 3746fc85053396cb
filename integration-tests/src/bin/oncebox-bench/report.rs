//! Medians, ratios, and how they are shown.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::Result;
use oncebox_integration_tests::services::Database;
use serde::Serialize;

use crate::latency::Latency;
use crate::limits::Limit;
use crate::relay::Drained;
use crate::rows::Rows;
use crate::{BATCH, Options, process};

/// A column of the table: its title, and how to show a cell.
type Column = (&'static str, fn(&Medians) -> String);

/// One measurement of everything, with one compression.
#[derive(Debug, Serialize)]
pub(crate) struct Measured {
    pub(crate) copy_out: Limit,
    pub(crate) producer: Limit,
    pub(crate) relay: Drained,
    /// Bytes of the topic on the broker's disk.
    pub(crate) bytes: u64,
}

/// The medians of several, with one compression.
#[derive(Debug, Serialize)]
struct Medians {
    copy_out_rows_per_second: f64,
    producer_rows_per_second: f64,
    relay_rows_per_second: f64,
    relay_rows_per_second_with_start: f64,
    /// The relay's rate divided by the slower of the two limits'.
    ratio: f64,
    relay_peak_memory: f64,
    producer_processor_micros: f64,
    relay_processor_micros: f64,
    topic_bytes_per_row: f64,
}

/// Everything.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    rows: usize,
    payload_bytes: usize,
    rows_per_transaction: usize,
    postgres: String,
    machine_before: String,
    machine_after: String,
    runs: BTreeMap<String, Vec<Measured>>,
    medians: BTreeMap<String, Medians>,
    latency: Option<Latency>,
}

impl Report {
    pub(crate) async fn new(options: &Options, rows: &Rows, database: &Database) -> Result<Self> {
        let mut conn = database.connect().await;
        let postgres = sqlx::query_scalar("SHOW server_version")
            .fetch_one(&mut conn)
            .await?;
        Ok(Self {
            rows: options.rows,
            payload_bytes: rows.payload_bytes(),
            rows_per_transaction: BATCH,
            postgres,
            machine_before: process::load(),
            machine_after: String::new(),
            runs: BTreeMap::new(),
            medians: BTreeMap::new(),
            latency: None,
        })
    }

    pub(crate) fn add(&mut self, compression: &str, measured: Measured) {
        let runs = self.runs.entry(compression.to_owned()).or_default();
        runs.push(measured);
        let medians = Medians::of(runs, self.rows);
        self.medians.insert(compression.to_owned(), medians);
    }

    pub(crate) fn latency(&mut self, latency: Latency) {
        self.latency = Some(latency);
        self.machine_after = process::load();
    }

    pub(crate) fn print(&self, json: bool) -> Result<()> {
        if json {
            eprintln!("{self}");
            println!("{}", serde_json::to_string_pretty(self)?);
        } else {
            println!("{self}");
        }
        Ok(())
    }
}

impl Medians {
    #[allow(clippy::cast_precision_loss, reason = "counts and sizes")]
    fn of(runs: &[Measured], rows: usize) -> Self {
        let median = |pick: fn(&Measured) -> f64| {
            let mut values: Vec<_> = runs.iter().map(pick).collect();
            values.sort_by(f64::total_cmp);
            let middle = values.len() / 2;
            if values.len() % 2 == 1 {
                values[middle]
            } else {
                (values[middle - 1] + values[middle]) / 2.0
            }
        };
        let copy_out = median(|m| m.copy_out.rows_per_second);
        let producer = median(|m| m.producer.rows_per_second);
        let relay = median(|m| m.relay.rows_per_second);
        Self {
            copy_out_rows_per_second: copy_out,
            producer_rows_per_second: producer,
            relay_rows_per_second: relay,
            relay_rows_per_second_with_start: median(|m| m.relay.rows_per_second_with_start),
            ratio: relay / copy_out.min(producer),
            relay_peak_memory: median(|m| m.relay.peak_memory as f64),
            producer_processor_micros: median(|m| m.producer.processor_micros),
            relay_processor_micros: median(|m| m.relay.processor_micros),
            topic_bytes_per_row: median(|m| m.bytes as f64) / rows as f64,
        }
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "COPY OUT {:.0} rows/s, producer {:.0} rows/s, relay {:.0} rows/s",
            self.copy_out.rows_per_second,
            self.producer.rows_per_second,
            self.relay.rows_per_second
        )
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.runs.values().map(Vec::len).max().unwrap_or(0);
        writeln!(
            f,
            "{} rows of {} B of JSON, up to {} per transaction, acks=all, PostgreSQL {} with fsync, one Kafka broker; median of {runs}",
            self.rows, self.payload_bytes, self.rows_per_transaction, self.postgres
        )?;
        writeln!(f, "before: {}", self.machine_before)?;
        writeln!(f, "after:  {}\n", self.machine_after)?;
        let columns: [Column; 9] = [
            ("COPY OUT alone, rows/s", |m| {
                format!("{:.0}", m.copy_out_rows_per_second)
            }),
            ("producer fed from memory, rows/s", |m| {
                format!("{:.0}", m.producer_rows_per_second)
            }),
            ("relay, rows/s", |m| {
                format!("{:.0}", m.relay_rows_per_second)
            }),
            ("relay with its start, rows/s", |m| {
                format!("{:.0}", m.relay_rows_per_second_with_start)
            }),
            ("relay / slower limit", |m| {
                format!("{:.0} %", m.ratio * 100.0)
            }),
            ("relay, peak memory", |m| {
                format!("{:.0} MiB", m.relay_peak_memory / f64::from(1 << 20))
            }),
            ("producer, processor per row", |m| {
                format!("{:.2} µs", m.producer_processor_micros)
            }),
            ("relay, processor per row", |m| {
                format!("{:.2} µs", m.relay_processor_micros)
            }),
            ("topic on disk per row", |m| {
                format!("{:.0} B", m.topic_bytes_per_row)
            }),
        ];
        write!(f, "{:<36}", "compression")?;
        for compression in self.medians.keys() {
            write!(f, "{compression:>12}")?;
        }
        writeln!(f)?;
        for (title, show) in columns {
            write!(f, "{title:<36}")?;
            for medians in self.medians.values() {
                write!(f, "{:>12}", show(medians))?;
            }
            writeln!(f)?;
        }
        if let (Some(lz4), Some(none)) = (self.medians.get("lz4"), self.medians.get("none")) {
            let ratio = none.topic_bytes_per_row / lz4.topic_bytes_per_row;
            writeln!(
                f,
                "{:<36}{:>12}",
                "lz4 shrinks to 1 /",
                format!("{ratio:.2}")
            )?;
        }
        if let Some(l) = &self.latency {
            write!(
                f,
                "\ncommit to read_committed consumer at 200 events/s, {} events: p50 {:.1} ms, p99 {:.1} ms, max {:.1} ms",
                l.events, l.p50_ms, l.p99_ms, l.max_ms
            )?;
        }
        Ok(())
    }
}
