//! Specification of the runs: guests, trackers, and the number of rounds.

use std::fmt;
use std::time::Duration;

/// Harvest policy of the reaper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Policy {
    /// One harvest every second.
    Fixed,
    /// One of six sleeps, selected by the occupancy of the rings.
    Gears,
    /// The sleep is halved at a high occupancy of the rings, and extended at a low one.
    Aimd,
    /// vmferry's policy, which predicts when a ring fills.
    Predict,
}

impl Policy {
    /// All policies.
    pub const ALL: [Self; 4] = [Self::Fixed, Self::Gears, Self::Aimd, Self::Predict];

    /// Returns the name of the policy in requests and results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Gears => "gears",
            Self::Aimd => "aimd",
            Self::Predict => "predict",
        }
    }
}

/// Hypervisor that migrates, and its dirty tracker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// vmferry with KVM's dirty log.
    Log,
    /// vmferry with dirty rings.
    Ring {
        /// Number of entries of each vCPU's ring.
        entries: u32,
        /// Harvest policy.
        policy: Policy,
    },
    /// QEMU with its bitmap, or with rings that it harvests every second.
    Qemu {
        /// Number of entries of each vCPU's ring. `None` means the bitmap.
        ring: Option<u32>,
    },
}

impl Side {
    /// Returns the number of entries of each vCPU's ring, if there are rings.
    pub fn entries(self) -> Option<u32> {
        match self {
            Side::Log => None,
            Side::Ring { entries, .. } => Some(entries),
            Side::Qemu { ring } => ring,
        }
    }

    /// Returns the name of the side in a chart, without the ring size.
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

/// Purpose of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Comparison of the sides.
    Compare,
    /// Cost of a write fault on this host.
    FaultCost,
    /// Cost of the reaper of an idle guest.
    Idle,
}

impl Purpose {
    /// Returns the purpose as it is written in results.
    pub(super) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// Guest, its load, and the migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaseSpec {
    /// Name in the results.
    pub name: String,
    /// Purpose of the case.
    pub purpose: Purpose,
    /// Published stress in bytes that the case represents. `None` if there is none.
    pub published: Option<u64>,
    /// Memory of the guest in bytes.
    pub memory: u64,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Workload, as on the guest's command line.
    pub workload: String,
    /// Rate of the link in bytes per second. It is low enough for several passes.
    pub max_bandwidth: u64,
    /// Longest allowed downtime. It is short enough for several passes.
    pub downtime_limit: Duration,
    /// Time after which the guest is moved whatever the downtime.
    pub timeout: Duration,
    /// Sides that run in turn.
    pub sides: Vec<Side>,
}

/// Selection of a whole bench.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Guests that are run.
    pub cases: Vec<CaseSpec>,
    /// Number of rounds.
    pub repeats: usize,
    /// Time for which the guest is observed before the migration.
    pub before: Duration,
    /// Time for which the guest is observed on the target.
    pub after: Duration,
    /// Texts that select sides by name, as in `stress-192M/log`. Empty selects all.
    pub only: Vec<String>,
}

/// Divisor of the published working sets, so that two copies of such a guest fit on small hosts.
pub const SCALE: u64 = 16;
const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
/// Published ring sizes in entries.
pub const ENTRIES: [u32; 2] = [4096, 65536];

/// Returns the sides with rings of one size under the given policies.
fn rings(entries: u32, policies: &[Policy]) -> impl Iterator<Item = Side> {
    policies.iter().map(move |&policy| Side::Ring { entries, policy })
}

/// Returns vmferry's sides: the log, and each ring size under each policy.
fn ours() -> Vec<Side> {
    let rings = ENTRIES.into_iter().flat_map(|entries| rings(entries, &Policy::ALL));
    [Side::Log].into_iter().chain(rings).collect()
}

fn all_sides() -> Vec<Side> {
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

/// Returns a guest that writes at full speed to the published working set, scaled.
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
        // The working set is much larger than the ring, so each write faults. The link is slow
        // enough that sending takes no processor time from the guest.
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

/// Returns a guest whose working set just fits a ring of 4096 entries. The link is so slow that the
/// policy harvests, and not the passes.
fn ring_sized(sides: Vec<Side>) -> CaseSpec {
    let workload = "uniform,ws=14M,data=96M,sweep=0";
    CaseSpec { max_bandwidth: 40_000_000, ..case("ring-sized-14M-1cpu", 1, workload, sides) }
}

fn unequal(sides: Vec<Side>) -> CaseSpec {
    case("unequal-192M-2cpu", 2, "uniform,ws=192M,rate=40k,skew=8,sweep=0", sides)
}

impl Options {
    /// Returns the options of `--quick`, which takes under eight minutes on two cores.
    pub fn quick() -> Self {
        let small = |entries, policies: &[Policy]| {
            [Side::Log].into_iter().chain(rings(entries, policies)).collect::<Vec<_>>()
        };
        let mut cases = vec![
            fault_cost(),
            idle(&[Policy::Predict]),
            stress(3, 1, all_sides()),
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

    /// Returns the full options: all published working sets, scaled, one and two vCPUs, paced and
    /// unequal writers, and 30 s for each migration.
    pub fn full() -> Self {
        let mut cases = vec![fault_cost(), idle(&Policy::ALL)];
        cases.extend([3, 6, 10].map(|gib| stress(gib, 1, all_sides())));
        cases.extend([20, 30].map(|gib| stress(gib, 1, ours())));
        cases.extend([stress(3, 2, all_sides()), paced(all_sides()), unequal(ours()), ring_sized(ours())]);
        Options {
            cases,
            repeats: 3,
            before: Duration::from_millis(3000),
            after: Duration::from_millis(2000),
            only: Vec::new(),
        }
    }

    /// Returns whether `side` of `case` is selected.
    pub fn wants(&self, case: &CaseSpec, side: Side) -> bool {
        let name = format!("{}/{side}", case.name);
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }
}
