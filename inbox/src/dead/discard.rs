//! Discarding: what is deleted has no effect, ever.

use std::collections::BTreeMap;

use super::order::ids;
use super::{DiscardPlan, Filter, Letters};
use crate::error::Error;
use crate::operator::{self, Columns, OperatorStore, Sql, Value, tables};

/// Dead letters that one transaction deletes.
const CHUNK: usize = 1_000;

/// Consumer, topic and key.
type Key = (String, String, Vec<u8>);

/// What the filter means.
#[derive(Default)]
struct Meant {
    dead: Vec<i64>,
    /// Parked without a key: they block nobody.
    keyless: Vec<i64>,
    parked: BTreeMap<Key, Vec<i64>>,
}

impl<D: OperatorStore> Letters<D> {
    /// What [`Letters::discard`] would delete.
    ///
    /// # Errors
    ///
    /// [`Error::Schema`], [`Error::Database`].
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    pub async fn plan_discard(&self, filter: &Filter) -> Result<DiscardPlan, Error> {
        operator::check(self.pool(), &self.names).await?;
        let failed = |e| Error::database("plan to discard letters", e);
        let mut tx = operator::reading(self.pool()).await?;
        let meant = self.meant(&mut tx, filter).await.map_err(failed)?;
        let mut plan = DiscardPlan {
            dead: meant.dead,
            parked: meant.keyless,
            ..DiscardPlan::default()
        };
        for (key, letters) in meant.parked {
            let all = self.parked_of(&mut tx, &key).await.map_err(failed)?;
            if all > letters.len() as u64 {
                plan.still_blocked += 1;
            } else {
                plan.unblocked += 1;
            }
            plan.parked.extend(letters);
        }
        tx.rollback().await.map_err(failed)?;
        Ok(plan)
    }

    /// Deletes the letters that the filter means, ordered or not. A blocked key whose last parked letter goes is unblocked in the same
    /// transaction; one that keeps letters stays blocked until they are replayed or discarded. Marks stay: a redelivery of a
    /// discarded message is a duplicate.
    ///
    /// # Errors
    ///
    /// [`Error::Schema`], [`Error::Database`]; what was deleted until then is deleted.
    ///
    /// # Cancel safety
    ///
    /// Transactions of at most 1 000 dead letters, or of one key: repeat it to delete the rest.
    pub async fn discard(&self, filter: &Filter) -> Result<DiscardPlan, Error> {
        operator::check(self.pool(), &self.names).await?;
        let failed = |e| Error::database("discard letters", e);
        let mut tx = operator::reading(self.pool()).await?;
        let meant = self.meant(&mut tx, filter).await.map_err(failed)?;
        tx.rollback().await.map_err(failed)?;
        let mut plan = DiscardPlan {
            applied: true,
            ..DiscardPlan::default()
        };
        for chunk in meant.dead.chunks(CHUNK) {
            plan.deleted += self.delete_dead(chunk).await?;
        }
        plan.dead = meant.dead;
        if !meant.keyless.is_empty() {
            let mut tx = operator::writing(self.pool()).await?;
            plan.deleted += self
                .delete_parked(&mut tx, &meant.keyless)
                .await
                .map_err(failed)?;
            tx.commit().await.map_err(failed)?;
            plan.parked = meant.keyless;
        }
        for (key, letters) in meant.parked {
            let (deleted, unblocked, left) =
                self.discard_of(&key, &letters).await.map_err(failed)?;
            plan.deleted += deleted;
            plan.unblocked += u64::from(unblocked);
            plan.still_blocked += u64::from(left);
            plan.parked.extend(letters);
        }
        let all = (plan.dead.len() + plan.parked.len()) as u64;
        plan.busy = all.saturating_sub(plan.deleted);
        Ok(plan)
    }

    async fn delete_dead(&self, letters: &[i64]) -> Result<u64, Error> {
        let failed = |e| Error::database("delete dead letters", e);
        let mut tx = operator::writing(self.pool()).await?;
        let text = tables::<D>(D::LETTERS.delete_dead, &self.names);
        let (before, after) = text.split_once("{ids}").unwrap_or((&text, ""));
        let mut sql = Sql::new(before);
        sql.push_in::<D>("id", letters.iter().map(|id| Value::Int(*id)).collect());
        sql.push(after);
        let deleted = D::change(&mut tx, sql).await.map_err(failed)?;
        tx.commit().await.map_err(failed)?;
        Ok(deleted)
    }

    /// Deletes parked letters of one key: how many, whether the key is free now, whether letters are left.
    async fn discard_of(
        &self,
        key: &Key,
        letters: &[i64],
    ) -> Result<(u64, bool, bool), sqlx::Error> {
        let mut tx = self.pool().begin_with(D::BEGIN_WRITE).await?;
        // The consumer's order of locks: the key first. Whoever parks or releases at this moment holds it, and the statements below
        // see what came of it.
        D::rows(&mut tx, self.of_key(D::LETTERS.lock_key, key)).await?;
        let mut deleted = 0;
        for chunk in letters.chunks(CHUNK) {
            deleted += self.delete_parked(&mut tx, chunk).await?;
        }
        let left = self.parked_of(&mut tx, key).await? > 0;
        let freed = if left {
            0
        } else {
            let text =
                "DELETE FROM {blocked_key} WHERE consumer = {c} AND topic = {t} AND key = {k}";
            D::change(&mut tx, self.of_key(text, key)).await?
        };
        tx.commit().await?;
        Ok((deleted, freed > 0, left))
    }

    async fn delete_parked(
        &self,
        conn: &mut D::Connection,
        letters: &[i64],
    ) -> Result<u64, sqlx::Error> {
        let mut sql = Sql::new(tables::<D>(
            "DELETE FROM {dead_letter} WHERE parked AND ",
            &self.names,
        ));
        sql.push_in::<D>("id", letters.iter().map(|id| Value::Int(*id)).collect());
        D::change(conn, sql).await
    }

    async fn parked_of(&self, conn: &mut D::Connection, key: &Key) -> Result<u64, sqlx::Error> {
        let text = "SELECT count(*) FROM {dead_letter} WHERE consumer = {c} AND topic = {t} AND key = {k} AND parked";
        let rows = D::rows(conn, self.of_key(text, key)).await?;
        let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
        Columns::<D>::new(row).count()
    }

    /// A statement about one key.
    fn of_key(&self, text: &str, (consumer, topic, key): &Key) -> Sql {
        let mut sql = Sql::default();
        let consumer = sql.bind(Value::Text(consumer.clone()));
        let topic = sql.bind(Value::Text(topic.clone()));
        let key = sql.bind(Value::Bytes(key.clone()));
        let text = text
            .replace("{c}", &consumer)
            .replace("{t}", &topic)
            .replace("{k}", &key);
        sql.push(&tables::<D>(&text, &self.names));
        sql
    }

    async fn meant(&self, conn: &mut D::Connection, filter: &Filter) -> Result<Meant, sqlx::Error> {
        let mut meant = Meant::default();
        let mut sql = self.select("id");
        filter.push::<D>(&mut sql);
        sql.push(" AND NOT parked ORDER BY id");
        meant.dead = ids::<D>(&D::rows(conn, sql).await?)?;
        let mut sql = self.select("id, consumer, topic, key");
        filter.push::<D>(&mut sql);
        sql.push(" AND parked ORDER BY id");
        for row in D::rows(conn, sql).await? {
            let mut columns = Columns::<D>::new(&row);
            let id = columns.int()?;
            let (consumer, topic) = (columns.text()?, columns.text()?);
            match columns.bytes_or_none()? {
                Some(key) => {
                    let of = meant.parked.entry((consumer, topic, key));
                    of.or_default().push(id);
                }
                None => meant.keyless.push(id),
            }
        }
        Ok(meant)
    }
}
