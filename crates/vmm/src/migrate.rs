//! The engine's traits.

use crate::memory::GuestRam;
use crate::vm::Vm;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use vmferry_dirty::{KvmLogTracker, LogSlot, WpTracker};
use vmferry_engine::{
    DirtyTracker, GuestMemory, MachineConfig, Section, SourceVm, TargetVm, TrackerKind, VmError,
};
use vmferry_sys::kvm::SlotSpec;

impl Vm {
    /// What a VM must be like to take this one's guest.
    ///
    /// The processor is part of it: a guest that found a feature goes on using it. The frequency of the time stamp counter
    /// is not, because hosts of one kind differ by a few kHz, and some can scale it: loading the state finds out.
    #[must_use]
    pub fn machine_config(&self) -> MachineConfig {
        let (cpu, cpuid) = self.identity().clone();
        MachineConfig {
            kind: "kvm".to_owned(),
            vcpus: self.cpus(),
            regions: self.ram().layout().regions().to_vec(),
            extra: vec![("cpu".to_owned(), cpu), ("cpuid".to_owned(), cpuid)],
        }
    }

    fn log_tracker(&self) -> Result<Box<dyn DirtyTracker>, VmError> {
        let slots = self.ram().regions().iter().map(|ram| LogSlot {
            spec: SlotSpec {
                slot: ram.region().id.0,
                flags: 0,
                gpa: ram.region().gpa.0,
                len: ram.region().len,
                host: ram.host_address(),
            },
            marks: Some(ram.marks().bitmap()),
        });
        let machine: Arc<dyn AsRawFd + Send + Sync> = Arc::clone(self.machine()) as _;
        // SAFETY: the machine keeps its descriptor and its memory for as long as it lives, and these are the slots that
        // it was made with, which are never changed.
        Ok(Box::new(unsafe { KvmLogTracker::new(machine, slots.collect()) }?))
    }
}

impl SourceVm for Vm {
    fn config(&self) -> MachineConfig {
        self.machine_config()
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::clone(self.ram()) as Arc<GuestRam> as _
    }

    fn tracker(&mut self, kind: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError> {
        match kind.unwrap_or(TrackerKind::Log) {
            TrackerKind::Log => self.log_tracker(),
            TrackerKind::Wp => {
                let regions = self.ram().regions().iter().map(crate::memory::RamRegion::mapped).collect();
                Ok(Box::new(WpTracker::new(regions)?))
            }
            other => Err(VmError::new(format!(
                "a KVM guest's pages cannot be tracked by `{other}`; use `log` or `wp`"
            ))),
        }
    }

    fn pause(&mut self) -> Result<(), VmError> {
        Self::pause(self).map_err(VmError::new)
    }

    fn save(&mut self) -> Result<Vec<Section>, VmError> {
        self.save_state().map_err(VmError::new)
    }

    fn resume(&mut self) -> Result<(), VmError> {
        Self::resume(self).map_err(VmError::new)
    }
}

impl TargetVm for Vm {
    fn config(&self) -> MachineConfig {
        self.machine_config()
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::clone(self.ram()) as Arc<GuestRam> as _
    }

    fn load(&mut self, sections: &[Section]) -> Result<(), VmError> {
        self.load_state(sections).map_err(VmError::new)
    }

    fn start(&mut self) -> Result<(), VmError> {
        Self::start(self).map_err(VmError::new)
    }
}
