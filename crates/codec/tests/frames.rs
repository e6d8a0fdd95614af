//! Tests of frames: round trips, limits, and bytes that were changed.

use proptest::prelude::*;
use vmferry_codec::{BATCH_BYTES, BATCH_PAGES, Codec, DecodeError, Decoder, Encoder, Format, Level, Page};

const PAGE: usize = 4096;

fn codecs() -> impl Iterator<Item = Codec> {
    let levels = [1, 3, 6, 12, 19].map(|level| Codec::Zstd(Level::new(level).unwrap()));
    [Codec::Lz4].into_iter().chain(levels)
}

/// Returns pages of chunks of 16 bytes. There are `chunks` different chunks. With 256, all bytes
/// are random.
fn pages(count: usize, seed: u64, chunks: usize) -> Vec<Page> {
    let mut state = seed | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32).unwrap()
    };
    let mut chunk = || std::array::from_fn::<u8, 16, _>(|_| u8::try_from(next() % 256).unwrap());
    let known: Vec<[u8; 16]> = (0..chunks).map(|_| chunk()).collect();
    let mut pages = vec![[0; PAGE]; count];
    for to in pages.as_flattened_mut().chunks_mut(16) {
        let new = chunk();
        to.copy_from_slice(if chunks == 256 { &new } else { &known[usize::from(new[0]) % chunks] });
    }
    pages
}

/// Decodes between pages that must not change.
fn decode(
    decoder: &mut Decoder,
    format: Format,
    frame: &[u8],
    count: usize,
) -> Result<Vec<Page>, DecodeError> {
    let mut out = vec![[0x5a; PAGE]; count + 2];
    let result = decoder.decode(format, frame, &mut out[1..=count]);
    assert!(out[0] == [0x5a; PAGE] && out[count + 1] == [0x5a; PAGE], "{format}: written beyond the output");
    result.map(|()| out[1..=count].to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 64 } else { 256 }))]

    #[test]
    fn pages_survive_every_codec(count in 1..=BATCH_PAGES, seed: u64, chunks in 1usize..=256, limit in 0..=BATCH_BYTES) {
        let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
        let pages = pages(count, seed, chunks);
        for codec in codecs() {
            let Some(frame) = encoder.encode(codec, &pages, BATCH_BYTES) else {
                prop_assert!(chunks > 64, "{}: {} chunks do not compress", codec, chunks);
                continue;
            };
            prop_assert!(frame.len() < count * PAGE);
            let frame = frame.to_vec();
            prop_assert!(decode(&mut decoder, codec.format(), &frame, count).as_ref() == Ok(&pages), "{}", codec);
            // The limit decides, and the encoder is usable after it gave up.
            let limited = encoder.encode(codec, &pages, limit).map(<[u8]>::len);
            prop_assert!(limited.is_none_or(|len| len <= limit));
            // zstd needs some room beyond its frame, so a limit near the length may be refused.
            prop_assert!(limited.is_some() || frame.len() + 1024 > limit);
            prop_assert!(encoder.encode(codec, &pages, BATCH_BYTES) == Some(&frame[..]));
        }
    }

    #[test]
    fn changed_frames_never_write_beyond_their_pages(
        count in 1..=BATCH_PAGES, seed: u64, chunks in 1usize..=64,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        announced in 1..=BATCH_PAGES,
    ) {
        let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
        let pages = pages(count, seed, chunks);
        for codec in [Codec::Lz4, Codec::Zstd(Level::MIN)] {
            let frame = encoder.encode(codec, &pages, BATCH_BYTES).unwrap().to_vec();
            let format = codec.format();
            let truncated = decode(&mut decoder, format, &frame[..cut.index(frame.len())], count);
            prop_assert!(truncated.is_err(), "{}: a truncated frame was accepted", codec);
            if announced != count {
                prop_assert!(decode(&mut decoder, format, &frame, announced).is_err(), "{}", codec);
            }
            let mut changed = frame.clone();
            changes.iter().for_each(|(at, to)| changed[at.index(frame.len())] = *to);
            let _ = decode(&mut decoder, format, &changed, count);
            // The decoder is usable after errors.
            prop_assert!(decode(&mut decoder, format, &frame, count).as_ref() == Ok(&pages));
        }
    }
}

#[test]
fn every_number_of_pages_has_a_frame() {
    let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
    for count in 1..=BATCH_PAGES {
        let pages = pages(count, 3, 8);
        for codec in codecs() {
            let frame = encoder.encode(codec, &pages, BATCH_BYTES).unwrap();
            assert_eq!(
                decode(&mut decoder, codec.format(), frame, count).unwrap(),
                pages,
                "{codec}, {count} pages"
            );
        }
    }
}

#[test]
fn random_pages_have_no_frame() {
    let pages = pages(BATCH_PAGES, 1, 256);
    let mut encoder = Encoder::new();
    assert!(codecs().all(|codec| encoder.encode(codec, &pages, BATCH_BYTES).is_none()));
}

#[test]
fn memory_is_bounded() {
    let mut encoder = Encoder::new();
    let before = encoder.memory();
    assert!(before < 256 << 10, "{before} bytes before the first frame");
    for codec in codecs() {
        encoder.encode(codec, &pages(BATCH_PAGES, 1, 16), BATCH_BYTES).unwrap();
    }
    assert!(encoder.memory() < 8 << 20, "{} bytes", encoder.memory());
    assert!(Decoder::new().memory() < 256 << 10, "{} bytes", Decoder::new().memory());
}

#[test]
fn frames_that_are_not_exactly_the_pages_are_refused() {
    let mut decoder = Decoder::new();
    let mut encoder = Encoder::new();
    let pages = pages(2, 7, 4);
    let zstd = encoder.encode(Codec::Zstd(Level::MIN), &pages, BATCH_BYTES).unwrap().to_vec();
    let mut refused = |format, frame: &[u8], count| decode(&mut decoder, format, frame, count).unwrap_err();
    let header = DecodeError::Header { pages: 2 };

    // Another size of the content, a checksum, a dictionary, a window, a reserved bit.
    assert_eq!(refused(Format::Zstd, &zstd, 1), DecodeError::Header { pages: 1 });
    for descriptor in [0x64, 0x61, 0x40, 0x68, 0x20] {
        let mut other = zstd.clone();
        other[4] = descriptor;
        assert_eq!(refused(Format::Zstd, &other, 2), header, "{descriptor:#x}");
    }
    // A skippable frame, alone and in front. A second frame, and one byte more.
    let skippable = [0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0, 1, 2, 3, 4];
    assert_eq!(refused(Format::Zstd, &skippable, 2), header);
    assert_eq!(refused(Format::Zstd, &[&skippable[..], &zstd].concat(), 2), header);
    for after in [&skippable[..], &zstd, &[0]] {
        let longer = [&zstd[..], after].concat();
        let error = DecodeError::Trailing { pages: 2, end: zstd.len(), len: longer.len() };
        assert_eq!(refused(Format::Zstd, &longer, 2), error);
    }
    // A block that is larger than the pages: one byte, repeated 8193 times.
    let large = [0x28, 0xb5, 0x2f, 0xfd, 0x60, 0x00, 0x1f, 0x0b, 0x00, 0x01, 7];
    assert!(matches!(refused(Format::Zstd, &large, 2), DecodeError::Damaged { format: Format::Zstd, .. }));

    // Content that is shorter than the pages: one literal.
    assert_eq!(
        refused(Format::Lz4, &[0x10, 1], 1),
        DecodeError::Short { format: Format::Lz4, pages: 1, content: 1 }
    );
    let lz4 = encoder.encode(Codec::Lz4, &pages, BATCH_BYTES).unwrap().to_vec();
    assert!(matches!(
        refused(Format::Lz4, &lz4, 1),
        DecodeError::Damaged { .. } | DecodeError::TooLong { .. }
    ));
    assert_eq!(
        refused(Format::Lz4, &lz4, 3),
        DecodeError::Short { format: Format::Lz4, pages: 3, content: 2 * PAGE }
    );
    assert!(matches!(refused(Format::Lz4, &[], 1), DecodeError::Damaged { .. }));

    // Numbers of pages that no frame has, and frames that are not shorter than their pages.
    assert_eq!(refused(Format::Lz4, &lz4, 0), DecodeError::Pages { pages: 0 });
    assert_eq!(refused(Format::Lz4, &lz4, 33), DecodeError::Pages { pages: 33 });
    let long = DecodeError::TooLong { format: Format::Zstd, pages: 1, len: PAGE };
    assert_eq!(refused(Format::Zstd, &[0; PAGE], 1), long);
    assert!(long.to_string().contains("zstd frame of 1 pages has 4096 bytes"), "{long}");
}

#[test]
fn levels_are_those_of_zstd() {
    assert_eq!((Level::new(0), Level::new(20)), (None, None));
    assert_eq!(Level::new(19), Some(Level::MAX));
    assert_eq!(Codec::Zstd(Level::MIN).to_string(), "zstd:1");
}
