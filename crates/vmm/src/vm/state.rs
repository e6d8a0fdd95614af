//! A VM's state: saved, loaded, and brought back to what it was before its first kernel.

use super::{Stage, Vm};
use crate::error::{Error, Result};
use crate::generation;
use crate::net::VmNet;
use crate::state::{Saved, Sections, SerialSaved, StateError};
use crate::vcpu::{Command, PATIENCE};
use crate::{bus, disk};
use kvm_bindings::CpuId;
use std::time::{Duration, Instant};
use vmferry_engine::Section;
use vmferry_kvm::{GuestState, KvmChips, VcpuState, VmState};

/// Every VM has KVM's interrupt controllers and timer.
const CHIPS: KvmChips = KvmChips { irqchip: true, pit: true };

/// What a machine is like before its first kernel, apart from its memory and the devices on its bus.
#[derive(Debug)]
pub(super) struct Pristine {
    vcpus: Vec<VcpuState>,
    shared: VmState,
    serial: SerialSaved,
}

impl Vm {
    pub(super) fn pristine(&self) -> Result<Pristine> {
        let vcpus = self.save_vcpus("look at the new machine")?;
        let shared = VmState::save(self.shared.machine.fd(), CHIPS)?;
        Ok(Pristine { vcpus, shared, serial: self.shared.devices.save_serial() })
    }

    /// Brings the machine back to what it was before its first kernel, once its guest has asked for a reset: processors, interrupt
    /// controllers and devices as new, memory all zeros. A kernel can be [loaded](Self::load) next. Disks and networks stay this VM's.
    ///
    /// # Errors
    /// [`Error::WrongState`] if the guest has not asked for a reset, or its kernel was loaded elsewhere, where it came from; otherwise what
    /// the host refused: the VM is of no use then.
    pub fn reset(&mut self) -> Result<()> {
        let what = "reset the machine";
        self.expect(what, &[Stage::Running, Stage::Paused])?;
        let board = &self.shared.board;
        if !board.exit().is_some_and(|exit| exit.is_reset()) {
            return Err(Error::WrongState { what, why: "its guest has not asked for it".to_owned() });
        }
        let Some(pristine) = self.pristine.take() else {
            let why = "its guest came from elsewhere, and its kernel with it".to_owned();
            return Err(Error::WrongState { what, why });
        };
        self.keeper.iter().for_each(|keeper| keeper.set_running(false));
        board.pause_all(PATIENCE)?;
        self.stage = Stage::Paused;
        self.shared.devices.bus().quiesce()?;
        self.shared.devices.bus().reset();
        board.renew();
        self.ram().clear().map_err(|error| Error::WrongState { what, why: error.to_string() })?;
        let Pristine { vcpus, shared, serial } = &pristine;
        self.load_machine(what, vcpus.iter().map(|vcpu| (vcpu.clone(), None)).collect(), shared, serial)?;
        self.pristine = Some(pristine);
        self.stage = Stage::Empty;
        Ok(())
    }

    /// Brings devices to rest, and what was written to disks to where another host finds it; the guest is paused, or was never started. For no
    /// longer than `within`, nor than 10 s. [`resume`](Self::resume) lets the devices go on.
    ///
    /// # Errors
    /// One that [is busy](Error::is_busy) if that takes longer; [`Error::Disk`] if something that was written is lost; [`Error::WrongState`] if
    /// the guest runs, or has ended.
    pub fn settle(&mut self, within: Duration) -> Result<()> {
        self.expect_alive("bring its devices to rest")?;
        // What is finished now sends interrupts and writes memory (hazards.md 13).
        // One patience for both: the guest stands still meanwhile.
        let deadline = Instant::now() + within.min(bus::PATIENCE);
        self.shared.devices.bus().quiesce_by(deadline)?;
        Ok(disk::sync(self.shared.devices.disks(), deadline)?)
    }

    /// [Brings devices to rest](Self::settle) and saves vCPUs, interrupt controllers and devices; the guest is paused, or was never started.
    /// [`resume`](Self::resume) lets the devices go on.
    ///
    /// # Errors
    /// As [`settle`](Self::settle); [`Error::State`] if KVM does not give some of it.
    pub fn save_state(&mut self) -> Result<Vec<Section>> {
        self.settle(bus::PATIENCE)?;
        self.save_rested()
    }

    fn expect_alive(&self, what: &'static str) -> Result<()> {
        self.expect(what, &[Stage::Paused, Stage::Ready])?;
        match self.shared.board.exit() {
            Some(exit) => Err(Error::WrongState { what, why: exit.to_string() }),
            None => Ok(()),
        }
    }

    /// Saves it with its devices at rest.
    pub(crate) fn save_rested(&self) -> Result<Vec<Section>> {
        let what = "save the guest's state";
        self.expect_alive(what)?;
        let vcpus = self.save_vcpus(what)?;
        let vm = VmState::save(self.shared.machine.fd(), CHIPS)?;
        let mut sections = GuestState { vcpus, vm, cpu: self.model.clone() }.sections()?;
        sections.push(self.shared.devices.save_serial().section(0)?);
        sections.extend(self.shared.devices.bus().save()?);
        Ok(sections)
    }

    /// Leaves the disks to whoever gets the guest; its state was [saved](Self::save_state), and it has not run since. It can still
    /// be [resumed](Self::resume) if nobody has taken them.
    ///
    /// # Errors
    /// If a disk may still be locked; [`Error::WrongState`] if the guest runs.
    pub fn release(&mut self) -> Result<()> {
        self.expect("give the guest's disks away", &[Stage::Paused, Stage::Ready])?;
        Ok(disk::give_up(self.shared.devices.disks())?)
    }

    /// Loads what [`save_state`](Self::save_state) gave, into a VM that waits for a guest; [`start`](Self::start) then
    /// runs it. All memory must be there.
    ///
    /// # Errors
    /// [`Error::State`] if a section is missing, unknown, of another version or damaged, or KVM does not take it. The VM
    /// is then still empty, and loading can be tried again.
    pub fn load_state(&mut self, sections: &[Section]) -> Result<()> {
        let what = "load a guest's state";
        if !self.incoming {
            return Err(Error::WrongState { what, why: "the VM was not made to take a guest".to_owned() });
        }
        self.expect(what, &[Stage::Empty, Stage::Ready])?;
        self.stage = Stage::Empty;
        let mut parts = Sections::new(sections)?;
        let count = u32::try_from(self.vcpus.len()).unwrap_or(u32::MAX);
        let GuestState { vcpus, vm, cpu: model } = GuestState::take(&mut parts, count, CHIPS, &self.offer)?;
        let serial = SerialSaved::take(&mut parts, 0)?;
        let devices = self.shared.devices.bus().prepare(&mut parts)?;
        parts.finish()?;

        // Everything was understood; only now is anything changed.
        devices.into_iter().try_for_each(|load| load())?;
        let table = |(cpu, saved)| Ok((saved, Some(model.of_vcpu(cpu)?)));
        let vcpus = (0..).zip(vcpus).map(table).collect::<Result<_>>()?;
        self.load_machine(what, vcpus, &vm, &serial)?;
        self.model = model;
        self.stage = Stage::Ready;
        Ok(())
    }

    /// Gives the guest, which was [loaded](Self::load_state) and is a copy, a new VM generation ID; by [`VmOptions::new_macs`] also the MAC
    /// addresses that this VM was made with. [`start`](Self::start) then runs it.
    ///
    /// # Errors
    /// [`Error::WrongState`] if no guest was loaded, or its memory cannot be written.
    ///
    /// [`VmOptions::new_macs`]: crate::VmOptions::new_macs
    pub fn renew_identity(&mut self) -> Result<()> {
        self.expect("give the guest a new identity", &[Stage::Ready])?;
        if !generation::renew(&self.shared.machine)? {
            tracing::warn!(
                "the guest was started by a version without VM generation IDs: it cannot tell that it is a copy"
            );
        }
        if self.new_macs {
            self.shared.devices.nets().iter().for_each(VmNet::renew_mac);
        }
        Ok(())
    }

    /// All vCPUs at once, each in its thread.
    fn save_vcpus(&self, what: &'static str) -> Result<Vec<VcpuState>> {
        let answers: Vec<_> = self.vcpus.iter().map(|vcpu| vcpu.ask(what, Command::Save)).collect();
        answers.into_iter().map(|answer| Ok(answer.wait()??)).collect()
    }

    /// The machine apart from its bus; each vCPU with what CPUID is to say from now on, if that changes.
    fn load_machine(
        &self,
        what: &'static str,
        vcpus: Vec<(VcpuState, Option<CpuId>)>,
        shared: &VmState,
        serial: &SerialSaved,
    ) -> Result<()> {
        let load_serial = self.shared.devices.load_serial(serial);
        load_serial.map_err(|why| StateError::invalid(SerialSaved::KIND, 0, why))?;
        let loads = self.vcpus.iter().zip(vcpus);
        let answers: Vec<_> = loads
            .map(|(vcpu, load)| vcpu.ask(what, |answer| Command::Load(Box::new(load), answer)))
            .collect();
        for answer in answers {
            answer.wait()??;
        }
        Ok(shared.load(self.shared.machine.fd())?)
    }
}
