//! Whether a test failed as its sabotage has to make it fail.

use std::time::Duration;

use anyhow::{Result, bail};

use super::patch::Patch;

/// How the test's process ended.
#[derive(Debug)]
pub(super) enum Code {
    Exit(i32),
    /// By a signal, an abort for example.
    Killed(String),
    /// By us.
    TimedOut(Duration),
}

/// How a test ended, and what it wrote.
#[derive(Debug)]
pub(super) struct End {
    pub(super) code: Code,
    pub(super) output: String,
}

/// What the test harness answers when a test has failed.
const FAILED: i32 = 101;

/// Fine only when the one test ran and failed on its assertion.
pub(super) fn verdict(patch: &Patch, end: &End) -> Result<()> {
    let output = &end.output;
    match &end.code {
        Code::TimedOut(limit) => bail!("timed out after {} s", limit.as_secs()),
        Code::Killed(how) => bail!("the test did not fail, it was killed: {how}"),
        Code::Exit(0) if output.contains("running 0 tests") => {
            bail!(
                "there is no test {} in {} {}",
                patch.test,
                patch.package,
                patch.target
            )
        }
        Code::Exit(0) if output.contains("skipped: ") => bail!("the test was skipped"),
        Code::Exit(0) => bail!("the test still passes: {}", patch.test),
        Code::Exit(FAILED) if output.contains("test result: FAILED. 0 passed; 1 failed;") => {}
        Code::Exit(code) => bail!("the test did not fail, its program ended with {code}"),
    }
    let Some((_, said)) = output.split_once("panicked at ") else {
        bail!("the test failed without a panic");
    };
    let expected = patch.says.as_deref().unwrap_or("assertion ");
    if !said.contains(expected) {
        bail!(
            "the test failed otherwise than on its assertion; expected {expected:?}, it said: {}",
            said.lines().take(6).collect::<Vec<_>>().join(" | ")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(code: Code, output: &str, says: Option<&str>) -> String {
        let patch = Patch {
            name: "g2-x".to_owned(),
            path: "g2-x.patch".into(),
            guarantee: "G2".to_owned(),
            package: "p".to_owned(),
            target: "lib".to_owned(),
            test: "t".to_owned(),
            says: says.map(str::to_owned),
            needs_services: false,
            files: vec![],
        };
        let end = End {
            code,
            output: output.to_owned(),
        };
        verdict(&patch, &end).map_or_else(|e| e.to_string(), |()| "passed".to_owned())
    }

    const FAILURE: &str = "running 1 test\ntest t ... FAILED\n\
        thread 't' panicked at a.rs:1:1:\nassertion `left == right` failed: inverted\n\
        test result: FAILED. 0 passed; 1 failed; 0 ignored";

    #[test]
    fn only_a_failed_assertion_passes() {
        assert_eq!(judge(Code::Exit(101), FAILURE, None), "passed");
        assert_eq!(judge(Code::Exit(101), FAILURE, Some("inverted")), "passed");
    }

    #[test]
    fn everything_else_is_named() {
        let other = FAILURE.replace("assertion", "no server: an");
        for (code, output, says, part) in [
            (Code::Exit(101), FAILURE, Some("lost"), "otherwise"),
            (Code::Exit(101), &*other, None, "otherwise"),
            (
                Code::Exit(101),
                "error: no such option",
                None,
                "ended with 101",
            ),
            (Code::Exit(1), FAILURE, None, "ended with 1"),
            (Code::Exit(0), "running 0 tests", None, "no test"),
            (Code::Exit(0), "running 1 test", None, "still passes"),
            (Code::Exit(0), "skipped: no Kafka", None, "skipped"),
            (Code::Killed("signal 6".into()), FAILURE, None, "killed"),
            (
                Code::TimedOut(Duration::from_secs(9)),
                FAILURE,
                None,
                "timed out after 9 s",
            ),
        ] {
            let said = judge(code, output, says);
            assert!(said.contains(part), "{said}");
        }
    }
}
