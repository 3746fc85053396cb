//! The binary COPY format: <https://www.postgresql.org/docs/current/sql-copy.html#id-1.9.3.55.9.4>.

use bytes::{Buf as _, Bytes};

/// Signature, flags and length of the extension.
const SIGNATURE: &[u8] = b"PGCOPY\n\xff\r\n\0";

/// What a chunk of COPY data does not look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the server's COPY data cannot be understood: {0}")]
pub(crate) struct CopyError(pub(crate) &'static str);

/// Splits COPY data into rows of `N` fields. A chunk never splits a row.
#[derive(Debug, Default)]
pub(crate) struct CopyReader<const N: usize> {
    header_seen: bool,
}

impl<const N: usize> CopyReader<N> {
    /// Hands every row of the chunk to `row`; fields are slices of the chunk, NULL is `None`.
    pub(crate) fn chunk<E: From<CopyError>>(
        &mut self,
        mut chunk: Bytes,
        mut row: impl FnMut([Option<Bytes>; N]) -> Result<(), E>,
    ) -> Result<(), E> {
        if !self.header_seen {
            skip_header(&mut chunk)?;
            self.header_seen = true;
        }
        while chunk.has_remaining() {
            let fields = chunk
                .try_get_i16()
                .map_err(|_| CopyError("a row has no field count"))?;
            if fields == -1 {
                break;
            }
            if usize::try_from(fields) != Ok(N) {
                return Err(CopyError("a row has another number of fields").into());
            }
            let mut values = [const { None }; N];
            for value in &mut values {
                *value = field(&mut chunk)?;
            }
            row(values)?;
        }
        Ok(())
    }
}

fn skip_header(chunk: &mut Bytes) -> Result<(), CopyError> {
    if !chunk.starts_with(SIGNATURE) || chunk.len() < SIGNATURE.len() + 8 {
        return Err(CopyError("no signature"));
    }
    chunk.advance(SIGNATURE.len() + 4);
    let extension = usize::try_from(chunk.get_u32()).unwrap_or(usize::MAX);
    if chunk.len() < extension {
        return Err(CopyError("the header is cut off"));
    }
    chunk.advance(extension);
    Ok(())
}

fn field(chunk: &mut Bytes) -> Result<Option<Bytes>, CopyError> {
    let length = chunk
        .try_get_i32()
        .map_err(|_| CopyError("a field has no length"))?;
    if length == -1 {
        return Ok(None);
    }
    match usize::try_from(length) {
        Ok(length) if length <= chunk.len() => Ok(Some(chunk.split_to(length))),
        _ => Err(CopyError("a field is longer than its chunk")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Vec<u8> {
        let mut bytes = SIGNATURE.to_vec();
        bytes.extend([0; 8]);
        bytes
    }

    fn rows(chunks: &[Vec<u8>]) -> Result<Vec<[Option<Bytes>; 2]>, CopyError> {
        let mut reader = CopyReader::<2>::default();
        let mut rows = vec![];
        for chunk in chunks {
            reader.chunk(Bytes::from(chunk.clone()), |row| {
                rows.push(row);
                Ok::<_, CopyError>(())
            })?;
        }
        Ok(rows)
    }

    #[test]
    fn rows_fields_nulls_and_the_trailer() {
        let mut first = header();
        first.extend([0, 2, 0, 0, 0, 1, b'a', 0xff, 0xff, 0xff, 0xff]);
        let second = vec![0, 2, 0, 0, 0, 0, 0, 0, 0, 2, b'b', b'c'];
        let trailer = vec![0xff, 0xff];
        let bytes = |s: &'static [u8]| Some(Bytes::from_static(s));
        assert_eq!(
            rows(&[first, second, trailer]).unwrap(),
            [[bytes(b"a"), None], [bytes(b""), bytes(b"bc")]]
        );
    }

    #[test]
    fn damage_is_an_error() {
        let long = [header(), vec![0, 2, 0, 0, 0, 9, b'a']].concat();
        for bad in [
            vec![1, 2, 3],
            [header(), vec![0, 3]].concat(),
            [header(), vec![0]].concat(),
            long,
        ] {
            assert!(rows(&[bad]).is_err());
        }
    }
}
