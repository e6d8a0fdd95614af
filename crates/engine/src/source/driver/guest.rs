//! The guest and its VM, while the source owns the guest.

use super::control::Control;
use crate::vm::{self, TrialPause, shielded};
use std::time::Duration;
use vmferry_core::{PauseCosts, RunState, Section, SourceVm, VmError};
use vmferry_wire::{MAX_CONTROL_BYTES, MAX_SECTIONS, MAX_STATE_BYTES};

/// The guest.
pub(super) struct Guest<'e> {
    vm: &'e mut dyn SourceVm,
    paused: bool,
    /// True if the VM was asked to slow the guest.
    throttled: bool,
}

impl<'e> Guest<'e> {
    pub(super) fn new(vm: &'e mut dyn SourceVm) -> Self {
        Self { vm, paused: false, throttled: false }
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Calls `work` with the VM, and meanwhile sends pings, which tell the target that the source
    /// is alive.
    pub(super) fn during<T>(&mut self, control: &Control, work: impl FnOnce(&mut dyn SourceVm) -> T) -> T {
        control.during(|| work(self.vm))
    }

    pub(super) fn pause_costs(&self) -> PauseCosts {
        self.vm.pause_costs()
    }

    /// Returns the time for which each vCPU has waited for a processor. Empty if the VMM does not
    /// tell.
    pub(super) fn run_delays(&self) -> Vec<Duration> {
        self.vm.run_delays()
    }

    /// Returns the run state that the operator wants.
    pub(super) fn run_state(&self) -> RunState {
        self.vm.run_state()
    }

    pub(super) fn pause(&mut self, control: &Control) -> Result<(), VmError> {
        let paused = self.during(control, |vm| vm.pause());
        self.paused = paused.is_ok();
        paused
    }

    pub(super) fn resume(&mut self, control: &Control) -> Result<(), VmError> {
        self.paused = false;
        self.during(control, |vm| vm.resume())
    }

    /// Pauses the guest briefly. The guest's I/O has the time `within` to quiesce.
    pub(super) fn trial_pause(&mut self, control: &Control, within: Duration) -> Result<TrialPause, VmError> {
        self.during(control, |vm| vm::trial_pause(vm, within))
    }

    /// Saves the state. The guest's I/O has the time `within` to quiesce.
    pub(super) fn save(&mut self, control: &Control, within: Duration) -> Result<Vec<Section>, VmError> {
        self.during(control, |vm| vm::save(vm, within))
    }

    /// Stops each vCPU for its share of the time. Returns true if the VM supports that.
    pub(super) fn throttle(&mut self, shares: &[f64]) -> bool {
        self.throttled = true;
        let throttled = self.vm.throttle(shares);
        if let Err(error) = &throttled {
            tracing::warn!("cannot slow the guest, so the migration may not converge: {error}");
        }
        throttled.is_ok()
    }

    /// Lets the guest run at full speed. A throttle does not outlive its migration.
    pub(super) fn unthrottle(&mut self) {
        if std::mem::take(&mut self.throttled) {
            shielded("removing the throttle failed, so the guest may stay slow", || {
                // A throttle can fail only because a thread cannot be started, and a share of 0
                // needs no thread.
                let _ = self.vm.throttle(&[0.0]);
            });
        }
    }

    /// Returns the time for which each vCPU has been stopped by a throttle.
    pub(super) fn held(&self) -> Vec<Duration> {
        shielded("reading the throttle times failed", || self.vm.throttled())
    }
}

/// Returns the size of the device state in bytes, or an error if the protocol cannot carry the
/// state. The check comes early, so that the guest is not stopped for a state that cannot be sent.
pub(super) fn state_bytes(sections: &[Section]) -> Result<u64, VmError> {
    /// Upper bound of the size in bytes of a message, not counting the section's name and payload.
    const AROUND: usize = 64;
    let bytes = |section: &Section| section.name.len() + section.payload.len();
    if let Some(large) = sections.iter().find(|section| bytes(section) > MAX_CONTROL_BYTES - AROUND) {
        let (name, size, most) = (&large.name, bytes(large), (MAX_CONTROL_BYTES - AROUND) >> 10);
        return Err(VmError::new(format!(
            "the device state '{name}' has {size} bytes; a section holds at most {most} KiB"
        )));
    }
    let all: usize = sections.iter().map(bytes).sum();
    if all > MAX_STATE_BYTES || sections.len() > MAX_SECTIONS {
        let (most, count) = (MAX_STATE_BYTES >> 20, sections.len());
        return Err(VmError::new(format!(
            "the device state has {all} bytes in {count} sections; at most {most} MiB in {MAX_SECTIONS} can be sent"
        )));
    }
    Ok(all as u64)
}
