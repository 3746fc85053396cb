//! Kafka's frames: a length of four bytes, then the message.

use anyhow::{Result, bail};
use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The api keys that tests have rules for.
pub mod api {
    /// Produce.
    pub const PRODUCE: i16 = 0;
    /// Fetch.
    pub const FETCH: i16 = 1;
    /// Metadata.
    pub const METADATA: i16 = 3;
    /// OffsetCommit.
    pub const OFFSET_COMMIT: i16 = 8;
    /// OffsetFetch.
    pub const OFFSET_FETCH: i16 = 9;
    /// InitProducerId.
    pub const INIT_PRODUCER_ID: i16 = 22;
    /// AddPartitionsToTxn.
    pub const ADD_PARTITIONS_TO_TXN: i16 = 24;
    /// AddOffsetsToTxn.
    pub const ADD_OFFSETS_TO_TXN: i16 = 25;
    /// EndTxn.
    pub const END_TXN: i16 = 26;
    /// TxnOffsetCommit.
    pub const TXN_OFFSET_COMMIT: i16 = 28;
}

/// Larger frames are nonsense on a test broker.
const MAX_FRAME: usize = 128 << 20;

/// Reads one frame without its length; `None` at the end of the stream.
pub(super) async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Option<Bytes>> {
    let length = match stream.read_i32().await {
        Ok(length) => length,
        Err(end) if end.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(other) => return Err(other.into()),
    };
    let length = usize::try_from(length)?;
    if length > MAX_FRAME {
        bail!("a frame of {length} bytes");
    }
    let mut frame = BytesMut::zeroed(length);
    stream.read_exact(&mut frame).await?;
    Ok(Some(frame.freeze()))
}

/// Writes one frame with its length, in one write.
pub(super) async fn write(stream: &mut (impl AsyncWrite + Unpin), frame: &[u8]) -> Result<()> {
    let length = i32::try_from(frame.len())?;
    let mut bytes = Vec::with_capacity(4 + frame.len());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(frame);
    stream.write_all(&bytes).await?;
    Ok(())
}

/// The fixed beginning of every request.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestHead {
    pub(super) api_key: i16,
    pub(super) version: i16,
    pub(super) correlation: i32,
}

impl RequestHead {
    pub(super) fn of(mut frame: &[u8]) -> Result<Self> {
        if frame.len() < 8 {
            bail!("a request of {} bytes", frame.len());
        }
        Ok(Self {
            api_key: frame.get_i16(),
            version: frame.get_i16(),
            correlation: frame.get_i32(),
        })
    }
}

/// The broker's response to a request that a rule held, or a held response.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Api key of the request.
    pub api_key: i16,
    /// Version of the request.
    pub version: i16,
    /// The response without length and correlation id.
    pub body: Bytes,
}

impl Answer {
    /// The first error code of a transactional response (0 = none): InitProducerId, AddPartitionsToTxn up to v3,
    /// AddOffsetsToTxn, EndTxn, TxnOffsetCommit. `None` for anything else, or a body that is too short.
    pub fn error_code(&self) -> Option<i16> {
        let flexible_since = match self.api_key {
            api::INIT_PRODUCER_ID => 2,
            api::ADD_PARTITIONS_TO_TXN
            | api::ADD_OFFSETS_TO_TXN
            | api::END_TXN
            | api::TXN_OFFSET_COMMIT => 3,
            _ => return None,
        };
        let flexible = self.version >= flexible_since;
        let mut body = &self.body[..];
        skip(&mut body, usize::from(flexible))?; // tags of the response header: none
        skip(&mut body, 4)?; // throttle time
        if matches!(
            self.api_key,
            api::ADD_PARTITIONS_TO_TXN | api::TXN_OFFSET_COMMIT
        ) {
            // the first topic's name, the count of its partitions, the first partition's number
            let name = if flexible {
                skip(&mut body, 1)?;
                usize::from(*body.first()?).checked_sub(1)? + 1
            } else {
                skip(&mut body, 4)?;
                usize::from(u16::from_be_bytes([*body.first()?, *body.get(1)?])) + 2
            };
            skip(&mut body, name)?;
            skip(&mut body, if flexible { 1 } else { 4 } + 4)?;
        }
        Some(i16::from_be_bytes([*body.first()?, *body.get(1)?]))
    }
}

fn skip(body: &mut &[u8], n: usize) -> Option<()> {
    *body = body.get(n..)?;
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(api_key: i16, version: i16, body: &[u8]) -> Answer {
        Answer {
            api_key,
            version,
            body: Bytes::copy_from_slice(body),
        }
    }

    #[test]
    fn finds_the_error_code() {
        assert_eq!(
            answer(api::END_TXN, 1, &[0, 0, 0, 0, 0, 47]).error_code(),
            Some(47)
        );
        assert_eq!(
            answer(api::END_TXN, 3, &[0, 0, 0, 0, 0, 0, 47, 0]).error_code(),
            Some(47)
        );
        let offset_commit = [
            0, 0, 0, 0, 0, 2, 3, b't', b't', 2, 0, 0, 0, 0, 0, 48, 0, 0, 0,
        ];
        assert_eq!(
            answer(api::TXN_OFFSET_COMMIT, 3, &offset_commit).error_code(),
            Some(48)
        );
        let add_partitions = [
            0, 0, 0, 0, 0, 0, 0, 1, 0, 1, b't', 0, 0, 0, 1, 0, 0, 0, 3, 0, 51,
        ];
        assert_eq!(
            answer(api::ADD_PARTITIONS_TO_TXN, 0, &add_partitions).error_code(),
            Some(51)
        );
        assert_eq!(answer(api::END_TXN, 1, &[0, 0]).error_code(), None);
        assert_eq!(answer(api::PRODUCE, 7, &[0; 64]).error_code(), None);
    }
}
