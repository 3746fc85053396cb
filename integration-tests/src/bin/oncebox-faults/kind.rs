//! The kinds of faults, and where each is injected.

use std::fmt;

use oncebox_integration_tests::proxy::api;
use oncebox_relay::Step;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// SIGKILL, by the relay itself, at a named step.
    KillAt(Step),
    /// SIGKILL at any time, to the leader.
    Kill,
    /// SIGTERM to the leader: it gives the lease back.
    Stop,
    /// SIGSTOP of the leader for longer than its lease, then SIGCONT.
    Pause,
    /// The answer to a request is lost with its connection: the broker has done it.
    LostAnswer(i16),
    /// The request is lost with its connection: it never happened.
    LostRequest(i16),
    /// The answer comes late.
    SlowAnswer(i16),
    /// The broker gets the request twice.
    DoubleRequest(i16),
    /// The request arrives when the relay has long given it up.
    LateRequest(i16),
    /// Every connection to Kafka is cut.
    CutKafka,
    /// The broker is frozen and goes on.
    PauseBroker,
    /// The broker is killed and started again.
    KillBroker,
    /// Every session of the database is ended by the server, those of the writers too.
    CutDatabase,
    /// The network between the relays and their database is frozen for a while.
    FreezeCable,
    /// The network between the leader and its database is frozen until another leads.
    FreezeLeader,
    /// The network between the relays and their database breaks.
    CutCable,
    /// The server of both databases is stopped in an orderly way and started again.
    RestartDatabase,
    /// The server of both databases crashes and recovers.
    CrashDatabase,
    /// SIGKILL, by the consumer itself, at a named step.
    ConsumerKillAt(&'static str),
    /// SIGKILL at any time, to a consumer.
    ConsumerKill,
    /// SIGTERM to a consumer.
    ConsumerStop,
    /// SIGSTOP of a consumer, now shorter and now longer than its session, then SIGCONT.
    ConsumerPause,
    /// The answer to a consumer's request is lost with its connection.
    ConsumerLostAnswer(i16),
    /// A consumer's request is lost with its connection.
    ConsumerLostRequest(i16),
    /// Every session of the consumer's database is ended by the server.
    CutInventory,
    /// SIGKILL, by the relay itself, at a named step of parking or release, while Kafka refuses large records.
    KillWhileParking(Step),
    /// An operator pauses the topic and lets it go on.
    PauseTopic,
    /// A topic does not exist when its first messages come, and is created later.
    MissingTopic,
    /// The server of both databases becomes read-only for a while.
    ReadOnly,
    /// Every session is ended, and the server has no place for new ones for a while.
    NoConnections,
    /// A standby takes over from the server of both databases without a loss.
    Switchover,
    /// A standby takes over that misses what was published. The relay has to stop, and an operator decides.
    LossyFailover,
    /// The disk of both databases is full for a while.
    DiskFull,
    /// One of three brokers, the leader of a partition, is killed and started again.
    KillOneBroker,
    /// The same, stopped in an orderly way: it hands its partitions over.
    StopOneBroker,
    /// All three brokers are killed, now longer and now shorter than a transaction may take, and started again.
    AllBrokersDown,
    /// The topic alone has too few replicas in sync.
    TooFewReplicas,
}

/// What a kind of fault needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// One broker and one database server.
    Plain,
    /// A database server whose disk can be filled.
    SmallDisk,
    /// A cluster.
    ThreeBrokers,
}

/// Where consumers kill themselves.
const CONSUMER_STEPS: [&str; 7] = [
    "owned",
    "received",
    "marked",
    "handled",
    "before-commit",
    "committed",
    "offset-stored",
];

const WATCHED: [i16; 5] = [
    api::PRODUCE,
    api::ADD_PARTITIONS_TO_TXN,
    api::ADD_OFFSETS_TO_TXN,
    api::TXN_OFFSET_COMMIT,
    api::END_TXN,
];

impl Kind {
    /// Every kind.
    pub(crate) fn all() -> Vec<Self> {
        let mut kinds: Vec<_> = Step::LOOP.into_iter().map(Self::KillAt).collect();
        kinds.extend([
            Self::Kill,
            Self::Stop,
            Self::Pause,
            Self::CutKafka,
            Self::CutDatabase,
        ]);
        let requests: [fn(i16) -> Self; 5] = [
            Self::LostAnswer,
            Self::LostRequest,
            Self::SlowAnswer,
            Self::DoubleRequest,
            Self::LateRequest,
        ];
        for kind in requests {
            kinds.extend(WATCHED.map(kind));
        }
        kinds.extend([Self::FreezeCable, Self::FreezeLeader, Self::CutCable]);
        kinds.extend([Self::PauseBroker, Self::KillBroker]);
        kinds.extend([Self::RestartDatabase, Self::CrashDatabase]);
        kinds.extend(CONSUMER_STEPS.map(Self::ConsumerKillAt));
        kinds.extend([Self::ConsumerKill, Self::ConsumerStop, Self::ConsumerPause]);
        kinds.extend([api::FETCH, api::OFFSET_COMMIT].map(Self::ConsumerLostAnswer));
        kinds.extend([api::FETCH, api::OFFSET_COMMIT].map(Self::ConsumerLostRequest));
        kinds.push(Self::CutInventory);
        kinds.extend(Step::PARKING.map(Self::KillWhileParking));
        kinds.extend([Self::PauseTopic, Self::MissingTopic]);
        kinds.extend([Self::ReadOnly, Self::NoConnections]);
        kinds.extend([Self::Switchover, Self::LossyFailover, Self::DiskFull]);
        kinds.extend([Self::KillOneBroker, Self::StopOneBroker]);
        kinds.extend([Self::AllBrokersDown, Self::TooFewReplicas]);
        kinds
    }

    /// Nobody ends or stands still for long.
    pub(crate) fn is_quick(self) -> bool {
        matches!(
            self,
            Self::LostAnswer(_)
                | Self::LostRequest(_)
                | Self::DoubleRequest(_)
                | Self::CutKafka
                | Self::CutDatabase
                | Self::CutCable
                | Self::CutInventory
                | Self::ConsumerLostAnswer(_)
                | Self::ConsumerLostRequest(_)
        )
    }

    pub(crate) fn stage(self) -> Stage {
        match self {
            Self::DiskFull => Stage::SmallDisk,
            Self::KillOneBroker
            | Self::StopOneBroker
            | Self::AllBrokersDown
            | Self::TooFewReplicas => Stage::ThreeBrokers,
            _ => Stage::Plain,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let request = |key: &i16| match *key {
            api::PRODUCE => "produce",
            api::ADD_PARTITIONS_TO_TXN => "add-partitions",
            api::ADD_OFFSETS_TO_TXN => "add-offsets",
            api::TXN_OFFSET_COMMIT | api::OFFSET_COMMIT => "offset-commit",
            api::FETCH => "fetch",
            _ => "end-txn",
        };
        match self {
            Self::KillAt(step) => write!(f, "kill-at-{step}"),
            Self::Kill => f.write_str("kill"),
            Self::Pause => f.write_str("pause"),
            Self::LostAnswer(key) => write!(f, "lost-answer-{}", request(key)),
            Self::LostRequest(key) => write!(f, "lost-request-{}", request(key)),
            Self::SlowAnswer(key) => write!(f, "slow-answer-{}", request(key)),
            Self::DoubleRequest(key) => write!(f, "double-request-{}", request(key)),
            Self::LateRequest(key) => write!(f, "late-request-{}", request(key)),
            Self::CutKafka => f.write_str("cut-kafka"),
            Self::PauseBroker => f.write_str("pause-broker"),
            Self::KillBroker => f.write_str("kill-broker"),
            Self::CutDatabase => f.write_str("cut-database"),
            Self::FreezeCable => f.write_str("freeze-cable"),
            Self::FreezeLeader => f.write_str("freeze-leader"),
            Self::CutCable => f.write_str("cut-cable"),
            Self::RestartDatabase => f.write_str("restart-database"),
            Self::CrashDatabase => f.write_str("crash-database"),
            Self::Stop => f.write_str("stop"),
            Self::ConsumerKillAt(step) => write!(f, "consumer-kill-at-{step}"),
            Self::ConsumerKill => f.write_str("consumer-kill"),
            Self::ConsumerStop => f.write_str("consumer-stop"),
            Self::ConsumerPause => f.write_str("consumer-pause"),
            Self::ConsumerLostAnswer(key) => write!(f, "consumer-lost-answer-{}", request(key)),
            Self::ConsumerLostRequest(key) => write!(f, "consumer-lost-request-{}", request(key)),
            Self::CutInventory => f.write_str("cut-inventory"),
            Self::KillWhileParking(step) => write!(f, "kill-at-{step}"),
            Self::PauseTopic => f.write_str("pause-topic"),
            Self::MissingTopic => f.write_str("missing-topic"),
            Self::ReadOnly => f.write_str("read-only"),
            Self::NoConnections => f.write_str("no-connections"),
            Self::Switchover => f.write_str("switchover"),
            Self::LossyFailover => f.write_str("lossy-failover"),
            Self::DiskFull => f.write_str("disk-full"),
            Self::KillOneBroker => f.write_str("kill-one-broker"),
            Self::StopOneBroker => f.write_str("stop-one-broker"),
            Self::AllBrokersDown => f.write_str("all-brokers-down"),
            Self::TooFewReplicas => f.write_str("too-few-replicas"),
        }
    }
}
