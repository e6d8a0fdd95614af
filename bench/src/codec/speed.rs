//! Group `speed`: codecs, classes and deltas in memory.

use std::fmt;
use std::hint::black_box;
use std::time::Instant;

use serde_json::Value;
use vmferry_codec::{
    BATCH_BYTES, BATCH_PAGES, Class, Codec, Comparer, Decoder, Delta, DeltaEncoder, Encoder, Level,
    MAX_DELTA, Page,
};
use vmferry_report::json::{Case, Document};

use super::Options;
use super::contents::{Change, Content};
use crate::cases::{self, Figures};
use crate::host::available_memory;
use crate::rounds::{MEMORY_RESERVE, Rounds, Stop};

/// Levels of zstd that are measured.
const LEVELS: [u8; 5] = [1, 3, 6, 9, 12];

/// Number of pages of each version that fit into the L2 cache together with their deltas.
const HOT_PAGES: usize = 32;

/// Number of times that hot pages are encoded in a run.
const HOT_TIMES: usize = 256;

/// Subject of a run.
#[derive(Clone, Copy)]
enum Side {
    Codec(Codec),
    Class,
    Delta(&'static str, Comparer),
}

impl Side {
    fn of_contents() -> impl Iterator<Item = Self> {
        let levels = LEVELS.into_iter().filter_map(Level::new).map(Codec::Zstd);
        [Codec::Lz4].into_iter().chain(levels).map(Self::Codec).chain([Self::Class])
    }

    /// Returns a side for each comparison that this processor has.
    fn of_changes() -> impl Iterator<Item = Self> {
        Comparer::all().into_iter().filter_map(|(name, comparer)| Some(Self::Delta(name, comparer.ok()?)))
    }

    /// Returns the kind of the side's figures.
    fn kind(self) -> &'static str {
        match self {
            Self::Codec(_) => "frames",
            Self::Class => "classes",
            Self::Delta(..) => "deltas",
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Codec(Codec::Lz4) => f.write_str("lz4"),
            Self::Codec(Codec::Zstd(level)) => write!(f, "zstd-{}", level.get()),
            Self::Class => f.write_str("class"),
            Self::Delta(name, _) => write!(f, "delta-{name}"),
        }
    }
}

/// Measures all contents and all changes.
pub(super) fn run(options: &Options, rounds: &mut Rounds<'_>, document: &mut Document) {
    for content in Content::ALL {
        let group = format!("speed/{content}");
        let sides: Vec<Side> = selected(options, &group, Side::of_contents());
        if sides.is_empty() {
            continue;
        }
        match content.pages(options.pages, options.seed) {
            Err(why) => document.cases.push(Case::skipped(group, why)),
            Ok(pages) => measure(rounds, document, &group, &sides, |side| match side {
                Side::Codec(codec) => frames(codec, &pages),
                _ => Ok(classes(&pages)),
            }),
        }
    }
    for change in Change::ALL {
        let group = format!("speed/{change}");
        let sides: Vec<Side> = selected(options, &group, Side::of_changes());
        if sides.is_empty() {
            continue;
        }
        // Earlier versions, and the pages to which the deltas are applied.
        let needed = (options.cold_pages * size_of::<Page>() * 2) as u64 + MEMORY_RESERVE;
        if available_memory().is_some_and(|available| available < needed) {
            document.cases.push(Case::skipped(group, format!("needs {} MiB of memory", needed >> 20)));
            continue;
        }
        let mut versions = Versions::new(change, options);
        measure(rounds, document, &group, &sides, |side| match side {
            Side::Delta(_, comparer) => versions.deltas(comparer),
            _ => unreachable!("a side of the changes is a delta"),
        });
    }
}

fn selected(options: &Options, group: &str, sides: impl Iterator<Item = Side>) -> Vec<Side> {
    sides.filter(|side| options.wants(&format!("{group}/{side}"))).collect()
}

fn measure(
    rounds: &mut Rounds<'_>,
    document: &mut Document,
    group: &str,
    sides: &[Side],
    mut once: impl FnMut(Side) -> Result<Figures, Stop>,
) {
    let all = rounds.run(sides.iter().copied(), |side| format!("{group}/{side}"), |side, _: &[_]| once(side));
    for runs in all {
        let params = [("kind", Value::from(runs.side.kind())), ("group", "speed".into())];
        cases::add(document, (group, &params), &[runs], Figures::clone);
    }
}

/// Returns the result of `work` and its elapsed time in seconds.
fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let result = black_box(work());
    (result, start.elapsed().as_secs_f64())
}

/// Returns the speed of `pages` pages in 10^9 bytes per second.
fn gbytes_per_s(pages: usize, seconds: f64) -> f64 {
    (pages * size_of::<Page>()) as f64 / 1e9 / seconds
}

/// Returns the time in which `pages` are copied batch by batch, in seconds.
fn copy_time(pages: &[Page]) -> f64 {
    let mut to = vec![[1; size_of::<Page>()]; BATCH_PAGES];
    let copy = || {
        for batch in pages.chunks(BATCH_PAGES) {
            black_box(&mut to[..batch.len()]).copy_from_slice(batch);
        }
    };
    timed(copy).1
}

/// Encodes and decodes `pages` in batches.
fn frames(codec: Codec, pages: &[Page]) -> Result<Figures, Stop> {
    let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
    // The first frame allocates.
    let _ = encoder.encode(codec, &pages[..BATCH_PAGES.min(pages.len())], BATCH_BYTES);
    let mut frames = Vec::new();
    let mut seconds = 0.0;
    for batch in pages.chunks(BATCH_PAGES) {
        let start = Instant::now();
        let frame = black_box(encoder.encode(codec, batch, BATCH_BYTES));
        seconds += start.elapsed().as_secs_f64();
        frames.push((batch, frame.map(<[u8]>::to_vec)));
    }
    let sent: usize =
        frames.iter().map(|(batch, frame)| frame.as_ref().map_or(batch.as_flattened().len(), Vec::len)).sum();
    let copy = copy_time(pages);
    let mut figures = Figures::from([
        ("ratio", pages.as_flattened().len() as f64 / sent as f64),
        ("encode_gbytes_per_s", gbytes_per_s(pages.len(), seconds)),
        ("encode_to_copy", copy / seconds),
        ("copy_gbytes_per_s", gbytes_per_s(pages.len(), copy)),
        ("encoder_mib", encoder.memory() as f64 / f64::from(1 << 20)),
    ]);
    let mut out = vec![[0; size_of::<Page>()]; BATCH_PAGES];
    let (mut decoded, mut seconds) = (0, 0.0);
    for (batch, frame) in &frames {
        let Some(frame) = frame else { continue };
        let out = &mut out[..batch.len()];
        let (result, time) = timed(|| decoder.decode(codec.format(), frame, out));
        result.map_err(|error| Stop::Fail(error.to_string()))?;
        if out[..] != batch[..] {
            return Err(Stop::Fail(format!("{codec}: decoded pages differ")));
        }
        decoded += batch.len();
        seconds += time;
    }
    if decoded > 0 {
        figures.insert("decode_gbytes_per_s", gbytes_per_s(decoded, seconds));
    }
    Ok(figures)
}

/// Estimates the class of each page.
fn classes(pages: &[Page]) -> Figures {
    let mut found = [0_usize; Class::ALL.len()];
    let ((), seconds) = timed(|| pages.iter().for_each(|page| found[Class::of(page) as usize] += 1));
    let share = |class: Class| found[class as usize] as f64 / pages.len() as f64;
    Figures::from([
        ("class_gbytes_per_s", gbytes_per_s(pages.len(), seconds)),
        ("class_to_copy", copy_time(pages) / seconds),
        ("dense_share", share(Class::Dense)),
        ("sparse_share", share(Class::Sparse)),
    ])
}

/// Versions of pages that differ by one change.
struct Versions {
    /// Earlier versions. The first pages are repeated, so that each has its new version in `new`.
    old: Vec<Page>,
    /// New versions of the first pages. They stay in the cache.
    new: Vec<Page>,
    /// Pages on the target. They are the old ones at the beginning of a run.
    target: Vec<Page>,
}

impl Versions {
    fn new(change: Change, options: &Options) -> Self {
        let first = Content::Random.pages(HOT_PAGES, options.seed).expect("every host has random pages");
        let new = change.of(&first, options.seed);
        let old: Vec<Page> = first.iter().cycle().take(options.cold_pages).copied().collect();
        Self { target: old.clone(), old, new }
    }

    /// Encodes and applies deltas of hot and of cold pages.
    fn deltas(&mut self, comparer: Comparer) -> Result<Figures, Stop> {
        let mut encoder = DeltaEncoder::new(comparer);
        let (old, new) = (&self.old, &self.new);
        let mut encode_all = |old: &[Page]| {
            let mut len_of = |old, new| encoder.encode(old, new, MAX_DELTA).map_or(0, <[u8]>::len);
            old.iter().zip(new.iter().cycle()).map(|(old, new)| len_of(old, new)).sum::<usize>()
        };
        let hot_old = &old[..HOT_PAGES];
        let (bytes, hot) = timed(|| (0..HOT_TIMES).map(|_| encode_all(hot_old)).sum::<usize>());
        let (_, cold) = timed(|| encode_all(old));
        let copy = copy_time(old);
        let mut figures = Figures::from([
            ("encode_gbytes_per_s", gbytes_per_s(HOT_PAGES * HOT_TIMES, hot)),
            ("encode_cold_gbytes_per_s", gbytes_per_s(old.len(), cold)),
            ("encode_cold_to_copy", copy / cold),
        ]);
        if bytes == 0 {
            // The pages differ too much for a delta, and giving up is all that there is to measure.
            return Ok(figures);
        }
        figures.insert("delta_bytes", bytes as f64 / (HOT_PAGES * HOT_TIMES) as f64);
        let mut deltas = Vec::new();
        for (old, new) in hot_old.iter().zip(new) {
            deltas.extend(encoder.encode(old, new, MAX_DELTA).unwrap_or_default());
        }
        self.decode(&deltas, &mut figures)?;
        Ok(figures)
    }

    /// Applies the deltas of the first pages to hot and to cold pages.
    fn decode(&mut self, deltas: &[u8], figures: &mut Figures) -> Result<(), Stop> {
        let target = &mut self.target;
        // A delta has the same effect each time.
        let hot = &mut target[..HOT_PAGES];
        let (result, time) = timed(|| (0..HOT_TIMES).try_for_each(|_| apply_all(deltas, hot)));
        result?;
        figures.insert("decode_gbytes_per_s", gbytes_per_s(HOT_PAGES * HOT_TIMES, time));
        target.copy_from_slice(&self.old);
        let (result, time) =
            timed(|| target.chunks_mut(HOT_PAGES).try_for_each(|part| apply_all(deltas, part)));
        result?;
        if !target.iter().zip(self.new.iter().cycle()).all(|(page, new)| page == new) {
            return Err(Stop::Fail("the pages with their deltas differ from the new versions".into()));
        }
        let ((), write) = timed(|| target.iter_mut().for_each(|page| black_box(page).fill(7)));
        figures.insert("decode_cold_gbytes_per_s", gbytes_per_s(target.len(), time));
        figures.insert("write_cold_gbytes_per_s", gbytes_per_s(target.len(), write));
        figures.insert("decode_cold_to_write", write / time);
        target.copy_from_slice(&self.old);
        Ok(())
    }
}

/// Applies one delta to each of `pages`.
fn apply_all(deltas: &[u8], pages: &mut [Page]) -> Result<(), Stop> {
    let mut rest = deltas;
    for page in pages {
        let (delta, after) = Delta::parse(rest).map_err(|error| Stop::Fail(error.to_string()))?;
        delta.apply(page);
        rest = after;
    }
    Ok(())
}
