//! What the brokers under test are told.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::kafka::Route;

/// User and password of the SASL/PLAIN listener: a super user.
pub const SASL_ADMIN: (&str, &str) = ("admin", "admin-secret");
/// User and password of the SASL/PLAIN listener: without any right until an ACL gives one.
pub const SASL_USER: (&str, &str) = ("alice", "alice-secret");

/// How many tests of a process can stand behind a proxy at the same time.
const SLOTS: usize = 6;

/// The ports of one broker.
#[derive(Debug)]
pub(super) struct BrokerPorts {
    plain: u16,
    controller: u16,
    sasl: u16,
    slots: Vec<Route>,
}

impl BrokerPorts {
    /// Free ports for so many brokers.
    pub(super) fn choose(
        brokers: usize,
        free: impl Fn(usize) -> Result<Vec<u16>>,
    ) -> Result<Vec<Self>> {
        let choose_one = |_| {
            let ports = free(3 + 2 * SLOTS)?;
            let slots = ports[3..]
                .chunks(2)
                .map(|p| Route {
                    advertised: p[0],
                    target: p[1],
                })
                .collect();
            Ok(Self {
                plain: ports[0],
                controller: ports[1],
                sasl: ports[2],
                slots,
            })
        };
        (0..brokers).map(choose_one).collect()
    }
}

/// A cluster on 127.0.0.1.
#[derive(Debug)]
pub(super) struct Cluster {
    /// One entry per broker.
    pub(super) ports: Vec<BrokerPorts>,
    /// Further lines for every broker.
    pub(super) properties: Vec<(String, String)>,
    /// Key and certificate of the SASL listener, if it speaks TLS.
    pub(super) secure: Option<PathBuf>,
    /// Without Java's optimising compiler.
    pub(super) light: bool,
}

impl Cluster {
    /// A cluster id that belongs to these ports: 22 base64url characters, the last one without surplus bits.
    pub(super) fn id(&self) -> String {
        let ports = self
            .ports
            .iter()
            .fold(0u128, |all, p| (all << 16) | u128::from(p.plain));
        format!("oncebox{ports:014x}A")
    }

    /// Every broker's plain listener.
    pub(super) fn bootstrap(&self) -> String {
        self.addresses(|p| p.plain)
    }

    /// Every broker's SASL listener.
    pub(super) fn sasl_bootstrap(&self) -> String {
        self.addresses(|p| p.sasl)
    }

    fn addresses(&self, port: impl Fn(&BrokerPorts) -> u16) -> String {
        self.ports
            .iter()
            .map(|p| format!("127.0.0.1:{}", port(p)))
            .collect::<Vec<_>>()
            .join(",")
    }

    /// Slot by slot, the route of every broker.
    pub(super) fn slots(&self) -> Vec<Vec<Route>> {
        (0..SLOTS)
            .map(|slot| self.ports.iter().map(|p| p.slots[slot]).collect())
            .collect()
    }

    /// Every port a client may connect to.
    pub(super) fn listening_ports(&self) -> Vec<u16> {
        let of = |p: &BrokerPorts| {
            [p.plain, p.sasl]
                .into_iter()
                .chain(p.slots.iter().map(|r| r.target))
                .collect::<Vec<_>>()
        };
        self.ports.iter().flat_map(of).collect()
    }

    /// The properties file of broker `index`; clients' listeners are bound to `bind`, data is kept in `dir`.
    pub(super) fn server_properties(&self, index: usize, bind: &str, dir: &Path) -> String {
        let ports = &self.ports[index];
        let brokers = self.ports.len();
        let voters = self
            .ports
            .iter()
            .enumerate()
            .map(|(i, p)| format!("{}@127.0.0.1:{}", i + 1, p.controller));
        let voters = voters.collect::<Vec<_>>().join(",");

        // the listeners that clients may use, with the port each is advertised at
        let mut client_listeners = vec![
            ("PLAINTEXT".to_owned(), ports.plain, ports.plain),
            ("SASL".to_owned(), ports.sasl, ports.sasl),
        ];
        for (slot, route) in ports.slots.iter().enumerate() {
            client_listeners.push((format!("PROXY{slot}"), route.target, route.advertised));
        }
        let (mut listeners, mut advertised, mut protocols) = (
            format!("CONTROLLER://127.0.0.1:{}", ports.controller),
            String::new(),
            "CONTROLLER:PLAINTEXT".to_owned(),
        );
        for (name, port, advertised_port) in &client_listeners {
            let comma = if advertised.is_empty() { "" } else { "," };
            let protocol = match (&**name, &self.secure) {
                ("SASL", None) => "SASL_PLAINTEXT",
                ("SASL", Some(_)) => "SASL_SSL",
                _ => "PLAINTEXT",
            };
            let _ = write!(listeners, ",{name}://{bind}:{port}");
            let _ = write!(advertised, "{comma}{name}://127.0.0.1:{advertised_port}");
            let _ = write!(protocols, ",{name}:{protocol}");
        }

        let mut text = format!(
            "process.roles=broker,controller
node.id={id}
controller.quorum.voters={voters}
listeners={listeners}
advertised.listeners={advertised}
listener.security.protocol.map={protocols}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={dir}/data
default.replication.factor={brokers}
offsets.topic.replication.factor={brokers}
transaction.state.log.replication.factor={brokers}
transaction.state.log.min.isr={min_isr}
share.coordinator.state.topic.replication.factor={brokers}
share.coordinator.state.topic.min.isr={min_isr}
min.insync.replicas={min_isr}
offsets.topic.num.partitions=4
transaction.state.log.num.partitions=4
transaction.abort.timed.out.transaction.cleanup.interval.ms=500
group.initial.rebalance.delay.ms=0
num.partitions=4
num.network.threads=2
auto.create.topics.enable=false
sasl.enabled.mechanisms=PLAIN
listener.name.sasl.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
user_{admin}=\"{admin_password}\" user_{user}=\"{user_password}\";
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS;User:{admin}
",
            id = index + 1,
            dir = dir.display(),
            min_isr = if brokers > 1 { 2 } else { 1 },
            admin = SASL_ADMIN.0,
            admin_password = SASL_ADMIN.1,
            user = SASL_USER.0,
            user_password = SASL_USER.1,
        );
        if let Some(pem) = &self.secure {
            // The later line counts.
            let _ = writeln!(
                text,
                "sasl.enabled.mechanisms=SCRAM-SHA-512
listener.name.sasl.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.sasl.ssl.keystore.type=PEM
listener.name.sasl.ssl.keystore.location={}",
                pem.display()
            );
        }
        for (name, value) in &self.properties {
            let _ = writeln!(text, "{name}={value}");
        }
        text
    }
}
