//! Implementation of the engine's traits.

use crate::ProcessGuest;
use std::sync::Arc;
use std::time::Duration;
use vmferry_dirty::{MappedPages, WpTracker};
use vmferry_engine::{
    BranchMemory, DemandPaging, DirtyTracker, FreePages, GuestMemory, MachineConfig, Migratable, RegionFile,
    RetiredMemory, RunState, Section, SourceVm, TargetVm, TrackerKind, UsedPages, VmError, WriteProtection,
};
use vmferry_fault::{UffdMemory, UffdOptions, UffdProtection};

impl Migratable for ProcessGuest {
    fn config(&self) -> MachineConfig {
        MachineConfig::new("process", self.options.cpus, self.memory.layout())
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::clone(&self.memory) as _
    }

    fn adopt_memory(&mut self, regions: &[RegionFile]) -> Result<RetiredMemory, VmError> {
        self.memory.adopt(regions)
    }
}

impl SourceVm for ProcessGuest {
    fn tracker(&mut self, kind: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError> {
        match kind.unwrap_or(TrackerKind::Wp) {
            TrackerKind::Wp => Ok(Box::new(WpTracker::new(self.memory.regions().to_vec())?)),
            other => Err(VmError::new(format!(
                "cannot track the pages of a process guest with `{other}`, which needs KVM; use `wp`"
            ))),
        }
    }

    fn write_protection(&mut self) -> Result<Arc<dyn WriteProtection>, VmError> {
        let make = |threads| {
            let mut options = UffdOptions::new(threads);
            // As for demand paging: this guest accesses its memory only with loads and stores.
            options.user_mode_only = true;
            let owner = Arc::clone(&self.memory) as _;
            UffdProtection::new(&self.memory.protected_regions(), owner, &options)
        };
        Ok(self.paging.get_or_make_protection(make)?)
    }

    fn share_memory(&mut self) -> Result<Vec<RegionFile>, VmError> {
        self.memory.shared().map_err(VmError::new)
    }

    fn free_pages(&mut self) -> Option<Box<dyn FreePages>> {
        self.free_heap().map(|heap| Box::new(heap) as _)
    }

    fn throttle(&mut self, shares: &[f64]) -> Result<(), VmError> {
        Self::throttle(self, shares);
        Ok(())
    }

    fn throttled(&self) -> Vec<Duration> {
        Self::throttled(self)
    }

    fn run_delays(&self) -> Vec<Duration> {
        Self::run_delays(self)
    }

    fn pause(&mut self) -> Result<(), VmError> {
        Self::pause(self).map_err(VmError::new)
    }

    fn save(&mut self) -> Result<Vec<Section>, VmError> {
        self.save_state().map_err(VmError::new)
    }

    fn prepare_branch(&mut self) -> Result<BranchMemory, VmError> {
        self.memory.branch_memory()
    }

    fn release(&mut self) -> Result<(), VmError> {
        // A process guest has memory and threads only.
        Ok(())
    }

    fn run_state(&self) -> RunState {
        Self::run_state(self)
    }

    fn resume(&mut self) -> Result<(), VmError> {
        match Self::run_state(self) {
            RunState::Running => Self::start(self).map_err(VmError::new),
            RunState::Paused => Ok(()),
        }
    }
}

impl TargetVm for ProcessGuest {
    fn demand_paging(&mut self) -> Result<Arc<dyn DemandPaging>, VmError> {
        let regions = self.memory.paged_regions()?;
        let make = |threads| {
            let mut options = UffdOptions::new(threads);
            options.huge_pages = self.options.huge_pages;
            // The guest's threads, and the threads that verify it, access the memory only with
            // loads and stores. While pages are missing, no system call receives an address in this
            // memory, because the engine's receivers, which make such calls, have ended by then.
            // Such a call would fail with EFAULT at a missing page. Therefore a userfaultfd for
            // user-mode faults, which any user may open, is sufficient.
            options.user_mode_only = true;
            let owner = Arc::clone(&self.memory) as _;
            // SAFETY: `Memory` owns the mappings, whose backing is as stated; all accesses are
            // through raw addresses or atomics.
            unsafe { UffdMemory::new(regions, owner, &options) }
        };
        Ok(self.paging.get_or_make(make)?)
    }

    fn take_memory(&mut self, regions: Vec<RegionFile>) -> Result<(), VmError> {
        self.take_shared(regions).map_err(VmError::new)
    }

    fn used_pages(&mut self) -> Result<Box<dyn UsedPages>, VmError> {
        Ok(Box::new(MappedPages::new(self.memory.regions().to_vec())?))
    }

    fn load(&mut self, sections: &[Section]) -> Result<(), VmError> {
        self.load_state(sections).map_err(VmError::new)
    }

    fn start(&mut self, state: RunState) -> Result<(), VmError> {
        self.set_run_state(state).map_err(VmError::new)
    }
}
