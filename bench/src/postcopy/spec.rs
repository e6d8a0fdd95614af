//! What is run: links, guests, ways, and how often.

use std::fmt;
use std::time::Duration;

use crate::link::Shape;

/// How an urgent page of vmferry travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// In the bulk channel, behind what is queued there.
    Shared,
    /// In its own channel, sent by whoever sends bulk, between two pieces of it.
    Interleaved,
    /// In its own channel, sent at once by whoever got the request.
    Dedicated,
    /// The same, beside bulk that is paced: what vmferry does of its own accord. The others are unpaced.
    Ours,
}

/// Who migrates, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// vmferry.
    Ours(Way),
    /// QEMU, without and with `postcopy-preempt`.
    Qemu {
        /// With a channel for urgent pages.
        preempt: bool,
    },
}

impl Side {
    /// In the order in which they are shown.
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

/// What a case is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To compare how long pages take.
    Compare,
    /// To find out what more vCPUs do to the number of pages a second.
    Vcpus,
}

impl Purpose {
    /// Returns the purpose as it is written in results.
    pub(super) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// A guest and the link that it moves over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaseSpec {
    /// Its name in the results.
    pub name: String,
    /// What it is for.
    pub purpose: Purpose,
    /// The link's name: cases with the same share their floor.
    pub link: &'static str,
    /// What it is shaped to. None: loopback.
    pub shape: Option<Shape>,
    /// `random` or `sequential`.
    pub pattern: &'static str,
    /// Guest memory in bytes.
    pub memory: u64,
    /// Of that, what has content and is written to: what has to be moved.
    pub data: u64,
    /// vCPUs.
    pub vcpus: u32,
    /// Who takes turns.
    pub sides: Vec<Side>,
    /// Rounds at most.
    pub rounds: usize,
}

impl CaseSpec {
    /// The workload, as on the guest's command line: writes as fast as it can. Without a sweep, which would touch a second
    /// page beside each that is written.
    pub fn workload(&self) -> String {
        let pattern = if self.pattern == "random" { "uniform" } else { self.pattern };
        format!("{pattern},ws={}M,fill=random,sweep=0", self.data >> 20)
    }
}

/// A whole bench.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The guests.
    pub cases: Vec<CaseSpec>,
    /// Rounds.
    pub repeats: usize,
    /// How long the guest is watched before the migration.
    pub before: Duration,
    /// How long it is watched at most after the migration, while it has not got its speed back.
    pub after: Duration,
    /// If not empty: only those whose name, as in `2gbit-bbr-random/ours`, has one of these in it.
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

/// The published run wrote to 18 of 20 GB: as many parts of `memory`, in whole MiB.
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

impl Options {
    /// The bench of contracts in under five minutes on two cores: three rounds on loopback and at 2 Gb/s, one of the rest.
    pub fn quick() -> Self {
        let memory = 512 * MIB;
        let ours = [Side::Ours(Way::Ours)];
        let once = |case| CaseSpec { rounds: 1, ..case };
        let cases = vec![
            case(LOOPBACK, "random", memory),
            case(TWO_BBR, "random", memory),
            once(case(TEN_BBR, "random", memory)),
            once(case(TWO_BBR, "sequential", memory)),
            once(vcpus(TEN_BBR, 1, memory, &ours)),
            once(vcpus(TEN_BBR, 2, memory, &ours)),
        ];
        Options {
            cases,
            repeats: 3,
            before: Duration::from_millis(500),
            after: Duration::from_millis(1500),
            only: Vec::new(),
        }
    }

    /// Both patterns on every link, by BBR and by CUBIC; one, two and four vCPUs.
    pub fn full() -> Self {
        let memory = 1024 * MIB;
        let links = [LOOPBACK, TWO_BBR, TWO_CUBIC, TEN_BBR, TEN_CUBIC];
        let mut cases: Vec<CaseSpec> = links
            .into_iter()
            .flat_map(|link| ["random", "sequential"].map(|pattern| case(link, pattern, memory)))
            .collect();
        let sides = [Side::Ours(Way::Ours), Side::Qemu { preempt: true }];
        cases.extend([1, 2, 4].map(|count| vcpus(TEN_BBR, count, memory, &sides)));
        Options {
            cases,
            repeats: 3,
            before: Duration::from_millis(1000),
            after: Duration::from_millis(5000),
            only: Vec::new(),
        }
    }

    /// Whether `side` of `case` is wanted.
    pub fn wants(&self, case: &CaseSpec, side: Side) -> bool {
        let name = format!("{}/{side}", case.name);
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }
}
