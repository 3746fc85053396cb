//! What is the same on every database but for the text of the statements. sqlx's databases share the calls, not a usable
//! trait, so that these are macros; they are expanded where `conn`, `sql` and `leading` are those of one database.

/// One statement, in a transaction that holds the mark's row, if it still has this epoch.
macro_rules! write_as_leader {
    ($self:ident, $epoch:ident, $statement:ident, $($value:expr),+) => {{
        let Some(mut tx) = leading(&mut $self.conn, &$self.sql.renew, $epoch).await? else {
            return $self.written(0, $epoch, i64::MAX).await;
        };
        let query = sqlx::query(AssertSqlSafe(&*$self.sql.$statement));
        query$(.bind($value))+.execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(Written::Done)
    }};
}

/// Of [`super::Session`].
macro_rules! same_session_methods {
    () => {
        async fn mark(&mut self) -> Result<Mark, Error> {
            let row = sqlx::query(AssertSqlSafe(&*self.sql.mark))
                .fetch_optional(&mut self.conn)
                .await?;
            raw_mark!(row.ok_or_else(no_mark)?).decode()
        }

        async fn last_visible(&mut self) -> Result<i64, Error> {
            Ok(sqlx::query_scalar(AssertSqlSafe(&*self.sql.last_visible))
                .fetch_one(&mut self.conn)
                .await?)
        }

        async fn row_at_or_below(&mut self, id: i64) -> Result<Option<(i64, Uuid)>, Error> {
            let query = sqlx::query_as(AssertSqlSafe(&*self.sql.row_at_or_below)).bind(id);
            Ok(query.fetch_optional(&mut self.conn).await?)
        }

        async fn take(
            &mut self,
            seen: &Mark,
            epoch: i64,
            source: &str,
            owner: &str,
        ) -> Result<bool, Error> {
            let query = sqlx::query(AssertSqlSafe(&*self.sql.take));
            let query = query
                .bind(epoch)
                .bind(source)
                .bind(owner)
                .bind(seen.epoch)
                .bind(seen.renewal);
            Ok(query.execute(&mut self.conn).await?.rows_affected() == 1)
        }

        async fn renew(&mut self, epoch: i64) -> Result<Written, Error> {
            let done = sqlx::query(AssertSqlSafe(&*self.sql.renew))
                .bind(epoch)
                .execute(&mut self.conn)
                .await?;
            self.written(done.rows_affected(), epoch, 0).await
        }

        async fn confirm(
            &mut self,
            epoch: i64,
            checkpoint: &Checkpoint,
            cluster_id: &str,
        ) -> Result<Written, Error> {
            let query = sqlx::query(AssertSqlSafe(&*self.sql.confirm));
            let query = query
                .bind(epoch)
                .bind(checkpoint.seq)
                .bind(checkpoint.encode())
                .bind(cluster_id);
            let done = query.execute(&mut self.conn).await?;
            self.written(done.rows_affected(), epoch, checkpoint.seq)
                .await
        }

        async fn release(&mut self, epoch: i64) -> Result<Written, Error> {
            let done = sqlx::query(AssertSqlSafe(&*self.sql.release))
                .bind(epoch)
                .execute(&mut self.conn)
                .await?;
            self.written(done.rows_affected(), epoch, 0).await
        }

        async fn raise_format(&mut self, format: u32) -> Result<(), Error> {
            sqlx::query(AssertSqlSafe(&*self.sql.raise_format))
                .bind(i32::try_from(format).unwrap_or(i32::MAX))
                .execute(&mut self.conn)
                .await?;
            Ok(())
        }

        async fn rewrite(&mut self, epoch: i64, rewrite: &Rewrite) -> Result<Written, Error> {
            let stored = &rewrite.checkpoint;
            let query = sqlx::query(AssertSqlSafe(&*self.sql.rewrite));
            let query = query
                .bind(epoch)
                .bind(stored.seq)
                .bind(stored.epoch)
                .bind(stored.encode());
            let query = query.bind(&*rewrite.cluster_id).bind(rewrite.source_epoch);
            let query = query.bind(&*rewrite.source);
            let done = query.execute(&mut self.conn).await?;
            self.written(done.rows_affected(), epoch, i64::MAX).await
        }
    };
}

/// Of [`super::ParkingSession`].
macro_rules! same_parking_methods {
    () => {
        async fn overview(&mut self) -> Result<Overview, Error> {
            let parked = sqlx::query_as(AssertSqlSafe(&*self.sql.parked_by_topic))
                .fetch_all(&mut self.conn)
                .await?;
            let requests = sqlx::query_scalar(AssertSqlSafe(&*self.sql.requested))
                .fetch_one(&mut self.conn)
                .await?;
            let paused: Vec<(String, Option<Vec<u8>>, bool, String)> =
                sqlx::query_as(AssertSqlSafe(&*self.sql.paused))
                    .fetch_all(&mut self.conn)
                    .await?;
            Ok(Overview {
                parked,
                requests,
                paused: paused.into_iter().map(Paused::from).collect(),
            })
        }

        async fn pause(&mut self, epoch: i64, topic: &str, reason: &str) -> Result<Written, Error> {
            write_as_leader!(self, epoch, pause, topic, reason)
        }

        async fn releasable(
            &mut self,
            high: i64,
            limit: Limit,
            probe: Option<&str>,
        ) -> Result<Vec<ParkedRow>, Error> {
            let rows = sqlx::query(AssertSqlSafe(&*self.sql.releasable))
                .bind(high)
                .bind(probe)
                .bind(i64::try_from(limit.rows).unwrap_or(i64::MAX))
                .fetch(&mut self.conn);
            collect(rows, limit.bytes, |row| Ok(parked_row!(row))).await
        }

        async fn refuse(&mut self, epoch: i64, id: i64, reason: &str) -> Result<Written, Error> {
            write_as_leader!(self, epoch, refuse, id, reason)
        }

        async fn resume_topic(&mut self, epoch: i64, topic: &str) -> Result<Written, Error> {
            write_as_leader!(self, epoch, resume_topic, topic)
        }

        async fn resume_for_operator(
            &mut self,
            topic: &str,
            key: Option<&[u8]>,
        ) -> Result<bool, Error> {
            let query = sqlx::query(AssertSqlSafe(&*self.sql.resume_for_operator));
            let query = query.bind(topic).bind(key);
            Ok(query.execute(&mut self.conn).await?.rows_affected() > 0)
        }
    };
}

pub(super) use {same_parking_methods, same_session_methods, write_as_leader};
