//! Map of free pages, which the guest keeps ([`FreeMap`]).

use crate::runs::copy_bits;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};
use vmferry_core::{MAX_PAGES, PAGE_SIZE, PageSet, RegionId};
use vmferry_guest_abi::balloon::{FreeMap, free_map};

/// Run of whole pages of RAM, as the memory map reported it to the guest. The guest's map has one
/// bit for each of these pages, in the order of the runs.
///
/// A guest whose RAM has holes (below 4 GiB, below 1 MiB) has one value for each piece of RAM. If a
/// piece does not begin and end at a page boundary, only its whole pages count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WholePages {
    /// Region of the pages.
    pub region: RegionId,
    /// Pages in the region.
    pub pages: Range<u64>,
}

/// Error that reading the map returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The guest has not published a map.
    #[error("the guest keeps no map of its free pages")]
    None,
    /// The guest relies on the content of its free pages (page poison), so that they must not be
    /// skipped.
    #[error("the guest relies on the content of its free pages (page poison)")]
    Poison,
    /// The map does not fit the guest's memory.
    #[error("the guest's map of {pages} pages at {gpa:#x} does not fit its memory")]
    Misfit {
        /// Address that the driver wrote.
        gpa: u64,
        /// Number of pages that the driver wrote.
        pages: u64,
    },
    /// The map cannot be read, because pages of the guest are missing.
    #[error("pages of the guest are still arriving from the source")]
    Elsewhere,
}

/// Map that a device uses, in relation to its registers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MapInUse {
    /// The map that the registers describe.
    #[default]
    OfRegisters,
    /// Another map, as address and number of pages, or no map. The driver has begun to write the
    /// registers and has not written the last byte of the address.
    Earlier(Option<(u64, u64)>),
}

/// The two registers of the map, as the driver writes them, and the map that is in use.
///
/// The map in use changes only when the last byte of the address is written. Before that, the
/// registers may hold parts of two addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct MapRegisters {
    pages: u64,
    gpa: u64,
    in_use: Option<FreeMap>,
}

impl MapRegisters {
    /// Returns the registers that were [saved](Self::saved), with the map that was in use.
    pub(super) fn of(saved: Option<(u64, u64)>, in_use: MapInUse) -> Self {
        let (gpa, pages) = saved.unwrap_or_default();
        let in_use = match in_use {
            MapInUse::OfRegisters => Self::described(gpa, pages),
            MapInUse::Earlier(map) => map.and_then(|(gpa, pages)| Self::described(gpa, pages)),
        };
        Self { pages, gpa, in_use }
    }

    /// Returns the map's address and number of pages, if a driver has written them.
    pub(super) fn saved(&self) -> Option<(u64, u64)> {
        ((self.gpa, self.pages) != (0, 0)).then_some((self.gpa, self.pages))
    }

    /// Returns the map in use, in relation to the registers.
    pub(super) fn saved_in_use(&self) -> MapInUse {
        if self.in_use == Self::described(self.gpa, self.pages) {
            MapInUse::OfRegisters
        } else {
            MapInUse::Earlier(self.in_use.map(|map| (map.gpa, map.pages)))
        }
    }

    /// Returns the map that registers with these values describe. The address 0 means no map.
    fn described(gpa: u64, pages: u64) -> Option<FreeMap> {
        (gpa != 0).then_some(FreeMap { gpa, pages })
    }

    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        let bytes = [self.pages.to_le_bytes(), self.gpa.to_le_bytes()].concat();
        crate::device::read_bytes(&bytes, offset.wrapping_sub(free_map::PAGES), data);
    }

    /// Writes to the registers. Returns true if the map has changed: the write reached the last
    /// byte of the address.
    ///
    /// A driver that writes the address as two 32-bit words writes the low one first.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        let mut bytes = [self.pages.to_le_bytes(), self.gpa.to_le_bytes()].concat();
        let Ok(from) = usize::try_from(offset.wrapping_sub(free_map::PAGES)) else { return false };
        let Some(place) = bytes.get_mut(from..from.saturating_add(data.len())) else { return false };
        place.copy_from_slice(data);
        let word = |at: usize| bytes[at..].first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
        (self.pages, self.gpa) = (word(0), word(8));
        let changed = from + data.len() == bytes.len() && !data.is_empty();
        if changed {
            self.in_use = Self::described(self.gpa, self.pages);
        }
        changed
    }

    /// Returns the map in use.
    pub(super) fn map(&self) -> Option<FreeMap> {
        self.in_use
    }
}

/// Checks that `map` fits the guest's memory. Returns the number of its 64-bit words.
///
/// # Errors
/// Returns [`MapError::Misfit`] if the map does not have one bit for each page of RAM, is not
/// aligned to a page, or does not lie in guest memory.
pub(super) fn check<M: GuestMemory>(ram: &[WholePages], memory: &M, map: FreeMap) -> Result<usize, MapError> {
    let misfit = MapError::Misfit { gpa: map.gpa, pages: map.pages };
    let pages: u64 = ram.iter().map(|piece| piece.pages.end - piece.pages.start).sum();
    if map.pages != pages || !map.gpa.is_multiple_of(PAGE_SIZE) || pages > MAX_PAGES {
        return Err(misfit);
    }
    let words = usize::try_from(pages.div_ceil(64)).map_err(|_| misfit)?;
    if memory.check_range(GuestAddress(map.gpa), words * 8, Permissions::Read) {
        Ok(words)
    } else {
        Err(misfit)
    }
}

/// Adds the pages that `map` says are free to `free`. Returns the number of bits that were set.
///
/// The guest may change the map during the call, so each bit has the value that it had at some
/// moment of the call. Because no bit depends on another, the bits may be copied in portions of any
/// size.
pub(super) fn read<M: GuestMemory>(
    ram: &[WholePages],
    memory: &M,
    map: FreeMap,
    free: &mut PageSet,
) -> Result<u64, MapError> {
    let misfit = MapError::Misfit { gpa: map.gpa, pages: map.pages };
    let mut bytes = vec![0; check(ram, memory, map)? * 8];
    memory.read_slice(&mut bytes, GuestAddress(map.gpa)).map_err(|_| misfit)?;
    let bits: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let (mut at, mut count) = (0, 0);
    for piece in ram {
        let Some(region) = free.region_mut(piece.region).filter(|region| region.len() >= piece.pages.end)
        else {
            return Err(misfit);
        };
        copy_bits(&bits, at, piece.pages.clone(), |word, bits| {
            count += u64::from(bits.count_ones());
            region.union_word(word, bits);
        });
        at += piece.pages.end - piece.pages.start;
    }
    Ok(count)
}
