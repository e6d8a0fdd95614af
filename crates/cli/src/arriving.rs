//! What is said of a guest when it runs here: to whoever looks on, and by a target when its guest runs, not only when all that belongs to
//! its arrival is done.

use crate::api::{Place, Shared};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use vmferry_engine::{
    GuestMemory, LazyMemory, MachineConfig, Migratable, RunState, Section, StateWriter, StreamName, TargetVm,
    VmError,
};

pub(crate) struct Arriving<'a> {
    pub(crate) vm: &'a mut dyn TargetVm,
    pub(crate) shared: &'a Shared,
    /// It may come before its memory. Then there is more to be known of it before it is shown, and that does not take long.
    pub(crate) lazy: bool,
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
    fn lazy_memory(&mut self) -> Result<Arc<dyn LazyMemory>, VmError> {
        self.lazy = true;
        self.vm.lazy_memory()
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
        if !self.lazy {
            self.shared.is_here(match state {
                RunState::Running => Place::Running,
                RunState::Paused => Place::Paused,
            });
        }
        Ok(())
    }
}

/// How a guest that runs here is reached, as the end of a sentence.
pub(crate) fn reached_by(api: Option<&Path>) -> String {
    api.map_or(" (without --api it can neither be moved nor asked)".into(), |path| {
        format!("; its control socket is {}", path.display())
    })
}
