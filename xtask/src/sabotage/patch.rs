//! A patch of `sabotage/`: its header, and what its diff touches.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

/// One protection taken out.
#[derive(Debug)]
pub(super) struct Patch {
    /// The file's name without `.patch`.
    pub(super) name: String,
    pub(super) path: PathBuf,
    /// `G1` to `G10`.
    pub(super) guarantee: String,
    /// Where the test is: package, `lib` or the name of an integration test, and the test's full name.
    pub(super) package: String,
    pub(super) target: String,
    pub(super) test: String,
    /// What the failing assertion prints.
    pub(super) says: Option<String>,
    pub(super) needs_services: bool,
    /// The files that the diff changes, relative to the root.
    pub(super) files: Vec<String>,
}

/// Every patch of a directory.
pub(super) fn read_all(dir: &Path) -> Result<Vec<Patch>> {
    let mut patches = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "patch") {
            let text = std::fs::read_to_string(&path)?;
            patches.push(Patch::parse(&path, &text).with_context(|| path.display().to_string())?);
        }
    }
    Ok(patches)
}

impl Patch {
    fn parse(path: &Path, text: &str) -> Result<Self> {
        let stem = path.file_stem().and_then(|s| s.to_str());
        let name = stem.context("the name is no UTF-8")?.to_owned();
        let header = text.lines().take_while(|l| !l.starts_with("--- "));
        let mut header: Vec<(&str, &str)> = header
            .filter_map(|line| line.split_once(": "))
            .map(|(key, value)| (key, value.trim()))
            .collect();
        let mut take = |key: &str| {
            let at = header.iter().position(|(k, _)| *k == key)?;
            Some(header.remove(at).1)
        };
        let guarantee = take("guarantee").context("no `guarantee:`")?.to_owned();
        let protection = take("protection").context("no `protection:`")?;
        let test = take("test").context("no `test:`")?;
        let says = take("says").map(str::to_owned);
        let needs: Vec<&str> = take("needs").map_or_else(Vec::new, |n| n.split(' ').collect());

        ensure!(!protection.is_empty(), "`protection:` is empty");
        let prefix = format!("{}-", guarantee.to_lowercase());
        ensure!(
            name.starts_with(&prefix),
            "the name has to begin with {prefix}"
        );
        let [package, target, test] = test.split(' ').collect::<Vec<_>>()[..] else {
            bail!("`test:` is not <package> <lib or integration test> <full test name>");
        };
        if let Some(unknown) = needs
            .iter()
            .find(|n| !["postgres", "kafka", "redis"].contains(n))
        {
            bail!("`needs:` knows postgres, kafka and redis, not {unknown}");
        }
        let changed = text.lines().filter_map(|line| line.strip_prefix("+++ b/"));
        let files: Vec<String> = changed.map(str::to_owned).collect();
        ensure!(!files.is_empty(), "no diff with `+++ b/…`");
        if let Some((unknown, _)) = header.first() {
            bail!("unknown header `{unknown}:`");
        }
        Ok(Self {
            name,
            path: path.to_owned(),
            guarantee,
            package: package.to_owned(),
            target: target.to_owned(),
            test: test.to_owned(),
            says,
            needs_services: !needs.is_empty(),
            files,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "\
guarantee: G2
protection: the probe: it comes first
test: oncebox-relay lib a::b
needs: postgres kafka
says: left: 1

--- a/relay/src/a.rs
+++ b/relay/src/a.rs
@@ -1,1 +1,1 @@
-key: value
+x
";

    fn parse(name: &str, text: &str) -> Result<Patch> {
        Patch::parse(Path::new(name), text)
    }

    #[test]
    fn a_header_is_read() {
        let patch = parse("g2-probe.patch", GOOD).unwrap();
        assert_eq!(
            (&*patch.package, &*patch.target, &*patch.test),
            ("oncebox-relay", "lib", "a::b")
        );
        assert_eq!(patch.says.as_deref(), Some("left: 1"));
        assert!(patch.needs_services);
        assert_eq!(patch.files, ["relay/src/a.rs"]);
    }

    #[test]
    fn what_is_missing_or_unknown_is_named() {
        for (from, to, part) in [
            ("guarantee: G2", "", "guarantee"),
            ("test: oncebox-relay lib", "test: oncebox-relay", "`test:`"),
            ("needs: postgres", "needs: mysql", "mysql"),
            ("says:", "say:", "`say:`"),
            ("+++ b/", "+++ c/", "diff"),
            ("G2", "G3", "g3-"),
        ] {
            let error = parse("g2-probe.patch", &GOOD.replacen(from, to, 1)).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
