//! `cargo xtask sabotage`: takes one protection out at a time and expects the test that guards it to fail.
//!
//! `sabotage/README.md` says how a patch looks. Each is applied to a copy of the tree ([`copy`]), which is kept, as
//! are the builds, so that only what a patch touches is built again. A patch passes when its code compiles, its test
//! ran and failed on its assertion ([`mod@verdict`]); anything else is a failure, for then nothing shows that the test
//! guards the protection.

mod copy;
#[cfg(test)]
mod named;
mod patch;
mod verdict;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use self::copy::Copy;
use self::patch::Patch;
use self::verdict::{End, verdict};
use crate::test;
use crate::test::build::{Program, Programs};
use crate::test::services::Services;

/// The guarantees that are kept today; each has at least [`AT_LEAST`] patches.
const KEPT: &[&str] = &["G1", "G2", "G3", "G4", "G5", "G6", "G7", "G10"];
const AT_LEAST: usize = 2;

/// Tests of these crates are always selected together, so that their dependencies have the same features for every
/// patch and are built once. The integration tests need much more, and are selected alone.
const CRATES: &[&str] = &[
    "oncebox-outbox",
    "oncebox-migrations",
    "oncebox-kafka",
    "oncebox-relay",
    "oncebox-guard",
    "oncebox-inbox",
    "oncebox-gate",
];
const INTEGRATION: &str = "oncebox-integration-tests";

/// How long a test may take: without the sabotage none takes half of it.
const LIMIT: Duration = Duration::from_secs(180);

/// Tries the patches whose names begin with one of the arguments, or all of them; `--check` only looks whether all still
/// apply.
pub(crate) fn run(arguments: &[String]) -> Result<ExitCode> {
    let root = crate::workspace();
    let mut patches = patch::read_all(&root.join("sabotage"))?;
    if arguments == ["--check"] {
        return Ok(check(&root, &patches));
    }
    let mut complaints = Vec::new();
    if arguments.is_empty() {
        complaints.extend(too_few(&patches));
    } else {
        for name in arguments {
            if !patches.iter().any(|p| p.name.starts_with(name.as_str())) {
                bail!("no patch of sabotage/ begins with {name:?}");
            }
        }
        patches.retain(|p| arguments.iter().any(|a| p.name.starts_with(a.as_str())));
    }
    // neighbours touch the same crate: fewer builds
    patches.sort_by(|a, b| (&a.files, &a.name).cmp(&(&b.files, &b.name)));

    let home = root.join("target/sabotage");
    std::fs::create_dir_all(home.join("logs"))?;
    let lock = File::create(home.join("lock"))?;
    lock.lock().context("cannot lock target/sabotage")?;
    let mut stage = Stage {
        copy: Copy::refresh(&root, home.join("tree"))?,
        home,
        services: None,
    };
    if patches.iter().any(|p| p.needs_services) {
        let started = Instant::now();
        stage.start_services()?;
        println!("services: {:.0} s", started.elapsed().as_secs_f64());
    }

    let width = patches.iter().map(|p| p.name.len()).max().unwrap_or(0);
    let mut passed = 0;
    for patch in &patches {
        let started = Instant::now();
        let (test, outcome) = stage.attempt(patch);
        let seconds = started.elapsed().as_secs_f64();
        let word = if outcome.is_ok() { "passed" } else { "FAILED" };
        let test = test.map_or_else(String::new, |t| format!(", test {:.1}", t.as_secs_f64()));
        println!(
            "{:<4} {:<width$} {word} {seconds:>5.1} s{test}",
            patch.guarantee, patch.name
        );
        match outcome {
            Ok(()) => passed += 1,
            Err(reason) => complaints.push(format!("{}: {reason:#}", patch.name)),
        }
    }
    drop(stage);

    let failed = patches.len() - passed;
    for complaint in &complaints {
        println!("FAILED: {complaint}");
    }
    println!("\n{passed} passed, {failed} failed");
    Ok(if complaints.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Whether every patch still fits the tree. Seconds, where trying them takes minutes.
fn check(root: &Path, patches: &[Patch]) -> ExitCode {
    let mut code = ExitCode::SUCCESS;
    for patch in patches {
        if let Err(error) = copy::check(root, patch) {
            println!("FAILED: {}: {error:#}", patch.name);
            code = ExitCode::FAILURE;
        }
    }
    println!("{} patches looked at", patches.len());
    code
}

/// Guarantees with too few patches.
fn too_few(patches: &[Patch]) -> Vec<String> {
    let count = |guarantee: &str| patches.iter().filter(|p| p.guarantee == guarantee).count();
    KEPT.iter()
        .filter(|g| count(g) < AT_LEAST)
        .map(|g| format!("{g} has {} patches, it needs at least {AT_LEAST}", count(g)))
        .collect()
}

/// Where patches are tried.
struct Stage {
    home: PathBuf,
    copy: Copy,
    services: Option<Services>,
}

impl Stage {
    /// One PostgreSQL, one Kafka and one Redis for all patches, from the program that `cargo xtask test` takes them from.
    fn start_services(&mut self) -> Result<()> {
        let runner = test::prepare()?;
        let services = ["-p", INTEGRATION, "--bin", "oncebox-test-services"];
        let programs = self.build(&["build"], &services)?;
        self.services = Some(Services::start(&programs, runner)?);
        Ok(())
    }

    /// Tries one; how long its test took, if it ran, and whether the patch passes.
    fn attempt(&self, patch: &Patch) -> (Option<Duration>, Result<()>) {
        let applied = match self.copy.apply(patch) {
            Ok(applied) => applied,
            Err(error) => return (None, Err(error)),
        };
        let program = match self.program(patch) {
            Ok(program) => program,
            Err(error) => return (None, Err(error)),
        };
        let started = Instant::now();
        let end = self.test(patch, &program);
        let took = started.elapsed();
        drop(applied);
        (Some(took), end.and_then(|end| verdict(patch, &end)))
    }

    /// Builds the sabotaged code and the test program that the patch names.
    fn program(&self, patch: &Patch) -> Result<Program> {
        let mut arguments = Vec::new();
        let alone = [patch.package.as_str()];
        let selection = if CRATES.contains(&alone[0]) {
            CRATES
        } else {
            &alone
        };
        for package in selection {
            arguments.extend(["-p", package]);
        }
        let suite = match patch.target.as_str() {
            "lib" => {
                arguments.push("--lib");
                "unit"
            }
            target => {
                arguments.extend(["--test", target]);
                target
            }
        };
        let programs = self.build(&["test", "--no-run"], &arguments)?;
        programs.take(&format!("{} {suite}", patch.package))
    }

    fn build(&self, command: &[&str], selection: &[&str]) -> Result<Programs> {
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .args(command)
            .arg("--quiet")
            .args(selection)
            .current_dir(self.copy.root())
            .env("CARGO_TARGET_DIR", &self.home)
            // nobody looks at a backtrace here, and without it linking is quicker
            .env("CARGO_PROFILE_DEV_DEBUG", "none")
            .env("CARGO_TERM_COLOR", "never");
        test::build::programs(&mut cargo)
    }

    /// Runs the one test.
    fn test(&self, patch: &Patch, program: &Program) -> Result<End> {
        let log = |kind| self.home.join(format!("logs/{}.{kind}", patch.name));
        let (out, err) = (log("out"), log("err"));
        let mut command = Command::new(&program.executable);
        command
            .args(["--exact", &patch.test, "--show-output"])
            .current_dir(&program.dir)
            .stdin(Stdio::null())
            .stdout(File::create(&out)?)
            .stderr(File::create(&err)?);
        if let Some(services) = &self.services {
            command.envs(services.environment().iter().map(|(n, v)| (n, v)));
        }
        let code = wait(command, LIMIT)?;
        let read = |path: &Path| {
            std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        };
        Ok(End {
            code,
            output: format!("{}\n{}", read(&out)?, read(&err)?),
        })
    }
}

/// The exit code, and `None` for a process that was killed, here for being too slow or elsewhere.
fn wait(mut command: Command, limit: Duration) -> Result<verdict::Code> {
    use std::os::unix::process::CommandExt as _;
    // a group of its own: the relays that a hanging test has started end with it
    let mut child = command.process_group(0).spawn()?;
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(match status.code() {
                Some(code) => verdict::Code::Exit(code),
                None => verdict::Code::Killed(status.to_string()),
            });
        }
        if Instant::now() > deadline {
            let group = format!("-{}", child.id());
            // a builtin of the shell; not every machine has a binary of that name
            Command::new("sh")
                .args(["-c", r#"kill -s KILL -- "$1""#, "sh", &group])
                .status()?;
            child.wait()?;
            return Ok(verdict::Code::TimedOut(limit));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_patches_of_this_tree_are_well_formed_and_enough() {
        let patches = patch::read_all(&crate::workspace().join("sabotage")).unwrap();
        assert_eq!(too_few(&patches), [""; 0]);
    }
}
