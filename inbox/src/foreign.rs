//! An identity for messages that carry no Oncebox envelope.

use sha2::{Digest, Sha256};
use uuid::Uuid;

/// How a message without an Oncebox envelope is known, so that its duplicate can be recognised.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ForeignId {
    /// By where it lies: a hash of topic id, partition and offset. Catches every redelivery, but not a record that its
    /// producer wrote twice. The default.
    #[default]
    PartitionOffset,
    /// By the value of this header. A value that is a UUID is taken as it is, any other is hashed. Catches the producer's
    /// duplicates too. A message without the header is refused as with [`ForeignId::Refuse`].
    Header(String),
    /// Not at all: the message goes to the dead-letter table and the partition goes on.
    Refuse,
}

/// The id of a record known by its place.
pub(crate) fn by_place(topic_id: &str, partition: i32, offset: i64) -> Uuid {
    hash(&[
        b"place",
        topic_id.as_bytes(),
        &partition.to_be_bytes(),
        &offset.to_be_bytes(),
    ])
}

/// The id of a record known by a header.
pub(crate) fn by_header(name: &str, value: &[u8]) -> Uuid {
    std::str::from_utf8(value)
        .ok()
        .and_then(|text| Uuid::try_parse(text).ok())
        .unwrap_or_else(|| hash(&[b"header", name.as_bytes(), value]))
}

/// SHA-256, cut to 16 bytes and stamped as version 8 (RFC 9562 §5.8): 16 bytes in the mark instead of a long text.
fn hash(parts: &[&[u8]]) -> Uuid {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part);
    }
    let digest = hasher.finalize();
    let mut bytes = [0u8; 16];
    bytes.copy_from_slice(&digest[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_the_place_counts() {
        let ids = [
            by_place("a", 0, 0),
            by_place("b", 0, 0),
            by_place("a", 1, 0),
            by_place("a", 0, 1),
        ];
        for (i, x) in ids.iter().enumerate() {
            assert_eq!(x.get_version_num(), 8);
            assert!(ids[i + 1..].iter().all(|y| y != x));
        }
        assert_eq!(by_place("a", 0, 0), by_place("a", 0, 0));
    }

    #[test]
    fn a_uuid_in_the_header_is_taken_as_it_is() {
        let id = Uuid::now_v7();
        assert_eq!(by_header("id", id.to_string().as_bytes()), id);
        assert_ne!(by_header("id", b"order-1"), by_header("id", b"order-2"));
        assert_ne!(by_header("id", b"order-1"), by_header("key", b"order-1"));
    }
}
