//! Peer that sends arbitrary bytes, for fuzz targets and for tests with seeded noise.
//!
//! Random bytes never have a correct checksum. Most functions of this module therefore correct the
//! checksums, so that the code behind the checks is exercised.

use crate::{
    CONTROL_HEADER_BYTES, Content, ControlHeader, FRAME_HEADER_BYTES, FrameHeader, FrameKind, HELLO_BYTES,
    Hello, HelloReply, MAX_FRAME_PAGES, MAX_FRAME_RUNS, MAX_SEGMENTS, MigrationId, REQUEST_BYTES, Request,
    SNAPSHOT_HEADER_BYTES, ToSource, ToTarget, WorkingSet, crc, decode_control, encode_control, negotiate,
};
use serde::{Serialize, de::DeserializeOwned};
use vmferry_core::{PAGE_BYTES, PageDigest};

/// Maximum number of bytes that [`frames`] returns.
pub const MOST_FRAME_BYTES: usize = 1 << 20;
/// Maximum number of pages for which [`frames`] adds content to one frame. If a frame announces
/// more, the stream ends within the content of that frame.
const MOST_CONTENTS: usize = 32;

/// Puts the checksum of all bytes but the last eight into the last eight bytes.
fn seal(bytes: &mut [u8]) {
    let (body, sum) = bytes.split_at_mut(bytes.len() - 8);
    sum.copy_from_slice(&crc(body).to_le_bytes());
}

/// Returns the first bytes of `from`, padded with zeros.
fn block<const N: usize>(from: &[u8]) -> [u8; N] {
    let mut block = [0; N];
    let len = from.len().min(N);
    block[..len].copy_from_slice(&from[..len]);
    block
}

/// Decodes `bytes` as a hello, as a reply, as a request and as a working set, both unchanged and
/// with correct magic and checksum.
///
/// # Panics
/// Panics if a decoded value differs after encoding and decoding it again.
pub fn drive_hello(bytes: &[u8]) {
    let raw: [u8; HELLO_BYTES] = block(bytes);
    for magic in [None, Some(*b"VMFERRY\n"), Some(*b"VMFERRY\r")] {
        let mut block = raw;
        if let Some(magic) = magic {
            block[..8].copy_from_slice(&magic);
            seal(&mut block);
        }
        if let Ok(hello) = Hello::decode(&block) {
            assert_eq!(Hello::decode(&hello.encode()).as_ref(), Ok(&hello));
            let _ = negotiate(&hello);
        }
        if let Ok(reply) = HelloReply::decode(&block) {
            assert_eq!(HelloReply::decode(&reply.encode()).as_ref(), Ok(&reply));
        }
    }
    let mut request: [u8; REQUEST_BYTES] = block(bytes);
    for mended in [false, true] {
        if mended {
            request[..4].copy_from_slice(b"VMFr");
            seal(&mut request);
        }
        if let Ok(read) = Request::decode(&request) {
            assert_eq!(Request::decode(&read.encode()), Ok(read));
        }
    }
    drive_working_set(bytes);
}

fn drive_working_set(bytes: &[u8]) {
    let mut mended = bytes.to_vec();
    if mended.len() > 16 {
        mended[..8].copy_from_slice(&WorkingSet::new(MigrationId([0; 16])).encode()[..8]);
        seal(&mut mended);
    }
    for bytes in [bytes, &mended] {
        if let Ok(set) = WorkingSet::decode(bytes) {
            assert_eq!(WorkingSet::decode(&set.encode()).as_ref(), Ok(&set));
        }
    }
}

/// Decodes `body` as a control message with a matching header. Returns `None` if that is not
/// possible.
pub fn message<M: DeserializeOwned>(body: &[u8]) -> Option<M> {
    let len = u32::try_from(body.len()).ok()?;
    let sum = crc(body) ^ crc(&len.to_le_bytes());
    let header = [b"VMFc".as_slice(), &len.to_le_bytes(), &sum.to_le_bytes()].concat();
    let header = ControlHeader::decode(&block(&header)).ok()?;
    decode_control(header, body).ok()
}

/// Decodes `bytes` as the body of a control message in each direction, and the first bytes as a
/// header.
///
/// # Panics
/// Panics if a decoded message differs after encoding and decoding it again.
pub fn drive_messages(bytes: &[u8]) {
    let _ = ControlHeader::decode(&block(bytes));
    again(message::<ToTarget>(bytes).as_ref());
    again(message::<ToSource>(bytes).as_ref());
}

fn again<M: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(message: Option<&M>) {
    let Some(message) = message else { return };
    // The encoding may be shorter, if a number had a long encoding. It is longer only if characters
    // of a reason were replaced.
    let Ok(bytes) = encode_control(message) else { panic!("a decoded message does not encode") };
    let header = ControlHeader::decode(&block(&bytes));
    let back = header.and_then(|header| decode_control::<M>(header, &bytes[CONTROL_HEADER_BYTES..]));
    assert_eq!(back.as_ref(), Ok(message));
}

/// Returns the frames of a channel, built from `bytes`. For each frame, `bytes` contains the
/// header, the table, and one byte for each page with content. The page is filled with that byte.
/// If the content is encoded, `bytes` contains the encoded content instead.
///
/// If `mend` is true, the function corrects the magic, the frame numbers, the checksums, and the
/// digests of pages whose byte is even. Otherwise all of them are taken from `bytes`.
#[must_use]
pub fn frames(mut bytes: &[u8], mend: bool) -> Vec<u8> {
    let (mut stream, mut sequence) = (Vec::new(), 0u64);
    while let Some((head, rest)) = bytes.split_first_chunk::<FRAME_HEADER_BYTES>() {
        let mut head = *head;
        let (runs, pages) = (u16::from_le_bytes([head[6], head[7]]), u16::from_le_bytes([head[8], head[9]]));
        let (runs, pages) = (usize::from(runs).min(MAX_FRAME_RUNS), usize::from(pages).min(MAX_FRAME_PAGES));
        let encoded = head[4] == 0 && head[5] == 1;
        let segments = if encoded { usize::from(head[20]).min(MAX_SEGMENTS) } else { 0 };
        let of_segments = if encoded { 8 * segments + pages } else { 0 };
        let (table, rest) = rest.split_at(rest.len().min(8 * (runs + pages) + of_segments));
        // Only frames of kind 0 have contents.
        let contents = match head[4] {
            0 if encoded => encoded_bytes(table.get(8 * (runs + pages)..), segments),
            0 => pages.min(MOST_CONTENTS),
            _ => 0,
        };
        let (fills, rest) = rest.split_at(rest.len().min(contents));
        let mut table = table.to_vec();
        if mend {
            for (digest, fill) in table.chunks_exact_mut(8).skip(runs).zip(fills) {
                if !encoded && fill % 2 == 0 {
                    digest.copy_from_slice(&PageDigest::of(&[*fill; PAGE_BYTES]).0.to_le_bytes());
                }
            }
            head[..4].copy_from_slice(b"VMFb");
            head[24..32].copy_from_slice(&sequence.to_le_bytes());
            head[40..48].copy_from_slice(&crc(&table).to_le_bytes());
            seal(&mut head);
        }
        let content_bytes = if encoded { contents } else { PAGE_BYTES * contents };
        if stream.len() + head.len() + table.len() + content_bytes > MOST_FRAME_BYTES {
            break;
        }
        stream.extend(head);
        stream.extend(table);
        match encoded {
            true => stream.extend(fills),
            false => fills.iter().for_each(|fill| stream.resize(stream.len() + PAGE_BYTES, *fill)),
        }
        sequence += 1;
        bytes = rest;
    }
    if !mend {
        stream.extend(bytes);
    }
    stream
}

/// Returns the length of the content of a frame whose table has `segments` segments at the
/// beginning of `table`, but at most the content of [`MOST_CONTENTS`] pages.
fn encoded_bytes(table: Option<&[u8]>, segments: usize) -> usize {
    let entries = table.unwrap_or_default().chunks_exact(8).take(segments);
    let bytes = |entry: &[u8]| usize::from(u16::from_le_bytes([entry[4], entry[5]]));
    entries.map(bytes).sum::<usize>().min(MOST_CONTENTS * PAGE_BYTES)
}

/// Inverse of [`frames`]: returns `stream` with each page content reduced to its first byte, for
/// use as an initial fuzz input. Stops at the first frame that cannot be decoded.
#[must_use]
pub fn compact(mut stream: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let Some((head, rest)) = stream.split_first_chunk::<FRAME_HEADER_BYTES>() {
        let Ok(header) = FrameHeader::decode(head) else { break };
        let Some((table, rest)) = rest.split_at_checked(header.table_bytes()) else { break };
        let contents = match (header.kind, header.content) {
            (FrameKind::Pages, Content::Raw) => header.pages * PAGE_BYTES,
            (FrameKind::Pages, Content::Segments(count)) => {
                encoded_bytes(table.get(8 * (header.runs + header.pages)..), count)
            }
            _ => 0,
        };
        let Some((contents, rest)) = rest.split_at_checked(contents) else { break };
        bytes.extend(head);
        bytes.extend(table);
        match header.content {
            Content::Raw => bytes.extend(contents.chunks_exact(PAGE_BYTES).map(|page| page[0])),
            Content::Segments(_) => bytes.extend(contents),
        }
        stream = rest;
    }
    bytes
}

/// Corrects the checksum in the header of a snapshot.
pub fn seal_snapshot(header: &mut [u8; SNAPSHOT_HEADER_BYTES]) {
    seal(header);
}

/// Returns the checksum of a part of a snapshot, for a header that contains it.
#[must_use]
pub fn part_sum(bytes: &[u8]) -> u64 {
    crc(bytes)
}
