//! Migrations whose pages are encoded.

use crate::rig::{move_well, quick, unix_uri};
use crate::toy::Options;
use std::time::Duration;
use vmferry_engine::{
    CodecFigures, Deltas, MigrationMode, OnTimeout, PageCodec, Report, Settings, ZstdLevel,
};

/// Pages of both regions.
const PAGES: u64 = 1900;

/// Settings under which a busy guest needs several passes: the pages in use take about 100 ms.
fn several_passes(mode: MigrationMode, codec: PageCodec, deltas: Deltas) -> Settings {
    let (timeout, on_timeout) = (Some(Duration::from_secs(3)), OnTimeout::Switch);
    let on_timeout = if mode == MigrationMode::Precopy { on_timeout } else { OnTimeout::Cancel };
    let timeout = timeout.filter(|_| mode == MigrationMode::Precopy);
    let max_bandwidth = Some(50_000_000);
    Settings { mode, codec, deltas, max_bandwidth, timeout, on_timeout, verify: true, ..quick() }
}

fn moved(mode: MigrationMode, codec: PageCodec, deltas: Deltas) -> (Report, CodecFigures) {
    let options = Options { demand_paging: true, ..Options::default() };
    let (report, _) = move_well(options, &unix_uri(), &several_passes(mode, codec, deltas));
    assert_eq!(report.mismatched_pages, 0, "{mode:?}, {codec:?}, {deltas:?}");
    assert_eq!(report.digest_mismatches_resent, 0, "{mode:?}, {codec:?}, {deltas:?}");
    let codecs = report.codecs.clone().unwrap_or_default();
    (report, codecs)
}

#[test]
fn pages_arrive_with_every_codec_in_every_mode() {
    for mode in [MigrationMode::Precopy, MigrationMode::Hybrid, MigrationMode::Postcopy] {
        let (report, lz4) = moved(mode, PageCodec::Lz4, Deltas::Off);
        assert!(lz4.lz4.pages > 0, "{mode:?}: {report:?}");
        assert_eq!((lz4.zstd.pages, lz4.delta.pages), (0, 0), "{mode:?}: {report:?}");
        assert!(lz4.lz4.bytes < lz4.lz4.pages * 4096 / 2, "{mode:?}: {report:?}");
        assert_eq!(report.bytes.compressed, lz4.lz4.bytes);
        let (report, zstd) = moved(mode, PageCodec::Zstd(ZstdLevel::MIN), Deltas::Off);
        assert!(zstd.zstd.pages > 0 && zstd.lz4.pages == 0, "{mode:?}: {report:?}");
        let (report, raw) = moved(mode, PageCodec::Raw, Deltas::Off);
        assert_eq!((raw, report.codecs.is_none()), (CodecFigures::default(), true));
        assert_eq!(report.delta_cache, None);
        if mode == MigrationMode::Precopy {
            assert_eq!(report.verified_pages, PAGES);
        }
    }
}

#[test]
fn rewritten_pages_are_sent_as_deltas_until_the_handover() {
    for mode in [MigrationMode::Precopy, MigrationMode::Hybrid] {
        for codec in [PageCodec::Raw, PageCodec::Lz4] {
            let (report, codecs) = moved(mode, codec, Deltas::On);
            // The first pass has no deltas.
            let later: u64 = report.passes.iter().skip(1).map(|pass| pass.pages).sum();
            assert!(codecs.delta.pages <= later, "{mode:?}, {codec:?}: {report:?}");
            assert!(mode == MigrationMode::Hybrid || codecs.delta.pages > 0, "{codec:?}: {report:?}");
            assert!(codecs.delta.bytes <= codecs.delta.pages * 2048, "{mode:?}, {codec:?}: {report:?}");
            let cache = report.delta_cache.as_ref().expect("deltas are on");
            let saved = codecs.delta.raw_bytes - codecs.delta.bytes;
            assert_eq!((cache.hits, cache.saved_bytes), (codecs.delta.pages, saved), "{report:?}");
            // Each page of the first pass is a miss.
            assert!(cache.misses > 0 && cache.admitted <= cache.misses, "{report:?}");
            assert!((4096..=cache.limit_bytes).contains(&cache.memory_bytes), "{report:?}");
            assert_eq!(cache.limit_bytes, 16 << 20, "the default of a small guest");
        }
    }
    let (report, codecs) = moved(MigrationMode::Postcopy, PageCodec::Lz4, Deltas::On);
    assert_eq!(codecs.delta.pages, 0, "{report:?}");
}

#[test]
fn cache_for_deltas_is_not_larger_than_the_guest() {
    let settings = several_passes(MigrationMode::Precopy, PageCodec::Raw, Deltas::On);
    let (report, _) =
        move_well(Options::default(), &unix_uri(), &Settings { delta_cache: Some(u64::MAX), ..settings });
    let cache = report.delta_cache.expect("deltas are on");
    assert!(cache.limit_bytes < 2 * PAGES * 4096 + (16 << 20), "{cache:?}");
    assert!(cache.memory_bytes <= cache.limit_bytes && cache.hits > 0, "{cache:?}");
}

#[test]
fn source_chooses_an_encoding_while_the_link_is_slow() {
    let (report, codecs) = moved(MigrationMode::Precopy, PageCodec::Auto, Deltas::Auto);
    assert!(codecs.lz4.pages + codecs.zstd.pages > 0, "{report:?}");
}
