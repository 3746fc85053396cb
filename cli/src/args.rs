//! The command line.
//!
//! Values that can also come from a file or a variable are kept as the user wrote them, so that
//! one place ([`crate::config`]) checks them and names their origin.

mod operator;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::config::{ConfigError, Flags};
use crate::{demo, exit, kill_at::KillAt};

pub use operator::{
    DeadChoice, DeadCommand, DeadFilter, DeadList, DeadReplay, DeadShow, KindName, Reconcile,
    RecordClean, RecordCommand, RecordFilter, RecordList, RecordPartitions, RecordSummary,
};

const ABOUT: &str = "Carries a change from one service's database to Kafka and into the next service's database, exactly once";

const CONFIGURATION: &str = "\
Configuration: defaults < the file of --config (TOML) < ONCEBOX_… variables < flags.
  --database-url          ONCEBOX_DATABASE_URL           database_url
  --kafka                 ONCEBOX_KAFKA                  kafka.bootstrap
  --kafka-property a.b=c  ONCEBOX_KAFKA_A_B              kafka.properties.\"a.b\"
  --lease (and so on)     ONCEBOX_RELAY_LEASE            relay.lease
Passwords belong into the file or a variable: other users can read command lines.
Logs: RUST_LOG chooses what is logged (default: info).";

/// The `oncebox` command.
#[derive(Debug, Parser)]
#[command(name = "oncebox", version, about = ABOUT, after_long_help = format!("{CONFIGURATION}\n\n{}", exit::HELP), after_help = exit::HELP)]
pub struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Read settings from this TOML file.
    #[arg(long, global = true, value_name = "FILE", env = "ONCEBOX_CONFIG")]
    pub config: Option<PathBuf>,
    /// The database: postgres://user@host/database or sqlite:file.db.
    #[arg(long, global = true, value_name = "URL")]
    pub database_url: Option<String>,
    /// Kafka's bootstrap servers, host:port[,host:port…].
    #[arg(long, global = true, value_name = "BROKERS")]
    pub kafka: Option<String>,
    /// Any librdkafka property, for example security.protocol=SASL_SSL; may be repeated.
    #[arg(long, global = true, value_name = "KEY=VALUE")]
    pub kafka_property: Vec<String>,
    /// The name of the outbox; part of its transactional.id: never change it, never share it.
    #[arg(long, global = true, value_name = "NAME")]
    pub source: Option<String>,
    /// The PostgreSQL schema of Oncebox's tables [default: public].
    #[arg(long, global = true, value_name = "NAME")]
    pub schema: Option<String>,
    /// The prefix of Oncebox's tables [default: oncebox_].
    #[arg(long, global = true, value_name = "PREFIX")]
    pub prefix: Option<String>,
    /// The form of the log: text or json [default: text].
    #[arg(long, global = true, value_name = "FORM")]
    pub log: Option<String>,
}

impl Global {
    /// These options as the uppermost layer of the configuration.
    pub fn flags(&self) -> Flags {
        Flags::default()
            .with("database_url", "--database-url", &self.database_url)
            .with("kafka.bootstrap", "--kafka", &self.kafka)
            .with("source", "--source", &self.source)
            .with("schema", "--schema", &self.schema)
            .with("prefix", "--prefix", &self.prefix)
            .with("log", "--log", &self.log)
            .with_properties(&self.kafka_property)
    }
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Create or update Oncebox's tables, or print the SQL that does it.
    Migrate(Migrate),
    /// Publish committed messages to Kafka; run two, one leads.
    Relay(Box<Relay>),
    /// Operate on the consuming side.
    Inbox(Inbox),
    /// Messages that a consumer could not handle, and what waits behind them.
    #[command(subcommand)]
    Dead(DeadCommand),
    /// What was consumed: every message with its status, time and duration.
    #[command(subcommand)]
    Record(RecordCommand),
    /// Compare an outbox with a consumer: was everything that was published consumed, and the other way round?
    Reconcile(Box<Reconcile>),
    /// Say what is wrong with database, Kafka and tables, and what to type.
    Doctor(Doctor),
    /// Watch orders reach the inventory exactly once while relays are killed and messages come twice, late and in a race.
    Demo(demo::Options),
}

/// `oncebox migrate`
#[derive(Debug, Args)]
pub struct Migrate {
    /// Print the SQL instead of running it.
    #[arg(long)]
    pub print: bool,
    /// With --print: the version that is already there.
    #[arg(long, requires = "print", value_name = "VERSION", default_value_t = 0)]
    pub from: i64,
    /// With --print: the version to reach [default: the newest].
    #[arg(long, requires = "print", value_name = "VERSION")]
    pub to: Option<i64>,
    /// Print the GRANTs that producer, relay and consumer need (PostgreSQL).
    #[arg(long, conflicts_with = "print")]
    pub grants: bool,
    /// With --grants: the role of the services that enqueue.
    #[arg(
        long,
        requires = "grants",
        value_name = "ROLE",
        default_value = "oncebox_producer"
    )]
    pub producer: String,
    /// With --grants: the role of the relay.
    #[arg(
        long,
        requires = "grants",
        value_name = "ROLE",
        default_value = "oncebox_relay"
    )]
    pub relay: String,
    /// With --grants: the role of the services that consume.
    #[arg(
        long,
        requires = "grants",
        value_name = "ROLE",
        default_value = "oncebox_consumer"
    )]
    pub consumer: String,
    /// With --print: whose SQL [default: that of the database URL, otherwise postgres].
    #[arg(long, requires = "print", value_name = "DATABASE")]
    pub dialect: Option<DialectName>,
}

/// A database by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DialectName {
    /// PostgreSQL.
    Postgres,
    /// SQLite.
    Sqlite,
}

/// `oncebox relay`
#[derive(Debug, Args)]
#[command(subcommand_negates_reqs = true)]
pub struct Relay {
    /// `resume`, `pause`, `rename`, `park`, or nothing: run.
    #[command(subcommand)]
    pub command: Option<RelayCommand>,
    /// How to run.
    #[command(flatten)]
    pub run: RelayRun,
}

/// How `oncebox relay` runs.
#[derive(Clone, Debug, Default, Args)]
pub struct RelayRun {
    /// Publish everything committed by now and exit; exit code 3 when another relay leads.
    #[arg(long)]
    pub until_empty: bool,
    /// Serve /live, /ready and /metrics here, for example 127.0.0.1:9464.
    #[arg(long, value_name = "ADDRESS")]
    pub http: Option<String>,
    /// /ready fails when nothing moved for this long [default: 15s].
    #[arg(long, value_name = "DURATION")]
    pub ready_within: Option<String>,
    /// How long a silent leader keeps the lead [default: 3s].
    #[arg(long, value_name = "DURATION")]
    pub lease: Option<String>,
    /// How long published rows are kept [default: 24h].
    #[arg(long, value_name = "DURATION")]
    pub retention: Option<String>,
    /// The most rows of one Kafka transaction [default: 20000].
    #[arg(long, value_name = "ROWS")]
    pub max_batch_rows: Option<String>,
    /// The most bytes of one Kafka transaction [default: 32 MiB].
    #[arg(long, value_name = "BYTES")]
    pub max_batch_bytes: Option<String>,
    /// Kafka's transaction.timeout.ms [default: 30s].
    #[arg(long, value_name = "DURATION")]
    pub transaction_timeout: Option<String>,
    /// The longest time between two marks in the database [default: 250ms].
    #[arg(long, value_name = "DURATION")]
    pub mark_interval: Option<String>,
    /// How often an idle relay renews its checkpoint [default: 1h].
    #[arg(long, value_name = "DURATION")]
    pub heartbeat: Option<String>,
    /// The shortest pause between two reads of the outbox [default: 2ms].
    #[arg(long, value_name = "DURATION")]
    pub poll_min: Option<String>,
    /// The longest pause between two reads of an idle outbox [default: 50ms].
    #[arg(long, value_name = "DURATION")]
    pub poll_max: Option<String>,
    /// The topic that the checkpoint is committed for [default: oncebox.checkpoints].
    #[arg(long, global = true, value_name = "TOPIC")]
    pub checkpoint_topic: Option<String>,
    /// The most bytes of a checkpoint, the brokers' offset.metadata.max.bytes [default: 4096].
    #[arg(long, global = true, value_name = "BYTES")]
    pub checkpoint_bytes: Option<String>,
    /// For tests: SIGKILL this process when it reaches STEP for the n-th time.
    #[arg(long, value_name = "STEP[:N]", hide = true)]
    pub kill_at: Option<KillAt>,
    /// For tests: be a build that knows the formats up to this one.
    #[arg(long, value_name = "FORMAT", hide = true)]
    pub know_format: Option<u32>,
}

impl RelayRun {
    /// Adds these options to the flags.
    pub fn flags(&self, flags: Flags) -> Flags {
        flags
            .with("relay.http", "--http", &self.http)
            .with("relay.ready_within", "--ready-within", &self.ready_within)
            .with("relay.lease", "--lease", &self.lease)
            .with("relay.retention", "--retention", &self.retention)
            .with(
                "relay.max_batch_rows",
                "--max-batch-rows",
                &self.max_batch_rows,
            )
            .with(
                "relay.max_batch_bytes",
                "--max-batch-bytes",
                &self.max_batch_bytes,
            )
            .with(
                "relay.transaction_timeout",
                "--transaction-timeout",
                &self.transaction_timeout,
            )
            .with(
                "relay.mark_interval",
                "--mark-interval",
                &self.mark_interval,
            )
            .with("relay.heartbeat", "--heartbeat", &self.heartbeat)
            .with("relay.poll_min", "--poll-min", &self.poll_min)
            .with("relay.poll_max", "--poll-max", &self.poll_max)
            .with(
                "relay.checkpoint_topic",
                "--checkpoint-topic",
                &self.checkpoint_topic,
            )
            .with(
                "relay.checkpoint_bytes",
                "--checkpoint-bytes",
                &self.checkpoint_bytes,
            )
    }
}

/// Operations on a relay.
#[derive(Debug, Subcommand)]
pub enum RelayCommand {
    /// Choose the position that the relay goes on from, after it stopped for its safety; or publish to a paused topic again.
    Resume(RelayResume),
    /// Stop publishing to a topic, or to one key of it; its messages are parked until `resume --topic`.
    Pause(RelayPause),
    /// Give the source of --source another name; the relay must be stopped.
    Rename(RelayRename),
    /// Raise the format of the position to the newest of this build, when no relay of an older build is left.
    Upgrade(RelayUpgrade),
    /// Messages that Kafka refuses, and what waits behind them.
    #[command(subcommand)]
    Park(ParkCommand),
}

/// `oncebox relay resume`
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("what").required(true)))]
pub struct RelayResume {
    /// mark (the database's position), checkpoint (Kafka's), or an outbox id: everything up to it counts as published.
    #[arg(long, value_name = "mark|checkpoint|ID", group = "what")]
    pub from: Option<String>,
    /// Publish to this topic again, what was parked first.
    #[arg(long, group = "what")]
    pub topic: Option<String>,
    /// With --topic: only this key, if it was paused by itself.
    #[command(flatten)]
    pub key: Key,
    /// With --from: write it. Without: only say what would change.
    #[arg(long, requires = "from")]
    pub apply: bool,
}

/// A key of a topic.
#[derive(Clone, Debug, Default, Args)]
pub struct Key {
    /// The key, as text.
    #[arg(long, value_name = "KEY", requires = "topic")]
    pub key: Option<String>,
    /// The key, as hexadecimal digits.
    #[arg(long, value_name = "HEX", requires = "topic", conflicts_with = "key")]
    pub key_hex: Option<String>,
}

impl Key {
    /// Its bytes.
    ///
    /// # Errors
    /// Not hexadecimal.
    pub fn bytes(&self) -> Result<Option<Vec<u8>>, ConfigError> {
        let Some(hex) = &self.key_hex else {
            return Ok(self.key.as_ref().map(|key| key.as_bytes().to_vec()));
        };
        let pairs = hex.as_bytes().chunks(2).map(|pair| {
            let text = std::str::from_utf8(pair).ok().filter(|_| pair.len() == 2);
            text.and_then(|text| u8::from_str_radix(text, 16).ok())
        });
        let bytes: Option<Vec<u8>> = pairs.collect();
        let wrong = || {
            ConfigError::Value(format!(
                "flag --key-hex: {hex:?} is not an even number of hexadecimal digits"
            ))
        };
        bytes.map(Some).ok_or_else(wrong)
    }
}

/// `oncebox relay pause`
#[derive(Debug, Args)]
pub struct RelayPause {
    /// The topic.
    #[arg(long)]
    pub topic: String,
    /// Only this key.
    #[command(flatten)]
    pub key: Key,
    /// Why, for whoever looks at it later.
    #[arg(long, default_value = "paused by an operator")]
    pub reason: String,
}

/// `oncebox relay rename`
#[derive(Debug, Args)]
pub struct RelayRename {
    /// The new name.
    #[arg(long, value_name = "NAME")]
    pub to: String,
    /// Do it. Without: only say what would happen.
    #[arg(long)]
    pub apply: bool,
}

/// `oncebox relay upgrade`
#[derive(Debug, Args)]
pub struct RelayUpgrade {
    /// Do it. Without: only say what would happen.
    #[arg(long)]
    pub apply: bool,
    /// As with the relay.
    #[arg(long, value_name = "FORMAT", hide = true)]
    pub know_format: Option<u32>,
}

/// `oncebox relay park`
#[derive(Debug, Subcommand)]
pub enum ParkCommand {
    /// What waits and why, the oldest first, and which topics are paused.
    List(ParkList),
    /// One message in full.
    Show(ParkShow),
    /// Publish these messages again; what waits behind them follows by itself.
    Requeue(ParkChoice),
    /// Never publish these messages; what waits behind them follows by itself. They stay in the outbox until its clean-up.
    Skip(ParkChoice),
}

/// Which parked messages.
#[derive(Clone, Debug, Default, Args)]
pub struct ParkFilter {
    /// Only of this topic.
    #[arg(long)]
    pub topic: Option<String>,
    /// Only of this key.
    #[command(flatten)]
    pub key: Key,
    /// Only these: refused (by Kafka), key (behind a parked message of their key) or topic (of a paused topic).
    #[arg(long, value_name = "CAUSE")]
    pub cause: Option<CauseName>,
}

/// Why a message is parked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CauseName {
    /// Kafka refuses it.
    Refused,
    /// It waits behind another of its key.
    Key,
    /// Its topic is paused.
    Topic,
}

/// `oncebox relay park list`
#[derive(Debug, Args)]
pub struct ParkList {
    /// Which.
    #[command(flatten)]
    pub filter: ParkFilter,
    /// At most so many.
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub limit: usize,
    /// One JSON object per line.
    #[arg(long)]
    pub json: bool,
}

/// `oncebox relay park show`
#[derive(Debug, Args)]
pub struct ParkShow {
    /// Its outbox id.
    pub id: i64,
    /// As a JSON object; bytes that are no text as {"hex": …}.
    #[arg(long)]
    pub json: bool,
}

/// `oncebox relay park requeue` and `skip`
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("which").required(true).multiple(true).args(["ids", "topic", "cause"])))]
pub struct ParkChoice {
    /// Outbox ids.
    pub ids: Vec<i64>,
    /// Which.
    #[command(flatten)]
    pub filter: ParkFilter,
    /// Do it. Without: only say which messages are meant.
    #[arg(long)]
    pub apply: bool,
}

/// `oncebox inbox`
#[derive(Debug, Args)]
pub struct Inbox {
    /// What to do.
    #[command(subcommand)]
    pub command: InboxCommand,
}

/// Operations on the position of a consumer.
#[derive(Debug, Subcommand)]
pub enum InboxCommand {
    /// Choose the offsets that a consumer goes on from, or accept its failures, after it stopped for its safety.
    Resume(InboxResume),
    /// Let a consumer leave a topic alone until `unpause`: what is under way ends, nothing more begins, other topics go on.
    Pause(InboxPause),
    /// Let a consumer go on with a topic that was paused, where it was.
    Unpause(InboxTopic),
    /// Which topics of a consumer are paused, since when and why.
    Paused(InboxPaused),
}

/// `oncebox inbox pause`
#[derive(Debug, Args)]
pub struct InboxPause {
    /// What to pause.
    #[command(flatten)]
    pub of: InboxTopic,
    /// Why, for whoever looks at it later.
    #[arg(long, default_value = "paused by an operator")]
    pub reason: String,
}

/// A topic of a consumer.
#[derive(Debug, Args)]
pub struct InboxTopic {
    /// The consumer's name (its group.id).
    #[arg(long, value_name = "NAME")]
    pub consumer: String,
    /// The topic.
    #[arg(long, value_name = "TOPIC")]
    pub topic: String,
}

/// `oncebox inbox paused`
#[derive(Debug, Args)]
pub struct InboxPaused {
    /// The consumer's name (its group.id).
    #[arg(long, value_name = "NAME")]
    pub consumer: String,
    /// One JSON array instead of lines.
    #[arg(long)]
    pub json: bool,
}

/// `oncebox inbox resume`
#[derive(Debug, Args)]
pub struct InboxResume {
    /// The consumer's name (its group.id).
    #[arg(long, value_name = "NAME")]
    pub consumer: String,
    /// The topic; with --accept-failures all topics of the consumer.
    #[arg(
        long,
        value_name = "TOPIC",
        required_unless_present = "accept_failures"
    )]
    pub topic: Option<String>,
    /// earliest, latest, committed (Kafka's offset of the group), an offset, or a time such as 2026-11-29T20:00:00Z.
    #[arg(
        long,
        value_name = "WHERE",
        required_unless_present = "accept_failures"
    )]
    pub from: Option<String>,
    /// Only this partition [default: all].
    #[arg(long, value_name = "N")]
    pub partition: Option<i32>,
    /// Many messages failed in a row, so that the consumer stopped instead of writing them off: the cause is repaired, or they
    /// may become dead letters. It starts again after this.
    #[arg(long, conflicts_with_all = ["topic", "from", "partition"])]
    pub accept_failures: bool,
    /// Write it. Without: only say what would change.
    #[arg(long)]
    pub apply: bool,
}

/// `oncebox doctor`
#[derive(Debug, Args)]
pub struct Doctor {
    /// Check that this topic exists; may be repeated. The topics named in the outbox are always checked.
    #[arg(long, value_name = "TOPIC")]
    pub topic: Vec<String>,
    /// Whose rights in the database to check; may be repeated [default: relay].
    #[arg(long, value_name = "ROLE")]
    pub role: Vec<Role>,
    /// One JSON object instead of lines.
    #[arg(long)]
    pub json: bool,
}

impl Doctor {
    /// The roles to check.
    pub fn roles(&self) -> Vec<Role> {
        if self.role.is_empty() {
            vec![Role::Relay]
        } else {
            self.role.clone()
        }
    }
}

/// What a database user is meant to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// A service that enqueues.
    Producer,
    /// The relay.
    Relay,
    /// A service that consumes.
    Consumer,
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Producer => "producer",
            Self::Relay => "relay",
            Self::Consumer => "consumer",
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn help_documents_exit_codes_and_variables() {
        let help = Cli::command().render_long_help().to_string();
        for word in [
            "ONCEBOX_DATABASE_URL",
            "  3  relay --until-empty",
            "  2  the command line",
        ] {
            assert!(help.contains(word), "{help}");
        }
        assert!(!help.contains("kill-at"));
    }

    #[test]
    fn global_options_go_before_or_after_the_command() {
        for line in [
            &[
                "oncebox", "--source", "orders", "relay", "resume", "--from", "mark",
            ][..],
            &[
                "oncebox", "relay", "resume", "--from", "mark", "--source", "orders",
            ],
            &["oncebox", "relay", "--source", "orders", "--lease", "1s"],
        ] {
            let cli = Cli::try_parse_from(line).unwrap();
            assert_eq!(cli.global.source.as_deref(), Some("orders"), "{line:?}");
        }
    }
}
