//! The demo's promise, in small: relays die at every point, every other fault happens, and every order arrives exactly once.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::process::Command;

#[test]
fn every_order_arrives_exactly_once_while_relays_are_killed() {
    let output = Command::new(env!("CARGO_BIN_EXE_oncebox"))
        .args(["demo", "--orders", "200", "--kills", "5"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let problems = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{problems}");
    assert!(
        text.contains("RESULT: every committed order arrived exactly once"),
        "{text}"
    );
    let kills = "5: batch-read 1, producing 1, offsets-sent 1, endtxn-sent 1, committed 1";
    assert!(text.contains(kills), "{text}");
    for fault in [
        "injected copies 100, late 50",
        "delivered again",
        "the hint had forgotten",
        "by a second instance that came, settled",
        "refused by insert_once",
        "refused by the state machine 50",
        "between the stock and the points",
    ] {
        assert!(text.contains(fault), "{fault}: {text}");
    }
}
