//! Kafka's jars, copied by Maven once per version into `target/kafka-libs`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use tokio::sync::OnceCell;

/// The directory with the jars that `integration-tests/kafka/pom.xml` pins, plus the log configuration.
///
/// # Errors
/// Maven is missing, or could not resolve the artifacts.
pub async fn libs() -> Result<&'static Path> {
    static LIBS: OnceCell<PathBuf> = OnceCell::const_new();
    let libs = LIBS
        .get_or_try_init(|| async { tokio::task::spawn_blocking(copy).await? })
        .await?;
    Ok(libs)
}

/// The class path of broker and tools.
pub(crate) fn class_path(libs: &Path) -> String {
    format!("{}/*", libs.display())
}

/// The directory with `pom.xml` and the log configuration.
pub(crate) fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kafka")
}

/// Takes a lock file below `target`: several test processes may come to the same place at once. Released when the value
/// goes, also by a crash.
pub(crate) fn lock(name: &str) -> Result<std::fs::File> {
    let file = std::fs::File::create(target()?.join(name))?;
    file.lock()
        .with_context(|| format!("cannot lock target/{name}"))?;
    Ok(file)
}

fn target() -> Result<PathBuf> {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    std::fs::create_dir_all(&target)?;
    Ok(target.canonicalize()?)
}

fn copy() -> Result<PathBuf> {
    let _lock = lock("kafka-libs.lock")?;
    let target = target()?;
    let pom = std::fs::read_to_string(sources().join("pom.xml"))?;
    let libs = target.join("kafka-libs");
    let stamp = libs.join("pom.xml");
    if std::fs::read_to_string(&stamp).is_ok_and(|copied| copied == pom) {
        return Ok(libs);
    }
    let fresh = target.join("kafka-libs.new");
    let _ = std::fs::remove_dir_all(&fresh);
    let output = Command::new("mvn")
        .args(["-q", "-B", "dependency:copy-dependencies"])
        .arg(format!("-DoutputDirectory={}", fresh.display()))
        .current_dir(sources())
        .output()
        .context("Kafka's jars are missing and `mvn` cannot be run: install Maven")?;
    if !output.status.success() {
        bail!(
            "mvn could not copy Kafka's jars:\n{}",
            String::from_utf8_lossy(&output.stdout).trim()
        );
    }
    std::fs::copy(
        sources().join("log4j2.properties"),
        fresh.join("log4j2.properties"),
    )?;
    // the stamp last: a directory with it is complete
    std::fs::write(fresh.join("pom.xml"), pom)?;
    let _ = std::fs::remove_dir_all(&libs);
    std::fs::rename(&fresh, &libs)?;
    Ok(libs)
}
