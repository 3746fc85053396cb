//! What the tests need on the machine, installed where we may.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Result, bail};

/// A thing that must be there: how to see it, the Debian package that brings it, its name for people.
struct Need {
    present: fn() -> bool,
    package: &'static str,
    name: &'static str,
}

/// The C compiler and make build librdkafka; Java and Maven run Kafka and its tools; Redis is a local process.
const ALWAYS: &[Need] = &[
    Need {
        present: || on_path("cc"),
        package: "build-essential",
        name: "a C compiler",
    },
    Need {
        present: || on_path("c++"),
        package: "build-essential",
        name: "a C++ compiler",
    },
    Need {
        present: || on_path("make"),
        package: "build-essential",
        name: "make",
    },
    Need {
        present: || on_path("java"),
        package: "openjdk-17-jre-headless",
        name: "Java 17",
    },
    Need {
        present: || on_path("mvn"),
        package: "maven",
        name: "Maven",
    },
    // also beside a Docker engine: its tests kill and stop servers of their own
    Need {
        present: || on_path("redis-server"),
        package: "redis-server",
        name: "Redis",
    },
];

/// For the tests of TLS.
const OPENSSL: [Need; 2] = [
    Need {
        present: super::build::has_openssl,
        package: "libssl-dev",
        name: "OpenSSL's headers",
    },
    Need {
        present: super::build::has_openssl,
        package: "pkg-config",
        name: "pkg-config",
    },
];

/// Needed unless a Docker engine runs it.
const POSTGRES: Need = Need {
    present: has_postgres,
    package: "postgresql",
    name: "PostgreSQL (or a Docker engine)",
};

/// Installs what is missing as root on Debian; anywhere else one line says what to install.
pub(super) fn prepare(engine_answers: bool) -> Result<()> {
    let mut missing: Vec<&Need> = ALWAYS.iter().filter(|need| !(need.present)()).collect();
    if !engine_answers && !has_postgres() {
        missing.push(&POSTGRES);
    }
    // Who cannot install it tests without TLS.
    if may_install() {
        missing.extend(OPENSSL.iter().filter(|need| !(need.present)()));
    }
    if missing.is_empty() {
        return Ok(());
    }
    if !may_install() {
        let names: Vec<_> = missing.iter().map(|need| need.name).collect();
        bail!("please install: {}", names.join(", "));
    }
    let mut packages: Vec<_> = missing.iter().map(|need| need.package).collect();
    packages.dedup();
    install(&packages)
}

/// Whether PostgreSQL's server programs are there, in Debian's place or on the path.
pub(super) fn has_postgres() -> bool {
    let debian = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten();
    debian
        .into_iter()
        .any(|version| version.path().join("bin/initdb").is_file())
        || on_path("initdb")
}

/// Whether this is root on a Debian.
pub(super) fn may_install() -> bool {
    let id = Command::new("id").arg("-u").output();
    let root = id.is_ok_and(|id| id.stdout.trim_ascii() == b"0");
    root && Path::new("/etc/debian_version").exists() && on_path("apt-get")
}

/// Installs Debian packages, without starting the services they bring.
pub(super) fn install(packages: &[&str]) -> Result<()> {
    println!("installing {}", packages.join(" "));
    apt_get(&["-q", "update"])?;
    let mut arguments = vec!["-q", "install", "-y", "--no-install-recommends"];
    arguments.extend(packages);
    apt_get(&arguments)
}

fn apt_get(arguments: &[&str]) -> Result<()> {
    let output = Command::new("apt-get")
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        // invoke-rc.d's own switch: the tests start their services themselves
        .env("RUNLEVEL", "1")
        .stdin(Stdio::null())
        .output()?;
    if !output.status.success() {
        let log = [output.stdout, output.stderr].concat();
        bail!(
            "apt-get {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&log).trim()
        );
    }
    Ok(())
}

/// Whether a program of this name is on the path.
pub(super) fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}
