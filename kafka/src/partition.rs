//! Which partition a key goes to: Java's choice, so that every producer of a topic agrees (G4).
//!
//! The producer lets librdkafka choose (`partitioner=murmur2_random`); this is the same function
//! for callers that need to know the answer, and the test vectors that hold both to Java's.

/// Murmur2 as in Kafka's Java client (`org.apache.kafka.common.utils.Utils.murmur2`).
#[must_use]
pub fn murmur2(data: &[u8]) -> u32 {
    const SEED: u32 = 0x9747_b28c;
    const M: u32 = 0x5bd1_e995;
    #[allow(clippy::cast_possible_truncation)] // Java's length is an int
    let mut h = SEED ^ data.len() as u32;
    let mut words = data.chunks_exact(4);
    for word in &mut words {
        let mut k = u32::from_le_bytes([word[0], word[1], word[2], word[3]]).wrapping_mul(M);
        k ^= k >> 24;
        h = h.wrapping_mul(M) ^ k.wrapping_mul(M);
    }
    let rest = words.remainder();
    if !rest.is_empty() {
        for (i, byte) in rest.iter().enumerate() {
            h ^= u32::from(*byte) << (8 * i);
        }
        h = h.wrapping_mul(M);
    }
    h ^= h >> 13;
    h = h.wrapping_mul(M);
    h ^ (h >> 15)
}

/// The partition of a key in a topic with this many partitions, as Java's default partitioner
/// chooses it.
///
/// # Panics
/// With no partitions.
///
/// ```
/// assert_eq!(oncebox_kafka::partition::for_key(b"order-42", 1), 0);
/// ```
#[must_use]
pub fn for_key(key: &[u8], partitions: u32) -> u32 {
    (murmur2(key) & 0x7fff_ffff) % partitions
}

/// Keys with Java's murmur2 and Java's partition of 12 (from Kafka's own `UtilsTest` where it has
/// them).
#[cfg(test)]
pub(crate) const JAVA_VECTORS: &[(&[u8], i32)] = &[
    (b"21", -973_932_308),
    (b"foobar", -790_332_482),
    (b"a-little-bit-long-string", -985_981_536),
    (b"a-little-bit-longer-string", -1_486_304_829),
    (
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8",
        -58_897_971,
    ),
    (b"abc", 479_470_107),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn murmur2_is_javas() {
        for (key, expected) in JAVA_VECTORS {
            assert_eq!(
                murmur2(key).cast_signed(),
                *expected,
                "{}",
                String::from_utf8_lossy(key)
            );
        }
    }
}
