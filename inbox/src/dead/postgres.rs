//! PostgreSQL.

use sqlx::Postgres;

use super::texts::{Templates, Texts};

impl Texts for Postgres {
    const LETTERS: Templates = Templates {
        contains: "strpos(error, ?) > 0",
        columns: "id, consumer, message_id, topic, partition, record_offset, key, parked, delayed, error, attempts, \
                  (extract(epoch FROM first_failed_at) * 1000000)::bigint, (extract(epoch FROM failed_at) * 1000000)::bigint, \
                  record_timestamp, (extract(epoch FROM replay_at) * 1000000)::bigint, replays, octet_length(payload)",
        groups: "consumer, topic, count(*) FILTER (WHERE NOT parked AND NOT delayed), count(*) FILTER (WHERE parked), \
                 count(DISTINCT key) FILTER (WHERE parked), count(*) FILTER (WHERE delayed), \
                 count(*) FILTER (WHERE replay_at IS NOT NULL AND NOT delayed), \
                 (extract(epoch FROM min(failed_at)) * 1000000)::bigint, \
                 greatest(0, (extract(epoch FROM now() - min(failed_at)) * 1000000)::bigint)",
        // SKIP LOCKED: who holds a letter is replaying it, ordering it or deleting it at this moment. Waiting could only find that out,
        // and two operators that wait for each other's rows would deadlock.
        order: "{verdicts}, locked AS (SELECT d.id, d.consumer, d.topic, d.partition, d.record_offset FROM {dead_letter} d \
                WHERE d.id IN (SELECT id FROM verdicts WHERE verdict = 'order') AND (d.replay_at IS NULL OR d.delayed) FOR UPDATE SKIP LOCKED), \
                numbered AS (SELECT id, row_number() OVER (ORDER BY record_offset, partition, topic, consumer, id) - 1 AS i FROM locked) \
                UPDATE {dead_letter} d SET replay_at = now() + ((n.i * {micros}) / {count}) * interval '1 microsecond' \
                FROM numbered n WHERE d.id = n.id RETURNING d.id",
        cancel: "{verdicts} UPDATE {dead_letter} SET replay_at = NULL WHERE id IN (SELECT d.id FROM {dead_letter} d \
                 WHERE d.id IN (SELECT id FROM verdicts WHERE verdict = 'ordered') AND d.replay_at IS NOT NULL FOR UPDATE SKIP LOCKED) \
                 RETURNING id",
        lock_key: "SELECT 1 FROM {blocked_key} WHERE consumer = {c} AND topic = {t} AND key = {k} FOR UPDATE",
        delete_dead: "DELETE FROM {dead_letter} WHERE id IN (SELECT id FROM {dead_letter} WHERE {ids} AND NOT parked FOR UPDATE SKIP LOCKED)",
    };
}
