//! A server as a container: created through testcontainers, then controlled by the engine's command line.

use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use testcontainers::core::IntoContainerPort;
use testcontainers::runners::AsyncRunner;
use testcontainers::{ContainerAsync, GenericImage, ImageExt};

use super::docker;
use super::images::Image;

/// What to run.
#[derive(Debug)]
pub(crate) struct Spec {
    /// The image.
    pub(crate) image: Image,
    /// A shell script; it ends with `exec` of the server.
    pub(crate) script: String,
    /// Run as this user of the image.
    pub(crate) user: Option<&'static str>,
    /// Files to put into it: path and text.
    pub(crate) files: Vec<(String, String)>,
    /// Published on 127.0.0.1 under the same number.
    pub(crate) ports: Vec<u16>,
    /// Share the network of this container instead of having one.
    pub(crate) network_of: Option<String>,
    /// The label the watchdog goes by.
    pub(crate) label: (String, String),
}

/// A running container, removed when dropped.
#[derive(Debug)]
pub(crate) struct Container {
    /// Never dropped: its own drop needs the runtime that created it, which a shared service outlives.
    handle: ManuallyDrop<ContainerAsync<GenericImage>>,
}

impl Container {
    /// Creates and starts it. Ready to serve is the caller's question.
    pub(crate) async fn start(spec: Spec) -> Result<Self> {
        let (name, tag) = spec.image.name_and_tag();
        let ports = spec.ports.clone();
        let mut request = GenericImage::new(name, tag)
            .with_entrypoint("sh")
            .with_cmd(["-c".to_owned(), spec.script])
            .with_label(spec.label.0, spec.label.1)
            .with_startup_timeout(Duration::from_secs(120));
        for port in &ports {
            request = request.with_mapped_port(*port, port.tcp());
        }
        for (path, text) in spec.files {
            request = request.with_copy_to(path, text.into_bytes());
        }
        if let Some(user) = spec.user {
            request = request.with_user(user);
        }
        if let Some(container) = spec.network_of {
            request = request.with_network(format!("container:{container}"));
        } else {
            // services of a test listen on the loopback address only
            request = request.with_host_config_modifier(|host| {
                for binding in host
                    .port_bindings
                    .iter_mut()
                    .flat_map(|b| b.values_mut())
                    .flatten()
                    .flatten()
                {
                    binding.host_ip = Some("127.0.0.1".to_owned());
                }
            });
        }
        let handle = request
            .start()
            .await
            .with_context(|| format!("cannot run the image {}", spec.image))?;
        Ok(Self {
            handle: ManuallyDrop::new(handle),
        })
    }

    /// Its id.
    pub(crate) fn id(&self) -> &str {
        self.handle.id()
    }

    /// See [`super::node::Node::start_again`].
    pub(crate) async fn start_again(&self) -> Result<()> {
        docker::run(&["start", self.id()]).await.map(drop)
    }

    /// See [`super::node::Node::signal`].
    pub(crate) async fn signal(&self, signal: &str) -> Result<()> {
        docker::run(&["kill", "-s", signal, self.id()])
            .await
            .map(drop)
    }

    /// See [`super::node::Node::stop`].
    pub(crate) async fn stop(&self, signal: &str, patience: Duration) -> Result<()> {
        self.signal(signal).await?;
        let deadline = Instant::now() + patience;
        while self.is_running().await? {
            if Instant::now() > deadline {
                return self.signal("KILL").await;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// See [`super::node::Node::check_alive`].
    pub(crate) async fn check_alive(&self) -> Result<()> {
        if !self.is_running().await? {
            let log = self.log_tail().await?;
            bail!("container {} has ended; its last lines:\n{log}", self.id());
        }
        Ok(())
    }

    /// See [`super::node::Node::log_tail`].
    pub(crate) async fn log_tail(&self) -> Result<String> {
        docker::run_both(&["logs", "--tail", "20", self.id()]).await
    }

    async fn is_running(&self) -> Result<bool> {
        let running = docker::run(&["inspect", "-f", "{{.State.Running}}", self.id()]).await?;
        Ok(running.trim() == "true")
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        docker::remove_container(self.id());
    }
}

/// Where a container finds what [`Spec::files`] put there.
pub(crate) fn home() -> PathBuf {
    PathBuf::from("/oncebox")
}
