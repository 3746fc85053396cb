//! What the doctor found: one line per check.

use std::fmt::Write as _;

use serde::Serialize;

use crate::redact::scrub;

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Ok,
    /// Works, but somebody should look.
    Warn,
    /// Does not work, or a guarantee is not kept.
    Fail,
    /// Could not be checked, because an earlier check failed or something was not given.
    Skip,
}

impl Status {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
            Self::Skip => "skip",
        }
    }
}

/// One check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Its name.
    pub name: String,
    /// How it ended.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// All checks, in the order in which they are read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checks(Vec<Check>);

impl Checks {
    fn push(
        &mut self,
        name: &str,
        status: Status,
        found: impl Into<String>,
        remedy: Option<String>,
    ) {
        self.0.push(Check {
            name: name.to_owned(),
            status,
            found: scrub(&found.into()),
            remedy: remedy.map(|r| scrub(&r)),
        });
    }

    /// Adds a check that found everything in order.
    pub fn ok(&mut self, name: &str, found: impl Into<String>) {
        self.push(name, Status::Ok, found, None);
    }

    /// Adds a check that found something to look at.
    pub fn warn(&mut self, name: &str, found: impl Into<String>, remedy: impl Into<String>) {
        self.push(name, Status::Warn, found, Some(remedy.into()));
    }

    /// Adds a check that failed.
    pub fn fail(&mut self, name: &str, found: impl Into<String>, remedy: impl Into<String>) {
        self.push(name, Status::Fail, found, Some(remedy.into()));
    }

    /// Adds a check that was not made.
    pub fn skip(&mut self, name: &str, why: impl Into<String>) {
        self.push(name, Status::Skip, why, None);
    }

    /// Appends other checks.
    pub fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// The checks.
    pub fn iter(&self) -> impl Iterator<Item = &Check> {
        self.0.iter()
    }

    /// Whether no check failed.
    pub fn healthy(&self) -> bool {
        self.0.iter().all(|c| c.status != Status::Fail)
    }

    fn count(&self, status: Status) -> usize {
        self.0.iter().filter(|c| c.status == status).count()
    }

    /// One line per check and a last line with the sum.
    pub fn text(&self) -> String {
        let width = self.0.iter().map(|c| c.name.len()).max().unwrap_or(0);
        let mut out = String::new();
        for check in &self.0 {
            let _ = write!(
                out,
                "{:<4}  {:<width$}  {}",
                check.status.word(),
                check.name,
                one_line(&check.found)
            );
            if let Some(remedy) = &check.remedy {
                let _ = write!(out, " -> {}", one_line(remedy));
            }
            out.push('\n');
        }
        let _ = writeln!(
            out,
            "{} ok, {} warn, {} FAIL, {} skipped",
            self.count(Status::Ok),
            self.count(Status::Warn),
            self.count(Status::Fail),
            self.count(Status::Skip)
        );
        out
    }

    /// One JSON object: `{"healthy": …, "checks": [{"name", "status", "found", "remedy"}]}`.
    pub fn json(&self) -> String {
        let mut text =
            serde_json::json!({ "healthy": self.healthy(), "checks": self.0 }).to_string();
        text.push('\n');
        text
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sick() -> Checks {
        let mut checks = Checks::default();
        checks.ok("database", "PostgreSQL 15");
        checks.warn("relay", "nobody leads", "start `oncebox relay`");
        checks.fail("schema", "version 0,\nneeded 2", "oncebox migrate");
        checks.skip("topics", "no broker");
        checks
    }

    #[test]
    fn a_check_is_one_line_with_its_remedy() {
        assert_eq!(
            sick().text(),
            "ok    database  PostgreSQL 15\n\
             warn  relay     nobody leads -> start `oncebox relay`\n\
             FAIL  schema    version 0, needed 2 -> oncebox migrate\n\
             skip  topics    no broker\n\
             1 ok, 1 warn, 1 FAIL, 1 skipped\n"
        );
    }

    #[test]
    fn one_failure_makes_it_unhealthy_and_json_says_so() {
        let checks = sick();
        assert!(!checks.healthy());
        let json: serde_json::Value = serde_json::from_str(&checks.json()).unwrap();
        assert_eq!(json["healthy"], false);
        assert_eq!(json["checks"][2]["status"], "fail");
        assert_eq!(json["checks"][2]["remedy"], "oncebox migrate");
        assert!(json["checks"][0].get("remedy").is_none());
    }

    #[test]
    fn no_secret_leaves_the_doctor() {
        let mut checks = Checks::default();
        checks.fail(
            "database",
            "cannot open postgres://u:doctor-secret@h/d",
            "correct postgres://u:doctor-secret@h/d",
        );
        let shown = format!("{}{}{:?}", checks.text(), checks.json(), checks);
        assert!(!shown.contains("doctor-secret"), "{shown}");
    }
}
