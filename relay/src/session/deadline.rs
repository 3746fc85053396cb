//! Nothing asked of a database waits for ever: a host that vanished answers nothing, and TCP alone notices after many
//! minutes or never. A session whose call ran out of time is in an unknown state; its term ends with the error.

use std::time::Duration;

use uuid::Uuid;

use super::{
    Among, Facts, Filter, Limit, Look, Mark, Overview, ParkedRow, Parking, ParkingSession, Probe,
    Request, Rewrite, Row, Server, Session, Written,
};
use crate::config::Config;
use crate::error::Error;
use crate::position::{Checkpoint, Gaps};

/// A statement that touches a row or two. Longer than a writer may hold SQLite's lock.
const SHORT: Duration = Duration::from_secs(30);

/// A batch of rows.
const READ: Duration = Duration::from_secs(120);

/// A scan over everything retained: 0.4 s per 10 million rows in memory.
const SCAN: Duration = Duration::from_secs(900);

/// A session whose every call has a deadline.
pub(crate) struct Deadline<S>(S);

async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let late = || {
        let text = format!("no answer from the database within {limit:?}");
        Error::Database(sqlx::Error::Io(std::io::Error::new(
            std::io::ErrorKind::TimedOut,
            text,
        )))
    };
    tokio::time::timeout(limit, call)
        .await
        .unwrap_or_else(|_| Err(late()))
}

impl<S: Session> Session for Deadline<S> {
    const GAPLESS: bool = S::GAPLESS;

    async fn connect(config: &Config) -> Result<Self, Error> {
        within(SHORT, S::connect(config)).await.map(Self)
    }

    fn server(&self) -> &Server {
        self.0.server()
    }

    async fn mark(&mut self) -> Result<Mark, Error> {
        within(SHORT, self.0.mark()).await
    }

    async fn probe(&mut self) -> Result<Probe, Error> {
        within(SHORT, self.0.probe()).await
    }

    async fn look(&mut self, gaps: &Gaps, high: i64, limit: Limit) -> Result<Look, Error> {
        within(READ, self.0.look(gaps, high, limit)).await
    }

    async fn last_visible(&mut self) -> Result<i64, Error> {
        within(SHORT, self.0.last_visible()).await
    }

    async fn row_at_or_below(&mut self, id: i64) -> Result<Option<(i64, Uuid)>, Error> {
        within(SHORT, self.0.row_at_or_below(id)).await
    }

    async fn facts(&mut self, high: i64, gaps: &Gaps, released: &Gaps) -> Result<Facts, Error> {
        within(SCAN, self.0.facts(high, gaps, released)).await
    }

    async fn take(
        &mut self,
        seen: &Mark,
        epoch: i64,
        source: &str,
        owner: &str,
    ) -> Result<bool, Error> {
        within(SHORT, self.0.take(seen, epoch, source, owner)).await
    }

    async fn renew(&mut self, epoch: i64) -> Result<Written, Error> {
        within(SHORT, self.0.renew(epoch)).await
    }

    async fn confirm(
        &mut self,
        epoch: i64,
        checkpoint: &Checkpoint,
        cluster_id: &str,
    ) -> Result<Written, Error> {
        within(SHORT, self.0.confirm(epoch, checkpoint, cluster_id)).await
    }

    async fn release(&mut self, epoch: i64) -> Result<Written, Error> {
        within(SHORT, self.0.release(epoch)).await
    }

    async fn clean_up(
        &mut self,
        epoch: i64,
        retention: Duration,
        limit: usize,
    ) -> Result<(Written, u64), Error> {
        within(READ, self.0.clean_up(epoch, retention, limit)).await
    }

    async fn raise_format(&mut self, format: u32) -> Result<(), Error> {
        within(SHORT, self.0.raise_format(format)).await
    }

    async fn rewrite(&mut self, epoch: i64, rewrite: &Rewrite) -> Result<Written, Error> {
        within(SHORT, self.0.rewrite(epoch, rewrite)).await
    }
}

impl<S: ParkingSession> ParkingSession for Deadline<S> {
    async fn overview(&mut self) -> Result<Overview, Error> {
        within(READ, self.0.overview()).await
    }

    async fn parked_among(&mut self, rows: &[Row]) -> Result<Among, Error> {
        within(READ, self.0.parked_among(rows)).await
    }

    async fn park(&mut self, epoch: i64, rows: &[Parking]) -> Result<Written, Error> {
        within(READ, self.0.park(epoch, rows)).await
    }

    async fn pause(&mut self, epoch: i64, topic: &str, reason: &str) -> Result<Written, Error> {
        within(SHORT, self.0.pause(epoch, topic, reason)).await
    }

    async fn releasable(
        &mut self,
        high: i64,
        limit: Limit,
        probe: Option<&str>,
    ) -> Result<Vec<ParkedRow>, Error> {
        within(READ, self.0.releasable(high, limit, probe)).await
    }

    async fn refuse(&mut self, epoch: i64, id: i64, reason: &str) -> Result<Written, Error> {
        within(SHORT, self.0.refuse(epoch, id, reason)).await
    }

    async fn finish_release(
        &mut self,
        epoch: i64,
        checkpoint: &Checkpoint,
        cluster_id: &str,
    ) -> Result<Written, Error> {
        within(READ, self.0.finish_release(epoch, checkpoint, cluster_id)).await
    }

    async fn resume_topic(&mut self, epoch: i64, topic: &str) -> Result<Written, Error> {
        within(SHORT, self.0.resume_topic(epoch, topic)).await
    }

    async fn list_parked(
        &mut self,
        filter: &Filter,
        limit: usize,
    ) -> Result<Vec<ParkedRow>, Error> {
        within(READ, self.0.list_parked(filter, limit)).await
    }

    async fn request(&mut self, ids: &[i64], request: Request) -> Result<u64, Error> {
        within(READ, self.0.request(ids, request)).await
    }

    async fn pause_for_operator(
        &mut self,
        topic: &str,
        key: Option<&[u8]>,
        reason: &str,
    ) -> Result<bool, Error> {
        within(SHORT, self.0.pause_for_operator(topic, key, reason)).await
    }

    async fn resume_for_operator(
        &mut self,
        topic: &str,
        key: Option<&[u8]>,
    ) -> Result<bool, Error> {
        within(SHORT, self.0.resume_for_operator(topic, key)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_call_without_an_answer_ends_as_an_outage() {
        let error = within(
            Duration::from_millis(10),
            std::future::pending::<Result<(), Error>>(),
        )
        .await
        .unwrap_err();
        assert!(
            error.is_retriable() && error.to_string().contains("no answer"),
            "{error}"
        );
    }
}
