//! Start and every recovery, which are one code path: look, take the lease, fence, read the checkpoint, check, claim.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use oncebox_kafka::Stability;
use tokio::sync::{Mutex, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::config::Config;
use crate::error::Error;
use crate::health::{Health, Role};
use crate::identity;
use crate::keeper::{Keeper, Pulse};
use crate::log::{How, Log, Producer};
use crate::position::{Checkpoint, Gaps, Position, Tally, Tracker};
use crate::reader::Reader;
use crate::session::{Mark, ParkingSession, Server, Session};

/// Aborts its task when dropped: a term that ends takes its helpers and their sessions with it.
#[derive(Debug)]
pub(crate) struct Task<T>(JoinHandle<T>);

impl<T: Send + 'static> Task<T> {
    pub(crate) fn spawn(work: impl Future<Output = T> + Send + 'static) -> Self {
        Self(tokio::spawn(work))
    }

    /// The task's result.
    ///
    /// # Cancel safety
    /// Cancel safe: the task goes on.
    pub(crate) async fn join(&mut self) -> T {
        match (&mut self.0).await {
            Ok(value) => value,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A name for one relay in the lease, by which it knows its own after a rebuild. Two relays of one process differ.
pub(crate) fn owner() -> String {
    let host = std::fs::read_to_string("/etc/hostname").unwrap_or_default();
    let host = match host.trim() {
        "" => "unknown",
        name => name,
    };
    format!("{host}/{}/{}", std::process::id(), Uuid::new_v4().simple())
}

/// A session of each kind, of the same server.
pub(crate) async fn connect<S: Session>(config: &Config) -> Result<(S, S), Error> {
    let keeper = S::connect(config).await?;
    let reader = S::connect(config).await?;
    if keeper.server() != reader.server() {
        let name = |server: &Server| {
            format!(
                "{}/{} since {}",
                server.system, server.timeline, server.instance
            )
        };
        return Err(Error::ServersDiffer(
            name(keeper.server()),
            name(reader.server()),
        ));
    }
    Ok((keeper, reader))
}

/// What a relay knows before it takes the lead.
pub(crate) struct FirstLook {
    pub(crate) mark: Mark,
    pub(crate) checkpoint: Option<Checkpoint>,
}

impl FirstLook {
    /// The newer of checkpoint and mark; `None` = nothing was ever published.
    fn chosen(&self) -> Option<&Checkpoint> {
        identity::newer(&self.mark, self.checkpoint.as_ref())
    }

    /// The same position as the next one, written by `epoch`.
    pub(crate) fn following(&self, server: &Server, epoch: i64) -> Checkpoint {
        let chosen = self.chosen();
        Checkpoint {
            format: self.mark.format,
            seq: chosen.map_or(0, |c| c.seq).max(self.mark.seq) + 1,
            epoch,
            source_id: self.mark.source_id,
            system: server.system.clone(),
            timeline: server.timeline,
            position: chosen.map_or_else(Position::default, |c| c.position.clone()),
            parked: chosen.map_or_else(Tally::default, |c| c.parked),
            released: chosen.map_or_else(Gaps::default, |c| c.released.clone()),
            incomplete: false,
        }
    }
}

/// Looks at everything before anybody is fenced: a relay that will have to stop must not stop its better first.
pub(crate) async fn first_look<S: Session, L: Log>(
    config: &Config,
    session: &mut S,
    log: &L,
    cluster_id: &str,
) -> Result<FirstLook, Error> {
    // The checkpoint first: the facts are newer, so what they miss is really missing.
    let checkpoint = log.checkpoint(Stability::Any).await?;
    let mark = session.mark().await?;
    identity::check_names(
        config,
        session.server(),
        cluster_id,
        &mark,
        checkpoint.as_ref(),
    )?;
    check_rows(session, mark, checkpoint).await
}

/// Chooses the newer of checkpoint and mark, both read before, and compares it with the rows.
pub(crate) async fn check_rows<S: Session>(
    session: &mut S,
    mark: Mark,
    checkpoint: Option<Checkpoint>,
) -> Result<FirstLook, Error> {
    let Some(chosen) = identity::newer(&mark, checkpoint.as_ref()).cloned() else {
        return Ok(FirstLook { mark, checkpoint });
    };
    let position = &chosen.position;
    let facts = session
        .facts(position.high, &position.gaps, &chosen.released)
        .await?;
    // Not comparable = a living leader moved on between the two looks; the lease is not free anyway.
    identity::check_facts(&chosen, &facts)?;
    Ok(FirstLook {
        mark: facts.mark,
        checkpoint,
    })
}

/// How the wait for the lease ended.
pub(crate) enum Lease {
    /// Mine, with this epoch.
    Taken(i64),
    /// Another relay shows signs of life, and the caller did not want to wait.
    Held,
    /// Shutdown was requested.
    Shutdown,
}

/// Waits until the lease is free: given back, my own of before, or without a sign of life for as long as it lasts by
/// my own clock. Then looks at everything and takes it by compare-and-set.
pub(crate) async fn wait_for_lease<S: Session, L: Log>(
    config: &Config,
    session: &mut S,
    log: &L,
    (cluster_id, owner): (&str, &str),
    wait: bool,
    health: &Health,
    shutdown: &CancellationToken,
) -> Result<Lease, Error> {
    let mut seen = session.mark().await?;
    identity::check_source(config, &seen)?;
    let mut since = Instant::now();
    loop {
        let free = match seen.owner.as_deref() {
            None => true,
            Some(holder) => holder == owner || since.elapsed() >= config.lease,
        };
        if free {
            let look = first_look(config, session, log, cluster_id).await?;
            if (look.mark.epoch, look.mark.renewal) == (seen.epoch, seen.renewal) {
                let epoch = identity::next_epoch(&look.mark, look.checkpoint.as_ref());
                if session
                    .take(&look.mark, epoch, &config.source, owner)
                    .await?
                {
                    tracing::info!(epoch, source = config.source, "lease taken");
                    return Ok(Lease::Taken(epoch));
                }
            }
        } else {
            health.role(Role::Standby);
            tokio::select! {
                () = tokio::time::sleep(LOOK.min(config.lease / 8)) => {}
                () = shutdown.cancelled() => return Ok(Lease::Shutdown),
            }
        }
        let now = session.mark().await?;
        identity::check_source(config, &now)?;
        health.progress();
        if (now.epoch, now.renewal) != (seen.epoch, seen.renewal) {
            // A last sign of life of my own term before may still land.
            if !wait && now.owner.as_deref().is_some_and(|holder| holder != owner) {
                return Ok(Lease::Held);
            }
            since = Instant::now();
        }
        seen = now;
    }
}

/// How often a standby looks whether the lease was given back: a deploy should cost less than a second.
const LOOK: Duration = Duration::from_millis(100);

/// Most bytes of a position: what does not fit into the checkpoint's metadata goes into a record, and this much fits into
/// one of Kafka's default size. More gaps hold the position.
const BASE_BYTES: usize = 900_000;

/// Everything that a leader works with.
pub(crate) struct Term<S, P> {
    pub(crate) epoch: i64,
    pub(crate) source_epoch: i64,
    pub(crate) cluster_id: String,
    pub(crate) producer: Arc<P>,
    pub(crate) reader: Reader<S>,
    /// The keeper's.
    pub(crate) session: Arc<Mutex<S>>,
    pub(crate) keeper: Task<Result<(), Error>>,
    pub(crate) stop_keeper: CancellationToken,
    pub(crate) pulse: Pulse,
    /// The acknowledged position; sending one makes the keeper write the mark.
    pub(crate) acknowledged: watch::Sender<Option<Checkpoint>>,
    pub(crate) claim: Checkpoint,
}

/// Makes a term of the taken lease: fence, settle, choose, check, claim.
pub(crate) async fn begin_term<S: ParkingSession, L: Log>(
    config: &Config,
    keeper: S,
    mut reader: S,
    log: &L,
    cluster_id: String,
    epoch: i64,
    health: &Health,
) -> Result<Term<S, L::Producer>, Error> {
    let (acknowledged, acknowledged_rx) = watch::channel(None);
    let producer_cell: Arc<OnceLock<Arc<L::Producer>>> = Arc::default();
    let started = Instant::now();
    let pulse = {
        let cell = Arc::clone(&producer_cell);
        let patience = config.transaction_timeout + Duration::from_secs(5);
        Pulse::new(patience, move || {
            cell.get()
                .map_or(started, |producer| Instant::from_std(producer.last_step()))
        })
    };
    // The keeper renews from here on: to open a producer may take longer than the lease.
    pulse.busy(true);
    let stop_keeper = CancellationToken::new();
    let session = Arc::new(Mutex::new(keeper));
    let keeper = Keeper {
        config: config.clone(),
        session: Arc::clone(&session),
        epoch,
        cluster_id: cluster_id.clone(),
        pulse: pulse.clone(),
        acknowledged: acknowledged_rx.clone(),
        stop: stop_keeper.clone(),
    };
    let keeper = Task::spawn(keeper.run());

    log.prepare().await?;
    let producer = Arc::new(log.open().await?);
    let _ = producer_cell.set(Arc::clone(&producer));

    // G3: read after the fence, with the outcome of whatever was open.
    let checkpoint = log.checkpoint(Stability::Stable).await?;
    if let Some(newer) = checkpoint.as_ref().filter(|c| c.epoch > epoch) {
        return Err(Error::Deposed(newer.epoch));
    }
    let mark = reader.mark().await?;
    if mark.epoch != epoch {
        return Err(Error::Deposed(mark.epoch));
    }
    identity::check_names(
        config,
        reader.server(),
        &cluster_id,
        &mark,
        checkpoint.as_ref(),
    )?;
    // G10: looked at before the rows, so that whoever commits after that look is one of them and the rows are checked again.
    // G2: whenever a position is loaded, its gaps take the holders of now.
    let holders = reader.probe().await?.holders;
    let look = check_rows(&mut reader, mark, checkpoint).await?;
    if look.mark.epoch != epoch {
        return Err(Error::Deposed(look.mark.epoch));
    }
    if look.checkpoint.is_none() && look.mark.seq > 0 {
        tracing::warn!(
            seq = look.mark.seq,
            "no checkpoint in Kafka: it expired or was deleted; continuing from the mark, \
             which may repeat what it lags behind"
        );
    }
    if let Some(half_done) = look.chosen().filter(|c| !c.released.is_empty()) {
        // G8: the rows were published, or dropped, with this checkpoint; without it they would be again.
        let mut session = session.lock().await;
        session
            .finish_release(epoch, half_done, &cluster_id)
            .await?
            .led()?;
    }
    let claim = Checkpoint {
        released: Gaps::default(),
        ..look.following(reader.server(), epoch)
    };
    let tainted = producer
        .publish(look.mark.source_epoch, &[], &claim, How::default())
        .await?;
    pulse.busy(false);
    acknowledged.send_replace(Some(claim.clone()));
    if let Some(reason) = tainted {
        return Err(Error::Tainted(reason));
    }

    let limit = BASE_BYTES.saturating_sub(claim.head_bytes() + Tracker::RESERVE);
    let tracker = Tracker::load(claim.position.clone(), holders.clone(), limit);
    let tracker = if S::GAPLESS {
        tracker.gapless()
    } else {
        tracker
    };
    let reader = Reader {
        config: config.clone(),
        session: reader,
        tracker,
        health: health.clone(),
        until: None,
        start_holders: holders,
        acknowledged: acknowledged_rx,
    };
    tracing::info!(
        epoch,
        seq = claim.seq,
        high = claim.position.high,
        gaps = claim.position.gaps.len(),
        "leading"
    );
    let source_epoch = look.mark.source_epoch;
    Ok(Term {
        epoch,
        source_epoch,
        cluster_id,
        producer,
        reader,
        session,
        keeper,
        stop_keeper,
        pulse,
        acknowledged,
        claim,
    })
}
