//! Consumed but not published.

use std::collections::{HashMap, HashSet};

use uuid::Uuid;

use super::buckets::{Buckets, made_at};
use super::inbox::{Consumed, Source};
use super::outbox::Published;
use super::report::{Extra, Range, Report};
use super::{Request, micros_of};
use crate::error::Error;
use crate::operator::{OperatorStore, time};

/// Ids that are looked for in one pass over the outbox, in pages.
const PAGES: usize = 100;

/// The search for messages that the outbox does not know.
#[derive(Debug)]
pub(super) struct Search {
    source: Source,
    buckets: Buckets,
    /// Milliseconds; `None`: nothing can be compared.
    range: Option<(i64, i64)>,
    grace: i64,
    since: Option<i64>,
    candidates: usize,
    shown: usize,
}

impl Search {
    /// `oldest`, `since` and `until` are microseconds.
    pub(super) fn new<A: OperatorStore, B: OperatorStore>(
        request: &Request<A, B>,
        source: Source,
        oldest: Option<i64>,
        since: Option<i64>,
        until: i64,
    ) -> Self {
        let grace = micros_of(request.grace);
        let begin = oldest.filter(|_| source != Source::Nothing);
        let range = begin
            .map(|oldest| (begin_of(oldest, grace, since), until.div_euclid(1_000)))
            .filter(|(from, until)| from < until);
        let (from, end) = range.unwrap_or((0, 0));
        Self {
            source,
            buckets: Buckets::new(from, end),
            range,
            grace,
            since,
            candidates: request.page.saturating_mul(PAGES),
            shown: request.shown,
        }
    }

    pub(super) fn source(&self) -> &Source {
        &self.source
    }

    /// A row of the outbox whose message the source names.
    pub(super) fn on_both_sides(&mut self, id: Uuid) {
        self.buckets.add(id, -1);
    }

    /// Counts what was consumed, and looks for the ids where the counts differ.
    pub(super) async fn finish<A: OperatorStore, B: OperatorStore>(
        mut self,
        published: &Published<A>,
        consumed: &Consumed<B>,
        report: &mut Report,
    ) -> Result<(), Error> {
        let failed = |e| Error::database("compare the consumer with the outbox", e);
        report.extra_by_record = matches!(self.source, Source::Records(_));
        let Some((from, until)) = self.range else {
            return Ok(());
        };
        report.extra_covers = Some(Range {
            from: Some(time(from.saturating_mul(1_000)).map_err(failed)?),
            until: time(until.saturating_mul(1_000)).map_err(failed)?,
        });
        let (first, end) = self.buckets.ids();
        let mut after = None;
        loop {
            let page = consumed
                .page(&self.source, after, first, end)
                .await
                .map_err(failed)?;
            let Some((last, _)) = page.last() else { break };
            after = Some(*last);
            for (id, _) in &page {
                self.buckets.add(*id, 1);
                report.consumed += u64::from(made_at(*id).is_some());
            }
        }
        let mut candidates = HashMap::new();
        for (first, end) in self.buckets.uneven() {
            let mut after = None;
            loop {
                let page = consumed
                    .page(&self.source, after, first, end)
                    .await
                    .map_err(failed)?;
                let Some((last, _)) = page.last() else { break };
                after = Some(*last);
                let of_an_outbox = page.into_iter().filter(|(id, _)| made_at(*id).is_some());
                candidates.extend(of_an_outbox);
                if candidates.len() >= self.candidates {
                    self.judge(published, consumed, &mut candidates, report)
                        .await?;
                }
            }
        }
        self.judge(published, consumed, &mut candidates, report)
            .await
    }

    /// One pass over the outbox: what it does not know is extra.
    async fn judge<A: OperatorStore, B: OperatorStore>(
        &self,
        published: &Published<A>,
        consumed: &Consumed<B>,
        candidates: &mut HashMap<Uuid, i64>,
        report: &mut Report,
    ) -> Result<(), Error> {
        let failed = |e| Error::database("look for consumed messages in the outbox", e);
        let mut unknown: HashSet<Uuid> = candidates.keys().copied().collect();
        published.remove_known(&mut unknown).await.map_err(failed)?;
        // The clean-up may have deleted some while we looked.
        let oldest = published.oldest().await.map_err(failed)?;
        let begin = oldest.map_or(i64::MAX, |at| begin_of(at, self.grace, self.since));
        let mut extra: Vec<Uuid> = unknown
            .into_iter()
            .filter(|id| made_at(*id).is_some_and(|made| made >= begin))
            .collect();
        extra.sort_unstable();
        report.extra_count += extra.len() as u64;
        extra.truncate(self.shown.saturating_sub(report.extra.len()));
        let topics = consumed.topics_of(&extra).await.map_err(failed)?;
        for id in extra {
            let (Some(made), Some(consumed_at)) = (made_at(id), candidates.get(&id)) else {
                continue;
            };
            report.extra.push(Extra {
                message_id: id,
                topic: topics.get(&id).cloned(),
                made_at: time(made.saturating_mul(1_000)).map_err(failed)?,
                consumed_at: time(*consumed_at).map_err(failed)?,
            });
        }
        candidates.clear();
        Ok(())
    }
}

/// The first millisecond of which the outbox certainly holds all messages: the id was made by the producer's clock, the row's time by
/// the database's.
fn begin_of(oldest: i64, grace: i64, since: Option<i64>) -> i64 {
    let held = oldest.saturating_add(grace);
    let begin = since.map_or(held, |since| since.max(held));
    begin.saturating_add(999).div_euclid(1_000)
}
