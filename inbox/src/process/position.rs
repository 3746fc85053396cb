//! The position row outside of messages: it is read, taken and created; and the breaker's.

use std::collections::BTreeMap;

use uuid::Uuid;

use super::Processor;
use crate::InboxStore;
use crate::partition::Attempt;
use crate::position::{Key, Row};

impl<D: InboxStore> Processor<D> {
    /// Writes down that the consumer stops because many messages failed in a row.
    pub(crate) async fn trip(
        &self,
        topic: &str,
        consumer: &str,
        failures: u32,
        error: &str,
    ) -> Result<(), sqlx::Error> {
        let failures = i32::try_from(failures).unwrap_or(i32::MAX);
        let write = async {
            let mut conn = self.pool.acquire().await?;
            D::trip(
                &mut conn,
                &self.statements,
                consumer,
                topic,
                failures,
                error,
            )
            .await
        };
        self.limited(write).await
    }

    /// Reads the position row as committed, in a session of its own.
    pub(crate) async fn read(&self, key: &Key) -> Result<Option<Row>, sqlx::Error> {
        let read = async {
            let mut conn = self.pool.acquire().await?;
            D::read(&mut conn, &self.statements, key).await
        };
        self.limited(read).await
    }

    /// Takes ownership of a partition, and reads what was tried in vain; `None` when it has no row yet.
    ///
    /// The token is written before Kafka is asked where the partition begins and ends, and before it is told to
    /// deliver. It may wait for the last transaction of the previous owner, and thereby sees its outcome: whatever
    /// that one tries later fails on the token (G6). A lost answer needs no care: the next attempt writes another token.
    pub(crate) async fn take(
        &self,
        key: &Key,
    ) -> Result<Option<(Row, BTreeMap<i64, Attempt>)>, sqlx::Error> {
        let take = async {
            let statements = &self.statements;
            let mut tx = D::begin_brief(&self.pool, statements).await?;
            let Some(row) = D::take(&mut tx, statements, key, Uuid::new_v4()).await? else {
                return Ok(None);
            };
            D::forget_below(&mut tx, statements, key, row.next).await?;
            let attempts = D::attempts(&mut tx, statements, key, row.next).await?;
            tx.commit().await?;
            Ok(Some((row, attempts)))
        };
        self.limited(take).await
    }

    /// Creates the row of a partition that has none. `None`: another process was faster, take it.
    pub(crate) async fn create(
        &self,
        key: &Key,
        topic_id: String,
        next: i64,
    ) -> Result<Option<Row>, sqlx::Error> {
        let row = Row {
            topic_id,
            next,
            seq: 0,
            owner: Uuid::new_v4(),
        };
        let create = async {
            let mut tx = D::begin_brief(&self.pool, &self.statements).await?;
            let created = D::create(&mut tx, &self.statements, key, &row).await?;
            tx.commit().await?;
            Ok(created)
        };
        Ok(self.limited(create).await?.then_some(row))
    }
}
