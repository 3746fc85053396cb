//! The rows: orders with lines, names and ids, about 1 KiB of JSON each, that lz4 shrinks to about half.

use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use bytes::{BufMut as _, Bytes, BytesMut};
use oncebox_integration_tests::services::Database;
use oncebox_kafka::{Envelope, Record};
use oncebox_migrations::{Dialect, Names, headers};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use sqlx::AssertSqlSafe;
use uuid::Uuid;

/// The topic that the rows name.
pub(crate) const TOPIC: &str = "oncebox-bench";

/// Microseconds between 1970-01-01 and PostgreSQL's epoch, 2000-01-01.
const POSTGRES_EPOCH_MICROS: i64 = 946_684_800_000_000;

/// The rows of the outbox, as the records that the relay has to make of them.
pub(crate) struct Rows {
    records: Vec<Record>,
}

impl Rows {
    /// The same rows at every call, but for their time.
    pub(crate) fn generate(count: usize) -> Self {
        let mut rng = StdRng::seed_from_u64(1);
        let topic: Arc<str> = TOPIC.into();
        let kind = headers::encode([("oncebox-type", Some(&b"order.placed"[..]))]);
        let kind = Bytes::from(kind.unwrap_or_default());
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let now = i64::try_from(now.unwrap_or_default().as_micros()).unwrap_or_default();
        let mut json = String::with_capacity(2_048);
        let mut record = |outbox_id: i64| {
            let order = uuid(&mut rng);
            let created_at_micros = now + outbox_id;
            json.clear();
            write_order(&mut json, &mut rng, order, created_at_micros);
            Record {
                topic: Arc::clone(&topic),
                key: Some(Bytes::from(order.to_string())),
                payload: Some(Bytes::copy_from_slice(json.as_bytes())),
                headers: kind.clone(),
                envelope: Some(Envelope {
                    message_id: uuid(&mut rng),
                    outbox_id,
                    created_at_micros,
                }),
            }
        };
        let records = (1..).take(count).map(&mut record).collect();
        Self { records }
    }

    pub(crate) fn len(&self) -> usize {
        self.records.len()
    }

    /// Mean size of a payload.
    pub(crate) fn payload_bytes(&self) -> usize {
        let payloads = self.records.iter().filter_map(|r| r.payload.as_ref());
        payloads.map(Bytes::len).sum::<usize>() / self.len()
    }

    /// These rows as records.
    pub(crate) fn records(&self, range: Range<usize>) -> Vec<Record> {
        self.records[range].to_vec()
    }

    /// Writes them into an empty outbox by COPY, so that row n has id n, and leaves the table as a busy server's: with
    /// statistics and hint bits, nothing left to write.
    pub(crate) async fn insert(&self, database: &Database) -> Result<()> {
        let outbox = Names::default().outbox(Dialect::Postgres);
        let mut conn = database.connect().await;
        let columns = "message_id, topic, key, payload, headers, created_at";
        let statement = format!("COPY {outbox} ({columns}) FROM STDIN (FORMAT binary)");
        let mut copy = conn.copy_in_raw(&statement).await?;
        let mut buffer = BytesMut::new();
        buffer.put_slice(b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0");
        for record in &self.records {
            put(&mut buffer, record);
            if buffer.len() > 1 << 20 {
                copy.send(&buffer[..]).await?;
                buffer.clear();
            }
        }
        buffer.put_i16(-1);
        copy.send(&buffer[..]).await?;
        copy.finish().await?;
        for statement in [
            format!("VACUUM (ANALYZE) {outbox}"),
            "CHECKPOINT".to_owned(),
        ] {
            sqlx::query(AssertSqlSafe(statement))
                .execute(&mut conn)
                .await?;
        }
        Ok(())
    }
}

/// One row in COPY's binary format.
fn put(buffer: &mut BytesMut, record: &Record) {
    let field = |buffer: &mut BytesMut, value: &[u8]| {
        buffer.put_u32(u32::try_from(value.len()).unwrap_or_default());
        buffer.put_slice(value);
    };
    let Some(envelope) = &record.envelope else {
        return;
    };
    buffer.put_i16(6);
    field(buffer, envelope.message_id.as_bytes());
    field(buffer, record.topic.as_bytes());
    field(buffer, record.key.as_deref().unwrap_or_default());
    field(buffer, record.payload.as_deref().unwrap_or_default());
    field(buffer, &record.headers);
    let micros = envelope.created_at_micros - POSTGRES_EPOCH_MICROS;
    field(buffer, &micros.to_be_bytes());
}

fn uuid(rng: &mut StdRng) -> Uuid {
    uuid::Builder::from_random_bytes(rng.random()).into_uuid()
}

const FIRST: [&str; 16] = [
    "Anna", "Bilal", "Chiara", "Dmitri", "Elif", "Fatou", "Greta", "Hiro", "Ines", "Jakub", "Kaja",
    "Liam", "Mei", "Noor", "Oskar", "Priya",
];
const LAST: [&str; 16] = [
    "Andersen",
    "Bianchi",
    "Costa",
    "Diallo",
    "Eriksen",
    "Fischer",
    "García",
    "Haddad",
    "Ivanova",
    "Jensen",
    "Kowalski",
    "Lindqvist",
    "Martin",
    "Nakamura",
    "Okafor",
    "Petrov",
];
const STREETS: [&str; 8] = [
    "Lindenstraße",
    "Rue des Lilas",
    "Harbour Road",
    "Via Roma",
    "Calle Mayor",
    "Storgatan",
    "Mill Lane",
    "Dworcowa",
];
const CITIES: [&str; 8] = [
    "Kraków", "Lyon", "Leeds", "Torino", "Sevilla", "Malmö", "Gent", "Aachen",
];
const COLOURS: [&str; 8] = [
    "black", "blue", "crimson", "green", "ivory", "olive", "sand", "white",
];
const THINGS: [&str; 16] = [
    "backpack",
    "bicycle lamp",
    "bookshelf",
    "coffee grinder",
    "desk lamp",
    "garden chair",
    "kettle",
    "linen shirt",
    "notebook",
    "rain jacket",
    "running shoes",
    "sleeping bag",
    "teapot",
    "toolbox",
    "wool blanket",
    "wristwatch",
];

/// Writing to a string cannot fail.
fn write_order(json: &mut String, rng: &mut StdRng, id: Uuid, placed_at_micros: i64) {
    let mut one_of = |list: &[&'static str]| list[rng.random_range(0..list.len())];
    let (first, last, street, city) = (
        one_of(&FIRST),
        one_of(&LAST),
        one_of(&STREETS),
        one_of(&CITIES),
    );
    let _ = write!(
        json,
        r#"{{"order_id":"{id}","placed_at_micros":{placed_at_micros},"currency":"EUR","customer":{{"id":"{customer}","name":"{first} {last}","email":"{mail:x}@example.org","address":{{"street":"{street} {house}","postcode":"{postcode:05}","city":"{city}"}}}},"lines":["#,
        customer = uuid(rng),
        mail = rng.random::<u32>(),
        house = rng.random_range(1..200),
        postcode = rng.random_range(1_000..99_999),
    );
    let mut total = 0;
    for line in 1..=4 {
        let (quantity, cents) = (rng.random_range(1..5), rng.random_range(199..49_999));
        total += quantity * cents;
        let _ = write!(
            json,
            r#"{comma}{{"line":{line},"sku":"{sku:08X}","title":"{colour} {thing}","quantity":{quantity},"unit_price_cents":{cents},"reservation":"{reservation:016x}"}}"#,
            comma = if line == 1 { "" } else { "," },
            sku = rng.random::<u32>(),
            colour = COLOURS[rng.random_range(0..COLOURS.len())],
            thing = THINGS[rng.random_range(0..THINGS.len())],
            reservation = rng.random::<u64>(),
        );
    }
    let _ = write!(
        json,
        r#"],"total_cents":{total},"payment":{{"method":"card","reference":"{reference}","signature":"{signature:032x}"}}}}"#,
        reference = uuid(rng),
        signature = rng.random::<u128>(),
    );
}
