//! Optional demand paging and write protection of a VMM's guest memory.

use crate::error::FaultError;
use crate::memory::UffdMemory;
use crate::protection::UffdProtection;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};
use vmferry_core::{DemandPaging, PageRun, RegionId, WriteProtection};
use vmferry_thread::VcpuThreads;

/// Slot for the [`UffdMemory`] and the [`UffdProtection`] of a VMM, each of which is created on
/// first use, together with the table of the vCPU threads.
#[derive(Debug)]
pub struct PagingSlot {
    threads: Arc<VcpuThreads>,
    memory: RwLock<Option<Arc<UffdMemory>>>,
    protection: RwLock<Option<Arc<UffdProtection>>>,
}

impl PagingSlot {
    /// Creates an empty slot for a guest with `vcpus` vCPUs.
    #[must_use]
    pub fn new(vcpus: u32) -> Self {
        let threads = Arc::new(VcpuThreads::new(vcpus));
        Self { threads, memory: RwLock::new(None), protection: RwLock::new(None) }
    }

    /// Returns the table in which vCPU threads register.
    #[must_use]
    pub fn threads(&self) -> &Arc<VcpuThreads> {
        &self.threads
    }

    /// Returns the memory in the slot. If the slot is empty, calls `make` with the table of vCPU
    /// threads to create the memory.
    ///
    /// # Errors
    /// Returns the error of `make`. The slot then stays empty.
    pub fn get_or_make(
        &self,
        make: impl FnOnce(Arc<VcpuThreads>) -> Result<UffdMemory, FaultError>,
    ) -> Result<Arc<UffdMemory>, FaultError> {
        get_or_make(&self.memory, || make(Arc::clone(&self.threads)))
    }

    /// Returns the write protection in the slot. If the slot has none, calls `make` with the table
    /// of vCPU threads to create it.
    ///
    /// # Errors
    /// Returns the error of `make`. The slot then stays without write protection.
    pub fn get_or_make_protection(
        &self,
        make: impl FnOnce(Arc<VcpuThreads>) -> Result<UffdProtection, FaultError>,
    ) -> Result<Arc<UffdProtection>, FaultError> {
        get_or_make(&self.protection, || make(Arc::clone(&self.threads)))
    }

    /// Calls `read` under the conditions of [`UffdMemory::read_if_present`]. While the slot is
    /// empty, no page is missing, so `read` is always called.
    ///
    /// The slot is locked for reading while `read` runs. Therefore
    /// [`get_or_make`](Self::get_or_make) waits for `read`, and `read` must not call it.
    pub fn read_if_present<T>(&self, region: RegionId, run: PageRun, read: impl FnOnce() -> T) -> Option<T> {
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        match &*memory {
            Some(memory) => memory.read_if_present(region, run, read),
            None => Some(read()),
        }
    }

    /// Calls `change` if no page can be missing, prevents the begin of demand paging until `change`
    /// returns, and returns its result. Returns `None` while pages may be missing.
    pub fn if_complete<T>(&self, change: impl FnOnce() -> T) -> Option<T> {
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        match &*memory {
            Some(memory) => memory.if_complete(change),
            None => Some(change()),
        }
    }

    /// Calls `change`, which may give pages back to the host, if no page can be missing or
    /// write-protected. Prevents the begin of demand paging and of write protection until `change`
    /// returns, and returns its result. Returns `None` while pages may be missing or protected.
    /// Code that drops pages must run in `change`: a dropped page would be missing again, or would
    /// lose content that a snapshot needs.
    pub fn if_droppable<T>(&self, change: impl FnOnce() -> T) -> Option<T> {
        let protection = self.protection.read().unwrap_or_else(PoisonError::into_inner);
        match &*protection {
            Some(protection) => protection.if_unprotected(|| self.if_complete(change)).flatten(),
            None => self.if_complete(change),
        }
    }

    /// Waits for the vCPUs of a guest that were told to stop. Returns true if they have stopped.
    ///
    /// The function waits for at most `patience`. It gives up earlier if no thread serves faults,
    /// because a vCPU that sleeps on a missing page would never stop. `stopped` must return true if
    /// the vCPUs have stopped, and may wait for the given time. If the function returns false, some
    /// vCPUs may still sleep on missing pages, and [`end`](Self::end) wakes them.
    pub fn stop_or_sleep(&self, patience: Duration, mut stopped: impl FnMut(Duration) -> bool) -> bool {
        /// Number of consecutive checks at which no thread waits for faults. A thread that serves
        /// faults is not waiting for a moment between two faults, but hardly at each of these
        /// checks.
        const LOOKS: u32 = 5;
        const BETWEEN: Duration = Duration::from_millis(4);
        let (begin, mut unserved) = (Instant::now(), 0);
        while begin.elapsed() < patience && unserved < LOOKS {
            if stopped(BETWEEN) {
                return true;
            }
            let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
            let unserved_now = memory.as_ref().is_some_and(|memory| memory.is_unserved());
            unserved = if unserved_now { unserved + 1 } else { 0 };
        }
        false
    }

    /// Ends demand paging and write protection, and wakes the threads that sleep on a page. Call
    /// this function when the guest has ended. Otherwise a sleeping vCPU could not end, and KVM
    /// could not end a worker that sleeps on behalf of a vCPU.
    pub fn end(&self) {
        let protection = self.protection.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(protection) = &*protection {
            // As for demand paging below.
            let _ = protection.end();
        }
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = &*memory {
            // Memory that cannot be unregistered now is unregistered when its descriptors are
            // closed.
            let _ = memory.end();
        }
    }
}

fn get_or_make<T>(
    slot: &RwLock<Option<Arc<T>>>,
    make: impl FnOnce() -> Result<T, FaultError>,
) -> Result<Arc<T>, FaultError> {
    let mut slot = slot.write().unwrap_or_else(PoisonError::into_inner);
    let made = match slot.take() {
        Some(present) => present,
        None => Arc::new(make()?),
    };
    Ok(Arc::clone(slot.insert(made)))
}
