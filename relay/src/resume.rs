//! The way out after a stop: an operator chooses where to go on.
//!
//! [`plan`] changes nothing and says what would happen. [`apply`] takes the lease, fences the producer of before, reads
//! what it left behind, and writes the chosen position so that the next start continues from it.

use std::fmt;

use oncebox_kafka::Stability;
use uuid::Uuid;

use crate::config::{Config, Database};
use crate::error::{Error, Stop};
use crate::identity;
use crate::leader;
use crate::log::{How, KafkaLog, Log, Producer as _};
use crate::position::{Checkpoint, Gaps, Position};
use crate::session::{
    Deadline, Facts, Mark, PostgresSession, Rewrite, Session, SqliteSession, Written,
};

/// Where to go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// From the position in the database: repeats what was published after it, with the same message ids.
    Mark,
    /// From the position in Kafka.
    Checkpoint,
    /// After this id: everything above it is published again, everything at or below it counts as published.
    Id(i64),
}

/// What a resume would do, or did.
#[derive(Debug, Clone)]
pub struct Plan {
    mark: Option<Checkpoint>,
    checkpoint: Option<Checkpoint>,
    target: Checkpoint,
    source_epoch: i64,
    above: Option<(i64, i64)>,
    applied: bool,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |stored: &Option<Checkpoint>| match stored {
            Some(c) => format!(
                "seq {}, up to id {}, {} gaps",
                c.seq,
                c.position.high,
                c.position.gaps.len()
            ),
            None => "none".to_owned(),
        };
        writeln!(f, "mark in the database:  {}", show(&self.mark))?;
        writeln!(f, "checkpoint in Kafka:   {}", show(&self.checkpoint))?;
        let target = &self.target.position;
        writeln!(
            f,
            "continue:              after id {}, seq {}, epoch {}, source epoch {}",
            target.high, self.target.seq, self.target.epoch, self.source_epoch
        )?;
        if !target.gaps.is_empty() {
            writeln!(f, "open gaps kept:        {}", target.gaps)?;
        }
        if let Some((low, high)) = self.above {
            writeln!(
                f,
                "published (again):     every row above id {low}, now up to {high}; repeats keep their message ids, so an inbox drops them"
            )?;
        }
        if self.target.parked.count > 0 {
            writeln!(f, "parked rows kept:      {}", self.target.parked.count)?;
        }
        if self.applied {
            write!(f, "written; start the relay")
        } else {
            write!(f, "nothing was changed; add --apply to do it")
        }
    }
}

/// Says what [`apply`] would do. Reads only, and fences nobody.
///
/// # Errors
/// [`Error`] when the choice is not possible, with the reason.
pub async fn plan(config: Config, from: From) -> Result<Plan, Error> {
    config.validate()?;
    let log = KafkaLog::new(&config);
    match &config.database {
        Database::Postgres(_) => {
            plan_with::<Deadline<PostgresSession>, _>(&config, &log, from).await
        }
        Database::Sqlite(_) => plan_with::<Deadline<SqliteSession>, _>(&config, &log, from).await,
    }
}

/// Takes the lead for a moment and writes the chosen position.
///
/// # Errors
/// [`Error`] when the choice is not possible or a relay still leads.
///
/// # Cancel safety
/// The position is written in one statement; before it, only the lease was taken.
pub async fn apply(config: Config, from: From) -> Result<Plan, Error> {
    config.validate()?;
    let log = KafkaLog::new(&config);
    match &config.database {
        Database::Postgres(_) => {
            apply_with::<Deadline<PostgresSession>, _>(&config, &log, from).await
        }
        Database::Sqlite(_) => apply_with::<Deadline<SqliteSession>, _>(&config, &log, from).await,
    }
}

pub(crate) async fn plan_with<S: Session, L: Log>(
    config: &Config,
    log: &L,
    from: From,
) -> Result<Plan, Error> {
    let mut session = S::connect(config).await?;
    let checkpoint = log.checkpoint(Stability::Any).await?;
    let mark = session.mark().await?;
    check(config, &session, &mark, checkpoint.as_ref())?;
    let epoch = identity::next_epoch(&mark, checkpoint.as_ref());
    choose(&mut session, from, &mark, checkpoint, epoch).await
}

pub(crate) async fn apply_with<S: Session, L: Log>(
    config: &Config,
    log: &L,
    from: From,
) -> Result<Plan, Error> {
    let mut session = S::connect(config).await?;
    let cluster_id = log.cluster_id().await?;
    let seen = lease(config, &mut session).await?;
    let first = log.checkpoint(Stability::Any).await?;
    check(config, &session, &seen, first.as_ref())?;
    let epoch = identity::next_epoch(&seen, first.as_ref());
    // A choice that is refused is refused before anybody is fenced.
    choose(&mut session, from, &seen, first, epoch).await?;
    let (producer, checkpoint, mark) = fence(config, &mut session, log, &seen, epoch).await?;
    let epoch_after = identity::next_epoch(&mark, checkpoint.as_ref());
    let mut plan = choose(&mut session, from, &mark, checkpoint, epoch_after).await?;
    let rewrite = Rewrite {
        checkpoint: plan.target.clone(),
        cluster_id,
        source_epoch: plan.source_epoch,
        source: config.source.clone(),
    };
    match session.rewrite(epoch, &rewrite).await? {
        Written::Done => plan.applied = true,
        Written::Deposed(epoch) => return Err(Error::Deposed(epoch)),
    }
    // The checkpoint too, or the next start would find the old one, perhaps of another database, and stop again.
    producer
        .publish(plan.source_epoch, &[], &plan.target, How::default())
        .await?;
    producer.close().await;
    Ok(plan)
}

/// Takes the lease and fences whoever published under this name, before anything is written; then reads where it ended.
pub(crate) async fn fence<S: Session, L: Log>(
    config: &Config,
    session: &mut S,
    log: &L,
    seen: &Mark,
    epoch: i64,
) -> Result<(L::Producer, Option<Checkpoint>, Mark), Error> {
    let owner = leader::owner();
    if !session.take(seen, epoch, &config.source, &owner).await? {
        return Err(Error::Deposed(session.mark().await?.epoch));
    }
    log.prepare().await?;
    let producer = log.open().await?;
    let checkpoint = log.checkpoint(Stability::Stable).await?;
    Ok((producer, checkpoint, session.mark().await?))
}

/// Waits as long as a lease lasts; a relay that still renews has to be stopped first.
pub(crate) async fn lease<S: Session>(config: &Config, session: &mut S) -> Result<Mark, Error> {
    let seen = session.mark().await?;
    if seen.owner.is_none() {
        return Ok(seen);
    }
    tokio::time::sleep(config.lease).await;
    let now = session.mark().await?;
    if (now.epoch, now.renewal) != (seen.epoch, seen.renewal) {
        return Err(Error::Config(
            "a relay leads this outbox; stop it first, then resume".to_owned(),
        ));
    }
    Ok(now)
}

/// What no resume may pass over: another name for the outbox, and an old primary.
fn check<S: Session>(
    config: &Config,
    session: &S,
    mark: &Mark,
    checkpoint: Option<&Checkpoint>,
) -> Result<(), Error> {
    identity::check_source(config, mark)?;
    identity::check_timeline(session.server(), checkpoint)
}

async fn choose<S: Session>(
    session: &mut S,
    from: From,
    mark: &Mark,
    checkpoint: Option<Checkpoint>,
    epoch: i64,
) -> Result<Plan, Error> {
    let mine = checkpoint
        .as_ref()
        .filter(|c| c.source_id == mark.source_id);
    let stored = match from {
        From::Mark => Some(
            mark.checkpoint
                .as_ref()
                .ok_or_else(|| nothing_to_resume("mark"))?,
        ),
        From::Checkpoint => {
            Some(mine.ok_or_else(|| nothing_to_resume("checkpoint of this database"))?)
        }
        From::Id(id) => {
            check_id(id, mark, newest_known(mark, mine))?;
            None
        }
    };
    let known = |stored: Option<&Checkpoint>| {
        stored.map_or_else(Gaps::default, |c| c.position.gaps.clone())
    };
    let (wanted, gaps) = match (from, stored) {
        // A known gap is never dropped: its rows may still come.
        (From::Id(id), _) => (id, known(mark.checkpoint.as_ref()).union(&known(mine))),
        (_, stored) => (stored.map_or(0, |c| c.position.high), known(stored)),
    };
    let row = session.row_at_or_below(wanted).await?;
    let (high, high_message_id) = row.map_or((0, None), |(id, message_id)| (id, Some(message_id)));
    let gaps = gaps.up_to(high - 1);
    let released = stored.map_or_else(Gaps::default, |c| c.released.clone());
    let facts = session.facts(high, &gaps, &released).await?;
    if let Some(stored) = stored {
        check_stored(stored, high, high_message_id, &facts)?;
    }
    // What is there at or below `high` counts as published, together with what was deleted.
    let mut settled = facts.rows;
    settled.count += facts.mark.deleted.count;
    settled.fingerprint ^= facts.mark.deleted.fingerprint;
    let newest_known = newest_known(mark, mine).cloned();
    let reissued = match newest_known {
        Some(known) => ids_may_be_reissued(session, &known).await?,
        None => false,
    };
    let system = session.server().system.clone();
    let target = Checkpoint {
        format: mark.format,
        seq: mark.seq.max(checkpoint.as_ref().map_or(0, |c| c.seq)) + 1,
        epoch,
        source_id: mark.source_id,
        system,
        timeline: session.server().timeline,
        position: Position {
            high,
            high_message_id,
            gaps,
            settled,
        },
        parked: facts.parked,
        // The next start finishes a half-done release.
        released,
        incomplete: false,
    };
    let newest = session.last_visible().await?;
    Ok(Plan {
        mark: mark.checkpoint.clone(),
        checkpoint,
        above: (newest > high).then_some((high, newest)),
        target,
        source_epoch: mark.source_epoch + i64::from(reissued),
        applied: false,
    })
}

/// The stored position that reaches highest.
fn newest_known<'a>(mark: &'a Mark, checkpoint: Option<&'a Checkpoint>) -> Option<&'a Position> {
    let stored = mark.checkpoint.iter().chain(checkpoint);
    stored
        .map(|c| &c.position)
        .max_by_key(|position| position.high)
}

fn nothing_to_resume(what: &str) -> Error {
    Error::Config(format!(
        "there is no {what} to resume from; name an id: --from <id>"
    ))
}

fn check_id(id: i64, mark: &Mark, newest_known: Option<&Position>) -> Result<(), Error> {
    let low = mark.low_water;
    if id < low {
        return Err(Error::Config(format!(
            "rows up to id {low} were cleaned up; the lowest id to resume from is {low}"
        )));
    }
    if newest_known.is_some_and(|known| id > known.high) {
        let text = format!(
            "id {id} is above everything that was published: the rows in between would be skipped"
        );
        return Err(Error::Config(text));
    }
    Ok(())
}

/// A stored position may be resumed from only while its highest row is still that message: once that row was lost, the
/// ids below it may have been issued again, and nothing tells a new row from a published one.
fn check_stored(
    stored: &Checkpoint,
    high: i64,
    message_id: Option<Uuid>,
    facts: &Facts,
) -> Result<(), Error> {
    if stored.incomplete {
        return Err(Stop::BaseMissing.into());
    }
    let position = &stored.position;
    if (high, message_id) != (position.high, position.high_message_id) {
        let text = format!(
            "the highest row of that position, id {}, is gone or is another message: rows whose ids were issued again could not \
             be told from published ones. Name the last id that is surely old: --from <id>",
            position.high
        );
        return Err(Error::Config(text));
    }
    let settled = position.settled.without(facts.mark.deleted);
    if facts.rows.count > settled.count {
        let detail = format!(
            "{} rows up to id {high}, the position settled {}",
            facts.rows.count, settled.count
        );
        return Err(Stop::ForeignRows { detail }.into());
    }
    if facts.parked != stored.parked {
        let text = format!(
            "{} parked rows are there, that position settled {}: a parking was lost, or somebody changed the table. Name an id below \
             the rows that are missing: --from <id>",
            facts.parked.count, stored.parked.count
        );
        return Err(Error::Config(text));
    }
    Ok(())
}

/// The highest published row is gone, or the sequence stands below it: its id was or will be given to another message.
async fn ids_may_be_reissued<S: Session>(session: &mut S, known: &Position) -> Result<bool, Error> {
    let last_id = session.probe().await?.last_id;
    let row = session.row_at_or_below(known.high).await?;
    let there = known.high == 0
        || row
            == known
                .high_message_id
                .map(|message_id| (known.high, message_id));
    Ok(last_id < known.high || !there)
}
