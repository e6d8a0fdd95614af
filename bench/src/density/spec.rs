//! Specification of the runs: guests, ways of returning memory, and the memory of a fleet.

use std::fmt;
use std::time::Duration;

pub use vmferry_guest_abi::{HintMode, ReportMode};

use crate::rounds::MEMORY_RESERVE;

const MIB: u64 = 1 << 20;

/// Published test: memory of the host in bytes. It holds guests of 5 GB that allocate 4 GB.
const PUBLISHED_BUDGET: u64 = 15_837 * MIB;
const PUBLISHED_GUEST: u64 = 5120 * MIB;
const PUBLISHED_ALLOC: u64 = 4096 * MIB;

/// Largest size of the guests of `--quick`, in percent of the published ones.
const QUICK_PERCENT: u64 = 10;

/// Distance in pages between two pages that a fragmented pattern keeps.
const FRAG: u64 = 64;

/// Default number of rounds of a fleet, which takes longer than a single guest.
const FLEET_ROUNDS: usize = 3;

/// Number of guests at which a fleet ends without a kill.
pub(super) const MOST_GUESTS: usize = 32;

/// Sizes of a fleet and its guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scale {
    /// Memory for all guests, in bytes.
    pub budget: u64,
    /// Memory of one guest in bytes.
    pub guest: u64,
    /// Bytes that one guest allocates, touches and frees.
    pub alloc: u64,
}

impl Scale {
    /// Returns `percent` percent of the published sizes.
    fn percent(percent: u64) -> Self {
        let of = |bytes: u64| (bytes / 100 * percent).next_multiple_of(2 * MIB);
        Self { budget: of(PUBLISHED_BUDGET), guest: of(PUBLISHED_GUEST), alloc: of(PUBLISHED_ALLOC) }
    }

    /// Returns the largest sizes up to `most` percent of the published ones that fit in `available`
    /// bytes.
    fn fitting(most: u64, available: Option<u64>) -> Self {
        let fits =
            |scale: &Self| available.is_none_or(|available| scale.budget + MEMORY_RESERVE <= available);
        (1..=most).rev().map(Self::percent).find(fits).unwrap_or(Self::percent(1))
    }
}

/// VMM that runs a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Vmm {
    /// vmferry.
    Ours,
    /// QEMU, whose balloon takes back reported pages if the guest reports any.
    Qemu,
}

impl Vmm {
    /// Returns the beginning of the names of the VMM's sides.
    fn prefix(self) -> &'static str {
        match self {
            Self::Ours => "",
            Self::Qemu => "qemu-",
        }
    }
}

/// Way in which a guest returns memory and records its free pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Way {
    /// VMM that runs the guest.
    pub vmm: Vmm,
    /// Mode of the reports.
    pub mode: ReportMode,
    /// Set if the guest reports blocks of all sizes as soon as a buffer is full, as in the
    /// published test. Otherwise it reports only blocks that hosts back with huge pages.
    pub all_sizes: bool,
    /// Method by which the guest tells a migration which pages are free. The host asks no questions
    /// in this bench, so the side shows what the guest pays for being able to answer.
    pub hints: HintMode,
}

impl From<ReportMode> for Way {
    fn from(mode: ReportMode) -> Self {
        Self { vmm: Vmm::Ours, mode, all_sizes: false, hints: HintMode::Off }
    }
}

impl Way {
    /// Returns the way with which this one is compared: the same VMM, without reports and without
    /// hints.
    pub(super) fn base(self) -> Self {
        Self { vmm: self.vmm, ..ReportMode::Off.into() }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = if self.all_sizes { "-all-sizes" } else { "" };
        write!(f, "{}{}{sizes}", self.vmm.prefix(), self.mode)?;
        match self.hints {
            HintMode::Off => Ok(()),
            hints => write!(f, "-hints-{hints}"),
        }
    }
}

/// Guest that allocates, touches and frees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestSpec {
    /// Memory in bytes.
    pub memory: u64,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Bytes that the guest allocates in each round.
    pub alloc: u64,
    /// Number of rounds.
    pub rounds: u32,
    /// Distance in pages between two pages that are kept. 0 means that none is kept.
    pub frag: u64,
    /// Way in which the guest returns memory.
    pub report: Way,
}

impl GuestSpec {
    /// Returns the workload argument.
    pub fn workload(&self) -> String {
        format!("idle,data=4K,alloc={},rounds={},frag={}", self.alloc, self.rounds, self.frag)
    }

    /// Returns the other guest arguments.
    pub fn args(&self) -> String {
        let from = if self.report.all_sizes { " report_from=0" } else { "" };
        format!("report={}{from} hints={}", self.report.mode, self.report.hints)
    }
}

/// Way and pattern of a single guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct One {
    /// Way in which the guest returns memory.
    pub report: Way,
    /// Pattern in which the guest frees memory.
    pub pattern: Pattern,
}

/// Pattern in which a guest frees memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// All memory is freed once.
    Once,
    /// All memory is freed once, except for single pages in between.
    Fragmented,
    /// All memory is freed and allocated repeatedly, so that returned memory is needed again.
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

/// Fleet of guests, each of which allocates and frees once and stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fleet {
    /// VMM that runs the guests.
    pub vmm: Vmm,
    /// Mode of the reports.
    pub mode: ReportMode,
}

impl Fleet {
    fn way(self) -> Way {
        Way { vmm: self.vmm, ..self.mode.into() }
    }
}

impl From<ReportMode> for Fleet {
    fn from(mode: ReportMode) -> Self {
        Self { vmm: Vmm::Ours, mode }
    }
}

impl fmt::Display for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.way().fmt(f)
    }
}

/// Selection of runs, and their number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The sizes of a fleet.
    pub scale: Scale,
    /// Fleets that are run.
    pub fleets: Vec<Fleet>,
    /// Memory of a single guest, and the bytes that it allocates.
    pub one: (u64, u64),
    /// Ways and patterns of single guests.
    pub ones: Vec<One>,
    /// Rounds of single guests.
    pub repeats: usize,
    /// Rounds of fleets, at most `repeats`.
    pub fleet_repeats: usize,
    /// Longest time that a guest may take.
    pub limit: Duration,
    /// Texts that select sides by name, as in `one/sync`. Empty selects all.
    pub only: Vec<String>,
}

impl Options {
    /// Returns the options of `--quick`: a tenth of the published sizes, in under four minutes on
    /// two cores.
    pub fn quick(available: Option<u64>) -> Self {
        let modes = [ReportMode::Off, ReportMode::Sync];
        Self::sized(Scale::fitting(QUICK_PERCENT, available), &modes, 3)
    }

    /// Returns the options with the published sizes, as far as the host has the memory.
    pub fn full(available: Option<u64>) -> Self {
        let modes = [ReportMode::Off, ReportMode::Sync, ReportMode::Async, ReportMode::Hypercall];
        Self::sized(Scale::fitting(100, available), &modes, 5)
    }

    fn sized(scale: Scale, fleets: &[ReportMode], repeats: usize) -> Self {
        let modes = [ReportMode::Off, ReportMode::Sync, ReportMode::Async, ReportMode::Hypercall];
        let published = Way { all_sizes: true, ..ReportMode::Sync.into() };
        let hints = [HintMode::Demand, HintMode::Incremental];
        let hints = hints.map(|hints| Way { hints, ..ReportMode::Off.into() });
        let qemu = [ReportMode::Off, ReportMode::Sync];
        let in_qemu = qemu.map(|mode| Fleet { vmm: Vmm::Qemu, mode });
        let ours = modes.into_iter().map(Way::from).chain([published]).chain(hints);
        let ways: Vec<_> = ours.chain(in_qemu.map(Fleet::way)).collect();
        let all = |pattern| ways.iter().map(move |report| One { report: *report, pattern });
        let ones = [Pattern::Once, Pattern::Fragmented, Pattern::Again].into_iter().flat_map(all);
        // The results of a single guest do not depend on its size, so both tests use the smaller
        // size.
        let Scale { guest, alloc, .. } = Scale::percent(QUICK_PERCENT);
        Options {
            scale,
            fleets: fleets.iter().copied().map(Fleet::from).chain(in_qemu).collect(),
            one: (guest, alloc),
            ones: ones.collect(),
            repeats,
            fleet_repeats: repeats.min(FLEET_ROUNDS),
            limit: Duration::from_secs(60),
            only: Vec::new(),
        }
    }

    /// Returns whether the side `name` is selected.
    pub(super) fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }

    /// Returns the specification of a single guest.
    pub(super) fn single(&self, one: One) -> GuestSpec {
        let (memory, alloc) = self.one;
        GuestSpec {
            memory,
            // The asynchronous way needs a second vCPU to report.
            vcpus: 2,
            alloc,
            rounds: if one.pattern == Pattern::Again { 4 } else { 1 },
            frag: if one.pattern == Pattern::Fragmented { FRAG } else { 0 },
            report: one.report,
        }
    }

    /// Returns the specification of each guest of a fleet.
    pub(super) fn of_fleet(&self, fleet: Fleet) -> GuestSpec {
        let Scale { guest, alloc, .. } = self.scale;
        GuestSpec { memory: guest, vcpus: 1, alloc, rounds: 1, frag: 0, report: fleet.way() }
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
            // Without reports, three guests fit and four do not.
            assert!(3 * scale.alloc < scale.budget && 4 * scale.alloc > scale.budget, "{scale:?}");
        }
    }

    #[test]
    fn guest_arguments_parse_as_specified() {
        for options in [Options::quick(None), Options::full(None)] {
            let names: BTreeSet<_> = options.ones.iter().map(ToString::to_string).collect();
            assert_eq!(names.len(), 27);
            assert!(names.contains("off-hints-incremental-again") && names.contains("qemu-sync-fragmented"));
            let specs = options.ones.iter().map(|one| options.single(*one));
            for spec in specs.chain(options.fleets.iter().map(|fleet| options.of_fleet(*fleet))) {
                let line = format!("workload={} {}", spec.workload(), spec.args());
                let args: GuestArgs = line.parse().unwrap();
                assert_eq!((args.report, args.workload.alloc.unwrap().bytes), (spec.report.mode, spec.alloc));
                assert_eq!(args.report_from == 0, spec.report.all_sizes);
                assert_eq!(args.hints, spec.report.hints);
                assert!(spec.alloc < spec.memory);
            }
        }
    }
}
