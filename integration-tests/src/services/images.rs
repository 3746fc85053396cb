//! The images of the container path: one table, pulled where that works, otherwise built on this machine.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use super::{docker, jars};

/// One line of the table.
#[derive(Debug)]
struct Recipe {
    name: &'static str,
    /// The environment variable that names another image.
    variable: &'static str,
    /// The published image.
    published: &'static str,
    /// How to build the same from this machine's Debian mirror, on the base image `{base}`.
    dockerfile: &'static str,
    /// Whether the build copies Kafka's jars.
    with_jars: bool,
}

const POSTGRES: Recipe = Recipe {
    name: "postgres",
    variable: "ONCEBOX_TEST_IMAGE_POSTGRES",
    published: "postgres:17",
    dockerfile: "FROM {base}
RUN apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends postgresql
",
    with_jars: false,
};

const KAFKA: Recipe = Recipe {
    name: "kafka",
    variable: "ONCEBOX_TEST_IMAGE_KAFKA",
    published: "apache/kafka:4.1.2",
    dockerfile: "FROM {base}
RUN apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends \
openjdk-17-jre-headless
COPY . /opt/kafka/libs/
",
    with_jars: true,
};

/// PostgreSQL, ready to run.
pub(crate) async fn postgres() -> Result<Image> {
    POSTGRES.obtain().await
}

/// Java and Kafka's jars in `/opt/kafka/libs`, ready to run.
pub(crate) async fn kafka() -> Result<Image> {
    KAFKA.obtain().await
}

/// An image that can be run: `name:tag`.
#[derive(Clone, Debug)]
pub(crate) struct Image(String);

impl Image {
    /// Name and tag apart.
    pub(crate) fn name_and_tag(&self) -> (&str, &str) {
        match self.0.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, tag),
            _ => (&self.0, "latest"),
        }
    }
}

impl fmt::Display for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Recipe {
    /// From the environment, from the engine, from the registry, or built here: the first that works.
    async fn obtain(&self) -> Result<Image> {
        if let Ok(image) = std::env::var(self.variable) {
            return Ok(Image(image));
        }
        // one process pulls or builds, the others find the result
        let _lock = tokio::task::spawn_blocking(|| jars::lock("images.lock")).await??;
        let built = format!("oncebox-test/{}:{}", self.name, self.tag()?);
        for image in [self.published, &built] {
            if docker::run(&["image", "inspect", image]).await.is_ok() {
                return Ok(Image(image.to_owned()));
            }
        }
        let pull = ["pull", "-q", self.published];
        let Err(not_pulled) =
            tokio::time::timeout(Duration::from_secs(300), docker::run(&pull)).await?
        else {
            return Ok(Image(self.published.to_owned()));
        };
        let base = base()
            .await
            .with_context(|| format!("cannot pull {} ({not_pulled:#})", self.published))?;
        let empty = tempfile::tempdir()?;
        let context = if self.with_jars {
            jars::libs().await?
        } else {
            empty.path()
        };
        build(&built, context, &self.dockerfile.replace("{base}", &base)).await?;
        Ok(Image(built))
    }

    /// Changes with everything the image is made of.
    fn tag(&self) -> Result<String> {
        let mut hasher = std::hash::DefaultHasher::new();
        self.dockerfile.hash(&mut hasher);
        if self.with_jars {
            std::fs::read(jars::sources().join("pom.xml"))?.hash(&mut hasher);
        }
        Ok(format!("{:016x}", hasher.finish()))
    }
}

/// A minimal Debian, imported into the engine once.
async fn base() -> Result<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("debian-root.sh");
    let mut hasher = std::hash::DefaultHasher::new();
    std::fs::read(&script)?.hash(&mut hasher);
    let image = format!("oncebox-test/base:{:016x}", hasher.finish());
    if docker::run(&["image", "inspect", &image]).await.is_ok() {
        return Ok(image);
    }
    let dir = tempfile::Builder::new()
        .prefix("oncebox-test-base-")
        .tempdir()?;
    let root = dir.path().join("root");
    let made = Command::new(&script)
        .arg(&root)
        .stdin(Stdio::null())
        .output()
        .await?;
    if !made.status.success() {
        let reason = String::from_utf8_lossy(&made.stderr).trim().to_owned();
        bail!("and cannot build it here, as root on Debian with debootstrap: {reason}");
    }
    let pipe = r#"tar -C "$1" -c . | docker import - "$2""#;
    let imported = Command::new("sh")
        .args(["-c", pipe, "sh"])
        .arg(&root)
        .arg(&image)
        .output()
        .await?;
    if !imported.status.success() {
        bail!(
            "docker import: {}",
            String::from_utf8_lossy(&imported.stderr).trim()
        );
    }
    Ok(image)
}

async fn build(image: &str, context: &Path, dockerfile: &str) -> Result<()> {
    let mut docker = Command::new("docker")
        .args(["build", "-q", "-t", image, "-f", "-"])
        .arg(context)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    if let Some(mut stdin) = docker.stdin.take() {
        stdin.write_all(dockerfile.as_bytes()).await?;
    }
    let output = docker.wait_with_output().await?;
    if !output.status.success() {
        bail!(
            "docker build {image}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}
