//! The encoded header list: what the `headers` columns hold.
//!
//! Repeated `{ name_len: u16 BE, name: UTF-8, value_len: i32 BE (-1 = null), value }`. Encoded once by the client at
//! enqueue; the relay reads it without allocating and hands it to Kafka.
//!
//! ```
//! use oncebox_migrations::headers;
//!
//! let list = headers::encode([("tenant", Some(&b"42"[..])), ("flag", None)])?;
//! let back = headers::decode(&list).collect::<Result<Vec<_>, _>>()?;
//! assert_eq!(back, [("tenant", Some(&b"42"[..])), ("flag", None)]);
//! # Ok::<(), headers::HeadersError>(())
//! ```

/// Encodes a list of headers in its order.
///
/// # Errors
///
/// [`HeadersError::TooLong`] when a name exceeds 65 535 bytes or a value 2 147 483 647 bytes.
pub fn encode<'a>(
    headers: impl IntoIterator<Item = (&'a str, Option<&'a [u8]>)>,
) -> Result<Vec<u8>, HeadersError> {
    let mut list = Vec::new();
    for (name, value) in headers {
        push(&mut list, name, value)?;
    }
    Ok(list)
}

/// Appends one header to an encoded list.
///
/// # Errors
///
/// [`HeadersError::TooLong`], as [`encode`]; the list is then unchanged.
pub fn push(list: &mut Vec<u8>, name: &str, value: Option<&[u8]>) -> Result<(), HeadersError> {
    let name_len = u16::try_from(name.len()).map_err(|_| HeadersError::TooLong {
        part: "name",
        actual: name.len(),
    })?;
    let value_len = match value {
        None => -1,
        Some(value) => i32::try_from(value.len()).map_err(|_| HeadersError::TooLong {
            part: "value",
            actual: value.len(),
        })?,
    };
    list.reserve(2 + name.len() + 4 + value.map_or(0, <[u8]>::len));
    list.extend_from_slice(&name_len.to_be_bytes());
    list.extend_from_slice(name.as_bytes());
    list.extend_from_slice(&value_len.to_be_bytes());
    list.extend_from_slice(value.unwrap_or_default());
    Ok(())
}

/// Reads an encoded list header by header, without allocating. After an error the iterator ends.
#[must_use]
pub fn decode(list: &[u8]) -> Decode<'_> {
    Decode {
        rest: list,
        offset: 0,
    }
}

/// The iterator of [`decode`].
#[derive(Debug, Clone)]
pub struct Decode<'a> {
    rest: &'a [u8],
    offset: usize,
}

impl<'a> Decode<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], HeadersError> {
        let (head, rest) = self
            .rest
            .split_at_checked(n)
            .ok_or(HeadersError::Malformed {
                offset: self.offset,
                what: "the list ends inside a header",
            })?;
        self.rest = rest;
        self.offset += n;
        Ok(head)
    }

    fn take_array<const N: usize>(&mut self) -> Result<[u8; N], HeadersError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn header(&mut self) -> Result<(&'a str, Option<&'a [u8]>), HeadersError> {
        let name_len = u16::from_be_bytes(self.take_array()?);
        let offset = self.offset;
        let name = std::str::from_utf8(self.take(usize::from(name_len))?).map_err(|_| {
            HeadersError::Malformed {
                offset,
                what: "a name is not UTF-8",
            }
        })?;
        let offset = self.offset;
        let value =
            match i32::from_be_bytes(self.take_array()?) {
                -1 => None,
                len => Some(self.take(usize::try_from(len).map_err(|_| {
                    HeadersError::Malformed {
                        offset,
                        what: "a value has a negative length",
                    }
                })?)?),
            };
        Ok((name, value))
    }
}

impl<'a> Iterator for Decode<'a> {
    type Item = Result<(&'a str, Option<&'a [u8]>), HeadersError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let header = self.header();
        if header.is_err() {
            self.rest = &[];
        }
        Some(header)
    }
}

impl std::iter::FusedIterator for Decode<'_> {}

/// A header list that cannot be encoded or decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeadersError {
    /// A name or value does not fit its length field.
    #[error("header {part} of {actual} bytes cannot be encoded")]
    TooLong {
        /// `name` or `value`.
        part: &'static str,
        /// Its length in bytes.
        actual: usize,
    },
    /// The bytes are no header list: written by something else than Oncebox, or damaged.
    #[error("not an encoded header list: {what} (byte {offset})")]
    Malformed {
        /// Where it was noticed.
        offset: usize,
        /// What is wrong.
        what: &'static str,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_format_is_fixed() {
        let list = encode([("a", Some(&b"xy"[..])), ("", None), ("é", Some(&b""[..]))]).unwrap();
        assert_eq!(
            list,
            [
                &[0, 1, b'a', 0, 0, 0, 2, b'x', b'y'][..],
                &[0, 0, 0xff, 0xff, 0xff, 0xff],
                &[0, 2, 0xc3, 0xa9, 0, 0, 0, 0],
            ]
            .concat()
        );
    }

    #[test]
    fn damaged_lists_are_errors_and_end() {
        for (list, what) in [
            (&[0][..], "ends inside"),
            (&[0, 1], "ends inside"),
            (&[0, 1, b'a', 0, 0, 0], "ends inside"),
            (&[0, 1, b'a', 0, 0, 0, 2, b'x'], "ends inside"),
            (&[0, 1, 0xff, 0, 0, 0, 0], "not UTF-8"),
            (&[0, 0, 0xff, 0xff, 0xff, 0xfe], "negative length"),
        ] {
            let mut decode = decode(list);
            let error = decode.next().unwrap().unwrap_err();
            assert!(error.to_string().contains(what), "{list:?}: {error}");
            assert!(decode.next().is_none());
        }
    }

    #[test]
    fn a_name_that_does_not_fit_leaves_the_list_unchanged() {
        let mut list = vec![1, 2, 3];
        let error = push(&mut list, &"n".repeat(65_536), None).unwrap_err();
        assert_eq!(
            error,
            HeadersError::TooLong {
                part: "name",
                actual: 65_536
            }
        );
        assert_eq!(list, [1, 2, 3]);
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(
            headers in prop::collection::vec((".{0,8}", prop::option::of(prop::collection::vec(any::<u8>(), 0..20))), 0..6)
        ) {
            let list = encode(headers.iter().map(|(n, v)| (n.as_str(), v.as_deref()))).unwrap();
            let back = decode(&list).collect::<Result<Vec<_>, _>>().unwrap();
            let back: Vec<_> = back.into_iter().map(|(n, v)| (n.to_owned(), v.map(<[u8]>::to_vec))).collect();
            prop_assert_eq!(back, headers);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
            let _ = decode(&bytes).count();
        }
    }
}
