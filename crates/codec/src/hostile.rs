//! Arbitrary bytes for the decoders, for fuzz targets and for tests with seeded noise.

use crate::{
    BATCH_BYTES, BATCH_PAGES, Codec, Decoder, Delta, DeltaEncoder, Encoder, Format, Level, MAX_DELTA, Page,
};
use vmferry_core::PAGE_BYTES;

/// Xorshift generator of test data.
#[derive(Debug, Clone)]
pub struct Noise(u64);

impl Noise {
    /// Creates a generator. Each seed has another sequence.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns the next 64 bits.
    pub fn word(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from((self.word() >> 11) % end as u64).expect("below a usize")
    }

    /// Fills `bytes` with random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for part in bytes.chunks_mut(8) {
            let word = self.word().to_le_bytes();
            part.copy_from_slice(&word[..part.len()]);
        }
    }
}

/// Byte of the pages around the output of a decoder.
const GUARD: u8 = 0xa5;

/// Decodes a frame that `bytes` describes.
///
/// The lowest bit of the first byte selects the format, and the other bits the number of pages. If
/// the highest bit is set, the function puts the header in front that a zstd frame of these pages
/// must have. Otherwise the rest of `bytes` is the frame.
///
/// # Panics
/// Panics if the decoder writes beyond its output, if it returns another result for the same bytes,
/// or if the decoded pages differ after encoding and decoding them again.
pub fn drive_frames(bytes: &[u8]) {
    let Some((&first, rest)) = bytes.split_first() else { return };
    let format = if first & 1 == 0 { Format::Lz4 } else { Format::Zstd };
    // One page more than is allowed is tried as well.
    let pages = usize::from(first >> 1 & 0x3f) % (BATCH_PAGES + 2);
    let mut frame = Vec::new();
    if first & 0x80 != 0 && format == Format::Zstd && (1..=BATCH_PAGES).contains(&pages) {
        let mut encoder = Encoder::new();
        let some = vec![[0; PAGE_BYTES]; pages];
        let header = encoder.encode(Codec::Zstd(Level::MIN), &some, BATCH_BYTES).expect("zeros compress");
        frame.extend(&header[..if pages <= 16 { 7 } else { 9 }]);
    }
    frame.extend(rest);
    let mut decoder = Decoder::new();
    let mut decode = |fill: u8| {
        let mut out = vec![[GUARD; PAGE_BYTES]; pages + 2];
        out[1..=pages].fill([fill; PAGE_BYTES]);
        let result = decoder.decode(format, &frame, &mut out[1..=pages]);
        assert!(out[0] == [GUARD; PAGE_BYTES], "{format}: written before the output");
        assert!(out[pages + 1] == [GUARD; PAGE_BYTES], "{format}: written after the output");
        result.map(|()| out)
    };
    let (first, second) = (decode(0), decode(0xff));
    assert_eq!(first.as_ref().err(), second.as_ref().err());
    if let (Ok(first), Ok(second)) = (first, second) {
        // No byte of the output keeps its earlier value.
        assert!(first == second, "{format}: a part of the output was not written");
        again(&first[1..=pages]);
    }
}

fn again(pages: &[Page]) {
    let mut encoder = Encoder::new();
    for codec in [Codec::Lz4, Codec::Zstd(Level::MIN)] {
        let Some(frame) = encoder.encode(codec, pages, BATCH_BYTES) else { continue };
        let mut back = vec![[GUARD; PAGE_BYTES]; pages.len()];
        Decoder::new().decode(codec.format(), frame, &mut back).expect("an encoded frame can be decoded");
        assert!(back == pages, "{codec}: decoded pages differ after encoding them again");
    }
}

/// Parses `bytes` as deltas in a row, and applies them to a page.
///
/// # Panics
/// Panics if a delta changes a word that it does not name, or if the change differs after encoding
/// it again.
pub fn drive_deltas(bytes: &[u8]) {
    let mut old: Page = [0; PAGE_BYTES];
    Noise::new(bytes.len() as u64).fill(&mut old);
    let mut encoder = DeltaEncoder::default();
    let mut rest = bytes;
    while let Ok((delta, after)) = Delta::parse(rest) {
        assert!(delta.len() >= 2 && delta.len() <= MAX_DELTA && rest.len() - after.len() == delta.len());
        let mut new = old;
        delta.apply(&mut new);
        let differing =
            old.as_chunks::<8>().0.iter().zip(new.as_chunks::<8>().0).filter(|(a, b)| a != b).count();
        assert!(differing <= delta.words() as usize, "a word was changed that the delta does not name");
        // Bytes that are replaced by equal ones are not encoded again.
        let encoded = encoder.encode(&old, &new, MAX_DELTA).expect("not longer than the first delta");
        assert!(encoded.len() <= delta.len(), "{} bytes instead of {}", encoded.len(), delta.len());
        let (again, nothing) = Delta::parse(encoded).expect("an encoded delta can be parsed");
        assert!(nothing.is_empty());
        let mut back = old;
        again.apply(&mut back);
        assert!(back == new, "a page differs after encoding its delta again");
        (old, rest) = (new, after);
    }
}
