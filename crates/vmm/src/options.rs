//! What a VM is to be like.

use crate::error::{Error, Result};
use crate::memory::HUGE_PAGE_BYTES;
use std::fmt;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
pub use vmferry_kvm::CpuChoice;
use vmferry_kvm::RingEntries;
use vmferry_virtio::net::Mac;

/// Least memory that a VM can have, in bytes: enough for the boot data below 1 MiB and a small kernel above it.
pub const MIN_MEMORY: u64 = 4 << 20;
/// Most vCPUs: what 8-bit local APIC ids can name, less the broadcast id.
pub const MAX_CPUS: u32 = 254;

/// Often enough for people and for a balloon that follows the host's pressure, seldom enough to cost an idle guest nothing.
const STATS_EVERY: Duration = Duration::from_secs(1);

/// What guest memory is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backing {
    /// Anonymous memory: the fastest, and huge pages work everywhere.
    #[default]
    Anonymous,
    /// A memfd, which other processes can map (hosts with huge pages for shared memory switched off get 4 KiB pages).
    Memfd,
    /// A memfd of huge pages of 2 MiB out of the host's pool (hugetlbfs): all of the guest's memory is set aside at the
    /// start, and never swapped out.
    HugePages,
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Anonymous => "anonymous",
            Self::Memfd => "memfd",
            Self::HugePages => "huge-page",
        })
    }
}

/// How pages that a guest gives back go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DropWay {
    /// At once (`MADV_DONTNEED`, or a hole in the memfd).
    #[default]
    DontNeed,
    /// When the host needs memory (`MADV_FREE`; of a memfd: at once). For measurements only: a page then reads as old or as zeros,
    /// whenever the host likes, which a migration cannot know of: a comparison of both sides may find such pages different.
    Free,
    /// Not at all: for measurements of everything around it.
    Nothing,
}

/// Where the guest's serial output goes. Clones write to the same place.
///
/// A write that fails loses bytes and is counted; it never stops the guest.
#[derive(Clone)]
pub struct SerialSink(Arc<Mutex<dyn Write + Send>>);

impl SerialSink {
    /// Output to `out`, which is flushed after every byte.
    pub fn new(out: impl Write + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(out)))
    }

    /// Output to nowhere.
    #[must_use]
    pub fn discard() -> Self {
        Self::new(std::io::sink())
    }

    /// Output that is kept in memory, and where it can be read.
    #[must_use]
    pub fn capture() -> (Self, Captured) {
        let buffer = Arc::new(Mutex::new(Vec::new()));
        (Self::new(Captured(Arc::clone(&buffer))), Captured(buffer))
    }
}

impl fmt::Debug for SerialSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SerialSink")
    }
}

impl Write for SerialSink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).flush()
    }
}

/// Serial output kept in memory; see [`SerialSink::capture`].
#[derive(Debug, Clone)]
pub struct Captured(Arc<Mutex<Vec<u8>>>);

impl Captured {
    /// What came so far, as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}

impl Write for Captured {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A disk of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskOptions {
    /// The file or block device with its content, as it is (raw).
    pub path: PathBuf,
    /// Whether the guest cannot write it. Several VMs can have one disk at once if none of them can.
    pub read_only: bool,
}

impl DiskOptions {
    /// The disk in `path`, which the guest can write.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), read_only: false }
    }
}

/// A network interface of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NetOptions {
    /// The host's tap interface by name. Each side of a move has its own.
    pub tap: String,
    /// The guest's address; `None` for a random one. A guest that comes from elsewhere keeps the one that it has, unless it is a copy
    /// and [`VmOptions::new_macs`] is set.
    pub mac: Option<Mac>,
}

impl NetOptions {
    /// An interface at the tap `tap`.
    pub fn new(tap: impl Into<String>) -> Self {
        Self { tap: tap.into(), mac: None }
    }
}

/// What a VM is to be like. Start from [`VmOptions::new`] and change fields.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct VmOptions {
    /// Guest memory in bytes: a multiple of 4 KiB (on huge pages, of 2 MiB), at least [`MIN_MEMORY`].
    pub memory: u64,
    /// Number of vCPUs, 1 to [`MAX_CPUS`].
    pub cpus: u32,
    /// Which processor the guest is shown; of a VM that waits for a guest, the most that it takes one with.
    pub cpu: CpuChoice,
    /// What memory is made of.
    pub backing: Backing,
    /// Whether to ask for transparent huge pages. If the host refuses, the VM runs on small pages and
    /// [`Vm::notes`](crate::Vm::notes) says so.
    pub huge_pages: bool,
    /// Whether this VM waits for a guest from elsewhere instead of booting one.
    pub incoming: bool,
    /// Entries of a dirty ring for each vCPU, a power of two. A choice for good: a VM with rings has no dirty log.
    pub dirty_ring: Option<u32>,
    /// Whether it has a balloon, which both sides of a migration must agree upon.
    pub balloon: bool,
    /// Whether its balloon offers the extension that `docs/balloon-extension.md` specifies, which both sides of a migration must
    /// agree upon.
    pub balloon_extension: bool,
    /// How pages that the guest gives back go.
    pub drop_way: DropWay,
    /// How often the guest is asked for its memory statistics; `None` for never.
    pub stats_every: Option<Duration>,
    /// Whether it has a source of random numbers.
    pub rng: bool,
    /// Whether KVM may pass the notifications of drivers on to devices' threads by itself, where it can (ioeventfd); otherwise the vCPU
    /// that notifies does. Nothing that the guest sees, or that both sides of a move have to agree upon.
    pub kicks: bool,
    /// Its disks. Both sides of a move have as many, in the same order; likewise below.
    pub disks: Vec<DiskOptions>,
    /// Its network interfaces.
    pub nets: Vec<NetOptions>,
    /// Whether a guest that is a copy gets the addresses of [`nets`](Self::nets) instead of its original's. A guest that moves keeps its own.
    pub new_macs: bool,
    /// Where the guest's serial output goes.
    pub serial: SerialSink,
}

impl VmOptions {
    /// A VM of `memory` bytes and `cpus` vCPUs: anonymous memory, huge pages, a balloon, serial output discarded.
    #[must_use]
    pub fn new(memory: u64, cpus: u32) -> Self {
        Self {
            memory,
            cpus,
            cpu: CpuChoice::default(),
            backing: Backing::default(),
            huge_pages: true,
            incoming: false,
            dirty_ring: None,
            balloon: true,
            balloon_extension: true,
            drop_way: DropWay::default(),
            stats_every: Some(STATS_EVERY),
            rng: false,
            kicks: true,
            disks: Vec::new(),
            nets: Vec::new(),
            new_macs: false,
            serial: SerialSink::discard(),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.memory < MIN_MEMORY || !self.memory.is_multiple_of(vmferry_core::PAGE_SIZE) {
            return Err(Error::Options(format!(
                "{} bytes of memory: a VM needs at least {} MiB, in whole 4 KiB pages",
                self.memory,
                MIN_MEMORY >> 20
            )));
        }
        if self.backing == Backing::HugePages && !self.memory.is_multiple_of(HUGE_PAGE_BYTES) {
            return Err(Error::Options(format!(
                "{} bytes of memory: on huge pages of 2 MiB a VM has a multiple of that",
                self.memory
            )));
        }
        if !(1..=MAX_CPUS).contains(&self.cpus) {
            return Err(Error::Options(format!("{} vCPUs: a VM has 1 to {MAX_CPUS}", self.cpus)));
        }
        self.ring_entries().map(|_| ())
    }

    pub(crate) fn ring_entries(&self) -> Result<Option<RingEntries>> {
        let entries = |number| {
            RingEntries::new(number).ok_or_else(|| {
                Error::Options(format!(
                    "a dirty ring of {number} entries: it has a power of two, at least {}",
                    RingEntries::MIN
                ))
            })
        };
        self.dirty_ring.map(entries).transpose()
    }
}
