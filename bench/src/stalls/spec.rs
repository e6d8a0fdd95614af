//! Specification of the runs: guests, sides, and the number of rounds.

use std::fmt;
use std::time::Duration;

use super::CaseSpec;
use crate::migrate;
use serde::Serialize;

/// Setting of vmferry's channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Channels {
    /// One channel for each idle processor, the default of the command.
    Auto,
    /// A fixed number of channels.
    #[serde(untagged)]
    Count(u16),
}

/// Settings of vmferry's channels that are measured.
const OURS: [Channels; 3] = [Channels::Count(1), Channels::Count(2), Channels::Auto];

/// Program that moves the guest, and its connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// No migration. Other threads keep the processors busy that the guest leaves idle, so that
    /// the stalls are those of a guest whose host has no idle processor.
    Floor,
    /// vmferry, with this setting of its channels.
    Ours(Channels),
    /// QEMU.
    Qemu {
        /// Number of multifd channels. `None` means a single stream.
        multifd: Option<u32>,
    },
}

/// Side that vmferry is compared with.
pub(super) const QEMU: Side = Side::Qemu { multifd: None };

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Side::Floor => f.write_str("floor"),
            Side::Ours(Channels::Count(count)) => write!(f, "ours-{count}"),
            Side::Ours(Channels::Auto) => f.write_str("ours-auto"),
            Side::Qemu { multifd } => fmt::Display::fmt(&migrate::Side::Qemu { multifd }, f),
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
    /// Texts that select sides by name, as in `2cpu/ours-1`. Empty selects all.
    pub only: Vec<String>,
}

impl Options {
    /// Returns the options of `--quick`: three rounds.
    pub fn quick() -> Self {
        Options { repeats: 3, ..Self::full() }
    }

    /// Returns the full options: seven rounds of each guest.
    ///
    /// Each vCPU writes 100 000 times per second to a working set of 64 MiB. The guest has 3 GiB of
    /// random data, and two vCPUs or one. The case `bursts` has two vCPUs that write for 300 ms and
    /// then sleep as long, so that the number of idle processors changes during the migration. The
    /// cases `short` and `short-2cpu` have 1 GiB of data, and one or two vCPUs. Their migrations
    /// take about a second. In longer ones, a host that is itself a virtual machine may lose its
    /// processors for some time.
    pub fn full() -> Self {
        let ours = OURS.into_iter().map(Side::Ours);
        let sides = [Side::Floor].into_iter().chain(ours).chain([QEMU, Side::Qemu { multifd: Some(2) }]);
        Options {
            cases: vec![busy(2), busy(1), bursts(), short(1), short(2)],
            sides: sides.collect(),
            repeats: 7,
            only: Vec::new(),
        }
    }

    /// Returns the selected sides of `case`.
    pub(super) fn selected(&self, case: &CaseSpec) -> impl Iterator<Item = Side> {
        let wants = |side: &Side| {
            let name = format!("{}/{side}", case.name);
            self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
        };
        self.sides.iter().copied().filter(wants)
    }
}

/// Returns a guest whose `vcpus` vCPUs are never idle.
fn busy(vcpus: u32) -> CaseSpec {
    CaseSpec {
        name: format!("{vcpus}cpu"),
        // The guest itself and its counters need memory beyond the data.
        memory: (3 << 30) + (512 << 20),
        vcpus,
        workload: "uniform,ws=64M,data=3G,rate=100k,fill=random".into(),
        data: 3 << 30,
        downtime_limit: Duration::from_millis(300),
        warm_up: Duration::from_millis(1000),
        ..CaseSpec::default()
    }
}

/// Returns a guest whose vCPUs are all busy and all idle in turn.
fn bursts() -> CaseSpec {
    CaseSpec {
        name: "bursts".into(),
        workload: "uniform,ws=64M,data=3G,rate=100k,burst=300,fill=random".into(),
        ..busy(2)
    }
}

/// Returns a busy guest that is moved in about a second.
fn short(vcpus: u32) -> CaseSpec {
    CaseSpec {
        name: if vcpus == 1 { "short".into() } else { format!("short-{vcpus}cpu") },
        memory: (1 << 30) + (512 << 20),
        workload: "uniform,ws=64M,data=1G,rate=100k,fill=random".into(),
        data: 1 << 30,
        ..busy(vcpus)
    }
}
