//! Optional demand paging of a VMM's guest memory.

use crate::error::FaultError;
use crate::memory::UffdMemory;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};
use vmferry_core::{DemandPaging, PageRun, RegionId};
use vmferry_thread::VcpuThreads;

/// Holder of a VMM's [`UffdMemory`], which is created on first use, and of the state that all
/// threads of the VMM need.
#[derive(Debug)]
pub struct PagingSlot {
    threads: Arc<VcpuThreads>,
    memory: RwLock<Option<Arc<UffdMemory>>>,
}

impl PagingSlot {
    /// Creates an empty slot for a guest with `vcpus` vCPUs.
    #[must_use]
    pub fn new(vcpus: u32) -> Self {
        Self { threads: Arc::new(VcpuThreads::new(vcpus)), memory: RwLock::new(None) }
    }

    /// Returns the table in which vCPU threads register.
    #[must_use]
    pub fn threads(&self) -> &Arc<VcpuThreads> {
        &self.threads
    }

    /// Returns the memory in the slot, or creates it with `make` and the vCPU threads of this slot.
    ///
    /// # Errors
    /// Returns the error of `make`. The slot then stays empty.
    pub fn get_or_make(
        &self,
        make: impl FnOnce(Arc<VcpuThreads>) -> Result<UffdMemory, FaultError>,
    ) -> Result<Arc<UffdMemory>, FaultError> {
        let mut memory = self.memory.write().unwrap_or_else(PoisonError::into_inner);
        let made = match memory.take() {
            Some(present) => present,
            None => Arc::new(make(Arc::clone(&self.threads))?),
        };
        Ok(Arc::clone(memory.insert(made)))
    }

    /// Calls `read` as [`UffdMemory::read_if_present`] does. In an empty slot no page is ever
    /// missing.
    ///
    /// The slot is locked for reading while `read` runs, so [`get_or_make`](Self::get_or_make)
    /// waits for `read`.
    pub fn read_if_present<T>(&self, region: RegionId, run: PageRun, read: impl FnOnce() -> T) -> Option<T> {
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        match &*memory {
            Some(memory) => memory.read_if_present(region, run, read),
            None => Some(read()),
        }
    }

    /// Calls `change` if no page can be missing, and keeps this state until `change` returns. Code
    /// that drops pages runs in `change`. Returns `None` while pages may be missing.
    pub fn if_complete<T>(&self, change: impl FnOnce() -> T) -> Option<T> {
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        match &*memory {
            Some(memory) => memory.if_complete(change),
            None => Some(change()),
        }
    }

    /// Waits until the vCPUs of a guest, which were told to stop, have stopped, and returns whether
    /// they have.
    ///
    /// Waits for at most `patience`, and stops waiting early if no thread serves faults: a vCPU
    /// that sleeps on a missing page would never stop. `stopped` returns whether the vCPUs have
    /// stopped, and may wait for the given time. After a result of false, sleeping vCPUs remain,
    /// and [`end`](Self::end) wakes them.
    pub fn stop_or_sleep(&self, patience: Duration, mut stopped: impl FnMut(Duration) -> bool) -> bool {
        /// Number of consecutive checks without a waiting fault server. A server is between two
        /// faults for a moment, but hardly at each of these checks.
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

    /// Ends demand paging when the guest has ended, and wakes the threads that sleep on a missing
    /// page. Otherwise a sleeping vCPU could not be ended, and KVM could not end a worker that
    /// sleeps for a vCPU.
    pub fn end(&self) {
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = &*memory {
            // Memory that cannot be unregistered now is unregistered when its descriptors are
            // closed.
            let _ = memory.end();
        }
    }
}
