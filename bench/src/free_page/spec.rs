//! Specification of the runs: guests, ways to learn their free pages, and the number of rounds.

use std::fmt;

pub use vmferry_guest_abi::InflateBy;

use crate::link::Shape;
use crate::rounds::MEMORY_RESERVE;

const MIB: u64 = 1 << 20;

/// Way in which a host learns a guest's free pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The guest puts its free pages into the balloon, in portions of the given kind. The host
    /// treats them as `Give` says.
    Inflate(InflateBy, Give),
    /// The guest walks its free lists on demand.
    Hints,
    /// The guest keeps a map of its free pages, which the host reads.
    Map,
}

/// Way in which the host drops the pages that it is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Give {
    /// The host calls `MADV_DONTNEED`.
    DontNeed,
    /// The host calls `MADV_FREE`.
    Free,
    /// The host keeps the pages.
    Nothing,
}

/// Hypervisor of the idle guest, and the way in which its free pages are learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Learn {
    /// vmferry, in the given way.
    Ours(Way),
    /// QEMU, by inflation with the given number of pages per request.
    Qemu(u32),
}

/// Kind of touched memory, and the way in which the host drops it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drop {
    /// Way in which the host drops the memory.
    pub give: Give,
    /// Set if the memory consists of transparent huge pages.
    pub huge: bool,
}

/// Source of the free pages that a migration skips.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FreePageSource {
    /// No source: all memory that was ever touched is sent.
    Off,
    /// Hints of the guest on demand.
    Hints,
    /// Map of the guest.
    Map,
}

/// Hypervisor that migrates the guest, and its source of free pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Move {
    /// vmferry, with the given source.
    Ours(FreePageSource),
    /// QEMU, with or without hints of its balloon.
    Qemu {
        /// Value of the balloon's property `free-page-hint`.
        hints: bool,
    },
}

/// Part of a guest's free memory that is not available to it while it allocates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// All free memory is available.
    None,
    /// The host requests half of the memory for the balloon.
    Balloon,
    /// The host asks for free pages all the time, and the guest keeps the named pages back.
    Question,
    /// The guest reports freed memory.
    Reports,
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Balloon => "balloon",
            Self::Question => "question",
            Self::Reports => "reports",
        })
    }
}

/// Longest wait for the guest's answer before the first page of a migration. 0 means no wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnswerWait {
    /// Milliseconds.
    pub ms: u64,
}

/// Link of the migrations that wait for the guest's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitLink {
    /// Name of the group of these migrations.
    pub group: &'static str,
    /// Shape of the link. `None` means loopback.
    pub shape: Option<Shape>,
}

impl WaitLink {
    const LOOPBACK: Self = Self { group: "wait-loopback", shape: None };
    const TEN_GBIT: Self = Self::shaped("wait-10gbit", 10_000_000_000);
    const ONE_GBIT: Self = Self::shaped("wait-1gbit", 1_000_000_000);

    const fn shaped(group: &'static str, bits_per_s: u64) -> Self {
        Self { group, shape: Some(Shape { bits_per_s, congestion: None }) }
    }
}

impl fmt::Display for AnswerWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}ms", self.ms)
    }
}

impl fmt::Display for Give {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DontNeed => "dontneed",
            Self::Free => "free",
            Self::Nothing => "nothing",
        })
    }
}

impl fmt::Display for Learn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ours(Way::Inflate(by, give)) => {
                match by {
                    InflateBy::Pages(pages) => write!(f, "inflate-{pages}")?,
                    InflateBy::Ranges => f.write_str("inflate-ranges")?,
                }
                if *give == Give::DontNeed { Ok(()) } else { write!(f, "-{give}") }
            }
            Self::Ours(Way::Hints) => f.write_str("hints"),
            Self::Ours(Way::Map) => f.write_str("map"),
            Self::Qemu(pages) => write!(f, "qemu-inflate-{pages}"),
        }
    }
}

impl fmt::Display for Drop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.give, if self.huge { "huge" } else { "small" })
    }
}

impl fmt::Display for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ours(FreePageSource::Off) => "off",
            Self::Ours(FreePageSource::Hints) => "hints",
            Self::Ours(FreePageSource::Map) => "map",
            Self::Qemu { hints: false } => "qemu-off",
            Self::Qemu { hints: true } => "qemu-hints",
        })
    }
}

/// Idle guest whose free pages are learned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LearnSpec {
    /// Memory in bytes.
    pub memory: u64,
    /// Bytes that go into the balloon.
    pub inflate: u64,
    /// Reason why the guest is smaller than the published one. `None` if it is not.
    pub smaller: Option<String>,
}

/// Memory of the published guest in bytes.
const PUBLISHED: u64 = 8192 * MIB;

impl LearnSpec {
    /// Returns the published guest: 8 GiB, of which 7 GiB are inflated.
    ///
    /// If `available` bytes do not hold it, the guest has half or a quarter of the size, and the
    /// reason is recorded. The guest touches little of its memory, but may touch all of it.
    pub(super) fn fitting(available: Option<u64>) -> Self {
        Self::of(PUBLISHED, available)
    }

    fn of(wanted: u64, available: Option<u64>) -> Self {
        let fits = |memory: u64| available.is_none_or(|available| memory + MEMORY_RESERVE <= available);
        let memory =
            [wanted, wanted / 2, wanted / 4].into_iter().find(|memory| fits(*memory)).unwrap_or(wanted / 8);
        let smaller = (memory < wanted).then(|| {
            format!(
                "{} MiB are available, {} MiB were wanted",
                available.unwrap_or(0) / MIB,
                (wanted + MEMORY_RESERVE) / MIB
            )
        });
        Self { memory, inflate: memory / 8 * 7, smaller }
    }
}

/// Guest that migrates after it has freed most of its memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MoveSpec {
    /// Memory in bytes.
    pub memory: u64,
    /// Bytes that the guest keeps in use.
    pub data: u64,
    /// Bytes that the guest allocates, touches and frees before the migration.
    pub alloc: u64,
}

impl MoveSpec {
    /// Returns the guest's workload: one round, after which the guest is idle.
    pub fn workload(&self) -> String {
        format!("idle,data={},fill=random,alloc={},rounds=1", self.data, self.alloc)
    }
}

/// Guest that allocates most of its memory, several times.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LowSpec {
    /// Memory in bytes.
    pub memory: u64,
    /// Bytes that the guest allocates, touches and frees in each round.
    pub alloc: u64,
    /// Number of rounds of the guest.
    pub rounds: u32,
}

impl LowSpec {
    /// Returns the guest's workload.
    pub fn workload(&self) -> String {
        format!("idle,data=4K,alloc={},rounds={}", self.alloc, self.rounds)
    }
}

/// Selection of runs, and their number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Guest of the group `learn`.
    pub learn: LearnSpec,
    /// Sides of the group `learn`.
    pub ways: Vec<Learn>,
    /// Bytes of touched memory that the group `drop` gives back.
    pub touched: u64,
    /// Sides of the group `drop`.
    pub drops: Vec<Drop>,
    /// Guest of the group `move`.
    pub moved: MoveSpec,
    /// Sides of the group `move`.
    pub moves: Vec<Move>,
    /// Guest of the group `low`.
    pub low: LowSpec,
    /// Sides of the group `low`.
    pub claims: Vec<Claim>,
    /// Sides of the groups `wait`. The guest of the group `move` answers on demand.
    pub waits: Vec<AnswerWait>,
    /// Links of the groups `wait`.
    pub wait_links: Vec<WaitLink>,
    /// Number of rounds.
    pub repeats: usize,
    /// Texts that select sides by name, as in `learn/map`. Empty selects all.
    pub only: Vec<String>,
}

impl Options {
    /// Returns the options of `--quick`: the published idle guest, a migrating guest of 1.5 GiB,
    /// and waits on loopback only, in under three minutes on two cores.
    pub fn quick(available: Option<u64>) -> Self {
        let quick = Self::sized(
            available,
            3,
            512 * MIB,
            MoveSpec { memory: 1536 * MIB, data: 128 * MIB, alloc: 1280 * MIB },
        );
        Self { wait_links: vec![WaitLink::LOOPBACK], ..quick }
    }

    /// Returns the full options: more rounds, and more memory that is touched.
    pub fn full(available: Option<u64>) -> Self {
        Self::sized(
            available,
            5,
            2048 * MIB,
            MoveSpec { memory: 4096 * MIB, data: 384 * MIB, alloc: 3400 * MIB },
        )
    }

    fn sized(available: Option<u64>, repeats: usize, touched: u64, moved: MoveSpec) -> Self {
        let by = |by, give| Learn::Ours(Way::Inflate(by, give));
        let numbers = InflateBy::Pages;
        let ways = vec![
            by(numbers(256), Give::DontNeed),
            by(numbers(16_384), Give::DontNeed),
            by(InflateBy::Ranges, Give::DontNeed),
            by(numbers(256), Give::Free),
            by(numbers(256), Give::Nothing),
            by(InflateBy::Ranges, Give::Nothing),
            Learn::Ours(Way::Hints),
            Learn::Ours(Way::Map),
            Learn::Qemu(256),
            Learn::Qemu(16_384),
        ];
        let drops = [true, false]
            .into_iter()
            .flat_map(|huge| [Give::DontNeed, Give::Free, Give::Nothing].map(|give| Drop { give, huge }));
        let moves =
            [FreePageSource::Off, FreePageSource::Hints, FreePageSource::Map].map(Move::Ours).into_iter();
        Options {
            learn: LearnSpec::fitting(available),
            ways,
            touched,
            drops: drops.collect(),
            moved,
            moves: moves.chain([false, true].map(|hints| Move::Qemu { hints })).collect(),
            low: LowSpec { memory: 512 * MIB, alloc: 384 * MIB, rounds: 4 },
            claims: vec![Claim::None, Claim::Balloon, Claim::Question, Claim::Reports],
            waits: [0, 50, 200].map(|ms| AnswerWait { ms }).into(),
            wait_links: vec![WaitLink::ONE_GBIT, WaitLink::TEN_GBIT, WaitLink::LOOPBACK],
            repeats,
            only: Vec::new(),
        }
    }

    /// Returns whether the side `name` is selected.
    pub(super) fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn host_with_less_memory_gets_a_smaller_guest_and_the_reason() {
        let whole = LearnSpec::fitting(Some(9 << 30));
        assert_eq!((whole.memory, whole.inflate, whole.smaller), (8 << 30, 7 << 30, None));
        assert_eq!(LearnSpec::fitting(None).smaller, None);
        let half = LearnSpec::fitting(Some(8 << 30));
        assert_eq!(half.memory, 4 << 30);
        assert_eq!(half.smaller.as_deref(), Some("8192 MiB are available, 8704 MiB were wanted"));
        assert_eq!(LearnSpec::fitting(Some(0)).memory, 1 << 30);
    }

    #[test]
    fn sides_have_distinct_names_and_valid_workloads() {
        for options in [Options::quick(None), Options::full(None)] {
            let learn: BTreeSet<_> = options.ways.iter().map(ToString::to_string).collect();
            let drops: BTreeSet<_> = options.drops.iter().map(ToString::to_string).collect();
            let moves: BTreeSet<_> = options.moves.iter().map(ToString::to_string).collect();
            assert_eq!((learn.len(), drops.len(), moves.len()), (10, 6, 5));
            let waits: BTreeSet<_> = options.waits.iter().map(ToString::to_string).collect();
            let groups: BTreeSet<_> = options.wait_links.iter().map(|link| link.group).collect();
            assert_eq!((waits.len(), groups.len()), (3, options.wait_links.len()));
            assert!(groups.iter().all(|group| vmferry_report::benches::free_page::has_group(group)));
            assert!(options.moved.workload().parse::<vmferry_guest_abi::Workload>().is_ok());
            assert!(options.low.workload().parse::<vmferry_guest_abi::Workload>().is_ok());
            // The balloon gets half of the memory, so the guest has to take pages back.
            assert!((options.low.memory / 2..options.low.memory).contains(&options.low.alloc));
            assert!(options.moved.data + options.moved.alloc < options.moved.memory);
        }
    }

    #[test]
    fn only_selected_sides_are_run() {
        let options = Options { only: vec!["move/".into(), "learn/map".into()], ..Options::quick(None) };
        assert!(options.wants("move/off") && options.wants("learn/map") && !options.wants("learn/hints"));
    }
}
