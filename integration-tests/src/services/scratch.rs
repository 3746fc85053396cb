//! A directory whose contents, processes and containers cannot outlive the test process.
//!
//! The watchdog is a shell that waits for the end of a pipe which only this process holds open. The kernel closes that
//! pipe however the process ends, SIGKILL included; then the watchdog stops what is noted in the directory and removes it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

/// What the watchdog runs. `$1` = the directory. A `*.pid` file holds `<signal> <process group>`; a file `containers`
/// holds the label of the containers that belong to the directory.
const WATCHDOG: &str = r#"
trap '' INT TERM HUP
cat >/dev/null
cd "$1" || exit 0
if [ -e containers ]; then
    label=$(cat containers)
    for pass in 1 2; do
        ids=$(docker ps -aq --filter "label=$label") && [ -n "$ids" ] && docker rm -f -v $ids
        [ $pass = 2 ] || sleep 0.5
    done
fi
groups=
for file in *.pid; do
    [ -e "$file" ] || continue
    read -r signal group <"$file"
    kill -s CONT -- "-$group"
    kill -s "$signal" -- "-$group" && groups="$groups $group"
done
tries=0
for group in $groups; do
    while kill -s 0 -- "-$group" && [ $tries -lt 100 ]; do
        sleep 0.05
        tries=$((tries + 1))
    done
    kill -s KILL -- "-$group"
done
cd /
if [ -e "$1/mounted" ]; then
    umount "$1/data"
fi
rm -rf "$1"
"#;

/// A private directory with a watchdog.
#[derive(Debug)]
pub(crate) struct Scratch {
    dir: PathBuf,
    watchdog: Child,
}

impl Scratch {
    /// Makes the directory and starts its watchdog.
    pub(crate) fn new() -> Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("oncebox-test-")
            .tempdir()?
            .keep();
        make_traversable(&dir)?;
        let watchdog = Command::new("sh")
            .args(["-c", WATCHDOG, "oncebox-test-watchdog"])
            .arg(&dir)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .own_group()
            .spawn()
            .context("cannot start the watchdog shell")?;
        Ok(Self { dir, watchdog })
    }

    /// The directory.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Mounts a file system of so many bytes, in memory, as the directory `data`.
    ///
    /// # Errors
    /// Only root may mount.
    pub(crate) fn mount_data(&self, bytes: u64) -> Result<PathBuf> {
        let data = self.dir.join("data");
        std::fs::create_dir(&data)?;
        // Noted before: to unmount what is not mounted does nothing.
        std::fs::write(self.dir.join("mounted"), "")?;
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={bytes},mode=700")])
            .args(["oncebox-test"])
            .arg(&data)
            .status()
            .context("cannot run `mount`")?;
        if !mounted.success() {
            bail!("cannot mount a small file system: that takes root, with the right to mount");
        }
        Ok(data)
    }

    /// The label (`name`, `value`) that every container of this directory must carry. Noted before the first container
    /// is created, so that none can be missed.
    pub(crate) fn container_label(&self) -> Result<(String, String)> {
        let name = "oncebox.test.scratch";
        let value = self
            .dir
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        std::fs::write(self.dir.join("containers"), format!("{name}={value}\n"))?;
        Ok((name.to_owned(), value))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(self.watchdog.stdin.take());
        let _ = self.watchdog.wait();
    }
}

/// PostgreSQL runs as another user and has to reach its data below the directory.
fn make_traversable(dir: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// Starts a command in a process group of its own, so that Ctrl-C in a terminal reaches the tests first.
pub(crate) trait OwnGroup {
    /// See the trait.
    fn own_group(&mut self) -> &mut Self;
}

impl OwnGroup for Command {
    fn own_group(&mut self) -> &mut Self {
        use std::os::unix::process::CommandExt;
        self.process_group(0)
    }
}
