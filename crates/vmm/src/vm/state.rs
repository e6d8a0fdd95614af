//! State of a VM: saving, loading, and resetting to the state before the first kernel.

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

/// State of a machine before its first kernel, apart from its memory and the devices on its bus.
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

    /// Resets the machine to the state before its first kernel, after its guest has requested a
    /// reset. Processors, interrupt controllers and devices are in their initial state, and the
    /// memory contains only zeros. Next, [load](Self::load) a kernel. The VM keeps its disks and
    /// networks.
    ///
    /// # Errors
    /// Returns [`Error::WrongState`] if the guest has not requested a reset, or if the guest was
    /// received and its kernel was loaded on another host. Returns an error that [is
    /// busy](Error::is_busy) if a device does not complete its requests within 10 s; the call can
    /// be repeated then. Otherwise returns the error of the host, and the VM cannot be used after
    /// that.
    pub fn reset(&mut self) -> Result<()> {
        let what = "reset the machine";
        self.expect(what, &[Stage::Running, Stage::Paused])?;
        let board = &self.shared.board;
        if !board.exit().is_some_and(|exit| exit.is_reset()) {
            return Err(Error::WrongState { what, why: "the guest has not asked for it".to_owned() });
        }
        let Some(pristine) = self.pristine.take() else {
            let why =
                "the guest was migrated to this VM, and its kernel was loaded on another host".to_owned();
            return Err(Error::WrongState { what, why });
        };
        if let Err(error) = self.stand_by() {
            // Nothing has changed, so the call can be repeated.
            self.pristine = Some(pristine);
            return Err(error);
        }
        self.become_pristine(what, pristine)
    }

    /// Pauses the vCPUs and quiesces the devices for a reset.
    fn stand_by(&mut self) -> Result<()> {
        self.keeper.iter().for_each(|keeper| keeper.set_running(false));
        self.shared.board.pause_all(PATIENCE)?;
        self.stage = Stage::Paused;
        self.shared.devices.bus().quiesce()
    }

    /// Gives the machine the state `pristine`. After an error, the VM cannot be used.
    fn become_pristine(&mut self, what: &'static str, pristine: Pristine) -> Result<()> {
        self.shared.devices.bus().reset();
        self.shared.board.renew();
        self.ram().clear().map_err(|error| Error::WrongState { what, why: error.to_string() })?;
        let Pristine { vcpus, shared, serial } = &pristine;
        self.load_machine(what, vcpus.iter().map(|vcpu| (vcpu.clone(), None)).collect(), shared, serial)?;
        self.pristine = Some(pristine);
        self.stage = Stage::Empty;
        Ok(())
    }

    /// Quiesces the devices, and writes disk data to the storage, so that another host can read it.
    /// The guest must be paused, or must never have been started. The call takes at most `within`,
    /// and at most 10 s. [`resume`](Self::resume) resumes the devices.
    ///
    /// # Errors
    /// Returns an error that [is busy](Error::is_busy) if more time is needed, [`Error::Disk`] if
    /// written data is lost, and [`Error::WrongState`] if the guest runs or has ended.
    pub fn quiesce(&mut self, within: Duration) -> Result<()> {
        self.expect_alive("quiesce its devices")?;
        // Work that ends now sends interrupts and writes memory (hazards.md 13). One deadline
        // covers both steps, because the guest is paused meanwhile.
        let deadline = Instant::now() + within.min(bus::PATIENCE);
        self.shared.devices.bus().quiesce_by(deadline)?;
        Ok(disk::sync(self.shared.devices.disks(), deadline)?)
    }

    /// Quiesces the devices ([`quiesce`](Self::quiesce)), and saves the state of vCPUs, interrupt
    /// controllers and devices. The guest must be paused, or must never have been started.
    /// [`resume`](Self::resume) resumes the devices.
    ///
    /// # Errors
    /// Returns an error in the cases of [`quiesce`](Self::quiesce), and [`Error::State`] if KVM
    /// refuses a part of the state.
    pub fn save_state(&mut self) -> Result<Vec<Section>> {
        self.quiesce(bus::PATIENCE)?;
        self.save_quiesced()
    }

    fn expect_alive(&self, what: &'static str) -> Result<()> {
        self.expect(what, &[Stage::Paused, Stage::Ready])?;
        match self.shared.board.exit() {
            Some(exit) => Err(Error::WrongState { what, why: exit.to_string() }),
            None => Ok(()),
        }
    }

    /// Saves the state of a VM whose devices are quiesced.
    pub(crate) fn save_quiesced(&self) -> Result<Vec<Section>> {
        let what = "save the guest's state";
        self.expect_alive(what)?;
        let vcpus = self.save_vcpus(what)?;
        let vm = VmState::save(self.shared.machine.fd(), CHIPS)?;
        let mut sections = GuestState { vcpus, vm, cpu: self.model.clone() }.sections()?;
        sections.push(self.shared.devices.save_serial().section(0)?);
        sections.extend(self.shared.devices.bus().save()?);
        Ok(sections)
    }

    /// Releases the disks for the VM to which the guest moves. The guest's state must have been
    /// [saved](Self::save_state), and the guest must not have run since. The guest can still be
    /// [resumed](Self::resume), unless another VM has taken the disks.
    ///
    /// # Errors
    /// Returns an error if a disk may still be locked. Returns [`Error::WrongState`] if the guest
    /// runs.
    pub fn release(&mut self) -> Result<()> {
        self.expect("release the guest's disks", &[Stage::Paused, Stage::Ready])?;
        Ok(disk::give_up(self.shared.devices.disks())?)
    }

    /// Loads the result of [`save_state`](Self::save_state) into a VM that waits for a guest.
    /// [`start`](Self::start) then runs the guest. All memory must be mapped.
    ///
    /// # Errors
    /// Returns [`Error::State`] if a section is missing, unknown, of another version or damaged, or
    /// if KVM refuses it. The VM is then still empty, and loading can be tried again.
    pub fn load_state(&mut self, sections: &[Section]) -> Result<()> {
        let what = "load a guest's state";
        if !self.incoming {
            return Err(Error::WrongState {
                what,
                why: "the VM was not created to receive a guest".to_owned(),
            });
        }
        self.expect(what, &[Stage::Empty, Stage::Ready])?;
        self.stage = Stage::Empty;
        let mut parts = Sections::new(sections)?;
        let count = u32::try_from(self.vcpus.len()).unwrap_or(u32::MAX);
        let GuestState { vcpus, vm, cpu: model } = GuestState::take(&mut parts, count, CHIPS, &self.offer)?;
        let serial = SerialSaved::take(&mut parts, 0)?;
        let devices = self.shared.devices.bus().prepare(&mut parts)?;
        parts.finish()?;

        // All sections are valid. Only now is anything changed.
        devices.into_iter().try_for_each(|load| load())?;
        let table = |(cpu, saved)| Ok((saved, Some(model.of_vcpu(cpu)?)));
        let vcpus = (0..).zip(vcpus).map(table).collect::<Result<_>>()?;
        self.load_machine(what, vcpus, &vm, &serial)?;
        self.model = model;
        self.stage = Stage::Ready;
        Ok(())
    }

    /// Gives the guest, which was [loaded](Self::load_state) and is a copy, a new VM generation ID.
    /// With [`VmOptions::new_macs`], also gives it the MAC addresses that this VM was created with.
    /// [`start`](Self::start) then runs the guest.
    ///
    /// # Errors
    /// Returns [`Error::WrongState`] if no guest was loaded, or if its memory cannot be written.
    ///
    /// [`VmOptions::new_macs`]: crate::VmOptions::new_macs
    pub fn renew_identity(&mut self) -> Result<()> {
        self.expect("give the guest a new identity", &[Stage::Ready])?;
        if !generation::renew(&self.shared.machine)? {
            tracing::warn!(
                "the guest was started by a version without VM generation IDs and cannot detect that it is a copy"
            );
        }
        if self.new_macs {
            self.shared.devices.nets().iter().for_each(VmNet::renew_mac);
        }
        Ok(())
    }

    /// Saves all vCPUs at once, each in its thread.
    fn save_vcpus(&self, what: &'static str) -> Result<Vec<VcpuState>> {
        let answers: Vec<_> = self.vcpus.iter().map(|vcpu| vcpu.call(what, Command::Save)).collect();
        answers.into_iter().map(|answer| Ok(answer.wait()??)).collect()
    }

    /// Loads the machine apart from its bus, and each vCPU with its new CPUID table, if there is
    /// one.
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
            .map(|(vcpu, load)| vcpu.call(what, |answer| Command::Load(Box::new(load), answer)))
            .collect();
        for answer in answers {
            answer.wait()??;
        }
        Ok(shared.load(self.shared.machine.fd())?)
    }
}
