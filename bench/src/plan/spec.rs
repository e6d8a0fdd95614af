//! Specification of the predictions: guests, links, and modes of migration.

use std::time::Duration;

use crate::link::Shape;

/// Link that a guest moves over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Loopback with a limit of the migration itself, in bytes per second.
    Capped(u64),
    /// Loopback at full speed.
    Free,
    /// A shaped link.
    Shaped(Shape),
}

impl Way {
    /// Returns the bytes per second of frames that the link carries, or `None` if they are unknown
    /// in advance.
    #[expect(clippy::cast_precision_loss, reason = "rates")]
    pub fn bytes_per_s(self) -> Option<f64> {
        match self {
            Way::Capped(rate) => Some(rate as f64),
            Way::Free => None,
            // Ethernet, IP and TCP headers take their share of each frame.
            Way::Shaped(shape) => Some(shape.bits_per_s as f64 / 8.0 * 1448.0 / 1514.0),
        }
    }

    fn name(self) -> String {
        match self {
            Way::Capped(rate) => format!("cap{}M", rate / 1_000_000),
            Way::Free => "loopback".into(),
            Way::Shaped(shape) => format!("{}mbit", shape.bits_per_s / 1_000_000),
        }
    }
}

/// Workload of a guest, with its dirty rate relative to the link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// Access pattern: `idle`, `uniform`, `sequential` or `zipf:0.99`.
    pub pattern: &'static str,
    /// Working set in MiB.
    pub ws: u64,
    /// Pages written per second, divided by the pages per second that the link carries.
    pub ratio: f64,
}

/// One prediction.
#[derive(Debug, Clone, PartialEq)]
pub struct CaseSpec {
    /// Name in the results.
    pub name: String,
    /// Kind of guest: `kvm` or `process`.
    pub guest: &'static str,
    /// Memory of the guest in bytes.
    pub memory: u64,
    /// Memory with content, in MiB.
    pub data: u64,
    /// Workload of the guest.
    pub load: Load,
    /// Link that the guest moves over.
    pub way: Way,
    /// Mode: `precopy`, `postcopy`, `hybrid` or `auto-converge`.
    pub mode: &'static str,
    /// Longest allowed downtime.
    pub downtime_limit: Duration,
    /// Time after which the migration counts as not converged.
    pub timeout: Duration,
}

impl CaseSpec {
    /// Returns whether the dirty rate is close to the capacity of the link: 0.7 to 1.3 of it.
    pub fn borderline(&self) -> bool {
        (0.7 - 1e-9..=1.3 + 1e-9).contains(&self.load.ratio)
    }

    /// Returns the guest's writes per second.
    pub fn rate(&self) -> u64 {
        // An unlimited link is measured with a guest that does not exceed any link.
        let link = self.way.bytes_per_s().unwrap_or(500e6);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "some ten thousand")]
        let rate = (self.load.ratio * link / 4096.0).max(1.0) as u64;
        rate
    }

    /// Returns the workload, as on the guest's command line.
    pub fn workload(&self) -> String {
        let Load { pattern, ws, .. } = self.load;
        if pattern == "idle" {
            return format!("idle,data={}M,fill=random", self.data);
        }
        // The sweep is off: KVM counts the first read of a page of a split huge page as a write,
        // which would raise the dirty rate.
        format!("{pattern},ws={ws}M,data={}M,rate={},fill=random,sweep=0", self.data, self.rate())
    }
}

/// Selection of a whole bench.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Predictions that are run.
    pub cases: Vec<CaseSpec>,
    /// Number of rounds.
    pub repeats: usize,
    /// Texts that select cases by name. Empty selects all.
    pub only: Vec<String>,
}

const MIB: u64 = 1 << 20;
const SLOW: Way = Way::Capped(100_000_000);
const FAST: Way = Way::Capped(200_000_000);
const GIGABIT: Way = Way::Shaped(Shape { bits_per_s: 1_000_000_000, congestion: None });
const TWO: Way = Way::Shaped(Shape { bits_per_s: 2_000_000_000, congestion: None });
const ZIPF: &str = "zipf:0.99";

fn case(pattern: &'static str, ws: u64, ratio: f64, way: Way) -> CaseSpec {
    let load = if pattern == "idle" { String::new() } else { format!("-{ws}M-x{ratio}") };
    CaseSpec {
        name: format!("{}{load}-{}", pattern.split(':').next().unwrap_or(pattern), way.name()),
        guest: "kvm",
        memory: 512 * MIB,
        data: 256,
        load: Load { pattern, ws, ratio },
        way,
        mode: "precopy",
        downtime_limit: Duration::from_millis(300),
        timeout: Duration::from_secs(15),
    }
}

fn by(mode: &'static str, base: CaseSpec) -> CaseSpec {
    CaseSpec { name: format!("{}-{mode}", base.name), mode, ..base }
}

fn process(base: CaseSpec) -> CaseSpec {
    CaseSpec { name: format!("{}-process", base.name), guest: "process", ..base }
}

fn idle(way: Way) -> CaseSpec {
    case("idle", 0, 0.0, way)
}

impl Options {
    /// Returns the options of `--quick`: about thirty predictions in about four minutes.
    pub fn quick() -> Self {
        let cases = vec![
            idle(SLOW),
            idle(GIGABIT),
            CaseSpec { memory: 1024 * MIB, data: 768, ..idle(Way::Free) },
            case("uniform", 128, 0.3, FAST),
            case("uniform", 128, 0.7, SLOW),
            case("uniform", 128, 0.85, GIGABIT),
            case("uniform", 128, 1.0, FAST),
            case("uniform", 128, 1.1, TWO),
            case("uniform", 128, 1.2, SLOW),
            case("uniform", 128, 1.3, GIGABIT),
            case("uniform", 128, 2.0, FAST),
            case("uniform", 16, 3.0, SLOW),
            case(ZIPF, 128, 0.5, SLOW),
            case(ZIPF, 128, 0.8, GIGABIT),
            case(ZIPF, 128, 1.0, FAST),
            case(ZIPF, 128, 1.3, SLOW),
            case(ZIPF, 192, 4.0, FAST),
            case("sequential", 96, 0.4, GIGABIT),
            case("sequential", 96, 0.7, SLOW),
            case("sequential", 96, 0.9, FAST),
            case("sequential", 96, 1.1, SLOW),
            case("sequential", 96, 1.3, TWO),
            process(case("uniform", 128, 0.7, FAST)),
            process(case("uniform", 128, 1.2, SLOW)),
            process(case("sequential", 96, 0.5, GIGABIT)),
            by("postcopy", case("uniform", 128, 0.5, FAST)),
            by("postcopy", idle(GIGABIT)),
            by("hybrid", case("uniform", 128, 2.0, FAST)),
            by("auto-converge", case("uniform", 128, 1.5, FAST)),
        ];
        Options { cases, repeats: 1, only: Vec::new() }
    }

    /// Returns the full options: more dirty rates of each pattern, and three rounds.
    pub fn full() -> Self {
        let mut cases = Self::quick().cases;
        for way in [SLOW, FAST, GIGABIT, TWO] {
            for ratio in [0.75, 0.95, 1.05, 1.15, 1.25, 1.6] {
                cases.push(case("uniform", 160, ratio, way));
                cases.push(case(ZIPF, 160, ratio, way));
                cases.push(case("sequential", 160, ratio, way));
            }
        }
        Options { cases, repeats: 3, only: Vec::new() }
    }

    /// Returns whether `case` is selected.
    pub fn wants(&self, case: &CaseSpec) -> bool {
        self.only.is_empty() || self.only.iter().any(|text| case.name.contains(text.as_str()))
    }
}
