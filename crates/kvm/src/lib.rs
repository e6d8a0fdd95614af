//! Building blocks for a VMM based on `kvm-ioctls` that moves guests.
//!
//! [`Guest`] is a VM with its vCPUs and their threads. For almost every method of the engine's
//! traits, it has a method to which the VMM can delegate the call. The VMM provides the memory, the
//! devices and the handling of exits.
//!
//! # Parts for a VMM with its own vCPU threads
//!
//! | part | purpose |
//! |---|---|
//! | [`missing_capabilities`] | finding the capabilities that moving a guest requires and that KVM on this host does not have |
//! | [`CpuModel`] | CPUID of a guest, and the check whether a target offers all features of the guest |
//! | [`KvmVm`] | a VM with its memory slots, and its dirty page trackers: dirty log or dirty rings |
//! | [`VcpuSaver`] | saving and loading the state of a vCPU: registers, local APIC, pending events, time |
//! | [`VmState`], [`KvmChips`] | state that the vCPUs share: interrupt controllers, timer, clock |
//! | [`GuestState`], [`Sections`] | all of this state as versioned sections, which are sent to the target |
//! | [`VcpuPark`] | pausing vCPU threads without losing a kick, and resuming them |
//! | [`Throttle`] | throttling vCPUs that write faster than the link can carry |
//!
//! The crate contains no devices. A VMM has its own devices, and saves their state in its own
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
//! The crate supports Linux on x86-64. KVM must emulate the local APICs. The VMM may emulate the
//! I/O APIC and the 8259s itself (`KVM_CAP_SPLIT_IRQCHIP`), and a VM need not have the 8254 timer.

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
