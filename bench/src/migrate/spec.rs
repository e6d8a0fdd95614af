//! What is run: cases, sides, and how often.

use std::fmt;
use std::time::Duration;

/// A guest, its workload, and what the floor copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaseSpec {
    /// Its name in the results.
    pub name: String,
    /// Guest memory in bytes.
    pub memory: u64,
    /// vCPUs.
    pub vcpus: u32,
    /// The workload, as on the guest's command line.
    pub workload: String,
    /// Bytes of the guest's memory that have content: what the floor copies.
    pub data: u64,
    /// How long a switchover may be.
    pub downtime_limit: Duration,
    /// How long the guest runs before it is migrated. Its speed before is taken from this time.
    pub settle: Duration,
}

/// Who migrates, and over how many connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// vmferry.
    Ours {
        /// Parallel channels.
        channels: u32,
        /// By TLS, both sides with certificates.
        encrypted: bool,
    },
    /// QEMU.
    Qemu {
        /// multifd with so many channels; None: a single stream.
        multifd: Option<u32>,
    },
    /// The bare copy.
    Floor {
        /// Parallel streams.
        streams: u32,
    },
}

impl Side {
    /// How many connections carry its pages: a side is compared with the floor of as many.
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

/// A whole bench.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The guests.
    pub cases: Vec<CaseSpec>,
    /// Who takes turns.
    pub sides: Vec<Side>,
    /// Rounds.
    pub repeats: usize,
    /// If not empty: only those whose name, as in `idle/floor-2`, has one of these in it.
    pub only: Vec<String>,
}

impl Options {
    /// The bench of contracts in under three minutes on two cores: three rounds.
    pub fn quick() -> Self {
        Options { repeats: 3, ..Self::full() }
    }

    /// Seven rounds of an idle guest with 4 GiB of random data, and of a guest that writes 100 000 times a
    /// second to 256 MiB of its 1 GiB.
    pub fn full() -> Self {
        let idle = CaseSpec {
            name: "idle".into(),
            // Half a GiB beyond the data for the guest itself and its counters.
            memory: (4 << 30) + (512 << 20),
            vcpus: 1,
            workload: "idle,data=4G,fill=random".into(),
            data: 4 << 30,
            downtime_limit: Duration::from_millis(300),
            settle: Duration::from_millis(500),
        };
        let uniform = CaseSpec {
            name: "uniform".into(),
            memory: 1 << 30,
            vcpus: 1,
            workload: "uniform,ws=256M,data=512M,rate=100k,fill=random".into(),
            data: 512 << 20,
            downtime_limit: Duration::from_millis(300),
            settle: Duration::from_millis(1000),
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

    /// Whether `side` of `case` is wanted.
    pub fn wants(&self, case: &CaseSpec, side: Side) -> bool {
        let name = format!("{}/{side}", case.name);
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }
}
