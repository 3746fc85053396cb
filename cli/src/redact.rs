//! Secrets stay secret: what may be printed of a URL, a property or a finished text.
//!
//! There are two lines of defence. Values that hold a secret ([`crate::config::DatabaseUrl`],
//! [`crate::config::Properties`]) print redacted by themselves. Behind them, everything the
//! process writes to the terminal or the log passes through [`scrub`], which knows the secrets
//! of this process and removes them even from the words of a foreign library.

use std::io::{self, Write};
use std::sync::{OnceLock, RwLock};

/// What stands in the place of a secret.
pub const HIDDEN: &str = "***";

/// Secrets shorter than this are not searched for in finished texts: removing every `a` would
/// destroy the text and tell the secret.
const SHORTEST: usize = 4;

fn secrets() -> &'static RwLock<Vec<String>> {
    static SECRETS: OnceLock<RwLock<Vec<String>>> = OnceLock::new();
    SECRETS.get_or_init(|| RwLock::new(Vec::new()))
}

/// Remembers a secret of this process; [`scrub`] removes it from then on.
pub fn remember(secret: &str) {
    if secret.len() < SHORTEST {
        return;
    }
    if let Ok(mut known) = secrets().write()
        && !known.iter().any(|s| s == secret)
    {
        known.push(secret.to_owned());
        // The longest first: a secret that contains another one must not leave its rest behind.
        known.sort_by_key(|s| std::cmp::Reverse(s.len()));
    }
}

/// `text` without the passwords of URLs in it and without the secrets given to [`remember`].
pub fn scrub(text: &str) -> String {
    let mut out = passwords_of_urls(text);
    if let Ok(known) = secrets().read() {
        for secret in known.iter() {
            if out.contains(secret.as_str()) {
                out = out.replace(secret.as_str(), HIDDEN);
            }
        }
    }
    out
}

/// Whether the value of the librdkafka property `name` is a secret.
pub fn is_secret_property(name: &str) -> bool {
    const PARTS: [&str; 7] = [
        "password",
        "secret",
        "oauthbearer.config",
        "ssl.key.pem",
        "token",
        "jaas",
        "assertion",
    ];
    let name = name.to_ascii_lowercase();
    PARTS.iter().any(|part| name.contains(part))
}

/// The URL with `***` for its password, also for one in the query (`?password=`).
pub fn url(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    // A password may hold an unescaped `/`, `?` or `@`: everything up to the last `@` in front
    // of a query's own `@` is taken for the credentials. Too much is hidden rather than too little.
    let (credentials, host) = match rest.rfind('@') {
        Some(at) => (Some(&rest[..at]), &rest[at + 1..]),
        None => (None, rest),
    };
    let mut out = format!("{scheme}://");
    if let Some(credentials) = credentials {
        match credentials.split_once(':') {
            Some((user, _)) => out.push_str(&format!("{user}:{HIDDEN}@")),
            None => out.push_str(&format!("{credentials}@")),
        }
    }
    match host.split_once('?') {
        Some((host, query)) => {
            out.push_str(host);
            out.push('?');
            let parts: Vec<String> = query.split('&').map(query_part).collect();
            out.push_str(&parts.join("&"));
        }
        None => out.push_str(host),
    }
    out
}

/// The secrets inside a URL: its password as written and decoded, and those in the query.
pub fn secrets_of_url(url: &str) -> Vec<String> {
    let Some((_, rest)) = url.split_once("://") else {
        return Vec::new();
    };
    let mut found = Vec::new();
    let host = match rest.rfind('@') {
        Some(at) => {
            if let Some((_, password)) = rest[..at].split_once(':') {
                found.push(password.to_owned());
            }
            &rest[at + 1..]
        }
        None => rest,
    };
    if let Some((_, query)) = host.split_once('?') {
        for part in query.split('&') {
            if let Some((name, value)) = part.split_once('=')
                && is_secret_property(name)
            {
                found.push(value.to_owned());
            }
        }
    }
    let decoded: Vec<String> = found.iter().map(|s| percent_decode(s)).collect();
    found.extend(decoded);
    found.retain(|s| !s.is_empty());
    found.dedup();
    found
}

fn query_part(part: &str) -> String {
    match part.split_once('=') {
        Some((name, _)) if is_secret_property(name) => format!("{name}={HIDDEN}"),
        _ => part.to_owned(),
    }
}

fn percent_decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while i < bytes.len() {
        let hex = bytes
            .get(i + 1..i + 3)
            .and_then(|h| std::str::from_utf8(h).ok());
        match (bytes[i], hex.and_then(|h| u8::from_str_radix(h, 16).ok())) {
            (b'%', Some(byte)) => {
                out.push(byte);
                i += 3;
            }
            (byte, _) => {
                out.push(byte);
                i += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Hides the credentials of every word of `text` that looks like a URL.
fn passwords_of_urls(text: &str) -> String {
    if !text.contains("://") {
        return text.to_owned();
    }
    let mut out = String::with_capacity(text.len());
    for piece in text.split_inclusive(|c: char| c.is_whitespace() || "\"'`,;()<>".contains(c)) {
        let (word, end) = match piece.char_indices().next_back() {
            Some((at, c)) if c.is_whitespace() || "\"'`,;()<>".contains(c) => piece.split_at(at),
            _ => (piece, ""),
        };
        if word.contains("://") {
            out.push_str(&url(word));
        } else {
            out.push_str(word);
        }
        out.push_str(end);
    }
    out
}

/// A writer that scrubs every write before it passes it on; for the log.
#[derive(Debug)]
pub struct Scrubbing<W>(pub W);

impl<W: Write> Write for Scrubbing<W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        // tracing-subscriber hands over one whole event per write.
        self.0
            .write_all(scrub(&String::from_utf8_lossy(buf)).as_bytes())?;
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_lose_their_passwords_and_keep_the_rest() {
        for (given, wanted) in [
            (
                "postgres://app:s3cret@db:5432/shop",
                "postgres://app:***@db:5432/shop",
            ),
            ("postgres://app@db/shop", "postgres://app@db/shop"),
            (
                "postgres://db/shop?password=s3cret&sslmode=require",
                "postgres://db/shop?password=***&sslmode=require",
            ),
            (
                "postgres://app:a/b@c:d@db/shop",
                "postgres://app:***@db/shop",
            ),
            ("sqlite:/tmp/orders.db", "sqlite:/tmp/orders.db"),
        ] {
            assert_eq!(url(given), wanted);
        }
    }

    #[test]
    fn texts_lose_urls_and_known_secrets() {
        remember("hunter2-is-long");
        let text = "cannot open 'postgres://u:p%40ss@h/d': password hunter2-is-long refused";
        assert_eq!(
            scrub(text),
            "cannot open 'postgres://u:***@h/d': password *** refused"
        );
    }

    #[test]
    fn the_secrets_of_a_url_are_found_encoded_and_decoded() {
        assert_eq!(
            secrets_of_url("postgres://u:p%40ss@h/d"),
            ["p%40ss", "p@ss"]
        );
        assert_eq!(secrets_of_url("postgres://h/d?password=abcd"), ["abcd"]);
        assert!(secrets_of_url("sqlite:x.db").is_empty());
    }

    #[test]
    fn secret_properties_are_known_by_name() {
        for name in [
            "sasl.password",
            "ssl.key.password",
            "ssl.keystore.password",
            "sasl.oauthbearer.client.secret",
            "ssl.key.pem",
        ] {
            assert!(is_secret_property(name), "{name}");
        }
        for name in [
            "sasl.username",
            "security.protocol",
            "ssl.ca.location",
            "linger.ms",
        ] {
            assert!(!is_secret_property(name), "{name}");
        }
    }

    #[test]
    fn the_log_writer_scrubs() {
        remember("very-secret-word");
        let mut out = Vec::new();
        Scrubbing(&mut out)
            .write_all(b"login very-secret-word failed\n")
            .unwrap();
        assert_eq!(out, b"login *** failed\n");
    }
}
