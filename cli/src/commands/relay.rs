//! `oncebox relay`, and its `resume`, `rename` and `upgrade`.

use oncebox_relay::position::know_format;
use oncebox_relay::resume::{self, From};
use oncebox_relay::{Exit, Health, Mode};

use super::print;
use crate::args::{RelayRename, RelayResume, RelayRun, RelayUpgrade};
use crate::config::{ConfigError, Settings};
use crate::exit::Failure;
use crate::{http, signals};

pub(crate) async fn run(args: &RelayRun, settings: &Settings) -> Result<(), Failure> {
    args.know_format.into_iter().for_each(know_format);
    let mut config = settings.relay()?;
    config.on_step = args.kill_at.map(crate::kill_at::KillAt::hook);
    let mode = if args.until_empty {
        Mode::UntilEmpty
    } else {
        Mode::Forever
    };
    let shutdown = signals::shutdown().map_err(Failure::error)?;
    let health = Health::new();
    let server = match settings.relay.http {
        Some(address) => {
            let within = settings.relay.ready_within;
            let (bound, task) =
                http::serve(address, health.clone(), within, shutdown.clone()).await?;
            tracing::info!(address = %bound, "serving /live, /ready and /metrics");
            Some(task)
        }
        None => None,
    };
    let exit = oncebox_relay::run(config, mode, health, shutdown.clone()).await;
    shutdown.cancel();
    if let Some(task) = server {
        let _ = task.await;
    }
    match exit? {
        Exit::Stopped => Ok(()),
        Exit::NotLeader => Err(Failure::NotLeader),
    }
}

pub(crate) async fn resume(args: &RelayResume, settings: &Settings) -> Result<(), Failure> {
    let Some(from) = &args.from else {
        return super::park::resume(args, settings).await;
    };
    let from = parse_from(from)?;
    let config = settings.relay()?;
    if args.apply {
        let plan = resume::apply(config, from).await?;
        print(&format!("{plan}\n"))
    } else {
        let plan = resume::plan(config, from).await?;
        print(&format!("{plan}\n"))
    }
}

pub(crate) async fn rename(args: &RelayRename, settings: &Settings) -> Result<(), Failure> {
    let plan = oncebox_relay::rename::rename(settings.relay()?, &args.to, args.apply).await?;
    print(&format!("{plan}\n"))
}

pub(crate) async fn upgrade(args: &RelayUpgrade, settings: &Settings) -> Result<(), Failure> {
    args.know_format.into_iter().for_each(know_format);
    let config = settings.relay_database()?;
    let plan = oncebox_relay::upgrade::upgrade(config, args.apply).await?;
    print(&format!("{plan}\n"))
}

fn parse_from(text: &str) -> Result<From, ConfigError> {
    match text {
        "mark" => Ok(From::Mark),
        "checkpoint" => Ok(From::Checkpoint),
        id => id.parse().map(From::Id).map_err(|_| {
            ConfigError::Value(format!(
                "flag --from: {id:?} is neither mark, nor checkpoint, nor an outbox id"
            ))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resume_knows_three_origins() {
        assert!(matches!(parse_from("mark"), Ok(From::Mark)));
        assert!(matches!(parse_from("checkpoint"), Ok(From::Checkpoint)));
        assert!(matches!(parse_from("42"), Ok(From::Id(42))));
        assert!(parse_from("yesterday").is_err());
    }
}
