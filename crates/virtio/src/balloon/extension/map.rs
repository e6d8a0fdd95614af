//! Map of free pages, which the guest keeps ([`FreeMap`]).

use crate::runs::copy_bits;
use std::ops::Range;
use vm_memory::{Bytes, GuestAddress, GuestMemory};
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

/// The two registers of the map, as the driver writes them.
///
/// The map changes when the last byte of the address is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct MapRegisters {
    pages: u64,
    gpa: u64,
}

impl MapRegisters {
    /// Returns the registers that were [saved](Self::saved).
    pub(super) fn of(saved: Option<(u64, u64)>) -> Self {
        saved.map_or(Self::default(), |(gpa, pages)| Self { pages, gpa })
    }

    /// Returns the map's address and number of pages, if a driver has written them.
    pub(super) fn saved(&self) -> Option<(u64, u64)> {
        (*self != Self::default()).then_some((self.gpa, self.pages))
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
        from + data.len() == bytes.len() && !data.is_empty()
    }

    pub(super) fn map(&self) -> Option<FreeMap> {
        (self.gpa != 0).then_some(FreeMap { gpa: self.gpa, pages: self.pages })
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
    let pages: u64 = ram.iter().map(|piece| piece.pages.end - piece.pages.start).sum();
    if map.pages != pages || !map.gpa.is_multiple_of(PAGE_SIZE) || pages > MAX_PAGES {
        return Err(misfit);
    }
    let words = usize::try_from(pages.div_ceil(64)).map_err(|_| misfit)?;
    let mut bytes = vec![0; words * 8];
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
