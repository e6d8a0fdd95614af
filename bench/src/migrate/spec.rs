//! Specification of the runs: cases, sides, and the number of rounds.

use super::cold::TargetMemory;
use std::fmt;
use std::time::Duration;

/// Guest, its workload, and the bytes that the floor copies.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CaseSpec {
    /// Name in the results.
    pub name: String,
    /// Memory of the guest in bytes.
    pub memory: u64,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Workload, as on the guest's command line.
    pub workload: String,
    /// Bytes of the guest's memory that have content. The floor copies as many.
    pub data: u64,
    /// Longest allowed downtime of the switchover.
    pub downtime_limit: Duration,
    /// Time for which the guest runs before it is migrated. Its speed before is measured in this
    /// time.
    pub warm_up: Duration,
    /// Time at which the target allocates its memory.
    pub target: TargetMemory,
    /// True if the target has only pages of 4 KiB.
    pub small_pages: bool,
    /// True if free memory of the host is not touched before the migration, so that a host that
    /// returns free memory to the machine below it has to get it again.
    pub given_back: bool,
}

/// Program that moves the data, and its connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// vmferry's migration.
    Ours {
        /// Number of parallel channels.
        channels: u32,
        /// Set for TLS with certificates of both sides.
        encrypted: bool,
    },
    /// QEMU's migration.
    Qemu {
        /// Number of multifd channels. `None` means a single stream.
        multifd: Option<u32>,
    },
    /// The floor, a plain copy.
    Floor {
        /// Number of parallel streams.
        streams: u32,
    },
}

impl Side {
    /// Returns the number of connections that carry pages. A side is compared with the floor of the
    /// same number.
    pub fn streams(self) -> u32 {
        match self {
            Side::Ours { channels, .. } => channels,
            Side::Qemu { multifd } => multifd.unwrap_or(1),
            Side::Floor { streams } => streams,
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Side::Ours { channels, encrypted: false } => write!(f, "ours-{channels}"),
            Side::Ours { channels, encrypted: true } => write!(f, "ours-{channels}-tls"),
            Side::Qemu { multifd: None } => f.write_str("qemu-single"),
            Side::Qemu { multifd: Some(channels) } => write!(f, "qemu-multifd-{channels}"),
            Side::Floor { streams } => write!(f, "floor-{streams}"),
        }
    }
}

/// Selection of a whole bench.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Guests that are run.
    pub cases: Vec<CaseSpec>,
    /// Sides that run in turn.
    pub sides: Vec<Side>,
    /// Number of rounds.
    pub repeats: usize,
    /// Texts that select sides by name, as in `idle/floor-2`. Empty selects all.
    pub only: Vec<String>,
}

impl Options {
    /// Returns the options of `--quick`: three rounds, in under three minutes on two cores.
    pub fn quick() -> Self {
        Options { repeats: 3, ..Self::full() }
    }

    /// Returns the full options: seven rounds of two guests.
    ///
    /// One guest is idle and has 4 GiB of random data. The other one writes 100 000 times per
    /// second to 256 MiB of its 1 GiB.
    pub fn full() -> Self {
        let idle = CaseSpec {
            name: "idle".into(),
            // The guest itself and its counters need half a GiB beyond the data.
            memory: (4 << 30) + (512 << 20),
            vcpus: 1,
            workload: "idle,data=4G,fill=random".into(),
            data: 4 << 30,
            downtime_limit: Duration::from_millis(300),
            warm_up: Duration::from_millis(500),
            ..CaseSpec::default()
        };
        let uniform = CaseSpec {
            name: "uniform".into(),
            memory: 1 << 30,
            vcpus: 1,
            workload: "uniform,ws=256M,data=512M,rate=100k,fill=random".into(),
            data: 512 << 20,
            downtime_limit: Duration::from_millis(300),
            warm_up: Duration::from_millis(1000),
            ..CaseSpec::default()
        };
        let sides = vec![
            Side::Ours { channels: 1, encrypted: false },
            Side::Qemu { multifd: None },
            Side::Floor { streams: 1 },
            Side::Ours { channels: 2, encrypted: false },
            Side::Ours { channels: 2, encrypted: true },
            Side::Qemu { multifd: Some(2) },
            Side::Floor { streams: 2 },
        ];
        Options { cases: vec![idle, uniform], sides, repeats: 7, only: Vec::new() }
    }

    /// Returns whether `side` of `case` is selected.
    pub fn wants(&self, case: &CaseSpec, side: Side) -> bool {
        let name = format!("{}/{side}", case.name);
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }
}
