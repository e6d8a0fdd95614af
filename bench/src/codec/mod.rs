//! `vmferry-bench codec`: what the codecs of pages cost and save.
//!
//! | group | cases |
//! |---|---|
//! | `speed` | codecs, deltas and the estimate of a page's class, on pages of known contents, without a guest |
//! | `moves` | whole migrations of a guest, by vmferry and by QEMU, with and without encoded pages |
//! | `return` | whole migrations of a guest to a target that has an older snapshot of it, by vmferry |
//!
//! The names of all cases begin with their group, so `--only speed` selects the group.
//!
//! # Group `speed`
//!
//! One thread encodes and decodes pages in memory. The contents depend on the seed only, except for
//! `files`, which are the executables and libraries of this host.
//!
//! - *Frames*: each codec encodes all pages in batches of 32, and decodes them into one batch. A
//!   batch that does not get smaller counts with the bytes of its pages.
//! - *Classes*: the estimate of each page. Its shares show how often pages that do not compress
//!   would be tried, and how often pages that compress would not be.
//! - *Deltas*: pages are encoded against an earlier version, and the deltas are applied to the
//!   earlier version. Hot pages fit into the cache. Cold pages are 128 MiB of earlier versions,
//!   while the new versions are hot: a sender has just copied the page that it encodes.
//!
//! Speeds are bytes of pages divided by elapsed time. Each side also copies the same pages in the
//! same round, and the ratios are to these copies.
//!
//! # Group `moves`
//!
//! A guest with known content moves over a link of a given rate, by each side in turn. The guest
//! writes nothing, or counters, parts of pages or whole pages at a given rate. All sides run the
//! same guest image, have the same downtime limit, and the same memory for earlier versions of
//! pages. Two network namespaces with a token bucket filter are the link. TCP uses the host's
//! default congestion control.
//!
//! | side | encoding |
//! |---|---|
//! | `ours-raw`, `ours-lz4`, `ours-zstd` | `--codec raw`, `lz4` or `zstd`, without deltas |
//! | `ours-delta` | `--codec raw --delta on` |
//! | `ours-auto` | `--codec auto --delta auto` |
//! | `qemu-raw` | none, a single stream |
//! | `qemu-zstd`, `qemu-zlib` | `multifd-compression` at level 1, two channels |
//! | `qemu-xbzrle` | the capability `xbzrle`, a single stream |
//!
//! - Time, downtime and sent bytes are those that the program reports. Processor time is that of
//!   both processes without their vCPU threads.
//! - *Time for each saved byte*: processor time of both processes beyond that of the raw side of
//!   the same program in the same round, divided by the bytes that the side sends less. It is given
//!   for guests that write nothing.
//! - *Convergence*: after 6 seconds, each side may stop the guest for any time. A migration that
//!   takes less has converged. The times of the others would be longer without this limit, so a
//!   ratio to such a side is an upper bound.

//!
//! # Group `return`
//!
//! The source writes a snapshot of its guest to a file, while the guest goes on
//! (`migrate --keep-running`). The guest then changes 5 % of its data. After that, it moves to a
//! target that was started with the file (`ours-known`) or without it (`ours-whole`). The target
//! reads the file when it starts, before the migration. The ratios compare the two sides in each
//! round.

mod contents;
mod moves;
mod report;
mod returns;
mod speed;

use std::path::Path;

use vmferry_report::json::Document;

use crate::host;
use crate::link::{Link, Tools};
use crate::rounds::Rounds;

pub use crate::postcopy::Run;
pub use crate::rounds::{OurError, Outcome};
pub use moves::{CACHE, CaseSpec, Encoding, MoveOptions, OBSERVE, QemuEncoding, Side, Writer};
pub use returns::{Return, ReturnSide, ReturnSpec};
pub use vmferry_report::benches::codec::{page, table};

/// Extent of the measurements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Number of rounds of the group `speed`.
    pub repeats: usize,
    /// Number of pages of each content.
    pub pages: usize,
    /// Number of earlier versions, for cold deltas. At least 32.
    pub cold_pages: usize,
    /// Seed of the contents.
    pub seed: u64,
    /// Cases of the group `moves`, and rounds of `moves` and `return`.
    pub moves: MoveOptions,
    /// Cases of the group `return`.
    pub returns: Vec<ReturnSpec>,
    /// Texts that select sides by name, as in `speed/text/lz4`. Empty selects all.
    pub only: Vec<String>,
}

impl Options {
    /// Returns the full options: 32 MiB of each content, seven rounds, and three rounds of all
    /// moves.
    pub fn full() -> Self {
        let moves = MoveOptions::full();
        let returns = ReturnSpec::all();
        Options { repeats: 7, pages: 8192, cold_pages: 32_768, seed: 1, moves, returns, only: Vec::new() }
    }

    /// Returns the options of `--quick`: 8 MiB of each content, three rounds, and one round of some
    /// moves.
    pub fn quick() -> Self {
        Options { repeats: 3, pages: 2048, moves: MoveOptions::quick(), ..Self::full() }
    }

    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }
}

/// Runner of vmferry's own side. It is implemented by the caller that has the VMM.
///
/// Its methods fail with [`OurError::Unavailable`] if this host cannot run the side, which skips
/// it. Every other error is a failure.
pub trait OurRunner {
    /// Boots the guest of `spec` at the source's end of `link`, lets it run for the warm-up time,
    /// migrates it with the encoding, and ends both processes. The guest has the file `initrd` in
    /// its memory, if it is given.
    ///
    /// The guest is observed before and during the migration, as for
    /// [`stalls`](crate::stalls::OurRunner::run), but during the migration only once per
    /// [`OBSERVE`].
    ///
    /// # Errors
    ///
    /// Fails as described at the trait.
    fn run(
        &mut self,
        spec: &CaseSpec,
        encoding: Encoding,
        link: &Link,
        initrd: Option<&Path>,
    ) -> Result<Run, OurError>;

    /// Boots the guest of `spec` at the source's end of `link`, writes a snapshot of it, lets it
    /// change its working set, migrates it to a target of `side`, and ends both processes.
    ///
    /// # Errors
    ///
    /// Fails as described at the trait.
    fn go_back(&mut self, spec: &ReturnSpec, side: ReturnSide, link: &Link) -> Result<Return, OurError>;
}

/// Runs the bench. Calls `progress` with the name of each run that begins.
pub fn run(options: &Options, ours: &mut dyn OurRunner, progress: &mut dyn FnMut(&str)) -> Outcome {
    let mut document = Document::new("codec", host::describe());
    let mut rounds = Rounds::new(options.repeats, progress);
    speed::run(options, &mut rounds, &mut document);
    rounds.repeats = options.moves.repeats;
    let tools = Tools::here();
    moves::run(options, ours, &tools, &mut rounds, &mut document);
    returns::run(options, ours, &tools, &mut rounds, &mut document);
    let failures = rounds.failures;
    report::finish(&mut document, options, &failures);
    Outcome { document, failures }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small(only: &[&str]) -> Outcome {
        let only = only.iter().map(|text| (*text).to_owned()).collect();
        let moves = MoveOptions { cases: Vec::new(), repeats: 0 };
        let returns = Vec::new();
        let options = Options { repeats: 2, pages: 96, cold_pages: 64, seed: 7, moves, returns, only };
        run(&options, &mut NoMoves, &mut |_| {})
    }

    struct NoMoves;

    impl OurRunner for NoMoves {
        fn run(&mut self, spec: &CaseSpec, _: Encoding, _: &Link, _: Option<&Path>) -> Result<Run, OurError> {
            unreachable!("no moves are selected, but {} runs", spec.name)
        }

        fn go_back(&mut self, spec: &ReturnSpec, _: ReturnSide, _: &Link) -> Result<Return, OurError> {
            unreachable!("no moves back are selected, but {} runs", spec.name)
        }
    }

    #[test]
    fn small_run_has_the_documented_figures() {
        let Outcome { document, failures } = small(&[]);
        assert!(failures.is_empty(), "{failures:?}");
        let metric = |name: &str, metric: &str| {
            let case = document.cases.iter().find(|case| case.name == name);
            case.unwrap_or_else(|| panic!("no case {name}")).metrics.get(metric).copied()
        };
        for side in ["lz4", "zstd-1", "zstd-3"] {
            let name = format!("speed/text/{side}");
            for figure in ["ratio", "encode_gbytes_per_s", "decode_gbytes_per_s", "encode_to_copy"] {
                assert!(metric(&name, figure).unwrap() > 0.0, "{name}: {figure}");
            }
            assert!(metric(&name, "ratio").unwrap() > 1.5, "{name}");
            assert_eq!(metric(&format!("speed/random/{side}"), "ratio"), Some(1.0));
            assert_eq!(metric(&format!("speed/random/{side}"), "decode_gbytes_per_s"), None);
        }
        assert_eq!(metric("speed/random/class", "dense_share"), Some(1.0));
        assert_eq!(metric("speed/text/class", "dense_share"), Some(0.0));
        let counter = "speed/counter/delta-portable";
        assert_eq!(metric(counter, "delta_bytes"), Some(12.0));
        assert!(metric(counter, "decode_cold_to_write").unwrap() > 0.0);
        assert_eq!(metric("speed/whole/delta-portable", "delta_bytes"), None);
        assert!(document.summary["sparse_encode_gbytes_per_s"].as_f64().unwrap() > 0.0);
        assert!(table(&document).contains("speed/text/lz4"), "{}", table(&document));
    }

    #[test]
    fn contents_depend_on_the_seed_only() {
        let ratio = || {
            let outcome = small(&["speed/text/lz4", "speed/pointers/zstd-3"]);
            let ratios = outcome.document.cases.iter().map(|case| case.metrics["ratio"]);
            ratios.collect::<Vec<f64>>()
        };
        let first = ratio();
        assert_eq!(first.len(), 2);
        assert_eq!(first, ratio());
    }
}
