//! Implementation of the engine's traits.

use crate::balloon::BalloonFree;
use crate::disk::WithWriteAhead;
use crate::error::Error;
use crate::memory::{GuestRam, RamRegion};
use crate::vm::Vm;
use std::sync::Arc;
use std::time::Duration;
use vmferry_dirty::{MappedPages, RingTracker, WpTracker};
use vmferry_engine::{
    BranchMemory, DemandPaging, DirtyTracker, FreePages, GuestMemory, MachineConfig, Migratable, RegionFile,
    RetiredMemory, RunState, Section, SourceVm, TargetVm, TrackerKind, UsedPages, VmError, WriteProtection,
};
use vmferry_fault::{UffdMemory, UffdOptions, UffdProtection};

impl Vm {
    fn log_tracker(&self) -> Result<Box<dyn DirtyTracker>, VmError> {
        if self.rings().is_some() {
            return Err(VmError::new(Error::NoLog));
        }
        Ok(Box::new(self.machine().vm().log_tracker()?))
    }

    fn ring_tracker(&self) -> Result<Box<dyn DirtyTracker>, VmError> {
        let rings = self.rings().ok_or_else(|| VmError::new(Error::NoRings))?;
        Ok(Box::new(RingTracker::with_policy(rings, Arc::clone(self.reaper()))))
    }
}

impl Migratable for Vm {
    /// Returns the properties that a VM must have to receive the guest.
    ///
    /// The processor's features are included: a guest that has found a feature continues to use it,
    /// and keeps what CPUID reported. The frequency of the time stamp counter is not included,
    /// because hosts of one type differ by a few kHz, and some can scale it. Loading the state
    /// checks it.
    fn config(&self) -> MachineConfig {
        let balloon = self.devices().balloon().map_or("off", |balloon| balloon.description());
        let disks = (0..).zip(self.devices().disks());
        let disks = disks.map(|(n, disk): (u32, _)| (format!("disk {n}"), disk.description()));
        let mut machine = MachineConfig::new("kvm", self.cpus(), self.ram().layout());
        machine.extra = vec![
            ("cpu".to_owned(), self.model().vendor()),
            ("balloon".to_owned(), balloon.to_owned()),
            ("devices".to_owned(), self.devices().bus().names().join(",")),
        ];
        machine.extra.extend(disks);
        machine.features = self.model().features();
        machine
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::clone(self.ram()) as Arc<GuestRam> as _
    }

    fn adopt_memory(&mut self, regions: &[RegionFile]) -> Result<RetiredMemory, VmError> {
        Self::adopt_memory(self, regions).map_err(VmError::new)
    }
}

impl SourceVm for Vm {
    fn tracker(&mut self, kind: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError> {
        let usual = if self.rings().is_some() { TrackerKind::Ring } else { TrackerKind::Log };
        let tracker = match kind.unwrap_or(usual) {
            TrackerKind::Log => self.log_tracker()?,
            TrackerKind::Ring => self.ring_tracker()?,
            TrackerKind::Wp => Box::new(WpTracker::new(self.ram().mapped())?),
            other => {
                return Err(VmError::new(format!(
                    "cannot track the pages of a KVM guest with `{other}`; use `log`, `ring` or `wp`"
                )));
            }
        };
        // A migration begins. Disk data that the host has not written out yet would otherwise
        // extend the pause.
        let tracker = WithWriteAhead::new(tracker, self.devices().disks()).map_err(VmError::new)?;
        Ok(Box::new(tracker))
    }

    fn write_protection(&mut self) -> Result<Arc<dyn WriteProtection>, VmError> {
        let make = |threads| {
            // Includes the faults of KVM and of system calls, because vCPUs and devices write
            // memory in the kernel.
            let options = UffdOptions::new(threads);
            let regions: Vec<_> = self.ram().regions().iter().map(RamRegion::protected).collect();
            UffdProtection::new(&regions, Arc::clone(self.ram()) as _, &options)
        };
        Ok(self.paging().get_or_make_protection(make)?)
    }

    fn share_memory(&mut self) -> Result<Vec<RegionFile>, VmError> {
        self.ram().shared().map_err(VmError::new)
    }

    fn free_pages(&mut self) -> Option<Box<dyn FreePages>> {
        BalloonFree::new(self.handle().balloon()?).map(|free| Box::new(free) as _)
    }

    fn throttle(&mut self, shares: &[f64]) -> Result<(), VmError> {
        self.set_throttle(shares).map_err(VmError::new)
    }

    fn throttled(&self) -> Vec<Duration> {
        Self::throttled(self)
    }

    fn run_delays(&self) -> Vec<Duration> {
        Self::run_delays(self)
    }

    fn pause(&mut self) -> Result<(), VmError> {
        // The balloon's state is saved after this point, with the target that the guest keeps.
        if let Some(balloon) = self.devices().balloon() {
            balloon.end_squeeze();
        }
        Self::pause(self).map_err(VmError::new)
    }

    fn quiesce(&mut self, within: Duration) -> Result<(), VmError> {
        Self::quiesce(self, within)
            .map_err(|error| if error.is_busy() { VmError::busy(error) } else { VmError::new(error) })
    }

    fn save(&mut self) -> Result<Vec<Section>, VmError> {
        self.save_quiesced().map_err(VmError::new)
    }

    fn prepare_branch(&mut self) -> Result<BranchMemory, VmError> {
        Self::prepare_branch(self).map_err(VmError::new)
    }

    fn copy_disks(&mut self) -> Result<(), VmError> {
        Self::copy_disks(self).map_err(VmError::new)
    }

    fn release(&mut self) -> Result<(), VmError> {
        Self::release(self).map_err(VmError::new)
    }

    fn run_state(&self) -> RunState {
        Self::run_state(self)
    }

    fn resume(&mut self) -> Result<(), VmError> {
        self.end_pause().map_err(VmError::new)
    }
}

impl TargetVm for Vm {
    fn demand_paging(&mut self) -> Result<Arc<dyn DemandPaging>, VmError> {
        let regions: Vec<_> = self.ram().regions().iter().map(RamRegion::paged).collect::<Result<_, _>>()?;
        let make = |threads| {
            // Includes the faults of KVM and of system calls, because vCPUs and devices touch
            // memory in the kernel.
            let mut options = UffdOptions::new(threads);
            options.huge_pages = self.ram().huge_pages();
            // SAFETY: the RAM owns its mappings, whose backing is as stated; this crate makes no
            // references to guest bytes other than to atomics.
            unsafe { UffdMemory::new(regions, Arc::clone(self.ram()) as _, &options) }
        };
        Ok(self.paging().get_or_make(make)?)
    }

    fn take_memory(&mut self, regions: Vec<RegionFile>) -> Result<(), VmError> {
        self.expect_empty("take a guest's memory").map_err(VmError::new)?;
        // SAFETY: the VM has no guest, so its vCPUs have not run, and the threads of its devices
        // are halted until it has one. The engine receives no pages any more. Readers of the
        // statistics only read.
        unsafe { self.ram().take(regions) }.map_err(VmError::new)
    }

    fn used_pages(&mut self) -> Result<Box<dyn UsedPages>, VmError> {
        Ok(Box::new(MappedPages::new(self.ram().mapped())?))
    }

    fn load(&mut self, sections: &[Section]) -> Result<(), VmError> {
        self.load_state(sections).map_err(VmError::new)
    }

    fn renew_identity(&mut self) -> Result<(), VmError> {
        Self::renew_identity(self).map_err(VmError::new)
    }

    fn start(&mut self, state: RunState) -> Result<(), VmError> {
        let started = match state {
            RunState::Running => Self::start(self),
            RunState::Paused => self.start_paused(),
        };
        started.map_err(VmError::new)
    }
}
