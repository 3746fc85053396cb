//! One PostgreSQL, one Kafka and one Redis for the whole run.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

use super::build::Programs;

/// The running services. Stopped when dropped, and by themselves when this process dies.
pub(crate) struct Services {
    keeper: Child,
    environment: Vec<(String, String)>,
}

impl Services {
    /// Starts them, as `local` processes or as `containers`. What the environment names is used as it is.
    pub(crate) fn start(programs: &Programs, runner: &str) -> Result<Self> {
        let program = programs.find("oncebox-integration-tests oncebox-test-services")?;
        let mut keeper = Command::new(&program.executable)
            .env("ONCEBOX_TEST_SERVICES", runner)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the services")?;
        let stdout = keeper.stdout.take().context("no output")?;
        // the private servers of some tests come from the same place
        let mut services = Self {
            keeper,
            environment: vec![("ONCEBOX_TEST_SERVICES".to_owned(), runner.to_owned())],
        };
        for line in BufReader::new(stdout).lines() {
            let line = line?;
            if line == "ready" {
                return Ok(services);
            }
            let (name, value) = line.split_once('=').with_context(|| line.clone())?;
            services
                .environment
                .push((name.to_owned(), value.to_owned()));
        }
        bail!("the services did not start")
    }

    /// What a test program has to be told.
    pub(crate) fn environment(&self) -> &[(String, String)] {
        &self.environment
    }

    /// Stops and removes them.
    pub(crate) fn stop(self) {}
}

impl Drop for Services {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}
