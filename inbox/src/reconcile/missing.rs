//! Published but not consumed.

use std::collections::HashMap;

use uuid::Uuid;

use super::extra::Search;
use super::inbox::Consumed;
use super::outbox::{OutboxRow, Published};
use super::report::{Missing, Report};
use super::{Request, micros_of};
use crate::error::Error;
use crate::operator::{OperatorStore, time};

/// Reads the outbox page by page and asks the consumer's side for each.
pub(super) async fn search<A: OperatorStore, B: OperatorStore>(
    request: &Request<A, B>,
    published: &Published<A>,
    consumed: &Consumed<B>,
    (since, until): (Option<i64>, i64),
    extra: &mut Search,
    report: &mut Report,
) -> Result<(), Error> {
    let failed = |e| Error::database("compare the outbox with the consumer", e);
    let mut found: Vec<OutboxRow> = Vec::new();
    // When the youngest consumed message of each topic was made.
    let mut reached: HashMap<String, i64> = HashMap::new();
    // A little more than was asked for: the extra ones are counted by the time in the id, which is the producer's clock.
    let grace = micros_of(request.grace);
    let wide = (
        since.map(|at| at.saturating_sub(grace)),
        until.saturating_add(grace),
    );
    let mut after = 0;
    loop {
        let page = published
            .page(after, &consumed.topics, wide.0, wide.1)
            .await
            .map_err(failed)?;
        let Some(last) = page.last() else { break };
        after = last.id;
        let ids: Vec<Uuid> = page.iter().map(|row| row.message_id).collect();
        let known = consumed.known(&ids, extra.source()).await.map_err(failed)?;
        let mut unknown = Vec::new();
        for row in page {
            if known.in_source.contains(&row.message_id) {
                extra.on_both_sides(row.message_id);
            }
            if row.created_at >= until || since.is_some_and(|since| row.created_at < since) {
                continue;
            }
            report.rows += 1;
            if known.settled.contains(&row.message_id) {
                report.settled += 1;
                let young = reached.entry(row.topic).or_default();
                *young = row.created_at.max(*young);
            } else if known.retrying.contains(&row.message_id) {
                report.retrying += 1;
            } else if !published.settles(row.id) {
                report.unpublished.waiting += 1;
                let oldest = time(row.created_at).map_err(failed)?;
                report.unpublished.oldest.get_or_insert(oldest);
            } else {
                unknown.push(row);
            }
        }
        let ids: Vec<Uuid> = unknown.iter().map(|row| row.message_id).collect();
        let parked = published.parked(&ids).await.map_err(failed)?;
        for row in unknown {
            if parked.contains(&row.message_id) {
                report.unpublished.parked += 1;
                continue;
            }
            report.missing_count += 1;
            if found.len() < request.shown {
                found.push(row);
            }
        }
    }
    for row in still_missing(request, consumed, extra, found, report).await? {
        let reached = reached.get(&row.topic).copied().unwrap_or(i64::MIN);
        let missing = Missing {
            outbox_id: row.id,
            message_id: row.message_id,
            overtaken: row.created_at.saturating_add(grace) < reached,
            topic: row.topic,
            created_at: time(row.created_at).map_err(failed)?,
        };
        report.missing.push(missing);
    }
    Ok(())
}

/// Looks again: a consumer that is catching up has consumed some of it in the meantime.
async fn still_missing<A: OperatorStore, B: OperatorStore>(
    request: &Request<A, B>,
    consumed: &Consumed<B>,
    extra: &Search,
    found: Vec<OutboxRow>,
    report: &mut Report,
) -> Result<Vec<OutboxRow>, Error> {
    let mut missing = Vec::new();
    for some in found.chunks(request.page) {
        let ids: Vec<Uuid> = some.iter().map(|row| row.message_id).collect();
        let known = consumed
            .known(&ids, extra.source())
            .await
            .map_err(|e| Error::database("compare the outbox with the consumer", e))?;
        for row in some {
            if known.settled.contains(&row.message_id) {
                report.missing_count -= 1;
                report.settled += 1;
            } else if known.retrying.contains(&row.message_id) {
                report.missing_count -= 1;
                report.retrying += 1;
            } else {
                missing.push(row.clone());
            }
        }
    }
    Ok(missing)
}
