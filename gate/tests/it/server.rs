//! A Redis for a test.

use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use oncebox_gate::{Redis, RedisConfig};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, FromRedisValue};
use uuid::Uuid;

const URL: &str = "ONCEBOX_TEST_REDIS_URL";

/// The server is killed when standard input ends: with the test, however that ends.
const SERVER: &str = r#"
redis-server "$@" >/dev/null 2>&1 &
echo $!
cat >/dev/null
kill -s KILL $! 2>/dev/null
"#;

/// An environment that no other test uses, on some server.
pub(crate) struct Place {
    pub(crate) url: String,
    pub(crate) environment: String,
    _own: Option<Server>,
}

impl Place {
    /// On the server of the environment, or else on one of its own. `None` = skipped, and said so.
    pub(crate) async fn shared() -> Option<Self> {
        match std::env::var(URL) {
            Ok(url) => Some(Self::on(url, None)),
            Err(_) => {
                let server = Server::start().await?;
                Some(Self::on(server.url(), Some(server)))
            }
        }
    }

    fn on(url: String, own: Option<Server>) -> Self {
        Self {
            url,
            environment: Uuid::new_v4().to_string(),
            _own: own,
        }
    }

    /// A connection of its own, as every process has one.
    pub(crate) fn redis(&self) -> Redis {
        patient(&self.url, &self.environment)
    }

    /// What Redis itself says.
    pub(crate) async fn ask<T: FromRedisValue>(&self, command: &Cmd) -> T {
        ask(&self.url, command).await
    }
}

/// A server that the test may kill, stop and empty.
pub(crate) struct Server {
    port: u16,
    directory: tempfile::TempDir,
    running: Child,
    pid: String,
}

impl Server {
    /// Starts one. `None` = skipped, and said so.
    pub(crate) async fn start() -> Option<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        if !std::env::split_paths(&path).any(|dir| dir.join("redis-server").is_file()) {
            println!("skipped: redis-server is not installed");
            return None;
        }
        let (port, directory) = (free_port(), tempfile::tempdir().unwrap());
        let (running, pid) = spawn(port, directory.path());
        let server = Self {
            port,
            directory,
            running,
            pid,
        };
        server.wait_ready().await;
        Some(server)
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// A connection of its own, as every process has one.
    pub(crate) fn redis(&self) -> Redis {
        patient(&self.url(), "test")
    }

    /// As a crash: everything in it is lost.
    pub(crate) fn kill(&mut self) {
        self.signal("KILL");
        drop(self.running.stdin.take());
        self.running.wait().unwrap();
    }

    /// Starts it after [`kill`](Self::kill): same port, empty.
    pub(crate) async fn start_again(&mut self) {
        (self.running, self.pid) = spawn(self.port, self.directory.path());
        self.wait_ready().await;
    }

    /// It takes connections and bytes, and answers nothing.
    pub(crate) fn stop(&self) {
        self.signal("STOP");
    }

    /// It goes on after [`stop`](Self::stop).
    pub(crate) fn cont(&self) {
        self.signal("CONT");
    }

    pub(crate) async fn flush(&self) {
        let () = self.ask(&redis::cmd("FLUSHALL")).await;
    }

    /// What Redis itself says.
    pub(crate) async fn ask<T: FromRedisValue>(&self, command: &Cmd) -> T {
        ask(&self.url(), command).await
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("sh")
            .args(["-c", r#"kill -s "$1" "$2""#, "sh", signal, &self.pid])
            .status();
        assert!(sent.unwrap().success(), "cannot send {signal}");
    }

    async fn wait_ready(&self) {
        let client = redis::Client::open(self.url()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while client.get_multiplexed_async_connection().await.is_err() {
            assert!(Instant::now() < deadline, "redis-server does not come up");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.running.stdin.take());
        let _ = self.running.wait();
    }
}

/// Waits longer than a machine under load needs.
fn patient(url: &str, environment: &str) -> Redis {
    Redis::new(RedisConfig {
        connect_timeout: Duration::from_secs(20),
        request_timeout: Duration::from_secs(20),
        ..RedisConfig::new(url, environment)
    })
    .unwrap()
}

async fn ask<T: FromRedisValue>(url: &str, command: &Cmd) -> T {
    let client = redis::Client::open(url).unwrap();
    let config = redis::AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None);
    let connection = client.get_multiplexed_async_connection_with_config(&config);
    let mut connection: MultiplexedConnection = connection.await.unwrap();
    command.query_async(&mut connection).await.unwrap()
}

fn spawn(port: u16, directory: &Path) -> (Child, String) {
    let mut running = Command::new("sh")
        .args(["-c", SERVER, "sh", "--bind", "127.0.0.1"])
        .args(["--port", &port.to_string()])
        .args(["--save", "", "--appendonly", "no"])
        .current_dir(directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut pid = String::new();
    let mut said = BufReader::new(running.stdout.take().unwrap());
    said.read_line(&mut pid).unwrap();
    (running, pid.trim().to_owned())
}

/// Below the range from which the kernel takes the ports of outgoing connections: it is still free after a kill.
fn free_port() -> u16 {
    for _ in 0..1_000 {
        let port = 20_000 + (Uuid::new_v4().as_u128() % 12_000) as u16;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
    panic!("no free port on 127.0.0.1");
}
