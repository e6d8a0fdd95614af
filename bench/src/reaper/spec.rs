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
    /// `Aimd` with a harvest of each ring on its own.
    AimdOwn,
    /// vmferry's policy, which predicts when a ring fills.
    Predict,
}

impl Policy {
    /// All policies.
    pub const ALL: [Self; 5] = [Self::Fixed, Self::Gears, Self::Aimd, Self::AimdOwn, Self::Predict];

    /// Returns the name of the policy in requests and results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Gears => "gears",
            Self::Aimd => "aimd",
            Self::AimdOwn => "aimd-own",
            Self::Predict => "predict",
        }
    }
}

/// vCPUs that vmferry throttles if the guest dirties pages faster than the link sends them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Throttle {
    /// All vCPUs equally.
    All,
    /// vCPUs that write more than their share. Without rings, all vCPUs equally.
    Writers,
}

impl Throttle {
    /// Returns the name in requests and results.
    pub fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Writers => "writers",
        }
    }
}

/// Mode of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Passes until the guest can be stopped for the rest.
    Precopy,
    /// Passes as long as they make progress, then postcopy.
    Hybrid,
}

impl Mode {
    /// Returns the name in requests and results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Precopy => "precopy",
            Self::Hybrid => "hybrid",
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
    /// vmferry with a computed throttle, and with the log or with rings under `predict`.
    Throttled {
        /// Number of entries of each vCPU's ring. `None` means the log.
        ring: Option<u32>,
        /// vCPUs that may be throttled.
        how: Throttle,
    },
    /// QEMU with its bitmap, or with rings that it harvests every second.
    Qemu {
        /// Number of entries of each vCPU's ring. `None` means the bitmap.
        ring: Option<u32>,
        /// True if auto-converge raises the throttle step by step.
        stepped: bool,
    },
}

impl Side {
    /// Returns the number of entries of each vCPU's ring, if there are rings.
    pub fn entries(self) -> Option<u32> {
        match self {
            Side::Log => None,
            Side::Ring { entries, .. } => Some(entries),
            Side::Throttled { ring, .. } | Side::Qemu { ring, .. } => ring,
        }
    }

    /// Returns the harvest policy, if vmferry harvests rings.
    pub fn policy(self) -> Option<Policy> {
        match self {
            Side::Ring { policy, .. } => Some(policy),
            Side::Throttled { ring, .. } => ring.map(|_| Policy::Predict),
            Side::Log | Side::Qemu { .. } => None,
        }
    }

    /// Returns the vCPUs that the side itself throttles, in addition to the throttle of the case.
    pub fn throttle(self) -> Option<Throttle> {
        match self {
            Side::Throttled { how, .. } => Some(how),
            Side::Log | Side::Ring { .. } | Side::Qemu { .. } => None,
        }
    }

    /// Returns the name of the side in a chart, without the ring size.
    pub fn short(self) -> &'static str {
        match self {
            Side::Log => "log",
            Side::Ring { policy, .. } => policy.name(),
            Side::Throttled { ring: None, how: Throttle::All } => "log, throttle all",
            Side::Throttled { ring: None, how: Throttle::Writers } => "log, throttle writers",
            Side::Throttled { ring: Some(_), how: Throttle::All } => "ring, throttle all",
            Side::Throttled { ring: Some(_), how: Throttle::Writers } => "ring, throttle writers",
            Side::Qemu { ring: None, stepped: false } => "QEMU bitmap",
            Side::Qemu { ring: Some(_), stepped: false } => "QEMU ring",
            Side::Qemu { ring: None, stepped: true } => "QEMU bitmap, stepped",
            Side::Qemu { ring: Some(_), stepped: true } => "QEMU ring, stepped",
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Side::Log => f.write_str("log"),
            Side::Ring { entries, policy } => write!(f, "ring-{entries}-{}", policy.name()),
            Side::Throttled { ring: None, how } => write!(f, "log-throttle-{}", how.name()),
            Side::Throttled { ring: Some(entries), how } => {
                write!(f, "ring-{entries}-throttle-{}", how.name())
            }
            Side::Qemu { ring, stepped } => {
                match ring {
                    None => f.write_str("qemu-bitmap")?,
                    Some(entries) => write!(f, "qemu-ring-{entries}")?,
                }
                f.write_str(if *stepped { "-stepped" } else { "" })
            }
        }
    }
}

/// Purpose of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Comparison of the sides.
    Compare,
    /// Comparison of the sides in a migration that does not end by its timeout.
    Converge,
    /// Comparison with the figures that were published for the same number of vCPUs.
    Published,
    /// Comparison of ways to throttle the guest.
    Throttle,
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
    /// Rate of the link in bytes per second, low enough for several passes. `None` means no limit.
    pub max_bandwidth: Option<u64>,
    /// Longest allowed downtime. It is short enough for several passes.
    pub downtime_limit: Duration,
    /// Mode of vmferry's sides.
    pub mode: Mode,
    /// vCPUs that all of vmferry's sides throttle.
    pub throttle: Option<Throttle>,
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

/// Returns QEMU's sides: the bitmap, and rings of 4096 entries.
fn qemu(stepped: bool) -> [Side; 2] {
    [None, Some(4096)].map(|ring| Side::Qemu { ring, stepped })
}

fn all_sides() -> Vec<Side> {
    ours().into_iter().chain(qemu(false)).collect()
}

/// Returns the sides with published figures: the log, and each ring size with a harvest every
/// second and with gears. `predict` is compared with them.
fn published_sides() -> Vec<Side> {
    let policies = [Policy::Fixed, Policy::Gears, Policy::Predict];
    let rings = ENTRIES.into_iter().flat_map(|entries| rings(entries, &policies).collect::<Vec<_>>());
    [Side::Log].into_iter().chain(rings).collect()
}

/// Returns the log and rings without a throttle and with each computed throttle, and QEMU, which
/// raises its throttle step by step.
fn throttles() -> Vec<Side> {
    let mut sides = vec![Side::Log, Side::Ring { entries: 4096, policy: Policy::Predict }];
    for how in [Throttle::All, Throttle::Writers] {
        sides.extend([None, Some(4096)].map(|ring| Side::Throttled { ring, how }));
    }
    sides.extend(qemu(true));
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
        max_bandwidth: Some(250_000_000),
        downtime_limit: Duration::from_millis(20),
        mode: Mode::Precopy,
        throttle: None,
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

/// Returns the guest of `stress` for a comparison with the published rows, with as many vCPUs as
/// fit none of the usual small hosts.
fn scaled(published_gib: u64, vcpus: u32) -> CaseSpec {
    let stress = stress(published_gib, vcpus, published_sides());
    CaseSpec {
        name: stress.name.replace("stress", "scaled"),
        purpose: Purpose::Published,
        // The timeout determines the duration. With 13 cases, a longer one would take hours.
        timeout: Duration::from_secs(10),
        ..stress
    }
}

/// Returns the guest of a published row in its full size, under the settings that guestperf has
/// without options: no limit of the link, and a downtime of at most 500 ms.
fn unscaled(gib: u64, vcpus: u32, memory_gib: u64, sides: Vec<Side>) -> CaseSpec {
    let (name, workload) = (format!("published-{gib}G-{vcpus}cpu"), format!("uniform,ws={gib}G,sweep=0"));
    CaseSpec {
        purpose: Purpose::Published,
        published: Some(gib * GIB),
        memory: memory_gib * GIB,
        max_bandwidth: None,
        downtime_limit: Duration::from_millis(500),
        ..case(&name, vcpus, &workload, sides)
    }
}

/// Returns all published rows: the first in its full size, the others scaled with 2, 4 and 8 vCPUs,
/// and in their full size, which only large hosts can hold.
fn published() -> Vec<CaseSpec> {
    let with_qemu = published_sides().into_iter().chain(qemu(false)).collect();
    let mut cases = vec![unscaled(3, 2, 4, with_qemu), scaled(3, 8)];
    cases.extend([6, 10, 20, 30].into_iter().flat_map(|gib| [2, 4, 8].map(|vcpus| scaled(gib, vcpus))));
    cases.extend([3, 6, 10, 20, 30].map(|gib| unscaled(gib, 8, 32, published_sides())));
    cases
}

fn converging(name: &str, workload: &str, sides: Vec<Side>) -> CaseSpec {
    let name = format!("converge-{name}");
    CaseSpec { purpose: Purpose::Converge, memory: 1568 * MIB, ..case(&name, 1, workload, sides) }
}

/// Returns a guest that writes at full speed, and can be stopped for what is left after a pass over
/// a link without a limit.
fn uncapped(sides: Vec<Side>) -> CaseSpec {
    CaseSpec {
        max_bandwidth: None,
        downtime_limit: Duration::from_secs(1),
        ..converging("uncapped-640M-1cpu", "uniform,ws=640M,sweep=0", sides)
    }
}

/// Returns a guest that writes less than the link without a limit carries, so that several passes
/// converge to a short downtime.
fn uncapped_paced(sides: Vec<Side>) -> CaseSpec {
    let workload = "uniform,ws=640M,rate=100k,sweep=0";
    CaseSpec { max_bandwidth: None, ..converging("paced-640M-1cpu", workload, sides) }
}

/// Returns a guest that converges because it is throttled. With the log, a guest at full speed
/// would dirty its whole working set even in the 3 % of its time that the throttle leaves.
fn throttled(sides: Vec<Side>) -> CaseSpec {
    let workload = "uniform,ws=192M,rate=100k,sweep=0";
    CaseSpec { throttle: Some(Throttle::All), ..converging("throttled-192M-1cpu", workload, sides) }
}

/// Returns a guest that writes at full speed, and moves by passes and then postcopy.
fn hybrid(sides: Vec<Side>) -> CaseSpec {
    CaseSpec { mode: Mode::Hybrid, ..converging("hybrid-192M-1cpu", "uniform,ws=192M,sweep=0", sides) }
}

/// Returns a guest with two vCPUs that together write more than the link carries. The second vCPU
/// writes `skew` times less often than the first.
fn throttle(name: &str, skew: u32, sides: Vec<Side>) -> CaseSpec {
    let name = format!("throttle-{name}-192M-2cpu");
    let workload = format!("uniform,ws=192M,rate=100k,skew={skew},sweep=0");
    CaseSpec { purpose: Purpose::Throttle, ..case(&name, 2, &workload, sides) }
}

/// Returns a guest whose second vCPU writes less than its share of the link.
fn throttle_unequal(sides: Vec<Side>) -> CaseSpec {
    throttle("unequal", 16, sides)
}

fn fault_cost() -> CaseSpec {
    CaseSpec {
        purpose: Purpose::FaultCost,
        // The working set is much larger than the ring, so each write faults. The link is slow
        // enough that sending takes no processor time from the guest.
        max_bandwidth: Some(60_000_000),
        timeout: Duration::from_secs(1),
        ..case("fault-cost", 1, "sequential,ws=64M,sweep=0", rings(4096, &[Policy::Predict]).collect())
    }
}

fn idle(policies: &[Policy]) -> CaseSpec {
    let sides = rings(4096, policies).collect();
    CaseSpec {
        purpose: Purpose::Idle,
        max_bandwidth: Some(25_000_000),
        ..case("idle", 1, "idle,data=64M", sides)
    }
}

fn paced(sides: Vec<Side>) -> CaseSpec {
    case("paced-192M-1cpu", 1, "uniform,ws=192M,rate=40k,sweep=0", sides)
}

/// Returns a guest whose working set just fits a ring of 4096 entries. The link is so slow that the
/// policy harvests, and not the passes.
fn ring_sized(sides: Vec<Side>) -> CaseSpec {
    let workload = "uniform,ws=14M,data=96M,sweep=0";
    CaseSpec { max_bandwidth: Some(40_000_000), ..case("ring-sized-14M-1cpu", 1, workload, sides) }
}

fn unequal(sides: Vec<Side>) -> CaseSpec {
    case("unequal-192M-2cpu", 2, "uniform,ws=192M,rate=40k,skew=8,sweep=0", sides)
}

impl Options {
    /// Returns the options of `--quick`, which takes about eight minutes on two cores.
    pub fn quick() -> Self {
        let small = |entries, policies: &[Policy]| {
            [Side::Log].into_iter().chain(rings(entries, policies)).collect::<Vec<_>>()
        };
        let four = [Policy::Fixed, Policy::Gears, Policy::Aimd, Policy::Predict];
        let two = || rings(4096, &[Policy::Fixed, Policy::Predict]).collect::<Vec<_>>();
        let mut cases = vec![
            fault_cost(),
            idle(&[Policy::Predict]),
            stress(3, 1, all_sides()),
            ring_sized(small(4096, &four)),
            paced(small(4096, &four)),
            unequal(small(4096, &[Policy::Fixed, Policy::Predict])),
        ];
        for case in &mut cases {
            case.timeout = case.timeout.min(Duration::from_secs(2));
        }
        // These migrations end before their timeout.
        let computed =
            [Throttle::All, Throttle::Writers].map(|how| Side::Throttled { ring: Some(4096), how });
        cases.extend([uncapped(two()), hybrid(two()), throttle_unequal(computed.to_vec())]);
        Options {
            cases,
            repeats: 3,
            before: Duration::from_millis(800),
            after: Duration::from_millis(500),
            only: Vec::new(),
        }
    }

    /// Returns the full options: all published working sets, scaled, one and two vCPUs, paced and
    /// unequal writers, the published rows, converging and throttled guests, and up to 30 s for
    /// each migration.
    pub fn full() -> Self {
        let mut cases = vec![fault_cost(), idle(&Policy::ALL)];
        cases.extend([3, 6, 10].map(|gib| stress(gib, 1, all_sides())));
        cases.extend([20, 30].map(|gib| stress(gib, 1, ours())));
        cases.extend([stress(3, 2, all_sides()), paced(all_sides()), unequal(ours()), ring_sized(ours())]);
        let stepped = ours().into_iter().chain(qemu(true)).collect();
        let converging =
            [uncapped(all_sides()), uncapped_paced(all_sides()), throttled(stepped), hybrid(ours())];
        cases.extend(converging);
        cases.extend([throttle("equal", 1, throttles()), throttle_unequal(throttles())]);
        cases.extend(published());
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
