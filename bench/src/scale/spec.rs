//! Specification of the runs: curves, their points, and the number of rounds.

use std::fmt;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// Quantity that grows from point to point of a curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Curve {
    /// Guest memory, all of which has content.
    MemoryTouched,
    /// Guest memory, of which only a working set of 64 MiB was ever touched.
    MemorySparse,
    /// Number of vCPU threads. All of them together write as often as one.
    Vcpus,
    /// Number of guests that run beside the guest that moves.
    Guests,
    /// Working set.
    WorkingSet,
}

impl Curve {
    /// All curves, in the order in which they are measured.
    pub const ALL: [Curve; 5] =
        [Curve::MemoryTouched, Curve::MemorySparse, Curve::Vcpus, Curve::Guests, Curve::WorkingSet];

    /// Returns the name in the results.
    pub fn name(self) -> &'static str {
        match self {
            Curve::MemoryTouched => "memory-touched",
            Curve::MemorySparse => "memory-sparse",
            Curve::Vcpus => "vcpus",
            Curve::Guests => "guests",
            Curve::WorkingSet => "working-set",
        }
    }

    /// Returns the unit in which slopes count the axis: its name, and the value of one unit.
    pub(super) fn unit(self) -> (&'static str, u64) {
        match self {
            Curve::MemoryTouched | Curve::MemorySparse => ("GiB", GIB),
            Curve::WorkingSet => ("MiB", MIB),
            Curve::Vcpus => ("vCPU", 1),
            Curve::Guests => ("guest", 1),
        }
    }

    /// Checks whether the axis counts bytes.
    fn in_bytes(self) -> bool {
        matches!(self, Curve::MemoryTouched | Curve::MemorySparse | Curve::WorkingSet)
    }
}

/// Kind of guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Guest whose vCPUs are threads of its process, with the tracker `wp`.
    Process,
    /// KVM guest, with the tracker `ring`.
    Kvm,
}

impl Kind {
    /// Returns the name, as the option `--guest` of vmferry has it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Process => "process",
            Kind::Kvm => "kvm",
        }
    }
}

/// Measured point of a curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Point {
    /// Curve of the point.
    pub curve: Curve,
    /// Kind of guest.
    pub kind: Kind,
    /// Position on the axis: bytes, vCPUs or guests.
    pub at: u64,
}

impl fmt::Display for Point {
    /// Writes the name of the point in its curve, such as `process-64G` or `process-8`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind.name();
        let (unit, size) = [("T", TIB), ("G", GIB), ("M", MIB)]
            .into_iter()
            .find(|(_, size)| self.curve.in_bytes() && self.at.is_multiple_of(*size))
            .unwrap_or(("", 1));
        write!(f, "{kind}-{}{unit}", self.at / size)
    }
}

/// Guest of a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestSpec {
    /// Kind of guest.
    pub kind: Kind,
    /// Memory of the guest in bytes.
    pub memory: u64,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Memory with content in bytes.
    pub data: u64,
    /// Working set in bytes.
    pub working_set: u64,
    /// Writes per second and vCPU.
    pub rate: u64,
    /// Number of guests of the same kind that run beside the guest that moves. Each of them is
    /// [`Neighbour`](GuestSpec::neighbour).
    pub neighbours: u32,
    /// True if the guest has a balloon. The measuring guest for KVM then has an allocator, which
    /// writes 8 bytes for each page of the guest's memory at boot.
    pub balloon: bool,
}

impl GuestSpec {
    /// Returns the workload, as on the guest's command line.
    pub fn workload(&self) -> String {
        // The sweep is off: KVM counts the first read of a page of a split huge page as a write.
        format!("uniform,ws={},data={},rate={},fill=random,sweep=0", self.working_set, self.data, self.rate)
    }

    /// Returns the guest that runs beside the guest that moves.
    #[must_use]
    pub fn neighbour(&self) -> Self {
        Self {
            memory: NEIGHBOUR_MEMORY,
            data: NEIGHBOUR_DATA,
            working_set: NEIGHBOUR_SET,
            rate: NEIGHBOUR_RATE,
            vcpus: 1,
            neighbours: 0,
            ..*self
        }
    }

    /// Returns the host memory in bytes that one end of a migration needs.
    ///
    /// The figure includes memory that grows with the size of the guest. It is an upper bound, so
    /// that a point does not make the host swap.
    pub fn needed(&self) -> u64 {
        let pages = self.memory / 4096;
        let per_page = match (self.kind, self.balloon) {
            // Bitmaps of one bit for each page, in the source and in the target.
            (Kind::Process, _) => pages,
            // Also KVM's reverse map and write counts of 10 bytes for each page of a slot.
            (Kind::Kvm, false) => pages * 12,
            // Also the allocator of the guest.
            (Kind::Kvm, true) => pages * 20,
        };
        // Counters of 8 bytes for each page of the working set, and the process itself.
        self.data + self.data / 256 + per_page + PROCESS
    }
}

/// Memory of a process besides its guest, in bytes: an upper bound.
const PROCESS: u64 = 64 * MIB;
/// Writes per second of a guest, over all of its vCPUs.
const WRITES: u64 = 50_000;
/// Working set of a guest, unless the working set is the axis.
const SET: u64 = 64 * MIB;
/// Memory of a guest whose working set is the axis. It is the same for all points.
const ROOM: u64 = 16 * GIB;
/// Memory of a guest whose vCPUs are the axis.
const VCPU_MEMORY: u64 = GIB;
/// Guests beside the guest that moves: many of them must not use all of the processors.
const NEIGHBOUR_MEMORY: u64 = 256 * MIB;
const NEIGHBOUR_DATA: u64 = 16 * MIB;
const NEIGHBOUR_SET: u64 = 4 * MIB;
const NEIGHBOUR_RATE: u64 = 100;

impl Point {
    /// Returns the guest of the point.
    pub fn guest(self) -> GuestSpec {
        let sparse = GuestSpec {
            kind: self.kind,
            memory: GIB,
            vcpus: 1,
            data: SET,
            working_set: SET,
            rate: WRITES,
            neighbours: 0,
            balloon: true,
        };
        let count = u32::try_from(self.at).unwrap_or(u32::MAX);
        match self.curve {
            Curve::MemoryTouched => {
                // The counters and a KVM guest's image and page tables have memory beside the data.
                GuestSpec { memory: self.at + self.at / 64 + 64 * MIB, data: self.at, ..sparse }
            }
            Curve::MemorySparse => GuestSpec { memory: self.at, balloon: false, ..sparse },
            Curve::Vcpus => {
                let rate = (WRITES / self.at.max(1)).max(1);
                GuestSpec { memory: VCPU_MEMORY, vcpus: count, rate, ..sparse }
            }
            Curve::Guests => GuestSpec { neighbours: count, ..sparse },
            Curve::WorkingSet => GuestSpec { memory: ROOM, data: self.at, working_set: self.at, ..sparse },
        }
    }
}

/// Selection of a whole bench.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Points of all curves.
    pub points: Vec<Point>,
    /// Number of rounds.
    pub repeats: usize,
    /// Texts that select points by name, as in `memory-sparse/process-4T`. Empty selects all.
    pub only: Vec<String>,
}

/// Guests of each kind on an axis.
type Axis = (Curve, Kind, &'static [u64]);

const SIZES: &[u64] = &[GIB, 64 * GIB, 256 * GIB, TIB, 4 * TIB];
const TOUCHED: &[u64] = &[GIB, 4 * GIB, 8 * GIB, 16 * GIB];
const POWERS: &[u64] = &[1, 2, 4, 8, 16, 32, 64];
const SETS: &[u64] = &[MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB, 4 * GIB, 8 * GIB];

const FULL: &[Axis] = &[
    (Curve::MemoryTouched, Kind::Process, TOUCHED),
    (Curve::MemoryTouched, Kind::Kvm, TOUCHED),
    (Curve::MemorySparse, Kind::Process, SIZES),
    (Curve::MemorySparse, Kind::Kvm, SIZES),
    (Curve::Vcpus, Kind::Process, POWERS),
    (Curve::Guests, Kind::Process, POWERS),
    (Curve::Guests, Kind::Kvm, POWERS),
    (Curve::WorkingSet, Kind::Process, SETS),
];

const QUICK: &[Axis] = &[
    (Curve::MemoryTouched, Kind::Process, &[GIB, 4 * GIB]),
    (Curve::MemoryTouched, Kind::Kvm, &[GIB, 4 * GIB]),
    (Curve::MemorySparse, Kind::Process, SIZES),
    (Curve::MemorySparse, Kind::Kvm, &[GIB, 64 * GIB]),
    (Curve::Vcpus, Kind::Process, &[1, 8, 64]),
    (Curve::Guests, Kind::Process, &[1, 8, 64]),
    (Curve::WorkingSet, Kind::Process, &[MIB, 64 * MIB, GIB]),
];

impl Options {
    /// Returns the options of `--quick`: three rounds of the ends of each curve, and of the goals.
    pub fn quick() -> Self {
        Self::of(QUICK, 3)
    }

    /// Returns the full options: five rounds of all points.
    pub fn full() -> Self {
        Self::of(FULL, 5)
    }

    fn of(axes: &[Axis], repeats: usize) -> Self {
        let points = axes
            .iter()
            .flat_map(|(curve, kind, at)| at.iter().map(|at| Point { curve: *curve, kind: *kind, at: *at }));
        Options { points: points.collect(), repeats, only: Vec::new() }
    }

    /// Returns the selected points of a curve.
    pub(super) fn selected(&self, curve: Curve) -> impl Iterator<Item = Point> {
        self.points.iter().copied().filter(move |point| point.curve == curve && self.wants(*point))
    }

    /// Checks whether a point is selected.
    pub fn wants(&self, point: Point) -> bool {
        let name = format!("{}/{point}", point.curve.name());
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }
}
