//! Making vCPUs and what goes with them.

use crate::cpuid::CpuModel;
use crate::devices::Devices;
use crate::error::{Error, Result};
use crate::kvm::Machine;
use crate::vcpu::{
    Board, HostTsc, KickPage, MsrPlan, Throttle, Vcpu, VcpuContext, XsaveSize, set_as_firmware,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use vmferry_dirty::DirtyRings;
use vmferry_fault::LazySlot;
use vmferry_sys::ring::RingEntries;

pub(super) fn create_vcpus(machine: &Machine, model: &CpuModel, cpus: u32) -> Result<Vec<VcpuFd>> {
    let create = |cpu| {
        let vcpu = machine.fd().create_vcpu(u64::from(cpu));
        let vcpu = vcpu.map_err(|e| Error::kvm(format!("KVM_CREATE_VCPU of vCPU {cpu}"), e))?;
        let set = vcpu.set_cpuid2(&model.of_vcpu(cpu)?);
        set.map_err(|e| Error::kvm(format!("KVM_SET_CPUID2 of vCPU {cpu}"), e))?;
        set_as_firmware(&vcpu);
        Ok(vcpu)
    };
    (0..cpus).map(create).collect()
}

pub(super) fn map_rings(machine: &Arc<Machine>, entries: RingEntries, fds: &[VcpuFd]) -> Result<DirtyRings> {
    // SAFETY: the descriptors are open for as long as `fds` is borrowed.
    let borrow = |fd: &VcpuFd| unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
    let vcpus: Vec<_> = fds.iter().map(borrow).collect();
    let vm: Arc<dyn AsRawFd + Send + Sync> = Arc::clone(machine) as _;
    // SAFETY: the machine keeps its descriptor and its memory for as long as it lives, and these are the slots that it
    // was made with, which are never changed.
    let rings = unsafe { DirtyRings::new(vm, entries, &vcpus, machine.log_slots()) };
    rings.map_err(|error| Error::DirtyRing { entries: entries.get(), why: error.to_string() })
}

pub(super) fn spawn_vcpus(
    kvm: &Kvm,
    machine: &Machine,
    devices: &Arc<Devices>,
    (plan, tsc): (Arc<MsrPlan>, HostTsc),
    fds: Vec<VcpuFd>,
    (rings, lazy): (Option<&DirtyRings>, &LazySlot),
) -> Result<(Arc<Board>, Arc<Throttle>, Vec<Vcpu>)> {
    debug_assert!(kvm.check_extension(Cap::Xsave));
    let pages: Vec<_> = fds.iter().map(|fd| KickPage::new(fd).map(Arc::new)).collect::<Result<_>>()?;
    let board = Arc::new(Board::new(pages.clone()));
    let xsave = XsaveSize::new(machine.fd().check_extension_int(Cap::Xsave2));
    let throttle = Arc::new(Throttle::new(fds.len()));
    let context = Arc::new(VcpuContext {
        board: Arc::clone(&board),
        devices: Arc::clone(devices),
        plan,
        xsave,
        tsc,
        throttle: Arc::clone(&throttle),
        threads: Arc::clone(lazy.threads()),
    });
    let vcpus = (0..)
        .zip(fds.into_iter().zip(pages))
        .map(|(cpu, (fd, page))| {
            let ring = rings.map(|rings| rings.vcpu(cpu as usize));
            Vcpu::spawn(cpu, (fd, ring), page, Arc::clone(&context))
        })
        .collect::<Result<_>>()?;
    Ok((board, throttle, vcpus))
}
