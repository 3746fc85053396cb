//! What the databases share: the functions of [`Store`](super::Store) that differ by their SQL only.

use std::sync::Arc;

use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Encode, Type};

use crate::position::Key;

/// A query over text of [`Statements`](super::Statements): the only place where run-time SQL is declared safe.
pub(super) fn sql<D: sqlx::Database>(text: &Arc<str>) -> Query<'_, D, D::Arguments> {
    sqlx::query(AssertSqlSafe(Arc::clone(text)))
}

/// [`sql`] with the partition of a consumer as `$1`, `$2` and `$3`.
pub(super) fn keyed<'q, D>(text: &'q Arc<str>, key: &'q Key) -> Query<'q, D, D::Arguments>
where
    D: sqlx::Database,
    &'q str: Encode<'q, D> + Type<D>,
    i32: Encode<'q, D> + Type<D>,
{
    sql(text)
        .bind(&*key.consumer)
        .bind(&*key.topic)
        .bind(key.partition)
}

/// The functions of [`Store`] whose code is the same text for every database: only the SQL and the types differ, and sqlx has
/// no bounds that would let one generic function serve both.
macro_rules! implement_statements {
    ($db:ty) => {
        async fn reopen(conn: &mut Self::Connection) -> Result<(), sqlx::Error> {
            // Refused, or only warned about, where a transaction is open.
            sqlx::query("BEGIN").execute(conn).await.map(drop)
        }

        async fn plain(
            conn: &mut Self::Connection,
            statement: &'static str,
        ) -> Result<(), sqlx::Error> {
            sqlx::query(statement).execute(conn).await.map(drop)
        }

        async fn advance(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            step: &$crate::chain::Move,
            marked: Option<uuid::Uuid>,
        ) -> Result<bool, sqlx::Error> {
            let text = if marked.is_some() {
                &statements.advance_marked
            } else {
                &statements.advance
            };
            let mut query = $crate::store::shared::keyed::<$db>(text, key)
                .bind(step.from.owner)
                .bind(step.from.next)
                .bind(step.from.seq)
                .bind(step.to.next)
                .bind(step.to.seq)
                .bind(step.hole);
            if let Some(id) = marked {
                query = query.bind(id);
            }
            Ok(query.execute(conn).await?.rows_affected() == 1)
        }

        async fn any_blocked(
            conn: &mut Self::Connection,
            statements: &Statements,
            consumer: &str,
        ) -> Result<bool, sqlx::Error> {
            let row = $crate::store::shared::sql::<$db>(&statements.any_blocked)
                .bind(consumer)
                .fetch_optional(conn)
                .await?;
            Ok(row.is_some())
        }

        async fn block(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            blocked: &[u8],
            reason: &str,
        ) -> Result<(), sqlx::Error> {
            $crate::store::shared::sql::<$db>(&statements.block)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(blocked)
                .bind(reason)
                .execute(conn)
                .await
                .map(drop)
        }

        async fn note(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            offset: i64,
            attempt: &$crate::partition::Attempt,
        ) -> Result<(), sqlx::Error> {
            $crate::store::shared::keyed::<$db>(&statements.note, key)
                .bind(offset)
                .bind(attempt.message_id)
                .bind(i32::try_from(attempt.attempts).unwrap_or(i32::MAX))
                .bind(&attempt.error)
                .bind(attempt.first_failed_at)
                .bind($crate::store::rows::whole_micros(attempt.wait))
                .execute(conn)
                .await
                .map(drop)
        }

        async fn forget(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            offset: i64,
        ) -> Result<(), sqlx::Error> {
            $crate::store::shared::keyed::<$db>(&statements.forget, key)
                .bind(offset)
                .execute(conn)
                .await
                .map(drop)
        }

        async fn due_letter(
            conn: &mut Self::Connection,
            statements: &Statements,
            consumer: &str,
        ) -> Result<Option<$crate::store::Letter>, sqlx::Error> {
            let row = $crate::store::shared::sql::<$db>(&statements.due_letter)
                .bind(consumer)
                .fetch_optional(conn)
                .await?;
            let Some(row) = row else { return Ok(None) };
            use sqlx::Row as _;
            Ok(Some($crate::store::Letter {
                id: row.try_get(0)?,
                message_id: row.try_get(1)?,
                topic: row.try_get(2)?,
                partition: row.try_get(3)?,
                offset: row.try_get(4)?,
                key: row.try_get(5)?,
                payload: row.try_get(6)?,
                headers: row.try_get(7)?,
                attempts: row.try_get(8)?,
                parked: row.try_get(9)?,
                timestamp_ms: row.try_get(10)?,
                delayed: row.try_get(11)?,
                error: row.try_get(12)?,
                first_failed_at: row.try_get(13)?,
                replays: row.try_get(14)?,
            }))
        }

        async fn depths(
            conn: &mut Self::Connection,
            statements: &Statements,
            consumer: &str,
        ) -> Result<Vec<$crate::depth::Depth>, sqlx::Error> {
            let rows = $crate::store::shared::sql::<$db>(&statements.depths)
                .bind(consumer)
                .fetch_all(conn)
                .await?;
            use sqlx::Row as _;
            rows.iter()
                .map(|row| {
                    Ok($crate::depth::Depth {
                        topic: row.try_get(0)?,
                        kind: row.try_get(1)?,
                        letters: row.try_get(2)?,
                        oldest: row.try_get(3)?,
                    })
                })
                .collect()
        }

        async fn count_replay(
            conn: &mut Self::Connection,
            statements: &Statements,
            letter: &$crate::store::Letter,
        ) -> Result<bool, sqlx::Error> {
            let done = $crate::store::shared::sql::<$db>(&statements.count_replay)
                .bind(letter.id)
                .bind(letter.replays)
                .execute(conn)
                .await?;
            Ok(done.rows_affected() == 1)
        }

        async fn take_letter(
            conn: &mut Self::Connection,
            statements: &Statements,
            id: i64,
        ) -> Result<bool, sqlx::Error> {
            let done = $crate::store::shared::sql::<$db>(&statements.take_letter)
                .bind(id)
                .execute(conn)
                .await?;
            Ok(done.rows_affected() == 1)
        }

        async fn first_parked(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            name: &[u8],
        ) -> Result<Option<i64>, sqlx::Error> {
            let row = $crate::store::shared::sql::<$db>(&statements.first_parked)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(name)
                .fetch_optional(conn)
                .await?;
            row.map(|row| sqlx::Row::try_get(&row, 0)).transpose()
        }

        async fn release_next(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            name: &[u8],
        ) -> Result<(), sqlx::Error> {
            let done = $crate::store::shared::sql::<$db>(&statements.release_next)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(name)
                .execute(&mut *conn)
                .await?;
            if done.rows_affected() > 0 {
                return Ok(());
            }
            $crate::store::shared::sql::<$db>(&statements.unblock)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(name)
                .execute(conn)
                .await
                .map(drop)
        }

        async fn refuse_replay(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            letter: &$crate::store::Letter,
            error: &str,
        ) -> Result<(), sqlx::Error> {
            let done = $crate::store::shared::sql::<$db>(&statements.refuse_letter)
                .bind(letter.id)
                .bind(error)
                .execute(&mut *conn)
                .await?;
            if done.rows_affected() == 0 {
                return Ok(());
            }
            let Some(name) = letter.key.as_deref().filter(|_| letter.parked) else {
                return Ok(());
            };
            $crate::store::shared::sql::<$db>(&statements.refuse_key)
                .bind(&*key.consumer)
                .bind(&*key.topic)
                .bind(name)
                .execute(conn)
                .await
                .map(drop)
        }

        async fn delay_again(
            conn: &mut Self::Connection,
            statements: &Statements,
            id: i64,
            delay: std::time::Duration,
            error: &str,
        ) -> Result<bool, sqlx::Error> {
            let done = $crate::store::shared::sql::<$db>(&statements.delay_again)
                .bind(id)
                .bind($crate::store::rows::whole_micros(delay))
                .bind(error)
                .execute(conn)
                .await?;
            Ok(done.rows_affected() == 1)
        }

        async fn give_up(
            conn: &mut Self::Connection,
            statements: &Statements,
            id: i64,
            error: &str,
        ) -> Result<bool, sqlx::Error> {
            let done = $crate::store::shared::sql::<$db>(&statements.give_up)
                .bind(id)
                .bind(error)
                .execute(conn)
                .await?;
            Ok(done.rows_affected() == 1)
        }

        async fn forget_below(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            next: i64,
        ) -> Result<(), sqlx::Error> {
            $crate::store::shared::keyed::<$db>(&statements.forget_below, key)
                .bind(next)
                .execute(conn)
                .await
                .map(drop)
        }

        async fn attempts(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            from: i64,
        ) -> Result<std::collections::BTreeMap<i64, $crate::partition::Attempt>, sqlx::Error> {
            let rows = $crate::store::shared::keyed::<$db>(&statements.attempts, key)
                .bind(from)
                .fetch_all(conn)
                .await?;
            rows.iter().map($crate::store::rows::attempt_row).collect()
        }

        async fn trip(
            conn: &mut Self::Connection,
            statements: &Statements,
            consumer: &str,
            topic: &str,
            failures: i32,
            error: &str,
        ) -> Result<(), sqlx::Error> {
            $crate::store::shared::sql::<$db>(&statements.trip)
                .bind(consumer)
                .bind(topic)
                .bind(failures)
                .bind(error)
                .execute(conn)
                .await
                .map(drop)
        }

        async fn all_tripped(
            conn: &mut Self::Connection,
            statements: &Statements,
            consumer: &str,
        ) -> Result<Vec<(String, i32, String)>, sqlx::Error> {
            let rows = $crate::store::shared::sql::<$db>(&statements.tripped)
                .bind(consumer)
                .fetch_all(conn)
                .await?;
            use sqlx::Row as _;
            rows.iter()
                .map(|row| Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?)))
                .collect()
        }

        async fn accept(
            conn: &mut Self::Connection,
            statements: &Statements,
            consumer: &str,
        ) -> Result<u64, sqlx::Error> {
            let done = $crate::store::shared::sql::<$db>(&statements.accept)
                .bind(consumer)
                .execute(conn)
                .await?;
            Ok(done.rows_affected())
        }

        async fn pause(
            conn: &mut Self::Connection,
            statements: &Statements,
            consumer: &str,
            topic: &str,
            reason: &str,
        ) -> Result<(), sqlx::Error> {
            $crate::store::shared::sql::<$db>(&statements.pause)
                .bind(consumer)
                .bind(topic)
                .bind(reason)
                .execute(conn)
                .await
                .map(drop)
        }

        async fn unpause(
            conn: &mut Self::Connection,
            statements: &Statements,
            consumer: &str,
            topic: &str,
        ) -> Result<bool, sqlx::Error> {
            let done = $crate::store::shared::sql::<$db>(&statements.unpause)
                .bind(consumer)
                .bind(topic)
                .execute(conn)
                .await?;
            Ok(done.rows_affected() == 1)
        }

        async fn paused(
            conn: &mut Self::Connection,
            statements: &Statements,
            consumer: &str,
        ) -> Result<Vec<(String, String, i64)>, sqlx::Error> {
            let rows = $crate::store::shared::sql::<$db>(&statements.paused)
                .bind(consumer)
                .fetch_all(conn)
                .await?;
            use sqlx::Row as _;
            rows.iter()
                .map(|row| Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?)))
                .collect()
        }

        async fn take(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            owner: uuid::Uuid,
        ) -> Result<Option<$crate::position::Row>, sqlx::Error> {
            let row = $crate::store::shared::keyed::<$db>(&statements.take, key)
                .bind(owner)
                .fetch_optional(conn)
                .await?;
            row.as_ref()
                .map($crate::store::rows::position_row)
                .transpose()
        }

        async fn create(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            row: &$crate::position::Row,
        ) -> Result<bool, sqlx::Error> {
            let done = $crate::store::shared::keyed::<$db>(&statements.create, key)
                .bind(&row.topic_id)
                .bind(row.next)
                .bind(row.seq)
                .bind(row.owner)
                .execute(conn)
                .await?;
            Ok(done.rows_affected() == 1)
        }

        async fn read(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
        ) -> Result<Option<$crate::position::Row>, sqlx::Error> {
            let row = $crate::store::shared::keyed::<$db>(&statements.read, key)
                .fetch_optional(conn)
                .await?;
            row.as_ref()
                .map($crate::store::rows::position_row)
                .transpose()
        }

        async fn put(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            row: &$crate::position::Row,
        ) -> Result<(), sqlx::Error> {
            $crate::store::shared::keyed::<$db>(&statements.put, key)
                .bind(&row.topic_id)
                .bind(row.next)
                .bind(row.seq)
                .bind(row.owner)
                .execute(conn)
                .await?;
            Ok(())
        }

        async fn bury(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            letter: &$crate::store::DeadLetter<'_>,
        ) -> Result<bool, sqlx::Error> {
            let done = $crate::store::shared::sql::<$db>(&statements.bury)
                .bind(&*key.consumer)
                .bind(letter.message_id)
                .bind(&*key.topic)
                .bind(key.partition)
                .bind(letter.offset)
                .bind(letter.key)
                .bind(letter.payload)
                .bind(letter.headers)
                .bind(letter.error)
                .bind(letter.attempts)
                .bind(letter.parked)
                .bind(letter.timestamp_ms)
                .bind(letter.first_failed_at)
                .bind(letter.delay_micros)
                .execute(conn)
                .await?;
            Ok(done.rows_affected() == 1)
        }

        async fn buried(
            conn: &mut Self::Connection,
            statements: &Statements,
            key: &$crate::position::Key,
            offset: i64,
        ) -> Result<Option<uuid::Uuid>, sqlx::Error> {
            let row = $crate::store::shared::keyed::<$db>(&statements.buried, key)
                .bind(offset)
                .fetch_optional(conn)
                .await?;
            row.map(|row| sqlx::Row::try_get(&row, 0)).transpose()
        }
    };
}
pub(super) use implement_statements;
