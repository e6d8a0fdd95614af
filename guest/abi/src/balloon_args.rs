//! Options of a guest's command line for its balloon.

use crate::PAGE_SIZE;
use crate::units::{parse_size, write_size};
use core::fmt;

/// Method by which a guest gives freed memory back: `report=off|sync|async|hypercall`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReportMode {
    /// Freed memory is not given back.
    Off,
    /// The vCPU whose buffer of 512 freed blocks is full reports them through the balloon's queue,
    /// before `free` returns.
    #[default]
    Sync,
    /// A vCPU whose buffer of 1000 is full continues. The last vCPU reports for all, between steps
    /// of its own work.
    Async,
    /// The vCPU reports as with [`Sync`](Self::Sync), but by a hypercall
    /// ([`REPORT_PORT`](crate::balloon::REPORT_PORT)).
    Hypercall,
}

/// Method by which a guest reports free memory: `hints=off|demand|incremental`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HintMode {
    /// Free memory is not reported.
    Off,
    /// The guest walks its free lists on request.
    #[default]
    Demand,
    /// The guest keeps a [map](crate::balloon::FreeMap) up to date.
    Incremental,
}

/// Portions in which memory is given to the balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InflateBy {
    /// Number of page numbers per request, of pages that are allocated one by one.
    Pages(u32),
    /// Ranges, of blocks as large as possible.
    Ranges,
}

/// `inflate=SIZE[,by=256|16384|ranges]`: memory that a guest gives to its balloon once, after it
/// has booted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inflation {
    /// Size in bytes.
    pub bytes: u64,
    /// Portions of the inflation. Default: 256 page numbers per request.
    pub by: InflateBy,
}

impl ReportMode {
    const ALL: [(Self, &'static str); 4] =
        [(Self::Off, "off"), (Self::Sync, "sync"), (Self::Async, "async"), (Self::Hypercall, "hypercall")];
    pub(crate) const ACCEPTED: &'static str = "off, sync, async or hypercall";

    pub(crate) fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, name)| *name == text).map(|(mode, _)| *mode)
    }
}

impl fmt::Display for ReportMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(mode, _)| mode == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

impl HintMode {
    const ALL: [(Self, &'static str); 3] =
        [(Self::Off, "off"), (Self::Demand, "demand"), (Self::Incremental, "incremental")];
    pub(crate) const ACCEPTED: &'static str = "off, demand or incremental";

    pub(crate) fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, name)| *name == text).map(|(mode, _)| *mode)
    }
}

impl fmt::Display for HintMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(mode, _)| mode == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

impl Inflation {
    pub(crate) const ACCEPTED: &'static str = "SIZE, SIZE,by=256, SIZE,by=16384 or SIZE,by=ranges";

    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (size, by) = text.split_once(',').unwrap_or((text, "by=256"));
        let by = match by {
            "by=256" => InflateBy::Pages(256),
            "by=16384" => InflateBy::Pages(16_384),
            "by=ranges" => InflateBy::Ranges,
            _ => return None,
        };
        parse_size(size).filter(|bytes| *bytes >= PAGE_SIZE).map(|bytes| Self { bytes, by })
    }
}

impl fmt::Display for Inflation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_size(f, self.bytes)?;
        match self.by {
            InflateBy::Pages(pages) => write!(f, ",by={pages}"),
            InflateBy::Ranges => f.write_str(",by=ranges"),
        }
    }
}

/// Maximum number of windows of virtio-mmio devices that a guest uses. Further windows are ignored.
pub const MAX_WINDOWS: usize = 8;

/// Windows of virtio-mmio devices from the machine's part of the command line:
/// `virtio_mmio.device=512@0xADDR:IRQ`, as Linux reads it
/// (Documentation/admin-guide/kernel-parameters.txt) and vmferry and QEMU's microvm write it. The
/// windows are not printed with the arguments, because the machine adds them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Windows {
    /// Addresses; 0 for none.
    addresses: [u64; MAX_WINDOWS],
}

impl Windows {
    /// Returns the addresses, in the order of the command line.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        self.addresses.into_iter().filter(|address| *address != 0)
    }

    /// Adds the value of one `virtio_mmio.device=`. Returns false if it is not valid.
    pub(crate) fn add(&mut self, text: &str) -> bool {
        let Some(address) = parse_window(text) else { return false };
        if let Some(slot) = self.addresses.iter_mut().find(|slot| **slot == 0) {
            *slot = address;
        }
        true
    }
}

/// Returns the base of `SIZE@BASE:IRQ[:ID]`.
fn parse_window(text: &str) -> Option<u64> {
    let (size, rest) = text.split_once('@')?;
    parse_size(size)?;
    let (base, irq) = rest.split_once(':')?;
    let irq = irq.split(':').next()?;
    irq.parse::<u32>().ok()?;
    let base = match base.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => base.parse().ok(),
    };
    base.filter(|base| *base != 0 && base.is_multiple_of(4))
}
