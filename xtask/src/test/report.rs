//! What is said at the end.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::expected;
use super::suite::Outcome;

/// The outcomes so far.
#[derive(Debug, Default)]
pub(super) struct Report {
    outcomes: Vec<Outcome>,
    steps: Vec<(&'static str, Duration)>,
}

impl Report {
    /// Notes a suite.
    pub(super) fn add(&mut self, outcome: Outcome) {
        // cargo makes a test program of every binary, and most hold no test
        if !outcome.is_empty() || expected::SUITES.contains(&outcome.name.as_str()) {
            self.outcomes.push(outcome);
        }
    }

    /// Runs a step that is no suite and notes its time.
    pub(super) fn timed<T>(
        &mut self,
        step: &'static str,
        run: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let started = Instant::now();
        let result = run();
        self.steps.push((step, started.elapsed()));
        result
    }

    /// Prints the summary and writes its last line to `summary` among the logs. Whether everything passed.
    pub(super) fn print(&self, logs: &Path) -> Result<bool> {
        println!(
            "\n{:<40} {:>6} {:>6} {:>7} {:>6}",
            "suite", "passed", "failed", "skipped", "s"
        );
        for (step, took) in &self.steps {
            println!("{step:<40} {:>29.0}", took.as_secs_f64());
        }
        for o in &self.outcomes {
            let seconds = o.took.as_secs_f64();
            println!(
                "{:<40} {:>6} {:>6} {:>7} {seconds:>6.0}",
                o.name,
                o.passed,
                o.failed,
                o.skipped.len()
            );
            for reason in &o.skipped {
                println!("  skipped: {reason}");
            }
        }
        let complaints = self.complaints();
        for complaint in &complaints {
            println!("FAILED: {complaint}");
        }
        let passed: usize = self.outcomes.iter().map(|o| o.passed).sum();
        let failed: usize = self.outcomes.iter().map(|o| o.failed).sum();
        let skipped: usize = self.outcomes.iter().map(|o| o.skipped.len()).sum();
        // a broken suite without a failed test still is a failure
        let failed = if complaints.is_empty() {
            failed
        } else {
            failed.max(complaints.len())
        };
        let line = format!("{passed} passed, {failed} failed, {skipped} skipped");
        std::fs::write(logs.join("summary"), format!("{line}\n"))?;
        println!("\n{line}");
        Ok(failed == 0)
    }

    /// Everything that is not as it has to be.
    fn complaints(&self) -> Vec<String> {
        let mut complaints = Vec::new();
        for o in &self.outcomes {
            if let Some(reason) = &o.broken {
                complaints.push(format!("{}: {reason}", o.name));
            } else if o.failed > 0 {
                complaints.push(format!("{}: {} tests failed", o.name, o.failed));
            }
            // services are there for every suite but the one on containers, which may lack an engine
            if !o.skipped.is_empty() && o.name != expected::ON_CONTAINERS {
                complaints.push(format!(
                    "{}: skipped although it could run: {}",
                    o.name,
                    o.skipped.join("; ")
                ));
            }
            if o.passed > 0 && !expected::SUITES.contains(&o.name.as_str()) {
                complaints.push(format!(
                    "{}: not in the table of expected suites (xtask/src/test/expected.rs)",
                    o.name
                ));
            }
        }
        for name in expected::SUITES {
            match self.outcomes.iter().find(|o| o.name == *name) {
                None => complaints.push(format!("{name}: the suite is missing")),
                Some(o) if o.is_empty() => {
                    complaints.push(format!("{name}: no test ran"));
                }
                Some(_) => {}
            }
        }
        complaints
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_well() -> Report {
        let outcome = |name: &&str| Outcome {
            name: (*name).to_owned(),
            passed: 1,
            ..Outcome::default()
        };
        Report {
            outcomes: expected::SUITES.iter().map(outcome).collect(),
            steps: Vec::new(),
        }
    }

    #[test]
    fn nothing_to_complain_about() {
        assert_eq!(all_well().complaints(), [""; 0]);
    }

    #[test]
    fn a_suite_that_is_missing_or_empty_or_skips_is_a_failure() {
        let mut report = all_well();
        let missing = report.outcomes.remove(0).name;
        report.outcomes[0].passed = 0;
        report.outcomes[1].skipped.push("too lazy".to_owned());
        report.outcomes[2].broken = Some("exit status: 101".to_owned());
        let said = report.complaints().join("\n");
        for expected in [
            "skipped although it could run: too lazy",
            "exit status: 101",
            "no test ran",
        ] {
            assert!(said.contains(expected), "{said}");
        }
        assert!(
            said.contains(&format!("{missing}: the suite is missing")),
            "{said}"
        );
    }

    #[test]
    fn an_unlisted_suite_is_a_failure() {
        let mut report = all_well();
        report.add(Outcome {
            name: "new".to_owned(),
            passed: 1,
            ..Outcome::default()
        });
        assert_eq!(report.complaints().len(), 1);
    }

    #[test]
    fn only_the_suite_on_containers_may_be_skipped() {
        let mut report = all_well();
        report
            .outcomes
            .retain(|o| o.name != expected::ON_CONTAINERS);
        report.add(Outcome::skipped(expected::ON_CONTAINERS, "no engine"));
        assert_eq!(report.complaints(), [""; 0]);
    }
}
