//! What is run: guests, trackers, and how often.

use std::fmt;
use std::time::Duration;

/// A policy of the reaper, by the name that the command knows it by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Policy {
    /// Every second.
    Fixed,
    /// Six gears.
    Gears,
    /// Halving and adding.
    Aimd,
    /// Looking first.
    Predict,
}

impl Policy {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Fixed, Self::Gears, Self::Aimd, Self::Predict];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Gears => "gears",
            Self::Aimd => "aimd",
            Self::Predict => "predict",
        }
    }
}

/// Who migrates, and how it finds dirty pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// vmferry by KVM's bitmap.
    Log,
    /// vmferry by dirty rings.
    Ring {
        /// Entries of each vCPU's ring.
        entries: u32,
        /// When it is harvested.
        policy: Policy,
    },
    /// QEMU, by its bitmap or by rings, which it harvests every second.
    Qemu {
        /// Entries of each vCPU's ring; None: the bitmap.
        ring: Option<u32>,
    },
}

impl Side {
    /// Entries of each vCPU's ring, if there are rings.
    pub fn entries(self) -> Option<u32> {
        match self {
            Side::Log => None,
            Side::Ring { entries, .. } => Some(entries),
            Side::Qemu { ring } => ring,
        }
    }

    /// Without the size of its rings: what a line in a chart is called.
    pub fn short(self) -> &'static str {
        match self {
            Side::Log => "log",
            Side::Ring { policy, .. } => policy.name(),
            Side::Qemu { ring: None } => "QEMU bitmap",
            Side::Qemu { ring: Some(_) } => "QEMU ring",
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Side::Log => f.write_str("log"),
            Side::Ring { entries, policy } => write!(f, "ring-{entries}-{}", policy.name()),
            Side::Qemu { ring: None } => f.write_str("qemu-bitmap"),
            Side::Qemu { ring: Some(entries) } => write!(f, "qemu-ring-{entries}"),
        }
    }
}

/// What a case is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To compare the sides.
    Compare,
    /// To find out what a write fault costs here.
    FaultCost,
    /// To find out what the reaper costs that has nothing to do.
    Idle,
}

impl Purpose {
    /// Returns the purpose as it is written in results.
    pub(super) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// A guest, its load, and the migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaseSpec {
    /// Its name in the results.
    pub name: String,
    /// What it is for.
    pub purpose: Purpose,
    /// The published stress that it stands for, in bytes. None: it stands for none.
    pub published: Option<u64>,
    /// Guest memory in bytes.
    pub memory: u64,
    /// vCPUs.
    pub vcpus: u32,
    /// The workload, as on the guest's command line.
    pub workload: String,
    /// The link's rate in bytes a second: so that the migration takes several passes.
    pub max_bandwidth: u64,
    /// How long a switchover may be: short, for the same reason.
    pub downtime_limit: Duration,
    /// How long the migration may take. Then the guest is moved whatever the downtime.
    pub timeout: Duration,
    /// Who takes turns.
    pub sides: Vec<Side>,
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
    /// How long it is watched on the target.
    pub after: Duration,
    /// If not empty: only those whose name, as in `stress-192M/log`, has one of these in it.
    pub only: Vec<String>,
}

/// The published working sets are divided by this so that they, and a guest twice, fit small hosts.
pub const SCALE: u64 = 16;
const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
/// The sizes of rings that were published.
pub const ENTRIES: [u32; 2] = [4096, 65536];

/// Rings of this size under these policies.
fn rings(entries: u32, policies: &[Policy]) -> impl Iterator<Item = Side> {
    policies.iter().map(move |&policy| Side::Ring { entries, policy })
}

/// The log, and each size under each policy.
fn ours() -> Vec<Side> {
    let rings = ENTRIES.into_iter().flat_map(|entries| rings(entries, &Policy::ALL));
    [Side::Log].into_iter().chain(rings).collect()
}

fn everyone() -> Vec<Side> {
    let mut sides = ours();
    sides.extend([Side::Qemu { ring: None }, Side::Qemu { ring: Some(4096) }]);
    sides
}

fn case(name: &str, vcpus: u32, workload: &str, sides: Vec<Side>) -> CaseSpec {
    CaseSpec {
        name: name.into(),
        purpose: Purpose::Compare,
        published: None,
        memory: GIB,
        vcpus,
        workload: workload.into(),
        max_bandwidth: 250_000_000,
        downtime_limit: Duration::from_millis(20),
        timeout: Duration::from_secs(30),
        sides,
    }
}

/// A guest that writes as fast as it can to the published working set, scaled.
fn stress(published_gib: u64, vcpus: u32, sides: Vec<Side>) -> CaseSpec {
    let ws = published_gib * GIB / SCALE;
    let name = format!("stress-{}M-{vcpus}cpu", ws / MIB);
    let workload = format!("uniform,ws={}M,sweep=0", ws / MIB);
    let published = Some(published_gib * GIB);
    CaseSpec { published, memory: ws + ws / 4 + 768 * MIB, ..case(&name, vcpus, &workload, sides) }
}

fn fault_cost() -> CaseSpec {
    CaseSpec {
        purpose: Purpose::FaultCost,
        // A set much larger than the ring: each write faults. Slow enough that sending takes no processor from the guest.
        max_bandwidth: 60_000_000,
        timeout: Duration::from_secs(1),
        ..case("fault-cost", 1, "sequential,ws=64M,sweep=0", rings(4096, &[Policy::Predict]).collect())
    }
}

fn idle(policies: &[Policy]) -> CaseSpec {
    let sides = rings(4096, policies).collect();
    CaseSpec { purpose: Purpose::Idle, max_bandwidth: 25_000_000, ..case("idle", 1, "idle,data=64M", sides) }
}

fn paced(sides: Vec<Side>) -> CaseSpec {
    case("paced-192M-1cpu", 1, "uniform,ws=192M,rate=40k,sweep=0", sides)
}

/// A set that just fits a ring of 4096, over a link so slow that the policy harvests, not the passes.
fn ring_sized(sides: Vec<Side>) -> CaseSpec {
    let workload = "uniform,ws=14M,data=96M,sweep=0";
    CaseSpec { max_bandwidth: 40_000_000, ..case("ring-sized-14M-1cpu", 1, workload, sides) }
}

fn unequal(sides: Vec<Side>) -> CaseSpec {
    case("unequal-192M-2cpu", 2, "uniform,ws=192M,rate=40k,skew=8,sweep=0", sides)
}

impl Options {
    /// The bench of contracts in under eight minutes on two cores.
    pub fn quick() -> Self {
        let small = |entries, policies: &[Policy]| {
            [Side::Log].into_iter().chain(rings(entries, policies)).collect::<Vec<_>>()
        };
        let mut cases = vec![
            fault_cost(),
            idle(&[Policy::Predict]),
            stress(3, 1, everyone()),
            ring_sized(small(4096, &Policy::ALL)),
            paced(small(4096, &Policy::ALL)),
            unequal(small(4096, &[Policy::Fixed, Policy::Predict])),
        ];
        for case in &mut cases {
            case.timeout = case.timeout.min(Duration::from_secs(2));
        }
        Options {
            cases,
            repeats: 3,
            before: Duration::from_millis(800),
            after: Duration::from_millis(500),
            only: Vec::new(),
        }
    }

    /// All published working sets, scaled; one vCPU and two; paced and unequal writers; 30 s for each migration.
    pub fn full() -> Self {
        let mut cases = vec![fault_cost(), idle(&Policy::ALL)];
        cases.extend([3, 6, 10].map(|gib| stress(gib, 1, everyone())));
        cases.extend([20, 30].map(|gib| stress(gib, 1, ours())));
        cases.extend([stress(3, 2, everyone()), paced(everyone()), unequal(ours()), ring_sized(ours())]);
        Options {
            cases,
            repeats: 3,
            before: Duration::from_millis(3000),
            after: Duration::from_millis(2000),
            only: Vec::new(),
        }
    }

    /// Whether `side` of `case` is wanted.
    pub fn wants(&self, case: &CaseSpec, side: Side) -> bool {
        let name = format!("{}/{side}", case.name);
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }
}
