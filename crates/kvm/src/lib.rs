//! Parts for a VMM on `kvm-ioctls` that moves guests.
//!
//! [`Guest`] is a VM with its vCPUs and their threads, and has a method for almost every method of
//! the engine's traits. The VMM provides the memory, the devices and the handling of exits.
//!
//! # Parts for a VMM with its own vCPU threads
//!
//! | part | purpose |
//! |---|---|
//! | [`missing_capabilities`] | capabilities for moving guests that KVM on this host does not have |
//! | [`CpuModel`] | features that a guest is shown, and the check whether a target has them |
//! | [`KvmVm`] | a VM with its memory slots, and the trackers of its dirty pages: dirty log or dirty rings |
//! | [`VcpuSaver`] | saving and loading the state of a vCPU: registers, local APIC, pending events, time |
//! | [`VmState`], [`KvmChips`] | state that the vCPUs share: interrupt controllers, timer, clock |
//! | [`GuestState`], [`Sections`] | all of this state as versioned sections, which are sent to the target |
//! | [`VcpuPark`] | pausing vCPU threads without losing a kick, and resuming them |
//! | [`Throttle`] | throttling vCPUs that write faster than the link carries |
//!
//! The crate has no devices: a VMM has its own, and saves their state as its own
//! [sections](SectionKind).
//!
//! # Saving and loading a guest
//!
//! ```no_run
//! use vmferry_core::Section;
//! use vmferry_kvm::{CpuModel, GuestState, KvmChips, KvmVm, Result, Sections, VcpuSaver, VmState};
//!
//! /// For `SourceVm::save`. The vCPU is paused.
//! fn save(vm: &KvmVm, vcpu: &kvm_ioctls::VcpuFd, saver: &VcpuSaver, cpu: &CpuModel) -> Result<Vec<Section>> {
//!     let vcpus = vec![saver.save(0, vcpu)?];
//!     let vm = VmState::save(vm.fd(), KvmChips::of(vm.fd())?)?;
//!     Ok(GuestState { vcpus, vm, cpu: cpu.clone() }.sections()?)
//! }
//!
//! /// For `TargetVm::load`. The vCPU has not run.
//! fn load(
//!     vm: &KvmVm,
//!     vcpu: &kvm_ioctls::VcpuFd,
//!     saver: &mut VcpuSaver,
//!     offer: &CpuModel,
//!     sections: &[Section],
//! ) -> Result<CpuModel> {
//!     let mut parts = Sections::new(sections)?;
//!     let state = GuestState::take(&mut parts, 1, KvmChips::of(vm.fd())?, offer)?;
//!     parts.finish()?; // Parse all state before you change anything.
//!     saver.load(0, vcpu, &state.vcpus[0], Some(&state.cpu.of_vcpu(0)?))?;
//!     state.vm.load(vm.fd())?;
//!     Ok(state.cpu)
//! }
//! ```
//!
//! The example `vm_memory` of the crate `vmferry` is a complete VMM that boots a guest and moves
//! it.
//!
//! # Platform
//! Linux on x86-64. The local APICs are in KVM. The I/O APIC and the 8259s may be in the VMM
//! (`KVM_CAP_SPLIT_IRQCHIP`), and the 8254 timer may be missing.

mod cpuid;
mod error;
mod guest;
mod guest_state;
#[cfg(feature = "hostile")]
pub mod hostile;
mod kick;
mod park;
mod slots;
pub mod state;
#[cfg(test)]
mod testing;
mod throttle;
mod vcpu;
mod vm_state;

pub use cpuid::{CpuChoice, CpuModel};
pub use error::{Error, Result};
pub use guest::{Guest, GuestExit, GuestOptions};
pub use guest_state::GuestState;
pub use park::{NotPaused, VcpuPark, VcpuRunner};
pub use slots::{KvmVm, largest_dirty_ring, missing_capabilities};
pub use state::{SectionKind, Sections, StateError, VcpuState};
pub use throttle::Throttle;
pub use vcpu::VcpuSaver;
pub use vm_state::{IrqchipState, KvmChips, VmState};
pub use vmferry_sys::ring::RingEntries;
pub use {kvm_bindings, kvm_ioctls};
