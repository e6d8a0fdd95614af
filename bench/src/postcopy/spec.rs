//! Specification of the runs: links, guests, ways for urgent pages, and the number of rounds.

use std::fmt;
use std::time::Duration;

use crate::link::Shape;

/// Way in which vmferry sends an urgent page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// In the bulk channel, behind the pages that are queued there.
    Shared,
    /// In a separate channel, sent by a bulk sender thread between two chunks.
    Interleaved,
    /// In a separate channel, sent at once by the thread that received the request.
    Dedicated,
    /// The same as `Dedicated`, with paced bulk channels. This is vmferry's default. The other ways
    /// have no pacing.
    Ours,
}

/// Hypervisor that migrates, and its way for urgent pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// vmferry, with the given way.
    Ours(Way),
    /// QEMU, with or without `postcopy-preempt`.
    Qemu {
        /// Set for a separate channel for urgent pages.
        preempt: bool,
    },
}

impl Side {
    /// All sides in the order in which they are shown.
    pub const ALL: [Self; 6] = [
        Side::Ours(Way::Shared),
        Side::Ours(Way::Interleaved),
        Side::Ours(Way::Dedicated),
        Side::Ours(Way::Ours),
        Side::Qemu { preempt: false },
        Side::Qemu { preempt: true },
    ];
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Side::Ours(Way::Shared) => "shared",
            Side::Ours(Way::Interleaved) => "interleaved",
            Side::Ours(Way::Dedicated) => "dedicated",
            Side::Ours(Way::Ours) => "ours",
            Side::Qemu { preempt: false } => "qemu",
            Side::Qemu { preempt: true } => "qemu-preempt",
        })
    }
}

/// Purpose of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Comparison of the time that pages take.
    Compare,
    /// Effect of more vCPUs on the number of pages per second.
    Vcpus,
    /// Effect of huge pages under the guest's memory on the time that pages take.
    Huge,
}

impl Purpose {
    /// Returns the purpose as it is written in results.
    pub(super) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// Kind of memory that backs the guest's memory on the source and on the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// Anonymous memory with transparent huge pages, if the host has them. This is vmferry's
    /// default.
    Usual,
    /// Anonymous memory of pages of 4 KiB.
    Small,
    /// Anonymous memory with transparent huge pages. A host without them skips the case.
    Thp,
    /// Huge pages of 2 MiB from the host's pool. A host whose pool is too small skips the case.
    Hugetlbfs,
}

impl Backing {
    /// Returns the name in results.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Usual => "usual",
            Self::Small => "small",
            Self::Thp => "thp",
            Self::Hugetlbfs => "hugetlbfs",
        }
    }

    /// Returns the options of `vmferry run` for this kind of memory.
    pub fn options(self) -> &'static [&'static str] {
        match self {
            Self::Usual => &[],
            Self::Small => &["--huge-pages", "false"],
            Self::Thp => &["--huge-pages", "true"],
            Self::Hugetlbfs => &["--memory-backing", "hugetlbfs"],
        }
    }
}

/// Guest, and the link that it moves over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaseSpec {
    /// Name in the results.
    pub name: String,
    /// Purpose of the case.
    pub purpose: Purpose,
    /// Name of the link. Cases with the same link are measured against the same kind of floor.
    pub link: &'static str,
    /// Shape of the link. `None` means loopback.
    pub shape: Option<Shape>,
    /// Access pattern: `random` or `sequential`.
    pub pattern: &'static str,
    /// Memory of the guest in bytes.
    pub memory: u64,
    /// Bytes of the memory that have content and are written to, and therefore have to be moved.
    pub data: u64,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Kind of memory of the guest.
    pub backing: Backing,
    /// Sides that run in turn.
    pub sides: Vec<Side>,
    /// Largest number of rounds.
    pub rounds: usize,
}

impl CaseSpec {
    /// Returns the workload, as on the guest's command line: writes at full speed. The sweep is
    /// off, because it would touch a second page for each write.
    pub fn workload(&self) -> String {
        let pattern = if self.pattern == "random" { "uniform" } else { self.pattern };
        format!("{pattern},ws={}M,fill=random,sweep=0", self.data >> 20)
    }
}

/// Selection of a whole bench.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Guests and links that are run.
    pub cases: Vec<CaseSpec>,
    /// Number of rounds.
    pub repeats: usize,
    /// Time for which the guest is observed before the migration.
    pub before: Duration,
    /// Longest time for which the guest is observed after the migration until it has recovered its
    /// speed.
    pub after: Duration,
    /// Texts that select sides by name, as in `2gbit-bbr-random/ours`. Empty selects all.
    pub only: Vec<String>,
}

const MIB: u64 = 1 << 20;

type LinkSpec = (&'static str, Option<Shape>);

const fn shaped(bits_per_s: u64, congestion: &'static str) -> Option<Shape> {
    Some(Shape { bits_per_s, congestion: Some(congestion) })
}

const LOOPBACK: LinkSpec = ("loopback", None);
const TWO_BBR: LinkSpec = ("2gbit-bbr", shaped(2_000_000_000, "bbr"));
const TWO_CUBIC: LinkSpec = ("2gbit-cubic", shaped(2_000_000_000, "cubic"));
const TEN_BBR: LinkSpec = ("10gbit-bbr", shaped(10_000_000_000, "bbr"));
const TEN_CUBIC: LinkSpec = ("10gbit-cubic", shaped(10_000_000_000, "cubic"));

/// Returns the part of `memory` that the guest writes to, in whole MiB: 18 of 20, as in the
/// published run.
fn most_of(memory: u64) -> u64 {
    memory / MIB * 18 / 20 * MIB
}

fn case((link, shape): LinkSpec, pattern: &'static str, memory: u64) -> CaseSpec {
    CaseSpec {
        name: format!("{link}-{pattern}"),
        purpose: Purpose::Compare,
        link,
        shape,
        pattern,
        memory,
        data: most_of(memory),
        vcpus: 1,
        backing: Backing::Usual,
        sides: Side::ALL.into(),
        rounds: usize::MAX,
    }
}

fn vcpus(link: LinkSpec, vcpus: u32, memory: u64, sides: &[Side]) -> CaseSpec {
    let base = case(link, "random", memory);
    CaseSpec {
        name: format!("{}-{vcpus}cpu", base.name),
        purpose: Purpose::Vcpus,
        vcpus,
        sides: sides.into(),
        ..base
    }
}

/// Returns the cases that compare small and huge pages. A case is named after its huge pages.
fn huge(memory: u64, sides: &[Side]) -> [CaseSpec; 3] {
    [(Backing::Small, "huge-off"), (Backing::Thp, "huge-thp"), (Backing::Hugetlbfs, "huge-hugetlbfs")].map(
        |(backing, name)| CaseSpec {
            name: name.into(),
            purpose: Purpose::Huge,
            backing,
            sides: sides.into(),
            ..case(TEN_BBR, "random", memory)
        },
    )
}

impl Options {
    /// Returns the options of `--quick`: three rounds on loopback and at 2 Gb/s and one of the
    /// others, in under five minutes on two cores.
    pub fn quick() -> Self {
        let memory = 512 * MIB;
        let ours = [Side::Ours(Way::Ours)];
        let once = |case| CaseSpec { rounds: 1, ..case };
        let mut cases = vec![
            case(LOOPBACK, "random", memory),
            case(TWO_BBR, "random", memory),
            once(case(TEN_BBR, "random", memory)),
            once(case(TWO_BBR, "sequential", memory)),
            once(vcpus(TEN_BBR, 1, memory, &ours)),
            once(vcpus(TEN_BBR, 2, memory, &ours)),
        ];
        cases.extend(huge(memory, &ours).map(once));
        Options {
            cases,
            repeats: 3,
            before: Duration::from_millis(500),
            after: Duration::from_millis(1500),
            only: Vec::new(),
        }
    }

    /// Returns the full options: both patterns on every link, with BBR and CUBIC, and one, two and
    /// four vCPUs, with guests of 8 GiB. The guests that compare huge pages have 1 GiB, because
    /// source and target reserve them from the host's pool.
    pub fn full() -> Self {
        let memory = 8192 * MIB;
        let links = [LOOPBACK, TWO_BBR, TWO_CUBIC, TEN_BBR, TEN_CUBIC];
        let mut cases: Vec<CaseSpec> = links
            .into_iter()
            .flat_map(|link| ["random", "sequential"].map(|pattern| case(link, pattern, memory)))
            .collect();
        let sides = [Side::Ours(Way::Ours), Side::Qemu { preempt: true }];
        cases.extend([1, 2, 4].map(|count| vcpus(TEN_BBR, count, memory, &sides)));
        cases.extend(huge(1024 * MIB, &[Side::Ours(Way::Shared), Side::Ours(Way::Ours)]));
        Options {
            cases,
            repeats: 3,
            before: Duration::from_millis(1000),
            after: Duration::from_millis(5000),
            only: Vec::new(),
        }
    }

    /// Returns whether `side` of `case` is selected.
    pub fn wants(&self, case: &CaseSpec, side: Side) -> bool {
        let name = format!("{}/{side}", case.name);
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }
}
