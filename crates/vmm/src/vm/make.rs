//! Creation of vCPUs and their threads.

use crate::devices::Devices;
use crate::error::{Error, Result};
use crate::kvm::Machine;
use crate::vcpu::{Throttle, Vcpu, VcpuBoard, VcpuContext};
use kvm_ioctls::VcpuFd;
use std::sync::Arc;
use vmferry_dirty::DirtyRings;
use vmferry_fault::PagingSlot;
use vmferry_kvm::{CpuModel, VcpuSaver};

pub(super) fn create_vcpus(machine: &Machine, model: &CpuModel, cpus: u32) -> Result<Vec<VcpuFd>> {
    let create = |cpu| {
        let vcpu = machine.fd().create_vcpu(u64::from(cpu));
        let vcpu = vcpu.map_err(|e| Error::kvm(format!("KVM_CREATE_VCPU of vCPU {cpu}"), e))?;
        model.set_up(cpu, &vcpu)?;
        Ok(vcpu)
    };
    (0..cpus).map(create).collect()
}

pub(super) fn spawn_vcpus(
    devices: &Arc<Devices>,
    saver: &VcpuSaver,
    fds: Vec<VcpuFd>,
    (rings, paging): (Option<&DirtyRings>, &PagingSlot),
) -> Result<(Arc<VcpuBoard>, Arc<Throttle>, Vec<Vcpu>)> {
    let board = Arc::new(VcpuBoard::new(&fds)?);
    let throttle = Arc::new(Throttle::new(Arc::clone(&board)));
    let context = Arc::new(VcpuContext {
        board: Arc::clone(&board),
        devices: Arc::clone(devices),
        throttle: Arc::clone(&throttle),
        threads: Arc::clone(paging.threads()),
    });
    let vcpus = (0..)
        .zip(fds)
        .map(|(cpu, fd)| {
            let ring = rings.map(|rings| rings.vcpu(cpu as usize));
            Vcpu::spawn(cpu, (fd, ring), saver.clone(), Arc::clone(&context))
        })
        .collect::<Result<_>>()?;
    Ok((board, throttle, vcpus))
}
