//! A VMM's memory with missing pages, which it may never have.

use crate::error::FaultError;
use crate::memory::UffdMemory;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};
use vmferry_core::{LazyMemory, PageRun, RegionId};
use vmferry_thread::VcpuThreads;

/// Where a VMM keeps its [`UffdMemory`], once somebody asked for it, and what all its threads need of it.
#[derive(Debug)]
pub struct LazySlot {
    threads: Arc<VcpuThreads>,
    memory: RwLock<Option<Arc<UffdMemory>>>,
}

impl LazySlot {
    /// An empty one, for a guest of `vcpus` vCPUs.
    #[must_use]
    pub fn new(vcpus: u32) -> Self {
        Self { threads: Arc::new(VcpuThreads::new(vcpus)), memory: RwLock::new(None) }
    }

    /// Where vCPU threads register.
    #[must_use]
    pub fn threads(&self) -> &Arc<VcpuThreads> {
        &self.threads
    }

    /// What is in it, or what `make` makes for these vCPUs.
    ///
    /// # Errors
    /// Those of `make`; the slot stays empty.
    pub fn get_or_make(
        &self,
        make: impl FnOnce(Arc<VcpuThreads>) -> Result<UffdMemory, FaultError>,
    ) -> Result<Arc<UffdMemory>, FaultError> {
        let mut memory = self.memory.write().unwrap_or_else(PoisonError::into_inner);
        let made = match memory.take() {
            Some(there) => there,
            None => Arc::new(make(Arc::clone(&self.threads))?),
        };
        Ok(Arc::clone(memory.insert(made)))
    }

    /// [`UffdMemory::look`]; without such memory nothing is ever missing. (Held while `read` runs, so that memory that
    /// becomes lazy meanwhile waits for it.)
    pub fn look<T>(&self, region: RegionId, run: PageRun, read: impl FnOnce() -> T) -> Option<T> {
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        match &*memory {
            Some(memory) => memory.look(region, run, read),
            None => Some(read()),
        }
    }

    /// Calls `change` if no page can be missing, and keeps it so until `change` returns: whoever drops pages does it in here. `None`
    /// while pages may be missing.
    pub fn settled<T>(&self, change: impl FnOnce() -> T) -> Option<T> {
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        match &*memory {
            Some(memory) => memory.settled(change),
            None => Some(change()),
        }
    }

    /// Waits until a guest's vCPUs, which have been told so, have stopped; at most for `patience`, and not for one that sleeps on a
    /// missing page that nobody brings. `stopped` says whether they have, and may wait a little for it. False if some have
    /// not: those sleep, and [`end`](Self::end) wakes them.
    pub fn stop_or_sleep(&self, patience: Duration, mut stopped: impl FnMut(Duration) -> bool) -> bool {
        /// Whoever serves faults is between two of them for a moment, but hardly at each of so many looks.
        const LOOKS: u32 = 5;
        const BETWEEN: Duration = Duration::from_millis(4);
        let (begin, mut unserved) = (Instant::now(), 0);
        while begin.elapsed() < patience && unserved < LOOKS {
            if stopped(BETWEEN) {
                return true;
            }
            let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
            let nobody = memory.as_ref().is_some_and(|memory| memory.lacks_server());
            unserved = if nobody { unserved + 1 } else { 0 };
        }
        false
    }

    /// Ends it when the guest is over: whoever sleeps on a missing page wakes. Otherwise a vCPU that sleeps could not be
    /// ended, nor could KVM get rid of a worker that sleeps for one.
    pub fn end(&self) {
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = &*memory {
            // What cannot be given back now is when its descriptors are closed.
            let _ = memory.end();
        }
    }
}
