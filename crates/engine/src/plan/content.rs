//! Content of the guest's memory: the bytes that encoding saves, and the processor time that it
//! needs, estimated from samples of pages.
//!
//! The guest runs while its pages are sampled. The cost is bounded: at most 2048 pages are encoded
//! with each codec, fewer with high levels of Zstandard. At most 1000 pages that the guest wrote
//! are compared with a later version.

use crate::handle::thread_cpu;
use crate::source::encode::LONGEST_DELTA;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use vmferry_codec::{BATCH_PAGES, Class, Codec, Decoder, DeltaEncoder, Encoder, Level, Page, SentPages};
use vmferry_core::{GuestMemory, PAGE_BYTES, PageRun, PageSet, RegionId, VmError};

/// Maximum number of groups of pages that are encoded. A group has the pages of a batch, which are
/// adjacent as in a batch of a sender, because adjacent pages compress better together.
const GROUPS: u64 = 64;
/// Maximum number of written pages whose versions are compared.
const VERSIONS: u64 = 1000;
/// Minimum time between the two versions of a page.
const APART: Duration = Duration::from_millis(100);

/// Effect of a codec on the sampled pages.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EncodingSample {
    /// Size of the encoded pages, divided by their size without the encoding. Pages that do not
    /// become smaller count with their size.
    pub ratio: f64,
    /// CPU time of the encoding for each page, in seconds.
    pub cpu_page_s: f64,
    /// CPU time of the decoding for each page, in seconds, measured on the source.
    pub decode_page_s: f64,
}

impl EncodingSample {
    /// Effect of sending the pages as they are.
    pub(crate) const RAW: Self = Self { ratio: 1.0, cpu_page_s: 0.0, decode_page_s: 0.0 };
}

impl Default for EncodingSample {
    fn default() -> Self {
        Self::RAW
    }
}

/// Effect of deltas on pages that the guest wrote.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DeltaSample {
    /// Number of sampled pages that changed between two versions.
    pub changed_pages: u64,
    /// Share of the changed pages, 0 to 1, whose delta is short enough to be sent.
    pub short_share: f64,
    /// Mean size of these deltas, divided by the size of a page.
    pub ratio: f64,
    /// CPU time for each changed page, in seconds.
    pub cpu_page_s: f64,
}

impl Default for DeltaSample {
    fn default() -> Self {
        Self { changed_pages: 0, short_share: 0.0, ratio: 1.0, cpu_page_s: 0.0 }
    }
}

/// Figures of the content of the guest's memory, for the prediction of encoded pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Content {
    /// Number of pages with content that were encoded.
    pub sampled_pages: u64,
    /// LZ4.
    pub lz4: EncodingSample,
    /// Zstandard at the level `zstd_level`.
    pub zstd: EncodingSample,
    /// Level of Zstandard. Zero if no page was sampled.
    pub zstd_level: u8,
    /// Deltas.
    pub delta: DeltaSample,
    /// Number of versions that the source can keep for deltas.
    pub delta_cache_pages: u64,
    /// Number of processors of the source. Zero if unknown.
    pub processors: u32,
    /// Elapsed time of the sampling, divided by its CPU time. Larger than 1 if other threads need
    /// the processors.
    pub delay: f64,
}

/// Result of the encoding of sampled pages.
pub(super) struct Encoded {
    pub(super) pages: u64,
    pub(super) lz4: EncodingSample,
    pub(super) zstd: EncodingSample,
    pub(super) delay: f64,
}

/// Encodes sampled pages with one codec, as a sender does.
struct Trial {
    encoder: Encoder,
    decoder: Decoder,
    codec: Codec,
    bytes_in: usize,
    bytes_out: usize,
    encode: Duration,
    decode: Duration,
    gathered: Vec<Page>,
    /// Number of groups that were offered.
    groups: usize,
}

impl Trial {
    /// Returns the distance between two groups that the codec encodes, so that a slow codec needs
    /// about as much time as a fast one.
    fn every(&self) -> usize {
        match self.codec {
            Codec::Lz4 => 1,
            Codec::Zstd(level) if level.get() < 4 => 1,
            Codec::Zstd(level) if level.get() < 10 => 4,
            Codec::Zstd(_) => 16,
        }
    }

    fn new(codec: Codec) -> Self {
        Self {
            encoder: Encoder::new(),
            decoder: Decoder::new(),
            codec,
            bytes_in: 0,
            bytes_out: 0,
            encode: Duration::ZERO,
            decode: Duration::ZERO,
            gathered: Vec::with_capacity(BATCH_PAGES),
            groups: 0,
        }
    }

    /// Encodes a group of pages: those of a class together, and dense pages not at all. Skips
    /// groups as [`every`](Self::every) says.
    fn add(&mut self, pages: &[Page], classes: &[Class]) {
        if pages.is_empty() {
            return;
        }
        self.groups += 1;
        if !(self.groups - 1).is_multiple_of(self.every()) {
            return;
        }
        for class in Class::ALL {
            let of_class = pages.iter().zip(classes).filter(|(_, of)| **of == class);
            self.gathered.clear();
            self.gathered.extend(of_class.map(|(page, _)| page));
            let bytes = self.gathered.len() * PAGE_BYTES;
            self.bytes_in += bytes;
            if class == Class::Dense || bytes == 0 {
                self.bytes_out += bytes;
                continue;
            }
            let began = thread_cpu();
            let encoded = self.encoder.encode(self.codec, &self.gathered, bytes - 1);
            let middle = thread_cpu();
            self.bytes_out += encoded.map_or(bytes, <[u8]>::len);
            if let Some(encoded) = encoded {
                let decoded = self.decoder.decode(self.codec.format(), encoded, &mut self.gathered);
                assert!(decoded.is_ok(), "the decoder reads what the encoder writes");
            }
            self.encode += middle.saturating_sub(began);
            self.decode += thread_cpu().saturating_sub(middle);
        }
    }

    fn result(&self) -> EncodingSample {
        if self.bytes_in == 0 {
            return EncodingSample::default();
        }
        let pages = self.bytes_in as f64 / PAGE_BYTES as f64;
        EncodingSample {
            ratio: self.bytes_out as f64 / self.bytes_in as f64,
            cpu_page_s: self.encode.as_secs_f64() / pages,
            decode_page_s: self.decode.as_secs_f64() / pages,
        }
    }
}

/// Encodes a sample of `pages` with LZ4, and with Zstandard at `level`.
pub(super) fn encode(memory: &dyn GuestMemory, pages: &PageSet, level: Level) -> Result<Encoded, VmError> {
    let batch = BATCH_PAGES as u64;
    let stride = pages.count().div_ceil(GROUPS).max(batch);
    let mut trials = [Codec::Lz4, Codec::Zstd(level)].map(Trial::new);
    let (mut group, mut classes): (Vec<Page>, Vec<Class>) = (Vec::with_capacity(BATCH_PAGES), vec![]);
    let (mut at, mut sampled) = (0, 0);
    let mut busy = (Duration::ZERO, Duration::ZERO);
    let mut encode = |group: &mut Vec<Page>| {
        let (began, cpu) = (Instant::now(), thread_cpu());
        classes.clear();
        classes.extend(group.iter().map(Class::of));
        trials.iter_mut().for_each(|trial| trial.add(group, &classes));
        sampled += group.len() as u64;
        group.clear();
        busy = (busy.0 + began.elapsed(), busy.1 + thread_cpu().saturating_sub(cpu));
    };
    for (region, map) in pages.iter() {
        for page in map.runs().flatten() {
            if at % stride == 0 {
                encode(&mut group);
            }
            if at % stride < batch {
                let mut copy = [0; PAGE_BYTES];
                if !copy_page(memory, region, page, &mut copy)? {
                    group.push(copy);
                }
            }
            at += 1;
        }
    }
    encode(&mut group);
    let [lz4, zstd] = trials.map(|trial| trial.result());
    let delay = (busy.0.as_secs_f64() / busy.1.as_secs_f64().max(1e-9)).max(1.0);
    Ok(Encoded { pages: sampled, lz4, zstd, delay })
}

/// Copies a page. Returns true if it contains only zeros.
fn copy_page(
    memory: &dyn GuestMemory,
    region: RegionId,
    page: u64,
    copy: &mut Page,
) -> Result<bool, VmError> {
    Ok(memory.window(region, PageRun::from(page..page + 1))?.copy_page(0, copy))
}

/// Copies of pages that the guest wrote, for the comparison with their later versions.
pub(super) struct Versions {
    taken: Instant,
    pages: Vec<(RegionId, u64, Page)>,
}

impl Versions {
    /// Copies a sample of the pages `written`.
    pub(super) fn take(memory: &dyn GuestMemory, written: &PageSet) -> Result<Self, VmError> {
        let stride = written.count().div_ceil(VERSIONS).max(1);
        let (mut pages, mut at) = (Vec::new(), 0);
        for (region, map) in written.iter() {
            for page in map.runs().flatten() {
                if at % stride == 0 {
                    let mut copy = [0; PAGE_BYTES];
                    copy_page(memory, region, page, &mut copy)?;
                    pages.push((region, page, copy));
                }
                at += 1;
            }
        }
        Ok(Self { taken: Instant::now(), pages })
    }

    /// Compares the pages with their present versions, at least [`APART`] later.
    pub(super) fn compare(self, memory: &dyn GuestMemory) -> Result<DeltaSample, VmError> {
        if self.pages.is_empty() {
            return Ok(DeltaSample::default());
        }
        std::thread::sleep(APART.saturating_sub(self.taken.elapsed()));
        // The cache has room for all pages, so each of them has a version.
        let mut sent = SentPages::new(2 * self.pages.len().max(64) * PAGE_BYTES, DeltaEncoder::default());
        for ((_, _, before), key) in self.pages.iter().zip(0..) {
            sent.send(key, before, LONGEST_DELTA);
        }
        sent.next_pass();
        let before = sent.take_figures();
        assert_eq!(before.admitted, before.misses, "every page has a version");
        let (mut changed, mut cpu) = (0_u64, Duration::ZERO);
        for ((region, page, before), key) in self.pages.iter().zip(0..) {
            let mut now = [0; PAGE_BYTES];
            copy_page(memory, *region, *page, &mut now)?;
            if *before == now {
                continue;
            }
            changed += 1;
            let began = thread_cpu();
            sent.send(key, &now, LONGEST_DELTA);
            cpu += thread_cpu().saturating_sub(began);
        }
        let figures = sent.figures();
        let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        Ok(DeltaSample {
            changed_pages: changed,
            short_share: share(figures.hits, changed),
            ratio: if figures.hits == 0 { 1.0 } else { share(figures.delta_bytes, figures.hits * 4096) },
            cpu_page_s: cpu.as_secs_f64() / changed.max(1) as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::{SCRATCH, Scratch};

    /// Returns memory whose pages `fill` has filled, and its pages.
    fn memory(fill: impl Fn(u64, &mut Page)) -> (Scratch, PageSet) {
        let scratch = Scratch::new().unwrap();
        let pages = PageSet::full(scratch.memory().layout());
        write(&scratch, fill);
        (scratch, pages)
    }

    fn write(scratch: &Scratch, fill: impl Fn(u64, &mut Page)) {
        let count = PageSet::full(scratch.memory().layout()).count();
        let window = scratch.memory().window(SCRATCH, PageRun::from(0..count)).unwrap();
        for page in 0..count {
            let (mut content, at) = ([0; PAGE_BYTES], usize::try_from(page).unwrap());
            window.copy_page(at, &mut content);
            fill(page, &mut content);
            window.write_page(at, &content);
        }
    }

    /// Fills a page with words that differ from page to page.
    fn text(page: u64, content: &mut Page) {
        for (line, at) in content.chunks_mut(32).zip(0u64..) {
            let text = format!("line {at} of the page {page}, and then more");
            line.copy_from_slice(&text.as_bytes()[..line.len()]);
        }
    }

    fn noise(page: u64, content: &mut Page) {
        let mut state = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for word in content.as_chunks_mut::<8>().0 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *word = state.to_le_bytes();
        }
    }

    #[test]
    fn text_shrinks_and_noise_does_not() {
        let (scratch, pages) = memory(text);
        let Encoded { pages: sampled, lz4, zstd, delay } =
            encode(scratch.memory(), &pages, Level::MIN).unwrap();
        assert!(delay >= 1.0 && sampled > 0 && sampled <= pages.count(), "{sampled}");
        assert!(lz4.ratio < 0.4 && zstd.ratio < lz4.ratio, "{lz4:?}, {zstd:?}");
        for sample in [lz4, zstd] {
            assert!(sample.cpu_page_s > 0.0 && sample.decode_page_s > 0.0, "{sample:?}");
        }
        let (scratch, pages) = memory(noise);
        let Encoded { lz4, zstd, .. } = encode(scratch.memory(), &pages, Level::MIN).unwrap();
        assert_eq!((lz4.ratio, zstd.ratio), (1.0, 1.0));
    }

    #[test]
    fn high_levels_encode_fewer_groups() {
        let (scratch, pages) = memory(text);
        let bytes = |level: u8| {
            let mut trial = Trial::new(Codec::Zstd(Level::new(level).unwrap()));
            let window = scratch.memory().window(SCRATCH, PageRun::from(0..1)).unwrap();
            let mut page = [0; PAGE_BYTES];
            window.copy_page(0, &mut page);
            (0..GROUPS).for_each(|_| trial.add(&[page; BATCH_PAGES], &[Class::Mixed; BATCH_PAGES]));
            trial.bytes_in
        };
        assert_eq!((bytes(1) / bytes(4), bytes(1) / bytes(19)), (4, 16));
        let encoded = encode(scratch.memory(), &pages, Level::MAX).unwrap();
        assert!(encoded.zstd.ratio < encoded.lz4.ratio && encoded.zstd.ratio > 0.0, "{:?}", encoded.zstd);
    }

    #[test]
    fn sample_is_bounded_and_without_pages_of_zeros() {
        let (scratch, pages) = memory(|page, content| {
            if page % 2 == 0 {
                text(page, content);
            }
        });
        let Encoded { pages: sampled, lz4, .. } = encode(scratch.memory(), &pages, Level::MIN).unwrap();
        assert!(sampled <= GROUPS * BATCH_PAGES as u64 && sampled <= pages.count() / 2, "{sampled}");
        assert!(sampled >= pages.count().min(GROUPS * BATCH_PAGES as u64) / 2 - 1, "{sampled}");
        assert!(lz4.ratio < 0.5, "{lz4:?}");
        let none = PageSet::empty(scratch.memory().layout());
        let empty = encode(scratch.memory(), &none, Level::MIN).unwrap();
        assert_eq!((empty.pages, empty.lz4, empty.zstd), (0, EncodingSample::RAW, EncodingSample::RAW));
    }

    #[test]
    fn counters_have_short_deltas_and_rewritten_pages_have_none() {
        let (scratch, pages) = memory(text);
        let versions = Versions::take(scratch.memory(), &pages).unwrap();
        assert!(versions.pages.len() as u64 <= VERSIONS);
        let of = |third| versions.pages.iter().filter(|(_, page, _)| page / 16 % 3 == third).count();
        let [kept, counters, others] = [of(0), of(1), of(2)];
        // About a third stays, a third has a counter, and a third gets other content.
        write(&scratch, |page, content| match page / 16 % 3 {
            0 => {}
            1 => content[8] = content[8].wrapping_add(1),
            _ => noise(page, content),
        });
        let sample = versions.compare(scratch.memory()).unwrap();
        assert_eq!(sample.changed_pages, (counters + others) as u64, "{kept} were kept: {sample:?}");
        let share = counters as f64 / (counters + others) as f64;
        assert!((sample.short_share - share).abs() < 1e-9 && sample.ratio < 0.01, "{sample:?}");
        assert!(sample.cpu_page_s > 0.0, "{sample:?}");
        let none = Versions::take(scratch.memory(), &PageSet::empty(scratch.memory().layout())).unwrap();
        assert_eq!(none.compare(scratch.memory()).unwrap(), DeltaSample::default());
    }
}
