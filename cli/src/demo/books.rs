//! The tables of the inventory service, as the audit and the run read them. The same text on both databases.

use std::collections::BTreeMap;

use anyhow::Context;
use oncebox_inbox::InboxStore;
use sqlx::{Executor, FromRow, IntoArguments, Pool};

use super::audit::{Books, Effect, Notice};

const EFFECTS: &str = "SELECT order_id, sku, quantity, customer, points FROM ledger";
const STOCK: &str = "SELECT sku, initial, quantity FROM stock";
const POINTS: &str = "SELECT customer, points FROM points";
const STATES: &str = "SELECT order_id, state FROM order_state";
const REFUSED: &str = "SELECT order_id, notice FROM refused";

/// Everything that the handler wrote.
pub(super) async fn read<D>(pool: &Pool<D>) -> anyhow::Result<Books>
where
    D: InboxStore,
    D::Arguments: IntoArguments<D>,
    for<'c> &'c Pool<D>: Executor<'c, Database = D>,
    for<'r> (i64, String, i64, String, i64): FromRow<'r, D::Row>,
    for<'r> (String, i64, i64): FromRow<'r, D::Row>,
    for<'r> (String, i64): FromRow<'r, D::Row>,
    for<'r> (i64, String): FromRow<'r, D::Row>,
{
    let effects: Vec<(i64, String, i64, String, i64)> =
        sqlx::query_as(EFFECTS).fetch_all(pool).await?;
    let stock: Vec<(String, i64, i64)> = sqlx::query_as(STOCK).fetch_all(pool).await?;
    let points: Vec<(String, i64)> = sqlx::query_as(POINTS).fetch_all(pool).await?;
    let states: Vec<(i64, String)> = sqlx::query_as(STATES).fetch_all(pool).await?;
    let refused: Vec<(i64, String)> = sqlx::query_as(REFUSED).fetch_all(pool).await?;
    Ok(Books {
        effects: effects
            .into_iter()
            .map(|(order, sku, quantity, customer, points)| Effect {
                order,
                sku,
                quantity,
                customer,
                points,
            })
            .collect(),
        stock: stock
            .into_iter()
            .map(|(sku, initial, now)| (sku, (initial, now)))
            .collect(),
        points: points.into_iter().collect(),
        states: BTreeMap::from_iter(states),
        refused: refused
            .into_iter()
            .map(|(order, name)| Some((order, Notice::named(&name)?)))
            .collect::<Option<_>>()
            .context("a refusal of an unknown kind")?,
    })
}
