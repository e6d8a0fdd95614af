//! A VMM's memory with missing pages, which it may never have.

use crate::error::FaultError;
use crate::memory::UffdMemory;
use crate::threads::VcpuThreads;
use std::sync::{Arc, PoisonError, RwLock};
use vmferry_engine::LazyMemory;
use vmferry_memory::{PageRun, RegionId};

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
