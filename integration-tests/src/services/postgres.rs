//! PostgreSQL for tests: the shared server and private ones.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use sqlx::Connection;

use super::choice::{self, Runner};
use super::container::{self, Container, Spec};
use super::database::with_database;
use super::node::Node;
use super::process::{Process, Program};
use super::scratch::Scratch;
use super::{images, ports};

/// Members of this role need their password; everyone else is trusted. For tests with wrong credentials.
pub const PASSWORD_ROLE: &str = "with_password";

const PATIENCE: Duration = Duration::from_secs(60);

/// Settings of every server the tests start. No fsync: the tests crash processes, not the machine.
const SETTINGS: &[(&str, &str)] = &[
    ("wal_level", "logical"),
    ("max_prepared_transactions", "10"),
    ("max_connections", "200"),
    ("fsync", "off"),
    ("shared_buffers", "128MB"),
    ("max_wal_size", "2GB"),
    ("log_min_messages", "warning"),
];

/// Settings of a private server, on top of those every test server has. Defaults to none.
#[derive(Clone, Debug, Default)]
pub struct PostgresOptions {
    /// `postgresql.conf` names and values.
    pub settings: Vec<(String, String)>,
    /// Certificate chain and private key in PEM: sessions with TLS are possible. Local processes only.
    pub tls: Option<(String, String)>,
    /// Bytes of the file system that holds the data: [`Postgres::fill_disk`]. Local processes of root only. Defaults to the
    /// machine's own.
    pub disk: Option<u64>,
}

/// A PostgreSQL server. Dropped = stopped and removed, unless it came from the environment.
#[derive(Debug)]
pub struct Postgres {
    url: String,
    node: Option<Node>,
    /// As it was started with.
    settings: Vec<(String, String)>,
    /// Takes the place on a small file system.
    filler: Option<PathBuf>,
    // after the node: its directory goes last
    _scratch: Option<Scratch>,
}

impl Postgres {
    /// Starts a private server: one that the test may crash.
    ///
    /// # Errors
    /// Neither an engine nor PostgreSQL's programs are there, or the server did not come up; the text says what to do.
    pub async fn start(options: PostgresOptions) -> Result<Self> {
        let runner = Runner::choose().await;
        let scratch = Scratch::new()?;
        let port = ports::free(1)?[0];
        let mut filler = None;
        let node = match runner {
            Runner::Containers if options.disk.is_some() => {
                bail!("only a local PostgreSQL can have a small disk")
            }
            Runner::Local => {
                let programs = programs()?;
                if let Some(bytes) = options.disk {
                    let data = scratch.mount_data(bytes)?;
                    if let Some((uid, gid)) = unprivileged()? {
                        std::os::unix::fs::chown(&data, Some(uid), Some(gid))?;
                    }
                    filler = Some(data.join("filler"));
                }
                initdb(&programs, &scratch).await?;
                Node::Process(local(&programs, &scratch, port, &options)?)
            }
            Runner::Containers => Node::Container(contained(&scratch, port, &options).await?),
        };
        let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
        let postgres = Self {
            url,
            node: Some(node),
            settings: options.settings,
            filler,
            _scratch: Some(scratch),
        };
        postgres.wait_ready().await?;
        let mut conn = sqlx::PgConnection::connect(&postgres.url).await?;
        sqlx::query(sqlx::AssertSqlSafe(format!("CREATE ROLE {PASSWORD_ROLE}")))
            .execute(&mut conn)
            .await?;
        conn.close().await?;
        Ok(postgres)
    }

    /// Starts a standby that follows this server asynchronously. It answers reads; [`Postgres::promote`] makes it a primary.
    ///
    /// # Errors
    /// This server is not a local process of ours, or the copy fails.
    pub async fn standby(&self) -> Result<Self> {
        if !matches!(self.node, Some(Node::Process(_))) {
            bail!("only a local PostgreSQL of our own can have a standby");
        }
        let (scratch, port) = (Scratch::new()?, ports::free(1)?[0]);
        let programs = programs()?;
        let mut copy = Command::new(programs.join("pg_basebackup"));
        copy.args(["-R", "-c", "fast", "-X", "stream", "-d", &self.url, "-D"]);
        copy.arg(scratch.dir().join("data"));
        run(copy, &scratch).await?;
        let options = PostgresOptions {
            settings: self.settings.clone(),
            ..PostgresOptions::default()
        };
        let process = local(&programs, &scratch, port, &options)?;
        let standby = Self {
            url: format!("postgres://postgres@127.0.0.1:{port}/postgres"),
            node: Some(Node::Process(process)),
            settings: options.settings,
            filler: None,
            _scratch: Some(scratch),
        };
        standby.wait_ready().await?;
        Ok(standby)
    }

    /// Waits until this standby has everything that its primary has written by now.
    ///
    /// # Errors
    /// Not within a minute.
    pub async fn caught_up(&self, primary: &Self) -> Result<()> {
        let mut conn = sqlx::PgConnection::connect(&primary.url).await?;
        let written: String = sqlx::query_scalar("SELECT pg_current_wal_lsn()::text")
            .fetch_one(&mut conn)
            .await?;
        let mut conn = sqlx::PgConnection::connect(&self.url).await?;
        let deadline = Instant::now() + PATIENCE;
        while !sqlx::query_scalar::<_, bool>("SELECT pg_last_wal_replay_lsn() >= $1::pg_lsn")
            .bind(&written)
            .fetch_one(&mut conn)
            .await?
        {
            if Instant::now() > deadline {
                bail!("the standby does not catch up");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Makes this standby a primary, on a new timeline.
    ///
    /// # Errors
    /// It is none.
    pub async fn promote(&self) -> Result<()> {
        let mut conn = sqlx::PgConnection::connect(&self.url).await?;
        if !sqlx::query_scalar("SELECT pg_promote()")
            .fetch_one(&mut conn)
            .await?
        {
            bail!("not promoted within a minute");
        }
        Ok(())
    }

    /// Copies a database of this server into a new database of another, with `pg_dump` and `psql`.
    ///
    /// # Errors
    /// A program is missing or fails.
    pub async fn dump_into(&self, database: &str, other: &Self) -> Result<String> {
        let scratch = Scratch::new()?;
        let programs = programs()?;
        let (from, to) = (
            with_database(&self.url, database),
            with_database(&other.url, database),
        );
        let mut conn = sqlx::PgConnection::connect(&other.url).await?;
        let create = format!("CREATE DATABASE {database}");
        sqlx::query(sqlx::AssertSqlSafe(create))
            .execute(&mut conn)
            .await?;
        let file = scratch.dir().join("dump.sql");
        let mut dump = Command::new(programs.join("pg_dump"));
        dump.arg("-d").arg(&from).arg("-f").arg(&file);
        run(dump, &scratch).await?;
        let mut restore = Command::new(programs.join("psql"));
        restore
            .args(["-q", "-v", "ON_ERROR_STOP=1", "-d", &to, "-f"])
            .arg(&file);
        run(restore, &scratch).await?;
        Ok(to)
    }

    /// The PostgreSQL to share: the one that the environment names, or a new one.
    ///
    /// # Errors
    /// As [`Postgres::start`], or the one from the environment does not answer.
    pub async fn obtain() -> Result<Self> {
        if let Ok(url) = std::env::var(choice::POSTGRES_URL) {
            choice::announce("PostgreSQL", choice::POSTGRES_URL);
            let postgres = Self {
                url,
                node: None,
                settings: Vec::new(),
                filler: None,
                _scratch: None,
            };
            postgres.wait_ready().await?;
            return Ok(postgres);
        }
        choice::announce("PostgreSQL", Runner::choose().await);
        Self::start(PostgresOptions::default()).await
    }

    /// URL of the administrator's database.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Stops it at once, as `pg_ctl stop -m immediate` does: no checkpoint, open transactions are gone, recovery at the
    /// next start.
    ///
    /// # Errors
    /// The server is not ours (environment), or is not running.
    pub async fn crash(&self) -> Result<()> {
        self.node()?.stop("QUIT", Duration::from_secs(30)).await
    }

    /// Stops it in an orderly way (`-m fast`): sessions are ended, a checkpoint is written.
    ///
    /// # Errors
    /// As [`Postgres::crash`].
    pub async fn stop(&self) -> Result<()> {
        self.node()?.stop("INT", Duration::from_secs(60)).await
    }

    /// Starts it after [`Postgres::crash`] or [`Postgres::stop`] and waits until it answers. Same port, same data.
    ///
    /// # Errors
    /// It did not come up.
    pub async fn start_again(&self) -> Result<()> {
        self.node()?.start_again().await?;
        self.wait_ready().await
    }

    /// Takes all the place that is left on its disk ([`PostgresOptions::disk`]).
    ///
    /// # Errors
    /// It has no disk of its own.
    pub async fn fill_disk(&self) -> Result<()> {
        let file = self.filler.clone().context("no disk of its own to fill")?;
        tokio::task::spawn_blocking(move || {
            let mut file = std::fs::File::create(file)?;
            for size in [1 << 20, 1 << 10] {
                let zeros = vec![0; size];
                loop {
                    match file.write_all(&zeros) {
                        Ok(()) => {}
                        Err(full) if full.kind() == std::io::ErrorKind::StorageFull => break,
                        Err(other) => return Err(other.into()),
                    }
                }
            }
            Ok(())
        })
        .await?
    }

    /// Gives the place back and waits until the server answers: it may have crashed for want of place.
    ///
    /// # Errors
    /// It has no disk of its own, or does not come up.
    pub async fn free_disk(&self) -> Result<()> {
        std::fs::remove_file(self.filler.as_ref().context("no disk of its own")?)?;
        // A crashed server either restarts by itself, or fails to and ends.
        for _ in 0..20 {
            if self.node()?.check_alive().await.is_err() {
                self.node()?.start_again().await?;
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.wait_ready().await
    }

    fn node(&self) -> Result<&Node> {
        self.node
            .as_ref()
            .context("this PostgreSQL comes from the environment: start a private one to stop it")
    }

    async fn wait_ready(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let refused = match sqlx::PgConnection::connect(&self.url).await {
                Ok(conn) => return Ok(conn.close().await?),
                Err(refused) => refused,
            };
            if let Some(node) = &self.node {
                node.check_alive().await?;
            }
            if Instant::now() > deadline {
                return Err(refused).context("PostgreSQL does not answer");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

fn server_arguments(port: u16, listen: &str, options: &PostgresOptions) -> Vec<String> {
    let mut arguments = vec!["-p".to_owned(), port.to_string()];
    let fixed = SETTINGS
        .iter()
        .map(|(n, v)| ((*n).to_owned(), (*v).to_owned()));
    let listen = ("listen_addresses".to_owned(), listen.to_owned());
    for (name, value) in fixed
        .chain([listen])
        .chain(options.settings.iter().cloned())
    {
        arguments.extend(["-c".to_owned(), format!("{name}={value}")]);
    }
    arguments
}

/// The password rule goes before the rules of `initdb -A trust`.
fn access_rule() -> String {
    format!(
        "host all +{PASSWORD_ROLE} all scram-sha-256\nhost all all all trust\nhost replication all all trust\nlocal all all trust\n"
    )
}

async fn initdb(programs: &Path, scratch: &Scratch) -> Result<()> {
    let data = scratch.dir().join("data");
    let mut initdb = Command::new(programs.join("initdb"));
    initdb
        .args([
            "-A",
            "trust",
            "-U",
            "postgres",
            "-E",
            "UTF8",
            "--locale=C",
            "-N",
            "-D",
        ])
        .arg(&data);
    run(initdb, scratch).await?;
    Ok(std::fs::write(data.join("pg_hba.conf"), access_rule())?)
}

/// Runs one of PostgreSQL's programs as the user that may, in the scratch directory.
async fn run(mut program: Command, scratch: &Scratch) -> Result<()> {
    program.current_dir(scratch.dir());
    if let Some((uid, gid)) = unprivileged()? {
        use std::os::unix::process::CommandExt;
        std::os::unix::fs::chown(scratch.dir(), Some(uid), Some(gid))?;
        program.uid(uid).gid(gid);
    }
    let name = program.get_program().display().to_string();
    let output = tokio::task::spawn_blocking(move || program.output()).await?;
    let output = output.with_context(|| name.clone())?;
    if !output.status.success() {
        bail!("{name}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

fn local(
    programs: &Path,
    scratch: &Scratch,
    port: u16,
    options: &PostgresOptions,
) -> Result<Process> {
    let data = scratch.dir().join("data");
    let mut argv = vec![
        programs.join("postgres").display().to_string(),
        "-D".to_owned(),
        data.display().to_string(),
    ];
    argv.extend(server_arguments(port, "127.0.0.1", options));
    if let Some((certificate, key)) = &options.tls {
        use std::os::unix::fs::PermissionsExt as _;
        for (name, text) in [("server.crt", certificate), ("server.key", key)] {
            let file = data.join(name);
            std::fs::write(&file, text)?;
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600))?;
            if let Some((uid, gid)) = unprivileged()? {
                std::os::unix::fs::chown(&file, Some(uid), Some(gid))?;
            }
        }
        argv.extend(["-c".to_owned(), "ssl=on".to_owned()]);
    }
    argv.extend([
        "-c".to_owned(),
        format!("unix_socket_directories={}", scratch.dir().display()),
    ]);
    Process::start(Program {
        name: "postgres".to_owned(),
        scratch: scratch.dir().to_owned(),
        argv,
        user: unprivileged()?,
        end_signal: "QUIT",
    })
}

async fn contained(scratch: &Scratch, port: u16, options: &PostgresOptions) -> Result<Container> {
    let home = container::home();
    let data = "/tmp/oncebox-data";
    let arguments = server_arguments(port, "*", options).join("' '");
    let script = format!(
        "PATH=\"$PATH:$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | tail -1)\"\n\
         [ -e {data}/PG_VERSION ] || initdb -A trust -U postgres -E UTF8 --locale=C -N -D {data} >/dev/null || exit 1\n\
         cp {home}/pg_hba.conf {data}/pg_hba.conf\n\
         exec postgres -D {data} -c unix_socket_directories=/tmp '{arguments}'",
        home = home.display(),
    );
    Container::start(Spec {
        image: images::postgres().await?,
        script,
        user: Some("postgres"),
        files: vec![(
            home.join("pg_hba.conf").display().to_string(),
            access_rule(),
        )],
        ports: vec![port],
        network_of: None,
        label: scratch.container_label()?,
    })
    .await
}

/// The directory of `initdb` and `postgres`: Debian keeps them out of the path, one directory per version.
fn programs() -> Result<PathBuf> {
    let mut candidates: Vec<PathBuf> = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path().join("bin")))
        .collect();
    candidates.sort_by_key(|bin| version_of(bin));
    candidates.reverse();
    candidates.extend(std::env::split_paths(
        &std::env::var_os("PATH").unwrap_or_default(),
    ));
    candidates
        .into_iter()
        .find(|bin| bin.join("initdb").is_file() && bin.join("postgres").is_file())
        .context("PostgreSQL's programs are missing: install the Debian package `postgresql`, or start a Docker engine")
}

fn version_of(bin: &Path) -> u32 {
    bin.parent()
        .and_then(Path::file_name)
        .and_then(|v| v.to_str())
        .and_then(|v| v.parse().ok())
        .unwrap_or(0)
}

/// PostgreSQL refuses to run as root: the ids of user `postgres` when we are root.
fn unprivileged() -> Result<Option<(u32, u32)>> {
    if id(&["-u"])? != 0 {
        return Ok(None);
    }
    let (uid, gid) = (id(&["-u", "postgres"]), id(&["-g", "postgres"]));
    Ok(Some((
        uid.context("no user `postgres` to run PostgreSQL as")?,
        gid?,
    )))
}

fn id(arguments: &[&str]) -> Result<u32> {
    let output = Command::new("id")
        .args(arguments)
        .output()
        .context("cannot run `id`")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().parse()?)
}
