//! `--kill-at STEP[:N]`: the process kills itself with SIGKILL at a named point, for tests and the demo.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use oncebox_relay::{Step, StepHook};

/// A point of the publish loop, and how often it is reached before the kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KillAt {
    /// The step.
    pub step: Step,
    /// 1 = the first time. Also the claim at the start passes the Kafka steps.
    pub nth: u32,
}

impl KillAt {
    /// The hook that does it.
    pub fn hook(self) -> StepHook {
        let seen = AtomicU32::new(0);
        Arc::new(move |step| {
            if step == self.step && seen.fetch_add(1, Ordering::SeqCst) + 1 == self.nth {
                kill_self();
            }
        })
    }
}

/// SIGKILL: no destructor, no flush, no goodbye to the broker, as the out-of-memory killer does it.
pub fn kill_self() -> ! {
    let me = rustix::process::getpid();
    let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
    // The signal is delivered before the call returns to this thread; never go on if it is not.
    loop {
        std::thread::park();
    }
}

impl FromStr for KillAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (step, nth) = match text.split_once(':') {
            Some((step, nth)) => {
                let nth = nth.parse().ok().filter(|n| *n > 0);
                (
                    step,
                    nth.ok_or_else(|| {
                        format!("{text:?}: expected a count from 1 after the colon")
                    })?,
                )
            }
            None => (text, 1),
        };
        Ok(Self {
            step: step.parse()?,
            nth,
        })
    }
}

impl fmt::Display for KillAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.step, self.nth)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_and_counts_parse() {
        let at = |text: &str| text.parse::<KillAt>();
        assert_eq!(
            at("batch-read").unwrap(),
            KillAt {
                step: Step::BatchRead,
                nth: 1
            }
        );
        assert_eq!(
            at("endtxn-sent:3").unwrap(),
            KillAt {
                step: Step::EndTxnSent,
                nth: 3
            }
        );
        assert_eq!(at("committed:2").unwrap().to_string(), "committed:2");
        for bad in [
            "",
            "nowhere",
            "committed:0",
            "committed:",
            "committed:x",
            ":1",
        ] {
            assert!(at(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn other_steps_and_earlier_times_do_not_kill() {
        let hook = KillAt {
            step: Step::Acked,
            nth: 3,
        }
        .hook();
        for step in Step::all() {
            hook(step);
        }
        hook(Step::Acked);
    }
}
