//! The headers of a consumed record, in one piece of memory.

use std::fmt;

use bytes::Bytes;

/// The headers of a consumed record, in their order; a name may occur more than once. Cheap to clone.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Headers(Bytes);

/// Length that stands for a value that is null.
const NULL: usize = usize::MAX;

impl Headers {
    /// Name and value of each header; `None` is Kafka's null, which is not an empty value.
    #[must_use]
    pub fn iter(&self) -> HeaderIter<'_> {
        HeaderIter(&self.0)
    }

    /// The value of the first header of this name; `None` also if that value is null.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.iter().find(|(n, _)| *n == name)?.1
    }

    /// The list that [`push`] has written.
    pub(crate) fn of(list: Bytes) -> Self {
        Self(list)
    }
}

/// Appends a header to a list: the lengths, the name, the value.
pub(crate) fn push(list: &mut Vec<u8>, name: &str, value: Option<&[u8]>) {
    list.extend_from_slice(&name.len().to_ne_bytes());
    list.extend_from_slice(&value.map_or(NULL, <[u8]>::len).to_ne_bytes());
    list.extend_from_slice(name.as_bytes());
    list.extend_from_slice(value.unwrap_or_default());
}

/// The iterator of [`Headers::iter`].
#[derive(Clone, Debug)]
pub struct HeaderIter<'a>(&'a [u8]);

impl<'a> Iterator for HeaderIter<'a> {
    type Item = (&'a str, Option<&'a [u8]>);

    fn next(&mut self) -> Option<Self::Item> {
        let (name, rest) = self.0.split_first_chunk()?;
        let (value, rest) = rest.split_first_chunk()?;
        let value = Some(usize::from_ne_bytes(*value)).filter(|length| *length != NULL);
        let (name, rest) = rest.split_at_checked(usize::from_ne_bytes(*name))?;
        let (content, rest) = rest.split_at_checked(value.unwrap_or(0))?;
        self.0 = rest;
        Some((std::str::from_utf8(name).ok()?, value.map(|_| content)))
    }
}

impl<'a> IntoIterator for &'a Headers {
    type Item = (&'a str, Option<&'a [u8]>);
    type IntoIter = HeaderIter<'a>;

    fn into_iter(self) -> HeaderIter<'a> {
        self.iter()
    }
}

impl<'a> FromIterator<(&'a str, Option<&'a [u8]>)> for Headers {
    fn from_iter<I: IntoIterator<Item = (&'a str, Option<&'a [u8]>)>>(headers: I) -> Self {
        let mut list = Vec::new();
        for (name, value) in headers {
            push(&mut list, name, value);
        }
        Self(list.into())
    }
}

impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |(name, value): (_, Option<&[u8]>)| (name, value.map(Bytes::copy_from_slice));
        f.debug_list().entries(self.iter().map(shown)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_keep_their_order_their_doubles_and_their_nulls() {
        let list: [(&str, Option<&[u8]>); 4] = [
            ("a", Some(b"1")),
            ("a", Some(b"")),
            ("", None),
            ("b", Some(&[0xff; 300])),
        ];
        let headers: Headers = list.into_iter().collect();
        assert_eq!(headers.iter().collect::<Vec<_>>(), list);
        assert_eq!(headers.get("a"), Some(&b"1"[..]));
        assert_eq!((headers.get(""), headers.get("c")), (None, None));
        assert_eq!(Headers::default().iter().count(), 0);
        assert!(
            format!("{headers:?}")
                .starts_with(r#"[("a", Some(b"1")), ("a", Some(b"")), ("", None)"#)
        );
    }
}
