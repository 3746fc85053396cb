//! The copy of the tree that is sabotaged.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::patch::Patch;

/// A copy of what git sees, uncommitted changes included. It is kept from run to run; a file is written only when it
/// differs, so that cargo builds only what has changed.
#[derive(Debug)]
pub(super) struct Copy {
    root: PathBuf,
}

impl Copy {
    /// Brings the copy at `root` up to date with the tree `from`.
    pub(super) fn refresh(from: &Path, root: PathBuf) -> Result<Self> {
        let listed = Command::new("git")
            .args([
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
            ])
            .current_dir(from)
            .output()
            .context("git")?;
        if !listed.status.success() {
            bail!("git ls-files: {}", String::from_utf8_lossy(&listed.stderr));
        }
        let listed = String::from_utf8(listed.stdout)?;
        // what is listed but deleted is not there to be copied
        let files: BTreeSet<&Path> = listed
            .split('\0')
            .map(Path::new)
            .filter(|file| from.join(file).is_file())
            .collect();
        std::fs::create_dir_all(&root)?;
        remove_others(&root, Path::new(""), &files)?;
        for file in files {
            let (source, target) = (from.join(file), root.join(file));
            if std::fs::read(&target).ok() != Some(std::fs::read(&source)?) {
                std::fs::create_dir_all(target.parent().unwrap_or(&root))?;
                std::fs::copy(&source, &target)?;
            }
        }
        // what the tests keep in `target`, Kafka's jars above all, is shared with the tree
        let (shared, wanted) = (root.join("target"), from.join("target"));
        if std::fs::read_link(&shared).ok().as_ref() != Some(&wanted) {
            let _ = std::fs::remove_file(&shared);
            std::os::unix::fs::symlink(wanted, shared)?;
        }
        Ok(Self { root })
    }

    /// The root of the copied workspace.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Applies a patch until the value is dropped.
    pub(super) fn apply(&self, patch: &Patch) -> Result<Applied> {
        let mut originals = Vec::new();
        for file in &patch.files {
            let path = self.root.join(file);
            let content = std::fs::read(&path)
                .with_context(|| format!("no longer applies: {file} is not there"))?;
            originals.push((path, content));
        }
        git_apply(&self.root, patch, &[])?;
        let applied = Applied { originals };
        if applied.changes_nothing()? {
            bail!("changes nothing");
        }
        Ok(applied)
    }
}

/// Whether a patch still fits the tree; changes nothing.
pub(super) fn check(root: &Path, patch: &Patch) -> Result<()> {
    git_apply(root, patch, &["--check"])
}

fn git_apply(root: &Path, patch: &Patch, more: &[&str]) -> Result<()> {
    let output = Command::new("git")
        // line numbers and counts may be off: the context decides
        .args(["apply", "--recount", "-C1", "--whitespace=nowarn"])
        .args(more)
        .arg(&patch.path)
        .current_dir(root)
        // the copy is no repository, and git must not take it for a part of the one around it
        .env("GIT_CEILING_DIRECTORIES", root.parent().unwrap_or(root))
        .output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("no longer applies: {}", said.trim());
    }
    Ok(())
}

/// An applied patch; taken back when dropped.
#[derive(Debug)]
pub(super) struct Applied {
    originals: Vec<(PathBuf, Vec<u8>)>,
}

impl Applied {
    fn changes_nothing(&self) -> Result<bool> {
        for (path, content) in &self.originals {
            if std::fs::read(path)? != *content {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Drop for Applied {
    fn drop(&mut self) {
        // written anew, so that cargo sees a change: an old time stamp would leave the sabotaged build in place
        for (path, content) in &self.originals {
            if let Err(error) = std::fs::write(path, content) {
                eprintln!("{}: {error}", path.display());
            }
        }
    }
}

/// Removes files and directories of the copy that the tree does not have.
fn remove_others(root: &Path, dir: &Path, files: &BTreeSet<&Path>) -> Result<()> {
    for entry in std::fs::read_dir(root.join(dir))? {
        let entry = entry?;
        let path = dir.join(entry.file_name());
        if path == Path::new("target") {
            continue;
        }
        if entry.file_type()?.is_dir() {
            remove_others(root, &path, files)?;
            // fails where something is left
            let _ = std::fs::remove_dir(root.join(&path));
        } else if !files.contains(path.as_path()) {
            std::fs::remove_file(root.join(&path))?;
        }
    }
    Ok(())
}
