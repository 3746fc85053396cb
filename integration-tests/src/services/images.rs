//! The images of the container path: one table, pulled where that works, otherwise built on this machine.

use std::fmt;

use anyhow::Result;

/// An image that can be run: `name:tag`.
#[derive(Clone, Debug)]
pub(crate) struct Image(String);

impl Image {
    /// Name and tag apart.
    pub(crate) fn name_and_tag(&self) -> (&str, &str) {
        match self.0.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, tag),
            _ => (&self.0, "latest"),
        }
    }
}

impl fmt::Display for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// PostgreSQL, ready to run.
pub(crate) async fn postgres() -> Result<Image> {
    Ok(Image(
        std::env::var("ONCEBOX_TEST_IMAGE_POSTGRES").unwrap_or_else(|_| "postgres:17".to_owned()),
    ))
}

/// Java with Kafka's jars, ready to run.
pub(crate) async fn kafka() -> Result<Image> {
    Ok(Image(
        std::env::var("ONCEBOX_TEST_IMAGE_KAFKA")
            .unwrap_or_else(|_| "apache/kafka:4.1.2".to_owned()),
    ))
}
