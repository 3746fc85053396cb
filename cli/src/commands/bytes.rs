//! Bytes that may be text.

use std::fmt::Write as _;

use serde_json::{Value, json};

/// Bytes of a payload that `show` prints.
pub(crate) const SHOWN: usize = 4_096;

/// Text as text, other bytes as an object with their hexadecimal digits.
pub(crate) fn value(bytes: Option<&[u8]>) -> Value {
    let Some(bytes) = bytes else {
        return Value::Null;
    };
    match std::str::from_utf8(bytes) {
        Ok(text) => json!(text),
        Err(_) => json!({ "hex": hex(bytes) }),
    }
}

/// Printable text as it is, other bytes as hexadecimal digits.
pub(crate) fn text(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text)
            if !text
                .chars()
                .any(|c| c.is_control() && c != '\n' && c != '\t') =>
        {
            text.to_owned()
        }
        _ => format!("0x{}", hex(bytes)),
    }
}

/// A text of somebody else's as one line: no line breaks, nothing that a terminal would obey.
pub(crate) fn one_line(text: &str) -> String {
    let calm = text.replace(char::is_control, " ");
    calm.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// `key 42` or `no key`.
pub(crate) fn key(bytes: Option<&[u8]>) -> String {
    bytes.map_or("no key".to_owned(), |key| format!("key {}", text(key)))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(
        String::with_capacity(bytes.len() * 2),
        |mut digits, byte| {
            let _ = write!(digits, "{byte:02x}");
            digits
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_somebody_else_wrote_stays_on_its_line() {
        assert_eq!(
            one_line("no stock\n  at \u{1b}[2J line 2\n"),
            "no stock at [2J line 2"
        );
        assert_eq!(text(b"\x1b[2J"), "0x1b5b324a");
        assert_eq!(key(Some(b"42")), "key 42");
        assert_eq!(key(None), "no key");
    }
}
