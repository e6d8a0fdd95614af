//! Encoding of pages in a plan: the cost of a page in a simulated migration, and the encoding with
//! which the migration is expected to be fastest.

use super::content::{Content, EncodingSample};
use super::inputs::Inputs;
use super::predict::{Likelihood, ModePlan, Strategy};
use crate::source::{Deltas, PageCodec, Settings};
use serde::{Serialize, Serializer};
use vmferry_codec::Level;
use vmferry_core::PAGE_SIZE;
use vmferry_protocol::source::readable_time as readable;

/// Bytes of a page on the wire in addition to its content: its share of a frame's table and header.
const TABLE_BYTES: f64 = 16.3;
/// Minimum number of changed pages in the sample, so that deltas are predicted.
const ENOUGH_CHANGED: u64 = 16;
/// Share of the time, 0 to 1, that an encoding must leave at most of the time without it, or of the
/// time with a simpler encoding.
const WORTHWHILE: f64 = 0.95;

/// Cost of a page with content.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PageCost {
    /// Bytes on the wire.
    pub(crate) wire: f64,
    /// CPU time of the encoding in seconds.
    pub(crate) encode: f64,
    /// CPU time of the decoding in seconds.
    pub(crate) decode: f64,
}

impl PageCost {
    /// Cost of a page that is sent as it is.
    pub(crate) const RAW: Self = Self { wire: PAGE_SIZE as f64 + TABLE_BYTES, encode: 0.0, decode: 0.0 };
}

/// Pages of a pass, by which the share of deltas is predicted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PassPages {
    /// Number of the pass, from 0. `None` for the pages after a handover, which have no deltas.
    pub(crate) pass: Option<u32>,
    /// Number of pages of the pass.
    pub(crate) pages: f64,
    /// Number of pages of the first pass.
    pub(crate) all: f64,
}

impl PassPages {
    /// Returns the share of the pages that have a version in the cache.
    ///
    /// The first pass fills the cache with the pages that it sends first. Later, the pages that the
    /// guest rewrites take the places of the others.
    fn kept(self, content: &Content) -> f64 {
        let cache = content.delta_cache_pages as f64;
        match self.pass {
            None | Some(0) => 0.0,
            Some(1) => (cache / self.all.max(1.0)).min(1.0),
            Some(_) => (cache / self.pages.max(1.0)).min(1.0),
        }
    }
}

/// Encoding of the pages of a simulated migration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Encoding<'a> {
    content: &'a Content,
    codec: PageCodec,
    deltas: Deltas,
    /// Number of threads that encode at the same time. The target is assumed to decode with as
    /// many.
    threads: f64,
}

impl<'a> Encoding<'a> {
    pub(crate) fn new(inputs: &'a Inputs, settings: &Settings) -> Self {
        let content = &inputs.content;
        let channels = u32::from(settings.channels.max(1));
        let threads = if content.processors == 0 { channels } else { channels.min(content.processors) };
        Self { content, codec: settings.codec, deltas: settings.deltas, threads: threads.into() }
    }

    /// Returns the time in seconds in which all channels together encode and decode a page. Source
    /// and target work at the same time.
    pub(crate) fn seconds(&self, cost: PageCost) -> f64 {
        cost.encode.max(cost.decode) * self.content.delay.max(1.0) / self.threads
    }

    /// Returns the mean cost of the pages of a pass, on a link with `bandwidth` bytes per second.
    ///
    /// If the source chooses the encoding, this is the encoding with the shortest time.
    pub(crate) fn cost(&self, pages: PassPages, bandwidth: f64) -> PageCost {
        let codecs: &[EncodingSample] = match self.codec {
            PageCodec::Raw => &[EncodingSample::RAW],
            PageCodec::Lz4 => &[self.content.lz4],
            PageCodec::Zstd(_) => &[self.content.zstd],
            PageCodec::Auto => &[EncodingSample::RAW, self.content.lz4, self.content.zstd],
        };
        let deltas: &[bool] = match self.deltas {
            Deltas::Off => &[false],
            Deltas::On => &[true],
            Deltas::Auto => &[false, true],
        };
        let all =
            codecs.iter().flat_map(|codec| deltas.iter().map(|deltas| self.mean(*codec, *deltas, pages)));
        let time = |cost: &PageCost| (cost.wire / bandwidth).max(self.seconds(*cost));
        all.min_by(|a, b| time(a).total_cmp(&time(b))).unwrap_or(PageCost::RAW)
    }

    fn mean(&self, codec: EncodingSample, deltas: bool, pages: PassPages) -> PageCost {
        let delta = &self.content.delta;
        let kept = if deltas { pages.kept(self.content) } else { 0.0 };
        let hits = kept * delta.short_share;
        PageCost {
            wire: PAGE_SIZE as f64 * (hits * delta.ratio + (1.0 - hits) * codec.ratio) + TABLE_BYTES,
            encode: kept * delta.cpu_page_s + (1.0 - hits) * codec.cpu_page_s,
            decode: (1.0 - hits) * codec.decode_page_s,
        }
    }
}

/// Prediction for one encoding of pages.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CodecPlan {
    /// Codec of the pages.
    #[serde(serialize_with = "text")]
    pub codec: PageCodec,
    /// True if pages that the guest has written again are sent as deltas.
    pub deltas: bool,
    /// Prediction for precopy if it ends by itself with this encoding, or else for hybrid.
    #[serde(flatten)]
    pub prediction: ModePlan,
}

/// Encoding of pages that a plan recommends.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct EncodingAdvice {
    /// Codec of the pages.
    #[serde(serialize_with = "text")]
    pub codec: PageCodec,
    /// True if deltas are recommended.
    pub deltas: bool,
    /// Reason for the recommendation, as text for the operator.
    pub reason: String,
}

fn text<S: Serializer>(codec: &PageCodec, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(codec)
}

/// Returns the encodings that a plan compares, from the simplest to the one with the most work.
pub(super) fn candidates(content: &Content) -> Vec<(PageCodec, bool)> {
    let level = Level::new(content.zstd_level).filter(|_| content.sampled_pages > 0);
    let zstd = level.map(PageCodec::Zstd);
    let codecs = [Some(PageCodec::Raw), level.map(|_| PageCodec::Lz4), zstd];
    let deltas = content.delta.changed_pages >= ENOUGH_CHANGED && content.delta.short_share > 0.0;
    let with = |codec| [Some((codec, false)), deltas.then_some((codec, true))];
    codecs.into_iter().flatten().flat_map(with).flatten().collect()
}

/// Recommends one of `plans`, whose first one is without encoding.
pub(super) fn advise(plans: &[CodecPlan], content: &Content) -> EncodingAdvice {
    let better = |best, plan| if is_better(plan, best) { plan } else { best };
    match (plans.first(), plans.iter().reduce(better)) {
        (Some(raw), Some(best)) if best != raw => {
            EncodingAdvice { codec: best.codec, deltas: best.deltas, reason: why(best, raw) }
        }
        _ => EncodingAdvice { codec: PageCodec::Raw, deltas: false, reason: why_raw(content) },
    }
}

/// Returns true if `plan` is expected to be so much faster than `best` that it is worth its work.
/// Also returns true if only `plan` lets precopy end by itself.
fn is_better(plan: &CodecPlan, best: &CodecPlan) -> bool {
    let precopy = |plan: &CodecPlan| plan.prediction.mode == Strategy::Precopy;
    if precopy(plan) != precopy(best) {
        return precopy(plan);
    }
    let total = |plan: &CodecPlan| plan.prediction.total_ms.map_or(f64::INFINITY, |total| total.expected);
    total(plan) < total(best) * WORTHWHILE
}

fn why_raw(content: &Content) -> String {
    if content.sampled_pages == 0 {
        return "no page with content was found to sample".to_owned();
    }
    let percent = |sample: EncodingSample| sample.ratio * 100.0;
    format!(
        "no encoding is expected to save 5 % of the time; LZ4 shrinks the sampled pages to {:.0} %, zstd to {:.0} %",
        percent(content.lz4),
        percent(content.zstd)
    )
}

fn why(best: &CodecPlan, raw: &CodecPlan) -> String {
    let time = |plan: &CodecPlan| {
        plan.prediction.total_ms.map_or_else(|| "?".to_owned(), |total| readable(total.expected / 1e3))
    };
    let mib =
        |plan: &CodecPlan| plan.prediction.bytes.map_or(0.0, |bytes| bytes.expected / f64::from(1 << 20));
    let ends = if best.prediction.mode == Strategy::Precopy && raw.prediction.mode != Strategy::Precopy {
        "precopy ends by itself only with it; "
    } else {
        ""
    };
    let cpu = best.prediction.encoding_cpu_ms.map_or(0.0, |cpu| cpu.expected);
    format!(
        "{ends}the migration takes about {} instead of {}, and sends {:.0} MiB instead of {:.0} MiB; the encoding needs about {} of \
         processor time",
        time(best),
        time(raw),
        mib(best),
        mib(raw),
        readable(cpu / 1e3)
    )
}

/// Returns the prediction for precopy if it ends by itself, or else for hybrid.
pub(super) fn that_ends(precopy: ModePlan, hybrid: impl FnOnce() -> ModePlan) -> ModePlan {
    if precopy.converges == Likelihood::Yes { precopy } else { hybrid() }
}
