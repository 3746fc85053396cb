//! One test program: run, limited in time, counted.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::build::Program;

/// What became of a suite.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) name: String,
    pub(super) passed: usize,
    pub(super) failed: usize,
    /// One reason per skipped test.
    pub(super) skipped: Vec<String>,
    pub(super) took: Duration,
    /// The suite did not end as it should.
    pub(super) broken: Option<String>,
}

impl Outcome {
    /// A program without tests.
    pub(super) fn is_empty(&self) -> bool {
        self.passed + self.failed + self.skipped.len() == 0 && self.broken.is_none()
    }

    /// A suite that cannot run here.
    pub(super) fn skipped(name: &str, reason: &str) -> Self {
        Self {
            name: name.to_owned(),
            skipped: vec![reason.to_owned()],
            ..Self::default()
        }
    }
}

/// A suite to run.
pub(super) struct Suite<'a> {
    name: String,
    program: &'a Program,
    log: PathBuf,
    limit: Duration,
}

impl<'a> Suite<'a> {
    /// A test program as cargo would run it.
    pub(super) fn program(program: &'a Program, logs: &Path) -> Self {
        Self::named(&program.suite, program, logs, Duration::from_secs(1200))
    }

    /// A test program under another name.
    pub(super) fn named(name: &str, program: &'a Program, logs: &Path, limit: Duration) -> Self {
        Self {
            name: name.to_owned(),
            program,
            log: logs.join(format!("{}.log", name.replace(' ', "-"))),
            limit,
        }
    }

    /// Runs it; its output goes to its log, and from there to standard output when it fails.
    pub(super) fn run(
        &self,
        environment: &[(String, String)],
        filters: &[&str],
    ) -> Result<Outcome> {
        let log = File::create(&self.log)?;
        let started = Instant::now();
        let child = Command::new(&self.program.executable)
            // the output of passed tests too: they say there what they skipped
            .arg("--show-output")
            .args(filters)
            .current_dir(&self.program.dir)
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let broken = wait(child, self.limit)?;
        let text = String::from_utf8_lossy(&std::fs::read(&self.log)?).into_owned();
        let mut outcome = Outcome {
            name: self.name.clone(),
            took: started.elapsed(),
            broken,
            ..Outcome::default()
        };
        count(&text, &mut outcome);
        announce(&outcome, &text);
        Ok(outcome)
    }
}

/// The doc tests of every crate: one suite per crate.
pub(super) fn doc_tests(environment: &[(String, String)], logs: &Path) -> Result<Vec<Outcome>> {
    let path = logs.join("doc.log");
    let log = File::create(&path)?;
    let started = Instant::now();
    let child = Command::new(env!("CARGO"))
        .args(["test", "--workspace", "--doc", "--no-fail-fast"])
        .current_dir(crate::workspace())
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()?;
    let mut broken = wait(child, Duration::from_secs(1200))?;
    let text = String::from_utf8_lossy(&std::fs::read(&path)?).into_owned();
    let mut outcomes = Vec::new();
    for part in text.split("   Doc-tests ").skip(1) {
        let name = part.lines().next().unwrap_or_default().replace('_', "-");
        let mut outcome = Outcome {
            name: format!("{name} doc"),
            ..Outcome::default()
        };
        count(part, &mut outcome);
        if outcome.failed > 0 {
            outcome.broken = broken.take();
        }
        announce(&outcome, part);
        outcomes.push(outcome);
    }
    if let Some(reason) = broken {
        print!("{text}");
        outcomes.push(Outcome {
            name: "doc tests".to_owned(),
            broken: Some(reason),
            ..Outcome::default()
        });
    }
    println!("doc tests: {:.0} s", started.elapsed().as_secs_f64());
    Ok(outcomes)
}

/// Waits for the program; past the limit it is killed. What is wrong with its end, if anything.
fn wait(mut child: Child, limit: Duration) -> Result<Option<String>> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok((!status.success()).then(|| status.to_string()));
        }
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            return Ok(Some(format!("killed after {} s", limit.as_secs())));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Adds up `test result: ok. 3 passed; 0 failed; 1 ignored; …` and the tests that say `skipped: reason`.
fn count(text: &str, outcome: &mut Outcome) {
    let mut said = 0;
    for line in text.lines() {
        if let Some((_, result)) = line.split_once("test result: ") {
            let number = |what: &str| {
                let before = result.split(what).next().unwrap_or_default();
                before
                    .rsplit([' ', '.', ';'])
                    .find_map(|word| word.parse::<usize>().ok())
                    .unwrap_or(0)
            };
            outcome.passed += number(" passed");
            outcome.failed += number(" failed");
        } else if let Some(test) = line
            .strip_prefix("test ")
            .and_then(|l| l.split_once(" ... ignored"))
        {
            outcome
                .skipped
                .push(format!("{}: ignored{}", test.0, test.1));
        } else if let Some(reason) = line.trim_start().strip_prefix("skipped: ") {
            // the harness counts it among the passed
            said += 1;
            outcome.skipped.push(reason.to_owned());
        }
    }
    outcome.passed = outcome.passed.saturating_sub(said);
}

fn announce(outcome: &Outcome, text: &str) {
    if outcome.is_empty() {
        return;
    }
    if outcome.broken.is_some() || outcome.failed > 0 {
        // the harness prints what the failed tests said last; a crashed one has only its end
        let failures = text
            .find("\nfailures:\n")
            .unwrap_or_else(|| text.floor_char_boundary(text.len().saturating_sub(8000)));
        println!("{}", &text[failures..]);
    }
    println!(
        "{}: {} passed, {} failed, {:.0} s",
        outcome.name,
        outcome.passed,
        outcome.failed,
        outcome.took.as_secs_f64()
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_the_harness_says() {
        let text = "\
test a ... ok
test b ... ignored, needs a moon

---- c stdout ----
skipped: no engine

test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
test result: ok. 5 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
        let mut outcome = Outcome::default();
        count(text, &mut outcome);
        assert_eq!((outcome.passed, outcome.failed), (16, 3));
        assert_eq!(outcome.skipped, ["b: ignored, needs a moon", "no engine"]);
    }
}
