//! Redis for tests: the shared server and private ones.
//!
//! Local processes only, also where everything else runs in containers: the tests of `oncebox-gate` need the program
//! `redis-server` anyway, to stop and kill servers of their own.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::choice;
use super::ports;
use super::process::{Process, Program};
use super::scratch::Scratch;

const PATIENCE: Duration = Duration::from_secs(60);

/// A Redis server without persistence. Dropped = stopped and removed, unless it came from the environment.
#[derive(Debug)]
pub struct Redis {
    url: String,
    process: Option<Process>,
    // after the process: its directory goes last
    _scratch: Option<Scratch>,
}

impl Redis {
    /// Starts a private server: one that the test may kill.
    ///
    /// # Errors
    /// `redis-server` is not on the path, or did not come up.
    pub async fn start() -> Result<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        if !std::env::split_paths(&path).any(|dir| dir.join("redis-server").is_file()) {
            bail!(
                "the program `redis-server` is missing: install the Debian package `redis-server`"
            );
        }
        let (scratch, port) = (Scratch::new()?, ports::free(1)?[0]);
        let mut argv = vec!["redis-server".to_owned()];
        for (name, value) in [
            ("--bind", "127.0.0.1"),
            ("--port", &*port.to_string()),
            // what it holds may be lost at any time, and is after a kill
            ("--save", ""),
            ("--appendonly", "no"),
        ] {
            argv.extend([name.to_owned(), value.to_owned()]);
        }
        let process = Process::start(Program {
            name: "redis".to_owned(),
            scratch: scratch.dir().to_owned(),
            argv,
            user: None,
            end_signal: "KILL",
        })?;
        let redis = Self {
            url: format!("redis://127.0.0.1:{port}"),
            process: Some(process),
            _scratch: Some(scratch),
        };
        redis.wait_ready().await?;
        Ok(redis)
    }

    /// The Redis to share: the one that the environment names, or a new one.
    ///
    /// # Errors
    /// As [`Redis::start`], or the one from the environment does not answer.
    pub async fn obtain() -> Result<Self> {
        if let Ok(url) = std::env::var(choice::REDIS_URL) {
            choice::announce("Redis", choice::REDIS_URL);
            let redis = Self {
                url,
                process: None,
                _scratch: None,
            };
            redis.wait_ready().await?;
            return Ok(redis);
        }
        choice::announce("Redis", "a local process");
        Self::start().await
    }

    /// Its URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Kills it with SIGKILL: everything it holds is lost.
    ///
    /// # Errors
    /// The server is not ours (environment), or is not running.
    pub async fn kill(&self) -> Result<()> {
        self.process()?.signal("KILL")?;
        self.process()?.wait_stopped(Duration::from_secs(10)).await
    }

    /// Starts it after [`Redis::kill`] and waits until it answers. Same port, empty.
    ///
    /// # Errors
    /// It did not come up.
    pub async fn start_again(&self) -> Result<()> {
        self.process()?.start_again()?;
        self.wait_ready().await
    }

    /// Freezes it (SIGSTOP): connections stay, nothing answers.
    ///
    /// # Errors
    /// As [`Redis::kill`].
    pub fn pause(&self) -> Result<()> {
        self.process()?.signal("STOP")
    }

    /// Lets it go on after [`Redis::pause`].
    ///
    /// # Errors
    /// As [`Redis::kill`].
    pub fn resume(&self) -> Result<()> {
        self.process()?.signal("CONT")
    }

    /// Empties it (FLUSHALL).
    ///
    /// # Errors
    /// As [`Redis::kill`].
    pub async fn flush(&self) -> Result<()> {
        self.process()?;
        let said = self.say("FLUSHALL").await?;
        if said != "+OK" {
            bail!("FLUSHALL: {said}");
        }
        Ok(())
    }

    fn process(&self) -> Result<&Process> {
        self.process
            .as_ref()
            .context("this Redis comes from the environment: start a private one to disturb it")
    }

    async fn wait_ready(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            // anything that it says: a server with a password refuses the command, and is there
            let Err(error) = self.say("PING").await else {
                return Ok(());
            };
            if let Some(process) = &self.process {
                process.check_alive()?;
            }
            if Instant::now() > deadline {
                return Err(error.context("Redis does not answer"));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The first line of its answer to an inline command.
    async fn say(&self, command: &str) -> Result<String> {
        let exchange = async {
            let mut stream = TcpStream::connect(address(&self.url)).await?;
            stream
                .write_all(format!("{command}\r\n").as_bytes())
                .await?;
            let mut said = Vec::new();
            while !said.ends_with(b"\r\n") {
                said.push(stream.read_u8().await?);
            }
            Ok(String::from_utf8_lossy(&said).trim_end().to_owned())
        };
        tokio::time::timeout(Duration::from_secs(10), exchange).await?
    }
}

/// Host and port of a Redis URL.
fn address(url: &str) -> String {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let rest = rest.split(['/', '?']).next().unwrap_or_default();
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    if host.contains(':') {
        host.to_owned()
    } else {
        format!("{host}:6379")
    }
}

#[cfg(test)]
mod tests {
    use super::address;

    #[test]
    fn the_address_is_what_stands_after_the_password() {
        assert_eq!(address("redis://127.0.0.1:7000"), "127.0.0.1:7000");
        assert_eq!(address("redis://:a@h:1/0?protocol=resp3"), "h:1");
        assert_eq!(address("redis://h"), "h:6379");
    }
}
