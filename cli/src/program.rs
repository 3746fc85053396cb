//! From the command line to the exit code.

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use crate::args::{Cli, Command, InboxCommand, RelayCommand};
use crate::config::{self, Settings};
use crate::exit::{self, Failure};
use crate::{commands, demo, doctor, logs, redact};

/// The whole program: reads the command line and the environment, runs the command, and gives the
/// exit code documented in `--help`.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            // clap repeats what it did not understand: perhaps a URL with a password.
            eprint!("{}", redact::scrub(&error.render().to_string()));
            return ExitCode::from(exit::USAGE);
        }
        Err(help) => {
            let _ = help.print();
            return ExitCode::from(exit::OK);
        }
    };
    exit::report(start(&cli))
}

fn start(cli: &Cli) -> Result<(), Failure> {
    let settings = settings(cli)?;
    // Only the relay talks while it works; the other commands answer, and log what is unusual.
    let level = match cli.command {
        Command::Relay(_) => "info",
        // Its lines say it all.
        Command::Doctor(_) => "off",
        _ => "warn",
    };
    logs::start(settings.log, level);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::error(format!("cannot start the runtime: {e}")))?;
    let outcome = runtime.block_on(dispatch(cli, &settings));
    // A client that hangs while it closes must not hold the exit code back.
    runtime.shutdown_timeout(Duration::from_secs(2));
    outcome
}

fn settings(cli: &Cli) -> Result<Settings, Failure> {
    let flags = cli.global.flags();
    let flags = match &cli.command {
        Command::Relay(relay) => relay.run.flags(flags),
        Command::Reconcile(reconcile) => reconcile.flags(flags),
        _ => flags,
    };
    // A variable that is not UTF-8 cannot be one of ours.
    let variables = std::env::vars_os()
        .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
    Ok(config::load(
        cli.global.config.as_deref(),
        variables,
        &flags,
    )?)
}

async fn dispatch(cli: &Cli, settings: &Settings) -> Result<(), Failure> {
    match &cli.command {
        Command::Migrate(args) => commands::migrate::run(args, settings).await,
        Command::Relay(args) => match &args.command {
            Some(RelayCommand::Resume(args)) => commands::relay::resume(args, settings).await,
            Some(RelayCommand::Upgrade(args)) => commands::relay::upgrade(args, settings).await,
            Some(RelayCommand::Rename(args)) => commands::relay::rename(args, settings).await,
            Some(RelayCommand::Pause(args)) => commands::park::pause(args, settings).await,
            Some(RelayCommand::Park(command)) => commands::park::run(command, settings).await,
            None => commands::relay::run(&args.run, settings).await,
        },
        Command::Inbox(args) => match &args.command {
            InboxCommand::Resume(args) => commands::inbox::resume(args, settings).await,
            InboxCommand::Pause(args) => commands::inbox::pause(args, settings).await,
            InboxCommand::Unpause(args) => commands::inbox::unpause(args, settings).await,
            InboxCommand::Paused(args) => commands::inbox::paused(args, settings).await,
        },
        Command::Dead(command) => commands::dead::run(command, settings).await,
        Command::Record(command) => commands::record::run(command, settings).await,
        Command::Reconcile(args) => commands::reconcile::run(args, settings).await,
        Command::Doctor(args) => doctor::run(args, settings).await,
        Command::Demo(options) => demo::run(options, settings).await,
    }
}
