//! Apache Kafka for tests: the shared broker and private clusters.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rdkafka::admin::{
    AdminClient, AdminOptions, AlterConfig, NewTopic, ResourceSpecifier, TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::metadata::Metadata;
use rdkafka::{Offset, TopicPartitionList};

use super::choice::{self, Runner};
use super::container::{self, Container, Spec};
use super::node::Node;
use super::process::{Process, Program};
use super::scratch::Scratch;
use super::server_properties::{BrokerPorts, Cluster};
use super::{images, jars, ports};

/// Three Java machines on two busy cores take their time.
const PATIENCE: Duration = Duration::from_secs(180);

/// A private cluster. Defaults to one broker and no further properties.
#[derive(Clone, Debug)]
pub struct KafkaOptions {
    /// One or three. Defaults to 1.
    pub brokers: usize,
    /// Further lines of `server.properties`. Defaults to none.
    pub properties: Vec<(String, String)>,
    /// A PEM file with private key and certificate chain: the SASL listener then speaks TLS and SCRAM-SHA-512, and knows the
    /// users that [`Kafka::scram_user`] adds. Defaults to none. Local processes only.
    pub secure: Option<PathBuf>,
    /// Java's optimising compiler and its concurrent collector are left out and the heap halved: the brokers start sooner and
    /// are slower at their best. Three brokers always are. Defaults to false.
    pub light: bool,
}

impl Default for KafkaOptions {
    fn default() -> Self {
        Self {
            brokers: 1,
            properties: Vec::new(),
            secure: None,
            light: false,
        }
    }
}

/// A port that a broker advertises to whoever comes through it, and the port where that broker really listens: a fault
/// proxy belongs between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Where the proxy has to listen.
    pub advertised: u16,
    /// Where the broker listens.
    pub target: u16,
}

/// An Apache Kafka cluster. Dropped = stopped and removed, unless it came from the environment.
#[derive(Debug)]
pub struct Kafka {
    bootstrap: String,
    sasl_bootstrap: Option<String>,
    slots: Vec<Vec<Route>>,
    brokers: Vec<Node>,
    // after the brokers: holds the network they share
    _network: Option<Container>,
    // last: its directory is theirs
    _scratch: Option<Scratch>,
}

impl Kafka {
    /// Starts a private cluster: one whose brokers the test may stop.
    ///
    /// # Errors
    /// Neither an engine nor Java and Maven are there, or a broker did not come up; the text says what to do.
    pub async fn start(options: KafkaOptions) -> Result<Self> {
        let runner = Runner::choose().await;
        let scratch = Scratch::new()?;
        let ports = BrokerPorts::choose(options.brokers, ports::free)?;
        let cluster = Cluster {
            ports,
            properties: options.properties,
            secure: options.secure,
            light: options.light || options.brokers > 1,
        };
        let (network, brokers) = match runner {
            Runner::Local => (None, local(&scratch, &cluster).await?),
            Runner::Containers => {
                let (network, brokers) = contained(&scratch, &cluster).await?;
                (Some(network), brokers)
            }
        };
        let kafka = Self {
            bootstrap: cluster.bootstrap(),
            sasl_bootstrap: Some(cluster.sasl_bootstrap()),
            slots: cluster.slots(),
            brokers,
            _network: network,
            _scratch: Some(scratch),
        };
        kafka.wait_ready(cluster.ports.len()).await?;
        Ok(kafka)
    }

    /// The Kafka to share: the one that the environment names, or a new one.
    ///
    /// # Errors
    /// As [`Kafka::start`], or the one from the environment does not answer.
    pub async fn obtain() -> Result<Self> {
        if let Ok(bootstrap) = std::env::var(choice::KAFKA) {
            choice::announce("Kafka", choice::KAFKA);
            let slots = match std::env::var(choice::KAFKA_PROXY) {
                Ok(routes) => parse_routes(&routes)
                    .with_context(|| format!("{}={routes}", choice::KAFKA_PROXY))?,
                Err(_) => Vec::new(),
            };
            let sasl_bootstrap = std::env::var(choice::KAFKA_SASL).ok();
            let kafka = Self {
                bootstrap,
                sasl_bootstrap,
                slots,
                brokers: Vec::new(),
                _network: None,
                _scratch: None,
            };
            kafka.wait_ready(1).await?;
            return Ok(kafka);
        }
        choice::announce("Kafka", Runner::choose().await);
        Self::start(KafkaOptions::default()).await
    }

    /// The bootstrap address: every broker's plain listener.
    pub fn bootstrap(&self) -> &str {
        &self.bootstrap
    }

    /// The bootstrap address of the SASL/PLAIN listener, where ACLs count ([`super::SASL_ADMIN`],
    /// [`super::SASL_USER`]). `None` for a foreign cluster.
    pub fn sasl_bootstrap(&self) -> Option<&str> {
        self.sasl_bootstrap.as_deref()
    }

    /// Adds a user to a cluster with [`KafkaOptions::secure`].
    ///
    /// # Errors
    /// The cluster refuses.
    pub async fn scram_user(&self, name: &str, password: &str) -> Result<()> {
        let config = format!("SCRAM-SHA-512=[password={password}]");
        let arguments = [
            "--bootstrap-server",
            &self.bootstrap,
            "--alter",
            "--add-config",
            &config,
            "--entity-type",
            "users",
            "--entity-name",
            name,
        ];
        crate::kafka_cli::run("kafka.admin.ConfigCommand", &arguments).await?;
        Ok(())
    }

    /// The proxy slots; each has one route per broker. One [`crate::proxy::Proxy`] takes one slot.
    pub fn slots(&self) -> &[Vec<Route>] {
        &self.slots
    }

    /// The slots as text, for the environment of another test process.
    pub fn proxy_routes(&self) -> String {
        let slot = |routes: &Vec<Route>| {
            routes
                .iter()
                .map(|r| format!("{}={}", r.advertised, r.target))
                .collect::<Vec<_>>()
                .join(",")
        };
        self.slots.iter().map(slot).collect::<Vec<_>>().join(";")
    }

    /// Creates a topic with a random name that begins with `prefix`, and waits until every partition has a leader.
    ///
    /// # Panics
    /// The cluster refuses.
    pub async fn create_topic(&self, prefix: &str, partitions: i32) -> String {
        self.create_topic_with(prefix, partitions, &[]).await
    }

    /// The same with topic properties.
    ///
    /// # Panics
    /// The cluster refuses.
    pub async fn create_topic_with(
        &self,
        prefix: &str,
        partitions: i32,
        properties: &[(&str, &str)],
    ) -> String {
        let name = format!("{prefix}-{}", uuid::Uuid::new_v4().simple());
        if let Err(refused) = self.try_create_topic(&name, partitions, properties).await {
            panic!("cannot create topic {name}: {refused:#}");
        }
        name
    }

    /// A topic of this name.
    ///
    /// # Panics
    /// The cluster refuses.
    pub async fn create_topic_named(&self, name: &str, partitions: i32) {
        if let Err(refused) = self.try_create_topic(name, partitions, &[]).await {
            panic!("cannot create topic {name}: {refused:#}");
        }
    }

    /// Gives a topic these properties, and no other.
    ///
    /// # Panics
    /// The cluster refuses.
    pub async fn set_topic(&self, name: &str, properties: &[(&str, &str)]) {
        // A broker that is starting, or starved of its processor, answers late; repeating changes nothing more.
        let mut last = anyhow::anyhow!("not tried");
        for _ in 0..5 {
            match self.try_set_topic(name, properties).await {
                Ok(()) => return,
                Err(refused) => last = refused,
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        panic!("cannot alter topic {name}: {last:#}");
    }

    async fn try_set_topic(&self, name: &str, properties: &[(&str, &str)]) -> Result<()> {
        let admin: AdminClient<DefaultClientContext> = self.client().create()?;
        let mut wanted = AlterConfig::new(ResourceSpecifier::Topic(name));
        for (name, value) in properties {
            wanted = wanted.set(name, value);
        }
        for altered in admin.alter_configs([&wanted], &AdminOptions::new()).await? {
            altered.map_err(|(_, code)| anyhow::anyhow!("{code}"))?;
        }
        Ok(())
    }

    /// Deletes every record of a partition, which a topic whose `cleanup.policy` is `compact` alone refuses.
    ///
    /// # Errors
    /// The cluster does not answer, or refuses.
    pub async fn delete_records(&self, topic: &str, partition: i32) -> Result<()> {
        let admin: AdminClient<DefaultClientContext> = self.client().create()?;
        let mut offsets = TopicPartitionList::new();
        offsets.add_partition_offset(topic, partition, Offset::End)?;
        let deleted = admin.delete_records(&offsets, &AdminOptions::new()).await?;
        for element in deleted.elements() {
            element.error()?;
        }
        Ok(())
    }

    async fn try_create_topic(
        &self,
        name: &str,
        partitions: i32,
        properties: &[(&str, &str)],
    ) -> Result<()> {
        let admin: AdminClient<DefaultClientContext> = self.client().create()?;
        let mut topic = NewTopic::new(name, partitions, TopicReplication::Fixed(-1));
        for (name, value) in properties {
            topic = topic.set(name, value);
        }
        for created in admin.create_topics([&topic], &AdminOptions::new()).await? {
            created.map_err(|(_, code)| anyhow::anyhow!("{code}"))?;
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        let name = name.to_owned();
        tokio::task::spawn_blocking(move || {
            loop {
                let metadata = admin
                    .inner()
                    .fetch_metadata(Some(&name), Duration::from_secs(10))?;
                let all = metadata.topics()[0].partitions();
                if all.len() == partitions as usize
                    && all.iter().all(|p| p.leader() >= 0 && p.error().is_none())
                {
                    return Ok(());
                }
                if Instant::now() > deadline {
                    bail!("no leader");
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        })
        .await?
    }

    /// The broker, counted from 0, that leads this partition now; `None` = no leader.
    ///
    /// # Errors
    /// The cluster does not answer, or does not know the partition.
    pub async fn leader(&self, topic: &str, partition: i32) -> Result<Option<usize>> {
        let name = topic.to_owned();
        let leader = self.metadata(Some(topic), move |metadata| {
            let topic = metadata.topics().iter().find(|t| t.name() == name)?;
            let found = topic.partitions().iter().find(|p| p.id() == partition)?;
            Some(found.leader())
        });
        let id = leader.await?.context("no such partition")?;
        Ok(usize::try_from(id).ok().and_then(|id| id.checked_sub(1)))
    }

    /// Waits until every partition of every topic is on all its brokers.
    ///
    /// # Errors
    /// Not within three minutes.
    pub async fn in_sync(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let complete = |metadata: &Metadata| {
            let mut partitions = metadata.topics().iter().flat_map(|t| t.partitions());
            partitions.all(|p| p.isr().len() == p.replicas().len())
        };
        while !matches!(self.metadata(None, complete).await, Ok(true)) {
            if Instant::now() > deadline {
                bail!("some replicas do not catch up");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    async fn metadata<T: Send + 'static>(
        &self,
        topic: Option<&str>,
        read: impl FnOnce(&Metadata) -> T + Send + 'static,
    ) -> Result<T> {
        let (config, topic) = (self.client(), topic.map(str::to_owned));
        tokio::task::spawn_blocking(move || {
            let client: BaseConsumer = config.create()?;
            let patience = Duration::from_secs(5);
            Ok(read(&client.fetch_metadata(topic.as_deref(), patience)?))
        })
        .await?
    }

    /// How many brokers can be stopped and started: none for a foreign cluster.
    pub fn brokers(&self) -> usize {
        self.brokers.len()
    }

    /// What the brokers wrote last, for a person.
    ///
    /// # Errors
    /// An engine does not answer.
    pub async fn log_tail(&self) -> Result<String> {
        let mut text = String::new();
        for (n, broker) in self.brokers.iter().enumerate() {
            text.push_str(&format!("broker {n}:\n{}\n", broker.log_tail().await?));
        }
        Ok(text)
    }

    /// Kills a broker (counted from 0) with SIGKILL.
    ///
    /// # Errors
    /// No such broker, or the cluster comes from the environment.
    pub async fn kill_broker(&self, broker: usize) -> Result<()> {
        self.broker(broker)?
            .stop("KILL", Duration::from_secs(10))
            .await
    }

    /// Stops a broker in an orderly way.
    ///
    /// # Errors
    /// As [`Kafka::kill_broker`].
    pub async fn stop_broker(&self, broker: usize) -> Result<()> {
        self.broker(broker)?
            .stop("TERM", Duration::from_secs(60))
            .await
    }

    /// Starts a broker again, same ports, same data, and waits until the cluster lists it.
    ///
    /// # Errors
    /// It did not come up.
    pub async fn start_broker(&self, broker: usize) -> Result<()> {
        self.broker(broker)?.start_again().await?;
        self.wait_ready(1).await
    }

    /// Freezes a broker (SIGSTOP): connections stay, nothing answers.
    ///
    /// # Errors
    /// As [`Kafka::kill_broker`].
    pub async fn pause_broker(&self, broker: usize) -> Result<()> {
        self.broker(broker)?.signal("STOP").await
    }

    /// Lets a frozen broker go on.
    ///
    /// # Errors
    /// As [`Kafka::kill_broker`].
    pub async fn resume_broker(&self, broker: usize) -> Result<()> {
        self.broker(broker)?.signal("CONT").await
    }

    fn broker(&self, broker: usize) -> Result<&Node> {
        self.brokers.get(broker).with_context(|| {
            format!("this cluster has no broker {broker} of ours: start a private cluster to stop brokers")
        })
    }

    /// Ready = a metadata request answers and lists at least `brokers`.
    async fn wait_ready(&self, brokers: usize) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let client: AdminClient<DefaultClientContext> = self.client().create()?;
        let client = std::sync::Arc::new(client);
        loop {
            let asked = std::sync::Arc::clone(&client);
            let metadata = tokio::task::spawn_blocking(move || {
                asked
                    .inner()
                    .fetch_metadata(None, Duration::from_millis(500))
                    .map(|m| m.brokers().len())
            });
            let seen = metadata.await?;
            if matches!(seen, Ok(n) if n >= brokers) {
                tokio::task::spawn_blocking(move || drop(client)).await?;
                return Ok(());
            }
            for node in &self.brokers {
                node.check_alive().await?;
            }
            if Instant::now() > deadline {
                bail!("Kafka at {} does not answer: {seen:?}", self.bootstrap);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn client(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.bootstrap);
        config
            .set("reconnect.backoff.max.ms", "200")
            .set("log_level", "0");
        config
    }
}

/// Formats the data directory when it is empty, then becomes the broker.
fn start_script(dir: &Path, class_path: &str, log_config: &Path, cluster: &Cluster) -> String {
    let options = if cluster.light {
        "-Xmx512m -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    } else {
        "-Xmx1g"
    };
    let java = format!(
        "java {options} -cp '{class_path}' -Dlog4j2.configurationFile={}",
        log_config.display()
    );
    let dir = dir.display();
    format!(
        "[ -e {dir}/data/meta.properties ] || {java} kafka.tools.StorageTool format -t {} -c {dir}/server.properties \
         || exit 1\nexec {java} kafka.Kafka {dir}/server.properties",
        cluster.id(),
    )
}

async fn local(scratch: &Scratch, cluster: &Cluster) -> Result<Vec<Node>> {
    let libs = jars::libs().await?;
    let mut brokers = Vec::new();
    for (index, _) in cluster.ports.iter().enumerate() {
        let name = format!("kafka-{}", index + 1);
        let dir = scratch.dir().join(&name);
        std::fs::create_dir(&dir)?;
        std::fs::write(
            dir.join("server.properties"),
            cluster.server_properties(index, "127.0.0.1", &dir),
        )?;
        let script = start_script(
            &dir,
            &jars::class_path(libs),
            &libs.join("log4j2.properties"),
            cluster,
        );
        brokers.push(Node::Process(Process::start(Program {
            name,
            scratch: scratch.dir().to_owned(),
            argv: vec!["sh".to_owned(), "-c".to_owned(), script],
            user: None,
            end_signal: "KILL",
        })?));
    }
    Ok(brokers)
}

/// One container holds the network and the published ports; the brokers share it. So 127.0.0.1 and every port mean the
/// same inside and outside, and the properties are those of the local processes.
async fn contained(scratch: &Scratch, cluster: &Cluster) -> Result<(Container, Vec<Node>)> {
    let image = images::kafka().await?;
    let label = scratch.container_label()?;
    let network = Container::start(Spec {
        image: image.clone(),
        script: "exec sleep infinity".to_owned(),
        user: None,
        files: Vec::new(),
        ports: cluster.listening_ports(),
        network_of: None,
        label: label.clone(),
    })
    .await?;
    let home = container::home();
    let log_config = home.join("log4j2.properties");
    let log_text = std::fs::read_to_string(jars::sources().join("log4j2.properties"))?;
    let mut brokers = Vec::new();
    for (index, _) in cluster.ports.iter().enumerate() {
        let dir = Path::new("/tmp/kafka");
        let properties = home.join("server.properties").display().to_string();
        let script = format!(
            "mkdir -p {dir} && cp {properties} {dir}/ || exit 1\n{}",
            start_script(dir, "/opt/kafka/libs/*", &log_config, cluster),
            dir = dir.display(),
        );
        brokers.push(Node::Container(
            Container::start(Spec {
                image: image.clone(),
                script,
                user: None,
                files: vec![
                    (properties, cluster.server_properties(index, "0.0.0.0", dir)),
                    (log_config.display().to_string(), log_text.clone()),
                ],
                ports: Vec::new(),
                network_of: Some(network.id().to_owned()),
                label: label.clone(),
            })
            .await?,
        ));
    }
    Ok((network, brokers))
}

fn parse_routes(text: &str) -> Result<Vec<Vec<Route>>> {
    let route = |pair: &str| {
        let (advertised, target) = pair.split_once('=').context("expected advertised=target")?;
        Ok(Route {
            advertised: advertised.parse()?,
            target: target.parse()?,
        })
    };
    text.split(';')
        .filter(|s| !s.is_empty())
        .map(|slot| slot.split(',').map(route).collect())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxy_routes_survive_the_environment() {
        let slots = vec![
            vec![
                Route {
                    advertised: 1,
                    target: 2,
                },
                Route {
                    advertised: 3,
                    target: 4,
                },
            ],
            vec![Route {
                advertised: 5,
                target: 6,
            }],
        ];
        let kafka = Kafka {
            bootstrap: String::new(),
            sasl_bootstrap: None,
            slots: slots.clone(),
            brokers: Vec::new(),
            _network: None,
            _scratch: None,
        };
        assert_eq!(kafka.proxy_routes(), "1=2,3=4;5=6");
        assert_eq!(parse_routes(&kafka.proxy_routes()).unwrap(), slots);
        assert!(parse_routes("1").is_err());
    }
}
