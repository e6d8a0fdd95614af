//! Extension of the balloon beyond virtio 1.2.
//!
//! `docs/balloon-extension.md` specifies the extension. [`vmferry_guest_abi::balloon`] has its
//! numbers and layouts, for device and driver.
//!
//! | module | feature bit | what the guest can do |
//! |---|---|---|
//! | `ranges` | [`FEATURE_RANGES`] | inflate and deflate by ranges, on a queue of their own |
//! | `map` | [`FEATURE_FREE_MAP`] | keep a bitmap of its free pages, which the host reads |
//! | `hypercall` | [`FEATURE_HYPERCALL`] | report free blocks by a write to a port |
//!
//! The standard device is complete without this module. The device gets additional feature bits and
//! the configuration from `CONFIG` on from `Extension`, and passes it the queue [`RANGES_QUEUE`].

mod hypercall;
mod map;
mod ranges;

pub use map::{MapError, MapInUse, WholePages};
pub use vmferry_guest_abi::balloon::{
    FEATURE_FREE_MAP, FEATURE_HYPERCALL, FEATURE_RANGES, FreeMap, RANGES_QUEUE,
};

pub(super) use ranges::ranges;

use super::control::{BalloonControl, BalloonState};
use map::MapRegisters;
use std::sync::{Mutex, PoisonError};
use vm_memory::GuestMemory;
use vmferry_core::{PAGE_SHIFT, PageSet};
use vmferry_guest_abi::balloon::free_map;

/// Feature bits of the extension.
pub const FEATURES: u128 = 1 << FEATURE_RANGES | 1 << FEATURE_FREE_MAP | 1 << FEATURE_HYPERCALL;

/// Offset of the first byte of the configuration that belongs to the extension.
pub(super) const CONFIG: u64 = free_map::PAGES;

/// Extension as part of the device: whether it is offered, and its registers.
#[derive(Debug)]
pub(super) struct Extension {
    offered: bool,
    registers: MapRegisters,
}

impl Extension {
    pub(super) fn new(offered: bool) -> Self {
        Self { offered, registers: MapRegisters::default() }
    }

    /// Returns the feature bits to offer.
    pub(super) fn features(&self) -> u128 {
        if self.offered { FEATURES } else { 0 }
    }

    /// Returns true if the device has queue `index`.
    pub(super) fn has_queue(&self, index: u16) -> bool {
        self.offered || index != RANGES_QUEUE
    }

    pub(super) fn read_config(&self, offset: u64, data: &mut [u8]) {
        if self.offered {
            self.registers.read(offset, data);
        }
    }

    pub(super) fn write_config(&mut self, shared: &BalloonState, offset: u64, data: &[u8]) {
        if self.offered && self.registers.write(offset, data) {
            self.publish(shared);
        }
    }

    /// Publishes the map in use, if the driver is ready and accepted the feature.
    pub(super) fn publish(&self, shared: &BalloonState) {
        let map = self.registers.map().filter(|_| shared.has(FEATURE_FREE_MAP));
        shared.extension.set_map(map);
    }

    /// Clears the registers when the device is reset.
    pub(super) fn reset(&mut self, shared: &BalloonState) {
        self.registers = MapRegisters::default();
        shared.extension.set_map(None);
    }

    /// Returns the map's address and number of pages from the registers, if a driver has written
    /// them.
    pub(super) fn saved(&self) -> Option<(u64, u64)> {
        self.registers.saved()
    }

    /// Returns the map in use, in relation to the registers.
    pub(super) fn saved_in_use(&self) -> MapInUse {
        self.registers.saved_in_use()
    }

    /// Returns an error if registers that were [saved](Self::saved), or the map that was in use,
    /// cannot be those of this device.
    pub(super) fn check(&self, saved: Option<(u64, u64)>, in_use: MapInUse) -> Result<(), String> {
        if self.offered || (saved, in_use) == (None, MapInUse::OfRegisters) {
            return Ok(());
        }
        Err("the guest keeps a map of free pages, but this balloon has no extension".to_owned())
    }

    /// Loads the registers and the map in use after the accepted features have been set.
    ///
    /// The map must not be read from the registers: the source may have been saved between the two
    /// writes of an address.
    pub(super) fn load(&mut self, shared: &BalloonState, saved: Option<(u64, u64)>, in_use: MapInUse) {
        self.registers = MapRegisters::of(saved, in_use);
        self.publish(shared);
    }
}

/// Part of the extension that other threads see.
#[derive(Debug)]
pub(super) struct Published {
    /// Whole pages of RAM, which are the bits of a map.
    ram: Vec<WholePages>,
    map: Mutex<Option<FreeMap>>,
}

impl Published {
    pub(super) fn new(ram: Vec<WholePages>) -> Self {
        Self { ram, map: Mutex::default() }
    }

    fn map(&self) -> Option<FreeMap> {
        *self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_map(&self, map: Option<FreeMap>) {
        *self.map.lock().unwrap_or_else(PoisonError::into_inner) = map;
    }
}

impl BalloonControl {
    /// Returns the map of free pages, or `None` if the guest keeps no map.
    #[must_use]
    pub fn map(&self) -> Option<FreeMap> {
        self.shared.extension.map()
    }

    /// Returns an error if [`read_map`](Self::read_map) cannot read a map in `memory`. Does not
    /// access the memory.
    ///
    /// # Errors
    /// Returns the error that `read_map` would return.
    pub fn check_map<M: GuestMemory>(&self, memory: &M) -> Result<(), MapError> {
        let map = self.usable_map()?;
        map::check(&self.shared.extension.ram, memory, map).map(drop)
    }

    fn usable_map(&self) -> Result<FreeMap, MapError> {
        let map = self.map().ok_or(MapError::None)?;
        if self.shared.poisoned() { Err(MapError::Poison) } else { Ok(map) }
    }

    /// Adds the pages that the guest's map marks as free to `free`, a set for the guest's layout.
    /// Returns the number of these pages.
    ///
    /// Each bit has the value that it had at some moment during the call.
    ///
    /// # Errors
    /// Returns an error if the guest keeps no map, if it relies on the content of its free pages,
    /// or if the map does not fit the guest's memory. `free` may then contain some of its pages.
    pub fn read_map<M: GuestMemory>(&self, memory: &M, free: &mut PageSet) -> Result<u64, MapError> {
        let map = self.usable_map()?;
        map::read(&self.shared.extension.ram, memory, map, free)
    }

    /// Reports the blocks that are listed in page number `page`, which a vCPU wrote to the
    /// hypercall's port.
    ///
    /// Several vCPU threads may call this method at the same time. It does nothing if the driver
    /// has not accepted the feature.
    pub fn report<M: GuestMemory>(&self, memory: &M, page: u32) {
        if self.has(FEATURE_HYPERCALL) {
            hypercall::report(&self.shared, memory, u64::from(page) << PAGE_SHIFT);
        }
    }
}
