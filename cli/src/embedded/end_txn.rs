//! The rewriting of one request: `EndTxn` v0–v2 to v3 and its response back.
//!
//! v3 differs in form only (KIP-482): compact strings and empty tag sections.

/// Api key of `EndTxn`.
const END_TXN: i16 = 26;
/// First version in the flexible form.
const FLEXIBLE: i16 = 3;

/// If this request is an old `EndTxn`: the same request as v3, and its correlation id.
pub(super) fn upgrade(request: &[u8]) -> Option<(Vec<u8>, i32)> {
    let (api_key, version) = (i16_at(request, 0)?, i16_at(request, 2)?);
    if api_key != END_TXN || version >= FLEXIBLE {
        return None;
    }
    let correlation = i32::from_be_bytes(*request.get(4..)?.first_chunk()?);
    // key, version, correlation id, client id with its length (-1 = null)
    let body = 10 + usize::try_from(i16_at(request, 8)?.max(0)).ok()?;
    let id_length = u32::try_from(i16_at(request, body)?).ok()?;

    let mut upgraded = request.get(..body)?.to_vec();
    upgraded[2..4].copy_from_slice(&FLEXIBLE.to_be_bytes());
    upgraded.push(0); // tags of the header
    put_uvarint(&mut upgraded, id_length + 1);
    upgraded.extend_from_slice(request.get(body + 2..)?); // transactional id, producer id, epoch, committed
    upgraded.push(0); // tags of the body
    Some((upgraded, correlation))
}

/// The v3 response to an upgraded request as the client expects it.
pub(super) fn downgrade(response: &mut Vec<u8>) {
    if response.len() > 5 {
        response.remove(4); // tags of the header, after the correlation id
        response.pop(); // tags of the body
    }
}

fn i16_at(bytes: &[u8], at: usize) -> Option<i16> {
    Some(i16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn put_uvarint(bytes: &mut Vec<u8>, mut value: u32) {
    while value >= 0x80 {
        bytes.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(version: i16, id: &str) -> Vec<u8> {
        let mut r = Vec::new();
        r.extend(END_TXN.to_be_bytes());
        r.extend(version.to_be_bytes());
        r.extend(7i32.to_be_bytes());
        r.extend(2i16.to_be_bytes());
        r.extend(b"me");
        r.extend((id.len() as i16).to_be_bytes());
        r.extend(id.as_bytes());
        r.extend(5i64.to_be_bytes());
        r.extend(1i16.to_be_bytes());
        r.push(1);
        r
    }

    #[test]
    fn an_old_request_becomes_v3() {
        let id = "x".repeat(200);
        let (upgraded, correlation) = upgrade(&request(1, &id)).unwrap();
        assert_eq!(correlation, 7);
        let mut expected = Vec::new();
        expected.extend(END_TXN.to_be_bytes());
        expected.extend(3i16.to_be_bytes());
        expected.extend(7i32.to_be_bytes());
        expected.extend(2i16.to_be_bytes());
        expected.extend(b"me\0");
        expected.extend([0xc9, 0x01]); // 201
        expected.extend(id.as_bytes());
        expected.extend(5i64.to_be_bytes());
        expected.extend(1i16.to_be_bytes());
        expected.extend([1, 0]);
        assert_eq!(upgraded, expected);
    }

    #[test]
    fn everything_else_is_left_alone() {
        assert!(upgrade(&request(3, "x")).is_none());
        let mut produce = request(1, "x");
        produce[..2].copy_from_slice(&0i16.to_be_bytes());
        assert!(upgrade(&produce).is_none());
        for length in 0..request(1, "x").len() - 12 {
            assert!(upgrade(&request(1, "x")[..length]).is_none(), "{length}");
        }
    }

    #[test]
    fn a_response_loses_its_tags() {
        let mut response = vec![0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 47, 0];
        downgrade(&mut response);
        assert_eq!(response, [0, 0, 0, 7, 0, 0, 0, 0, 0, 47]);
    }
}
