//! Wrapper of the target VM that publishes the guest's place as soon as the guest runs, before all
//! steps of its arrival are done.

use crate::api::{GuestPlace, RunContext};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use vmferry_engine::{
    DemandPaging, GuestMemory, MachineConfig, Migratable, RegionFile, RunState, Section, StateWriter,
    StreamName, TargetVm, VmError,
};

pub(crate) struct Arriving<'a> {
    pub(crate) vm: &'a mut dyn TargetVm,
    pub(crate) shared: &'a RunContext,
    /// The guest may start before its memory is complete. Its place is then published by the
    /// caller, shortly after the start.
    pub(crate) paging: bool,
}

impl Migratable for Arriving<'_> {
    fn config(&self) -> MachineConfig {
        self.vm.config()
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        self.vm.memory()
    }
}

impl TargetVm for Arriving<'_> {
    fn demand_paging(&mut self) -> Result<Arc<dyn DemandPaging>, VmError> {
        self.paging = true;
        self.vm.demand_paging()
    }

    fn take_memory(&mut self, regions: Vec<RegionFile>) -> Result<(), VmError> {
        self.vm.take_memory(regions)
    }

    fn load(&mut self, sections: &[Section]) -> Result<(), VmError> {
        self.vm.load(sections)
    }

    fn renew_identity(&mut self) -> Result<(), VmError> {
        self.vm.renew_identity()
    }

    fn expected_load(&self) -> Option<Duration> {
        self.vm.expected_load()
    }

    fn stream(&mut self, name: &StreamName) -> Result<Box<dyn StateWriter>, VmError> {
        self.vm.stream(name)
    }

    fn wants_trial(&self) -> bool {
        self.vm.wants_trial()
    }

    fn prepare(&mut self, trial: &[Section]) -> Result<(), VmError> {
        self.vm.prepare(trial)
    }

    fn start(&mut self, state: RunState) -> Result<(), VmError> {
        self.vm.start(state)?;
        if !self.paging {
            self.shared.record_guest(match state {
                RunState::Running => GuestPlace::Running,
                RunState::Paused => GuestPlace::Paused,
            });
        }
        Ok(())
    }
}

/// Returns how a guest of this process is reached, as the end of a sentence.
pub(crate) fn reached_by(api: Option<&Path>) -> String {
    api.map_or(" (without --api the guest cannot be moved or queried)".into(), |path| {
        format!("; its control socket is {}", path.display())
    })
}
