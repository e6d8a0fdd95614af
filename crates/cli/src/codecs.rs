//! Encodings of pages: the options that select them, and their figures in documents of migrations.

use crate::args::{heading, size};
use crate::choices::{CodecArg, DeltaArg};
use clap::Args;
use serde_json::Value;

// Options of commands that move a guest or plan a move.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct EncodingArgs {
    /// Encoding of the pages on bulk channels
    ///
    /// `auto` chooses for each kind of page what makes the migration fastest, by what the source
    /// measures: the rate of the link, the size and the time of encoded pages, and idle processors.
    /// LEVEL is from 1 (fast) to 19 (small).
    #[arg(long, default_value_t, value_name = "auto|raw|lz4|zstd[:LEVEL]", help_heading = heading::TRANSFER)]
    pub(crate) codec: CodecArg,
    /// Send only the changes of pages that the guest has written again
    ///
    /// `auto` does so while the link limits the migration.
    #[arg(long, value_enum, default_value = "off", value_name = "auto|on|off", help_heading = heading::TRANSFER)]
    pub(crate) delta: DeltaArg,
    /// Memory for the pages that changes refer to
    ///
    /// The default is a sixteenth of the guest's memory and at least 16 MiB, but at most a quarter
    /// of the memory that the host has available.
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = heading::TRANSFER)]
    pub(crate) delta_cache: Option<u64>,
}

/// Figures of one encoding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct EncodedPages<'a> {
    pub(crate) name: &'a str,
    pub(crate) pages: u64,
    /// Bytes of the pages without the encoding.
    pub(crate) raw_bytes: u64,
    pub(crate) bytes: u64,
    pub(crate) cpu_ms: f64,
}

impl EncodedPages<'_> {
    /// Returns the size of the encoded pages in percent of their size without the encoding. `None`
    /// without pages.
    pub(crate) fn percent(&self) -> Option<f64> {
        #[expect(clippy::cast_precision_loss, reason = "a share")]
        (self.raw_bytes > 0).then(|| self.bytes as f64 / self.raw_bytes as f64 * 100.0)
    }
}

/// Returns the encodings that the member `codecs` lists and that the source has used.
pub(crate) fn used(codecs: &Value) -> impl Iterator<Item = EncodedPages<'_>> {
    let all = codecs.as_object().into_iter().flatten().map(|(name, figures)| {
        let count = |field: &str| figures[field].as_u64().unwrap_or(0);
        let cpu_ms = figures["cpu_ms"].as_f64().filter(|ms| ms.is_finite()).unwrap_or(0.0);
        let (pages, raw_bytes, bytes) = (count("pages"), count("raw_bytes"), count("bytes"));
        EncodedPages { name, pages, raw_bytes, bytes, cpu_ms }
    });
    all.filter(|figures| figures.pages > 0 || figures.cpu_ms > 0.0)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use vmferry_engine::{CodecFigures, DeltaCacheFigures, KnownPagesFigures, Report};

    /// Returns the document of a migration that has sent a quarter of its pages with LZ4 and half
    /// of them as deltas, that has tried Zstandard in vain, and whose target knew some pages.
    pub(crate) fn document() -> Value {
        let mut codecs = CodecFigures::default();
        (codecs.lz4.pages, codecs.lz4.raw_bytes, codecs.lz4.bytes) = (25_600, 100 << 20, 40 << 20);
        (codecs.delta.pages, codecs.delta.raw_bytes, codecs.delta.bytes) = (51_200, 200 << 20, 2 << 20);
        (codecs.lz4.cpu_ms, codecs.zstd.cpu_ms, codecs.delta.cpu_ms) = (250.0, 20.0, 1500.0);
        let mut cache = DeltaCacheFigures::default();
        (cache.hits, cache.misses, cache.large) = (51_200, 25_600, 12);
        (cache.evicted, cache.saved_bytes) = (7, 198 << 20);
        (cache.memory_bytes, cache.limit_bytes) = (48 << 20, 64 << 20);
        let mut known = KnownPagesFigures::default();
        (known.hashes, known.known, known.unknown) = (25_600, 24_000, 1600);
        known.known_bytes = known.known * 4096;
        let mut report = Report::default();
        (report.codecs, report.delta_cache, report.known_pages) = (Some(codecs), Some(cache), Some(known));
        let mut document = serde_json::to_value(report).unwrap();
        document["bytes"]["wire"] = (142_u64 << 20).into();
        document
    }

    #[test]
    fn encodings_without_pages_and_time_are_not_listed() {
        let document = document();
        let found: Vec<_> = used(&document["codecs"]).map(|of| (of.name, of.pages, of.percent())).collect();
        let want = [("delta", 51_200, Some(1.0)), ("lz4", 25_600, Some(40.0)), ("zstd", 0, None)];
        assert_eq!(found, want);
        assert_eq!(used(&serde_json::to_value(CodecFigures::default()).unwrap()).count(), 0);
        for malformed in [Value::Null, serde_json::json!([1]), serde_json::json!({"lz4": {"pages": -1}})] {
            assert_eq!(used(&malformed).count(), 0, "{malformed}");
        }
    }
}
