//! A new name for a source: planned, so nothing is repeated and nothing is guessed.
//!
//! The name is part of the `transactional.id` and of the checkpoint's group. A rename fences the producer of the old name,
//! reads where it ended, commits that position under the new name, and writes both into the mark. Interrupted anywhere, it
//! leaves an outbox that either name's relay can lead, and can be repeated.

use std::fmt;

use oncebox_kafka::Stability;

use crate::config::{Config, Database};
use crate::error::{Error, Stop};
use crate::identity;
use crate::leader;
use crate::log::{How, KafkaLog, Log, Producer as _};
use crate::resume;
use crate::session::{Deadline, Mark, PostgresSession, Rewrite, Session, SqliteSession, Written};

/// What a rename would do, or did.
#[derive(Debug, Clone)]
pub struct Plan {
    from: String,
    to: String,
    high: i64,
    seq: i64,
    applied: bool,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "source {} becomes {}; it goes on after id {} (seq {})",
            self.from, self.to, self.high, self.seq
        )?;
        writeln!(
            f,
            "consumers see the new name in the header oncebox-source; message ids stay"
        )?;
        if self.applied {
            write!(f, "written; start the relay with --source {}", self.to)
        } else {
            write!(
                f,
                "nothing was changed; stop the relay, then add --apply to do it"
            )
        }
    }
}

/// Gives the source of `config` the name `to`. Without `apply` it only looks, and fences nobody.
///
/// # Errors
/// [`Error`] when a relay still leads, the new name is used by another outbox, or the position does not match the
/// outbox (resume first).
///
/// # Cancel safety
/// Safe anywhere, see the module.
pub async fn rename(config: Config, to: &str, apply: bool) -> Result<Plan, Error> {
    let new = Config {
        source: to.to_owned(),
        ..config.clone()
    };
    config.validate()?;
    new.validate()?;
    let logs = (KafkaLog::new(&config), KafkaLog::new(&new));
    match &config.database {
        Database::Postgres(_) => {
            rename_with::<Deadline<PostgresSession>, _>((&config, &new), (&logs.0, &logs.1), apply)
                .await
        }
        Database::Sqlite(_) => {
            rename_with::<Deadline<SqliteSession>, _>((&config, &new), (&logs.0, &logs.1), apply)
                .await
        }
    }
}

pub(crate) async fn rename_with<S: Session, L: Log>(
    (config, new): (&Config, &Config),
    (log, new_log): (&L, &L),
    apply: bool,
) -> Result<Plan, Error> {
    if config.source == new.source {
        return Err(Error::Config(format!(
            "the source is called {:?} already",
            new.source
        )));
    }
    let mut session = S::connect(config).await?;
    let cluster_id = log.cluster_id().await?;
    let look = leader::first_look(config, &mut session, log, &cluster_id).await?;
    check_free(new, new_log, &look.mark).await?;
    let epoch = identity::next_epoch(&look.mark, look.checkpoint.as_ref());
    let target = look.following(session.server(), epoch);
    let mut plan = Plan {
        from: config.source.clone(),
        to: new.source.clone(),
        high: target.position.high,
        seq: target.seq,
        applied: false,
    };
    if !apply {
        return Ok(plan);
    }
    let seen = resume::lease(config, &mut session).await?;
    let (old_producer, checkpoint, mark) =
        resume::fence(config, &mut session, log, &seen, epoch).await?;
    identity::check_names(
        config,
        session.server(),
        &cluster_id,
        &mark,
        checkpoint.as_ref(),
    )?;
    let look = leader::check_rows(&mut session, mark, checkpoint).await?;
    // The next start finishes a half-done release: its ids are named still.
    let target = look.following(session.server(), epoch + 1);
    // The checkpoint of the new name first: until the mark has the name, nobody reads it.
    let producer = new_log.open().await?;
    producer
        .publish(look.mark.source_epoch, &[], &target, How::default())
        .await?;
    let rewrite = Rewrite {
        checkpoint: target.clone(),
        cluster_id,
        source_epoch: look.mark.source_epoch,
        source: new.source.clone(),
    };
    if let Written::Deposed(epoch) = session.rewrite(epoch, &rewrite).await? {
        return Err(Error::Deposed(epoch));
    }
    producer.close().await;
    old_producer.close().await;
    (plan.high, plan.seq, plan.applied) = (target.position.high, target.seq, true);
    Ok(plan)
}

/// Refuses a name under which another outbox has published.
async fn check_free<L: Log>(new: &Config, log: &L, mark: &Mark) -> Result<(), Error> {
    match log.checkpoint(Stability::Any).await? {
        Some(other) if other.source_id != mark.source_id => Err(Stop::OtherDatabase {
            source_name: new.source.clone(),
            checkpoint: other.source_id,
            database: mark.source_id,
        }
        .into()),
        _ => Ok(()),
    }
}
