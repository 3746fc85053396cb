//! SQLite.

use sqlx::Sqlite;

use super::texts::{Templates, Texts};

impl Texts for Sqlite {
    const LETTERS: Templates = Templates {
        contains: "instr(error, ?) > 0",
        columns: "id, consumer, message_id, topic, partition, record_offset, key, parked, delayed, error, attempts, \
                  first_failed_at, failed_at, record_timestamp, replay_at, replays, length(payload)",
        groups: "consumer, topic, count(*) FILTER (WHERE NOT parked AND NOT delayed), count(*) FILTER (WHERE parked), \
                 count(DISTINCT key) FILTER (WHERE parked), count(*) FILTER (WHERE delayed), \
                 count(*) FILTER (WHERE replay_at IS NOT NULL AND NOT delayed), min(failed_at), \
                 max(0, CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 - min(failed_at))",
        // The transaction is the only one that writes.
        order: "{verdicts}, numbered AS (SELECT id, row_number() OVER (ORDER BY record_offset, partition, topic, consumer, id) - 1 AS i \
                FROM verdicts WHERE verdict = 'order') \
                UPDATE {dead_letter} SET replay_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 \
                + (numbered.i * {micros}) / {count} FROM numbered WHERE {dead_letter}.id = numbered.id RETURNING id",
        cancel: "{verdicts} UPDATE {dead_letter} SET replay_at = NULL \
                 WHERE id IN (SELECT id FROM verdicts WHERE verdict = 'ordered') RETURNING id",
        lock_key: "SELECT 1 FROM {blocked_key} WHERE consumer = {c} AND topic = {t} AND key = {k}",
        delete_dead: "DELETE FROM {dead_letter} WHERE {ids} AND NOT parked",
    };
}
