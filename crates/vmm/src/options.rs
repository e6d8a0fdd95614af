//! Options of a VM.

use crate::error::{Error, Result};
use crate::memory::HUGE_PAGE_BYTES;
use std::fmt;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
pub use vmferry_dirty::Prealloc;
pub use vmferry_kvm::CpuChoice;
use vmferry_kvm::RingEntries;
use vmferry_virtio::net::Mac;

/// Minimum memory of a VM in bytes, which has room for the boot data below 1 MiB and a small kernel
/// above it.
pub const MIN_MEMORY: u64 = 4 << 20;
/// Maximum number of vCPUs, which is the number of 8-bit local APIC IDs without the broadcast ID.
pub const MAX_CPUS: u32 = 254;

/// Default interval of statistics. It is short enough for operators and for a balloon that follows
/// the host's memory pressure. While no caller reads the statistics, the interval is ten times as
/// long, so that it costs an idle guest almost nothing.
const STATS_EVERY: Duration = Duration::from_secs(1);

/// Kind of memory that backs the guest's RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backing {
    /// Anonymous memory, which is the fastest, and for which every host can use huge pages.
    #[default]
    Anonymous,
    /// Memfd, which other processes can map. A host that disables huge pages for shared memory uses
    /// 4 KiB pages for it.
    Memfd,
    /// Memfd of huge pages of 2 MiB from the host's pool (hugetlbfs). All of the guest's memory is
    /// reserved at the start and never swapped out.
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

/// Method by which pages are given back to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DropWay {
    /// The host frees the pages at once (`MADV_DONTNEED`, or a hole in the memfd).
    #[default]
    DontNeed,
    /// The host frees the pages when it needs memory (`MADV_FREE`), or at once for a memfd. This
    /// method is only for measurements: until a page is freed, it reads as its old content, and
    /// then suddenly as zeros, which a migration cannot detect. A comparison of source and target
    /// may report such pages as different.
    Free,
    /// Pages are not given back. This method is for measurements of all other costs.
    Nothing,
}

/// Destination of the guest's serial output. A clone writes to the same destination.
///
/// If a write fails, its bytes are lost and counted. A failed write never stops the guest.
#[derive(Clone)]
pub struct SerialSink(Arc<Mutex<dyn Write + Send>>);

impl SerialSink {
    /// Creates a sink that writes to `out`, and flushes `out` after every byte.
    pub fn new(out: impl Write + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(out)))
    }

    /// Creates a sink that discards the output.
    #[must_use]
    pub fn discard() -> Self {
        Self::new(std::io::sink())
    }

    /// Creates a sink that keeps the output in memory, and returns it with a reader of the output.
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

/// Serial output kept in memory. See [`SerialSink::capture`].
#[derive(Debug, Clone)]
pub struct Captured(Arc<Mutex<Vec<u8>>>);

impl Captured {
    /// Returns the output so far, as text.
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

/// Options of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskOptions {
    /// Path of the file or block device with the raw content.
    pub path: PathBuf,
    /// True if the guest cannot write to the disk. Several VMs can use a disk at the same time if
    /// none of them can write to it.
    pub read_only: bool,
}

impl DiskOptions {
    /// Creates the options of a disk at `path` to which the guest can write.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), read_only: false }
    }
}

/// Options of a network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NetOptions {
    /// Name of the host's tap interface. Source and target of a migration each have their own.
    /// `None` for an interface without a tap, whose link is down.
    pub tap: Option<String>,
    /// MAC address of the guest, or `None` for a random address. A guest that arrives from a source
    /// keeps its address, unless it is a copy and [`VmOptions::new_macs`] is true.
    pub mac: Option<Mac>,
    /// Open tap, from a process on this host that hands its guest over. `None` opens the tap.
    pub open: Option<OpenTap>,
}

impl NetOptions {
    /// Creates the options of an interface at the tap `tap`, with a random address.
    pub fn new(tap: impl Into<String>) -> Self {
        Self { tap: Some(tap.into()), mac: None, open: None }
    }

    /// Creates the options of an interface without a tap, with a random address. The guest has the
    /// interface and sees that its link is down.
    #[must_use]
    pub fn unplugged() -> Self {
        Self { tap: None, mac: None, open: None }
    }
}

/// Tap that another process has opened. Two values are equal if they are the same descriptor.
#[derive(Debug, Clone)]
pub struct OpenTap(pub(crate) Arc<OwnedFd>);

impl OpenTap {
    /// Takes ownership of the descriptor of a tap.
    #[must_use]
    pub fn new(fd: OwnedFd) -> Self {
        Self(Arc::new(fd))
    }
}

impl PartialEq for OpenTap {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for OpenTap {}

/// Options of a VM. Create them with [`VmOptions::new`], and then change fields.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct VmOptions {
    /// Guest memory in bytes: a multiple of 4 KiB (on huge pages, of 2 MiB), at least
    /// [`MIN_MEMORY`].
    pub memory: u64,
    /// Number of vCPUs, 1 to [`MAX_CPUS`].
    pub cpus: u32,
    /// Processor that the guest sees. For a VM that waits for a guest, this is the processor with
    /// the most features that the guest may use.
    pub cpu: CpuChoice,
    /// Kind of memory that backs the guest's RAM.
    pub backing: Backing,
    /// True to request transparent huge pages. If the host refuses, the VM uses small pages, and
    /// [`Vm::notes`](crate::Vm::notes) contains a note.
    pub huge_pages: bool,
    /// Time at which the host allocates the guest's RAM. If the kernel cannot allocate it ahead,
    /// [`Vm::notes`](crate::Vm::notes) contains a note.
    pub prealloc: Prealloc,
    /// True if this VM waits for a guest from a source instead of booting one.
    pub incoming: bool,
    /// Number of entries in the dirty ring of each vCPU, a power of two, or `None` for a VM without
    /// dirty rings. The choice is permanent, and a VM with rings has no dirty log.
    pub dirty_ring: Option<u32>,
    /// True if the VM has a balloon. Source and target of a migration must agree.
    pub balloon: bool,
    /// True if the balloon offers the extension that `docs/balloon-extension.md` specifies. Source
    /// and target of a migration must agree.
    pub balloon_extension: bool,
    /// Method by which pages are given back to the host.
    pub drop_way: DropWay,
    /// Shortest interval at which the guest is asked for its memory statistics, or `None` for
    /// never. While no caller reads the statistics, the interval is ten times as long.
    pub stats_every: Option<Duration>,
    /// True if the VM has a random number device.
    pub rng: bool,
    /// True if KVM may pass the notifications of drivers directly to the threads of devices
    /// (ioeventfd), if it supports this. Otherwise the vCPU that notifies passes them on. The guest
    /// does not see the difference, so source and target of a migration need not agree.
    pub kicks: bool,
    /// Disks of the VM. Source and target of a migration must have the same disks, in the same
    /// order.
    pub disks: Vec<DiskOptions>,
    /// Network interfaces of the VM. Source and target of a migration must have the same number of
    /// interfaces, in the same order.
    pub nets: Vec<NetOptions>,
    /// True if a guest that is a copy gets the MAC addresses of [`nets`](Self::nets) instead of
    /// those of the original. A guest that is migrated always keeps its addresses.
    pub new_macs: bool,
    /// Destination of the guest's serial output.
    pub serial: SerialSink,
}

impl VmOptions {
    /// Creates the options of a VM with `memory` bytes and `cpus` vCPUs, which has anonymous
    /// memory, transparent huge pages and a balloon, and whose serial output is discarded.
    #[must_use]
    pub fn new(memory: u64, cpus: u32) -> Self {
        Self {
            memory,
            cpus,
            cpu: CpuChoice::default(),
            backing: Backing::default(),
            huge_pages: true,
            prealloc: Prealloc::default(),
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
                "{} bytes of memory are not possible: a VM needs at least {} MiB, in whole 4 KiB pages",
                self.memory,
                MIN_MEMORY >> 20
            )));
        }
        if self.backing == Backing::HugePages && !self.memory.is_multiple_of(HUGE_PAGE_BYTES) {
            return Err(Error::Options(format!(
                "{} bytes of memory are not possible on huge pages: a multiple of 2 MiB is needed",
                self.memory
            )));
        }
        if !(1..=MAX_CPUS).contains(&self.cpus) {
            return Err(Error::Options(format!(
                "{} vCPUs are not possible: a VM has 1 to {MAX_CPUS}",
                self.cpus
            )));
        }
        self.ring_entries().map(|_| ())
    }

    pub(crate) fn ring_entries(&self) -> Result<Option<RingEntries>> {
        let entries = |number| {
            RingEntries::new(number).ok_or_else(|| {
                Error::Options(format!(
                    "a dirty ring of {number} entries is not possible: a power of two is needed, at least {}",
                    RingEntries::MIN
                ))
            })
        };
        self.dirty_ring.map(entries).transpose()
    }
}
