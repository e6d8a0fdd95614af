//! Saving and loading the state of a vCPU.

#[cfg(test)]
mod kvm_tests;
mod msrs;
mod transfer;

use crate::error::{Error, Result};
use crate::state::{StateError, VcpuState};
use kvm_bindings::CpuId;
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use msrs::MsrPlan;
pub(crate) use msrs::set_as_firmware;
use std::sync::Arc;
pub(crate) use transfer::now_ns;
use transfer::{HostTsc, XsaveSize};

/// Saver and loader of the state of one vCPU.
///
/// Which state can be saved depends on the host, because KVM lists some model-specific registers
/// that it cannot return for this guest, and some that it returns but never accepts. Therefore
/// [`probe`](Self::probe) determines the usable registers once, on a vCPU that has not run. Use a
/// clone of the result for each vCPU of the VM.
#[derive(Debug, Clone)]
pub struct VcpuSaver {
    plan: Arc<MsrPlan>,
    xsave: XsaveSize,
    tsc: HostTsc,
}

impl VcpuSaver {
    /// Creates a saver, for which it determines the state that KVM on this host returns and
    /// accepts.
    ///
    /// `vcpu` is a vCPU of `vm` that has been [set up](crate::CpuModel::set_up) and has not run.
    ///
    /// # Errors
    /// Returns [`Error::Ioctl`] if KVM cannot be queried.
    pub fn probe(kvm: &Kvm, vm: &VmFd, vcpu: &VcpuFd) -> Result<Self> {
        Ok(Self {
            plan: Arc::new(MsrPlan::probe(kvm, vcpu)?),
            xsave: XsaveSize::new(vm.check_extension_int(Cap::Xsave2)),
            tsc: HostTsc::of(kvm, vcpu).map_err(|e| Error::ioctl("KVM_GET_TSC_KHZ", e))?,
        })
    }

    /// Returns the frequency of this host's time stamp counter in kHz, which a guest that boots on
    /// this host has.
    #[must_use]
    pub fn tsc_khz(&self) -> u32 {
        self.tsc.khz
    }

    /// Returns a text that names the registers which KVM lists and which are not saved, or `None`
    /// if all of them are saved.
    #[must_use]
    pub fn note(&self) -> Option<String> {
        self.plan.note()
    }

    /// Reads all state of `vcpu`, whose number in its VM is `cpu`. The vCPU must be paused.
    ///
    /// A vCPU is paused when `KVM_RUN` has returned `EINTR` with `immediate_exit` set. After any
    /// other exit, an access to a device may be incomplete, so call `KVM_RUN` once more.
    /// [`VcpuPark`](crate::VcpuPark) pauses vCPUs in this way.
    ///
    /// # Errors
    /// Returns [`StateError`], which names the failed ioctl, or the register that KVM does not
    /// return.
    pub fn save(&self, cpu: u32, vcpu: &VcpuFd) -> Result<VcpuState, StateError> {
        transfer::save(cpu, vcpu, &self.plan, self.xsave)
    }

    /// Loads `state` into `vcpu`, whose number in its VM is `cpu`.
    ///
    /// If `cpuid` is given, the guest is shown this CPUID from now on. A guest from another host
    /// needs the CPUID that it was shown there: see
    /// [`CpuModel::of_vcpu`](crate::CpuModel::of_vcpu). The time stamp counter continues as if the
    /// vCPU had never been paused.
    ///
    /// # Errors
    /// Returns [`StateError`] if KVM refuses a part of the state, or this host cannot run the
    /// counter at the guest's frequency. A part of the state may then be loaded already. Loading
    /// can be retried.
    pub fn load(
        &mut self,
        cpu: u32,
        vcpu: &VcpuFd,
        state: &VcpuState,
        cpuid: Option<&CpuId>,
    ) -> Result<(), StateError> {
        if let Some(table) = cpuid {
            let set = vcpu.set_cpuid2(table);
            set.map_err(|e| StateError::kvm::<VcpuState>(cpu, "KVM_SET_CPUID2", e))?;
        }
        transfer::load(cpu, vcpu, state, (self.xsave, self.tsc))?;
        // A guest that was shown fewer features than this host offers has fewer registers.
        self.plan = Arc::new(MsrPlan::of(&state.msrs, vcpu));
        Ok(())
    }
}
