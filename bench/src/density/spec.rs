//! What is run: guests, how they give memory back, and how much of it there is for all of them.

use std::fmt;
use std::time::Duration;

pub use vmferry_guest_abi::ReportMode;

use crate::rounds::MEMORY_RESERVE;

const MIB: u64 = 1 << 20;

/// The published test: so much memory for guests of 5 GB that allocate 4 GB.
const PUBLISHED_BUDGET: u64 = 15_837 * MIB;
const PUBLISHED_GUEST: u64 = 5120 * MIB;
const PUBLISHED_ALLOC: u64 = 4096 * MIB;

/// Guests are made no larger than this many percent of the published ones for `--quick`.
const QUICK_PERCENT: u64 = 10;

/// One page in so many is kept when the others are freed, in a fragmented pattern.
const FRAG: u64 = 64;

/// Guests at which a fleet is full enough.
pub(super) const MOST_GUESTS: usize = 32;

/// What the guests of the test are like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scale {
    /// Memory for all guests, in bytes.
    pub budget: u64,
    /// Memory of one, in bytes.
    pub guest: u64,
    /// What it allocates, touches and frees, in bytes.
    pub alloc: u64,
}

impl Scale {
    /// The published sizes, in percent.
    fn percent(percent: u64) -> Self {
        let of = |bytes: u64| (bytes / 100 * percent).next_multiple_of(2 * MIB);
        Self { budget: of(PUBLISHED_BUDGET), guest: of(PUBLISHED_GUEST), alloc: of(PUBLISHED_ALLOC) }
    }

    /// The largest up to `most` percent of the published sizes that fits what is available.
    fn fitting(most: u64, available: Option<u64>) -> Self {
        let fits =
            |scale: &Self| available.is_none_or(|available| scale.budget + MEMORY_RESERVE <= available);
        (1..=most).rev().map(Self::percent).find(fits).unwrap_or(Self::percent(1))
    }
}

/// How a guest gives memory back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Way {
    /// Who reports, and by what.
    pub mode: ReportMode,
    /// Whether blocks of all sizes are reported as soon as a buffer is full, as was published, and not only those that hosts back
    /// with huge pages.
    pub all_sizes: bool,
}

impl From<ReportMode> for Way {
    fn from(mode: ReportMode) -> Self {
        Self { mode, all_sizes: false }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = if self.all_sizes { "-all-sizes" } else { "" };
        write!(f, "{}{sizes}", self.mode)
    }
}

/// A guest that allocates, touches and frees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestSpec {
    /// Its memory in bytes.
    pub memory: u64,
    /// Its vCPUs.
    pub vcpus: u32,
    /// What it allocates in each round, in bytes.
    pub alloc: u64,
    /// Rounds.
    pub rounds: u32,
    /// One page in how many is kept; 0: none.
    pub frag: u64,
    /// How it gives memory back.
    pub report: Way,
}

impl GuestSpec {
    /// Its workload.
    pub fn workload(&self) -> String {
        format!("idle,data=4K,alloc={},rounds={},frag={}", self.alloc, self.rounds, self.frag)
    }

    /// What else it is told.
    pub fn args(&self) -> String {
        let from = if self.report.all_sizes { " report_from=0" } else { "" };
        format!("report={}{from} hints=off", self.report.mode)
    }
}

/// How one guest does it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct One {
    /// How it gives memory back.
    pub report: Way,
    /// In what pattern.
    pub pattern: Pattern,
}

/// In what pattern a guest frees, and how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// Once, all of it.
    Once,
    /// Once, but for single pages in between.
    Fragmented,
    /// Again and again: what was given back must be had again.
    Again,
}

impl fmt::Display for One {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pattern = match self.pattern {
            Pattern::Once => "",
            Pattern::Fragmented => "-fragmented",
            Pattern::Again => "-again",
        };
        write!(f, "{}{pattern}", self.report)
    }
}

/// A fleet of guests, each of which does it once and stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fleet(pub ReportMode);

impl fmt::Display for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What is run, and how often.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The sizes of a fleet.
    pub scale: Scale,
    /// Fleets.
    pub fleets: Vec<Fleet>,
    /// Memory of a guest on its own, and what it allocates, in bytes.
    pub one: (u64, u64),
    /// What single guests do.
    pub ones: Vec<One>,
    /// Rounds of single guests; fleets run once.
    pub repeats: usize,
    /// How long a guest may take.
    pub limit: Duration,
    /// Only sides whose names, as in `one/sync`, contain one of these. Empty: all.
    pub only: Vec<String>,
}

impl Options {
    /// The bench of contracts in under four minutes on two cores: a tenth of the published sizes.
    pub fn quick(available: Option<u64>) -> Self {
        let modes = [ReportMode::Off, ReportMode::Sync];
        Self::sized(Scale::fitting(QUICK_PERCENT, available), &modes, 3)
    }

    /// The published sizes, as far as the host has the memory.
    pub fn full(available: Option<u64>) -> Self {
        let modes = [ReportMode::Off, ReportMode::Sync, ReportMode::Async, ReportMode::Hypercall];
        Self::sized(Scale::fitting(100, available), &modes, 5)
    }

    fn sized(scale: Scale, fleets: &[ReportMode], repeats: usize) -> Self {
        let modes = [ReportMode::Off, ReportMode::Sync, ReportMode::Async, ReportMode::Hypercall];
        let published = Way { mode: ReportMode::Sync, all_sizes: true };
        let ways: Vec<_> = modes.into_iter().map(Way::from).chain([published]).collect();
        let all = |pattern| ways.iter().map(move |report| One { report: *report, pattern });
        let ones = [Pattern::Once, Pattern::Fragmented, Pattern::Again].into_iter().flat_map(all);
        // What is asked of one guest does not depend on its size: those of the smaller test do for both.
        let Scale { guest, alloc, .. } = Scale::percent(QUICK_PERCENT);
        Options {
            scale,
            fleets: fleets.iter().copied().map(Fleet).collect(),
            one: (guest, alloc),
            ones: ones.collect(),
            repeats,
            limit: Duration::from_secs(60),
            only: Vec::new(),
        }
    }

    /// Whether the side of this name is wanted.
    pub(super) fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }

    /// A guest on its own.
    pub(super) fn single(&self, one: One) -> GuestSpec {
        let (memory, alloc) = self.one;
        GuestSpec {
            memory,
            // With two, the asynchronous way has somebody else to report.
            vcpus: 2,
            alloc,
            rounds: if one.pattern == Pattern::Again { 4 } else { 1 },
            frag: if one.pattern == Pattern::Fragmented { FRAG } else { 0 },
            report: one.report,
        }
    }

    /// One of a fleet.
    pub(super) fn of_fleet(&self, fleet: Fleet) -> GuestSpec {
        let Scale { guest, alloc, .. } = self.scale;
        GuestSpec { memory: guest, vcpus: 1, alloc, rounds: 1, frag: 0, report: fleet.0.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use vmferry_guest_abi::GuestArgs;

    #[test]
    fn sizes_keep_their_proportions_and_fit() {
        let whole = Scale::fitting(100, Some(20 << 30));
        assert_eq!((whole.guest, whole.alloc), (5 << 30, 4 << 30));
        let tenth = Scale::percent(10);
        assert_eq!((tenth.budget / MIB, tenth.guest / MIB, tenth.alloc / MIB), (1584, 512, 410));
        let half = Scale::fitting(100, Some(8448 * MIB));
        assert!(
            half.budget + MEMORY_RESERVE <= 8448 * MIB && half.budget > 7900 * MIB - 160 * MIB,
            "{half:?}"
        );
        for scale in [whole, tenth, half] {
            // Without reports three guests fit, and four do not.
            assert!(3 * scale.alloc < scale.budget && 4 * scale.alloc > scale.budget, "{scale:?}");
        }
    }

    #[test]
    fn guests_are_told_what_they_understand() {
        for options in [Options::quick(None), Options::full(None)] {
            let names: BTreeSet<_> = options.ones.iter().map(ToString::to_string).collect();
            assert_eq!(names.len(), 15);
            let specs = options.ones.iter().map(|one| options.single(*one));
            for spec in specs.chain(options.fleets.iter().map(|fleet| options.of_fleet(*fleet))) {
                let line = format!("workload={} {}", spec.workload(), spec.args());
                let args: GuestArgs = line.parse().unwrap();
                assert_eq!((args.report, args.workload.alloc.unwrap().bytes), (spec.report.mode, spec.alloc));
                assert_eq!(args.report_from == 0, spec.report.all_sizes);
                assert!(spec.alloc < spec.memory);
            }
        }
    }
}
