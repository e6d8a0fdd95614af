//! Virtual machine.

mod branch;
mod make;
mod state;

use crate::acpi::{self, Platform};
use crate::balloon::StatsThread;
use crate::boot::{Kernel, KernelFormat};
use crate::devices::Devices;
use crate::disk;
use crate::error::{Error, Result};
use crate::generation::{self, GenerationId};
use crate::handle::{VmContext, VmHandle};
use crate::kicks;
use crate::kvm::{Machine, open_kvm};
use crate::memory::GuestRam;
use crate::net::VmNet;
use crate::options::VmOptions;
use crate::vcpu::{Command, Exit, PATIENCE, Throttle, Vcpu};
use make::{create_vcpus, spawn_vcpus};
use state::Pristine;
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;
use vmferry_core::RunState;
use vmferry_dirty::{DirtyRings, Predict, ReaperPolicy};
use vmferry_fault::PagingSlot;
use vmferry_kvm::{CpuModel, VcpuSaver};
use vmferry_virtio::device::Resume;

/// Time that the guest's end waits for vCPUs before it assumes that they sleep on a missing page,
/// and wakes them.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

/// Stage in the life cycle of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The VM has neither a kernel nor a loaded state.
    Empty,
    /// The guest is ready to run and has never run in this VM.
    Ready,
    /// The vCPUs run.
    Running,
    /// The vCPUs are paused.
    Paused,
    /// The vCPUs have ended.
    Stopped,
}

impl Stage {
    fn words(self) -> &'static str {
        match self {
            Self::Empty => "the VM has no guest yet",
            Self::Ready => "the guest has not been started",
            Self::Running => "the guest runs",
            Self::Paused => "the guest is paused",
            Self::Stopped => "the VM was stopped",
        }
    }
}

/// Virtual machine on KVM.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use vmferry_vmm::{SerialSink, Vm, VmOptions};
///
/// let mut options = VmOptions::new(1 << 30, 2);
/// options.serial = SerialSink::new(std::io::stdout());
/// let mut vm = Vm::new(options)?;
/// vm.load_kernel(&std::fs::read("vmlinux")?, "console=ttyS0")?;
/// vm.start()?;
/// println!("{}", vm.handle().wait_for_exit());
/// # Ok(()) }
/// ```
///
/// Dropping the value stops the guest and waits for its threads.
#[derive(Debug)]
pub struct Vm {
    // First field, so that the threads end before anything that they use is dropped.
    vcpus: Vec<Vcpu>,
    shared: Arc<VmContext>,
    stage: Stage,
    /// Run state that the operator requested.
    wanted: RunState,
    /// True if the guest was received and has not run in this VM.
    has_come: bool,
    incoming: bool,
    reaper: Arc<dyn ReaperPolicy>,
    throttle: Arc<Throttle>,
    /// Thread that asks the guest for statistics, if the options request it.
    keeper: Option<StatsThread>,
    tsc_khz: u32,
    /// Processor that this host can offer.
    offer: CpuModel,
    /// Processor that the guest was shown, which may have fewer features if the guest was received.
    model: CpuModel,
    /// State that a reset restores; `None` until a kernel was loaded.
    pristine: Option<Pristine>,
    /// ID that kernels which boot in this VM are given. A reset does not change it.
    generation: GenerationId,
    /// True if a copy gets other addresses than its original's.
    new_macs: bool,
    /// Files that become copies of the disks at a branch.
    disk_copies: Vec<File>,
    notes: Vec<String>,
}

impl Vm {
    /// Creates a VM that is stopped and has no guest. Next, load a kernel with
    /// [`load_kernel`](Self::load_kernel), or let the engine load a guest with
    /// [`TargetVm::load`](vmferry_engine::TargetVm::load).
    ///
    /// # Errors
    /// Returns an error that names what is missing on the host, and the action to take.
    pub fn new(options: VmOptions) -> Result<Self> {
        options.check()?;
        let kvm = open_kvm()?;
        let most = kvm.get_max_vcpus();
        if options.cpus as usize > most {
            return Err(Error::TooManyCpus { cpus: options.cpus, most });
        }
        let ram = Arc::new(GuestRam::new(&options)?);
        let mut notes = ram.notes().to_vec();
        let entries = options.ring_entries()?;
        let machine = Arc::new(Machine::new(&kvm, ram, entries)?);
        let paging = Arc::new(PagingSlot::new(options.cpus));
        let devices =
            Arc::new(Devices::new(&machine, &paging, &options, options.kicks && kicks::offered(&kvm))?);
        let model = CpuModel::new(&kvm, options.cpu, options.cpus, options.incoming)?;
        notes.extend(model.note());
        let fds = create_vcpus(&machine, &model, options.cpus)?;
        let saver = VcpuSaver::probe(&kvm, machine.fd(), &fds[0])?;
        notes.extend(saver.note());
        let rings = entries.map(|_| machine.vm().map_rings(&fds)).transpose()?;
        let (board, throttle, vcpus) = spawn_vcpus(&devices, &saver, fds, (rings.as_ref(), &paging))?;
        let keeper = devices.balloon().zip(options.stats_every);
        let keeper =
            keeper.map(|(balloon, every)| StatsThread::start(Arc::clone(balloon), every)).transpose()?;
        Ok(Self {
            vcpus,
            shared: Arc::new(VmContext { board, devices, machine, paging, rings }),
            stage: Stage::Empty,
            wanted: RunState::Running,
            has_come: options.incoming,
            incoming: options.incoming,
            reaper: Arc::new(Predict),
            throttle,
            keeper,
            tsc_khz: saver.tsc_khz(),
            offer: model.clone(),
            model,
            pristine: None,
            generation: GenerationId::random()?,
            new_macs: options.new_macs,
            disk_copies: Vec::new(),
            notes,
        })
    }

    /// Loads a kernel with a command line and without an initrd, like [`load`](Self::load).
    /// [`start`](Self::start) then boots the kernel.
    ///
    /// # Errors
    /// Returns an error in the cases of [`load`](Self::load).
    pub fn load_kernel(&mut self, image: &[u8], cmdline: &str) -> Result<()> {
        self.load(&Kernel { image, initrd: None, cmdline })
    }

    /// Loads a kernel with its initrd and command line. [`start`](Self::start) then boots the
    /// kernel.
    ///
    /// ACPI tables describe the machine. For a kernel that is not Linux, the command line starts
    /// with a description of the devices.
    ///
    /// # Errors
    /// Returns [`Error::Boot`] if the image cannot be loaded, and [`Error::WrongState`] if the VM
    /// already has a guest or waits for one from a source.
    pub fn load(&mut self, kernel: &Kernel<'_>) -> Result<()> {
        let what = "load a kernel";
        if self.incoming {
            return Err(Error::WrongState { what, why: "the VM waits for a guest from a source".to_owned() });
        }
        self.expect(what, &[Stage::Empty])?;
        let format = KernelFormat::detect(kernel.image)?;
        let bus = self.shared.devices.bus();
        let announced = if format.reads_devices(kernel.image) { bus.announcement() } else { String::new() };
        let cmdline = format!("{announced}{}", kernel.cmdline);
        let kernel = Kernel { cmdline: cmdline.trim_end(), ..*kernel };
        let platform = Platform { cpus: self.cpus(), devices: bus.slots() };
        if self.pristine.is_none() {
            self.pristine = Some(self.pristine()?);
        }
        let rsdp = acpi::install(self.ram(), &platform)?;
        generation::install(self.ram(), &self.generation)?;
        let boot = format.load(self.ram(), &kernel, rsdp)?;
        self.vcpus[0].call(what, |answer| Command::Boot(boot, answer)).wait()??;
        self.stage = Stage::Ready;
        Ok(())
    }

    /// Starts the guest: lets its vCPUs run for the first time in this VM.
    ///
    /// # Errors
    /// Returns [`Error::WrongState`] if there is no guest or it was started before, and
    /// [`Error::Device`] if a device cannot run on this host.
    pub fn start(&mut self) -> Result<()> {
        self.expect("start the guest", &[Stage::Ready])?;
        self.run("start the guest")
    }

    /// Lets the vCPUs run again after [`pause`](Self::pause). Does nothing if they already run.
    ///
    /// # Errors
    /// Returns [`Error::WrongState`] if there is no guest to resume, or if it has ended. Returns
    /// [`Error::Device`] if a device cannot resume, for example because another VM has taken its
    /// disk. In this case, the guest stays paused.
    pub fn resume(&mut self) -> Result<()> {
        let what = "resume the guest";
        self.expect(what, &[Stage::Paused, Stage::Running])?;
        if self.stage == Stage::Running { Ok(()) } else { self.run(what) }
    }

    /// Takes over a guest that the operator has paused on the source. Afterwards this VM owns the
    /// disks, but no vCPU runs until [`set_run_state`](Self::set_run_state) is called.
    ///
    /// # Errors
    /// Returns [`Error::WrongState`] if there is no guest or it was started before, and
    /// [`Error::Device`] if another VM holds its disk.
    pub fn start_paused(&mut self) -> Result<()> {
        self.expect("take the paused guest", &[Stage::Ready])?;
        disk::take(self.shared.devices.disks())?;
        (self.stage, self.wanted) = (Stage::Paused, RunState::Paused);
        Ok(())
    }

    /// Returns the run state that the operator requested.
    #[must_use]
    pub fn run_state(&self) -> RunState {
        self.wanted
    }

    /// Pauses the vCPUs or lets them run, at the request of the operator. A guest that this call
    /// has paused stays paused on the target of a migration.
    ///
    /// # Errors
    /// Returns an error in the cases of [`pause`](Self::pause) and [`resume`](Self::resume).
    pub fn set_run_state(&mut self, wanted: RunState) -> Result<()> {
        match wanted {
            RunState::Paused => self.pause()?,
            RunState::Running => self.resume()?,
        }
        self.wanted = wanted;
        Ok(())
    }

    /// Ends a pause that the operator did not request. This VM owns the disks again, and the vCPUs
    /// run unless the operator has paused the guest.
    ///
    /// # Errors
    /// Returns an error in the cases of [`resume`](Self::resume).
    pub(crate) fn end_pause(&mut self) -> Result<()> {
        match self.wanted {
            RunState::Running => self.resume(),
            RunState::Paused => {
                self.expect("keep the paused guest", &[Stage::Paused])?;
                Ok(disk::take(self.shared.devices.disks())?)
            }
        }
    }

    fn run(&mut self, what: &'static str) -> Result<()> {
        if let Some(exit) = self.shared.board.exit() {
            return Err(Error::WrongState { what, why: exit.to_string() });
        }
        let how = match self.stage {
            _ if self.has_come => Resume::Moved,
            Stage::Ready => Resume::First,
            _ => Resume::Again,
        };
        // The disks must belong to this VM first. See `disk::lease` for the order.
        disk::take(self.shared.devices.disks())?;
        if let Err(error) = self.shared.devices.bus().resumed(how) {
            if how == Resume::Moved && self.stage == Stage::Ready {
                // The guest returns to the source, which needs the disks.
                disk::give_up(self.shared.devices.disks())?;
            }
            return Err(error);
        }
        self.shared.board.run_all();
        self.keeper.iter().for_each(|keeper| keeper.set_running(true));
        self.vcpus.iter().for_each(|vcpu| vcpu.send(Command::Run));
        (self.stage, self.has_come) = (Stage::Running, false);
        Ok(())
    }

    /// Pauses the vCPUs. After this call has returned, no vCPU runs, and no access to a device is
    /// half done. Does nothing if the vCPUs are already paused.
    ///
    /// # Errors
    /// Returns [`Error::Unresponsive`] if a vCPU does not stop within 10 seconds, for example
    /// because it sleeps on a missing page and the host's kernel does not permit an interruption.
    /// Returns [`Error::WrongState`] if there is no guest.
    pub fn pause(&mut self) -> Result<()> {
        self.expect("pause the guest", &[Stage::Running, Stage::Paused])?;
        // The VM counts as paused even if a vCPU does not respond: the others have stopped, and
        // `resume` lets them run.
        self.stage = Stage::Paused;
        self.keeper.iter().for_each(|keeper| keeper.set_running(false));
        Ok(self.shared.board.pause_all(PATIENCE)?)
    }

    /// Ends the guest and waits for its threads. Further calls do nothing.
    pub fn stop(&mut self) {
        self.stage = Stage::Stopped;
        self.keeper = None;
        self.shared.board.record_exit(Exit::Stopped);
        // This must come before threads that sleep on missing pages are woken with other content.
        disk::abandon(self.shared.devices.disks());
        // For the same reason no frame may be sent from such a page.
        self.shared.devices.nets().iter().for_each(VmNet::halt);
        let board = &self.shared.board;
        let stopped = |within| board.pause_all(within).is_ok();
        let sleeps = !self.shared.paging.stop_or_sleep(LAST_PATIENCE, stopped);
        // No thread runs the guest any more. A thread that sleeps on a missing page sees the kick
        // before it could run the guest.
        self.shared.paging.end();
        if sleeps {
            // A vCPU that does not stop in this time is waited for below.
            let _ = self.shared.board.pause_all(PATIENCE);
        }
        self.vcpus.iter_mut().for_each(Vcpu::join);
        match self.shared.devices.bus().quiesce() {
            // A disk whose requests continue is not for other VMs. Its lock ends with this process.
            Err(error) => tracing::warn!(%error, "a device is still busy after the end of its guest"),
            Ok(()) => {
                if let Err(error) = disk::give_up(self.shared.devices.disks()) {
                    tracing::warn!(%error, "a disk stays locked until this process ends");
                }
            }
        }
    }

    /// Returns a handle of this VM for other threads.
    #[must_use]
    pub fn handle(&self) -> VmHandle {
        VmHandle::new(Arc::clone(&self.shared))
    }

    /// Returns the guest's memory.
    #[must_use]
    pub fn ram(&self) -> &Arc<GuestRam> {
        self.shared.machine.ram()
    }

    /// Returns the number of vCPUs.
    #[must_use]
    pub fn cpus(&self) -> u32 {
        u32::try_from(self.vcpus.len()).unwrap_or(u32::MAX)
    }

    /// Returns the frequency of the guest's time stamp counters, in kHz. A guest that cannot
    /// determine it otherwise needs it on its command line.
    #[must_use]
    pub fn tsc_khz(&self) -> u32 {
        self.tsc_khz
    }

    /// Returns a sentence for each property that the host refused and that the VM does without.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the dirty rings of the vCPUs, if the VM was created with them.
    #[must_use]
    pub fn rings(&self) -> Option<&DirtyRings> {
        self.shared.rings.as_ref()
    }

    /// Sets the harvest policy of the dirty rings for trackers that are created after this call.
    /// The policy of a new VM is [`Predict`].
    pub fn set_reaper(&mut self, policy: Arc<dyn ReaperPolicy>) {
        self.reaper = policy;
    }

    /// Throttles the vCPUs: each vCPU does not run for its share of the time, from 0 to 1, in
    /// slices of at most 10 ms. If there are more vCPUs than shares, the last share applies to the
    /// rest. Shares of 0 end the throttling.
    ///
    /// # Errors
    /// Returns an error if the host cannot create the throttle's thread.
    pub fn set_throttle(&mut self, shares: &[f64]) -> Result<()> {
        self.throttle.set(shares).map_err(|source| Error::Thread { cpu: 0, source })
    }

    /// Returns the time for which each vCPU was stopped by the throttle since the VM was created.
    #[must_use]
    pub fn throttled(&self) -> Vec<Duration> {
        self.throttle.totals()
    }

    /// Returns the time for which each vCPU has waited for a processor of the host.
    #[must_use]
    pub fn run_delays(&self) -> Vec<Duration> {
        self.shared.paging.threads().run_delays()
    }

    pub(crate) fn devices(&self) -> &Devices {
        &self.shared.devices
    }

    pub(crate) fn reaper(&self) -> &Arc<dyn ReaperPolicy> {
        &self.reaper
    }

    pub(crate) fn machine(&self) -> &Arc<Machine> {
        &self.shared.machine
    }

    pub(crate) fn paging(&self) -> &PagingSlot {
        &self.shared.paging
    }

    /// Returns the processor that the guest was shown.
    pub(crate) fn model(&self) -> &CpuModel {
        &self.model
    }

    /// Returns an error unless this VM waits for a guest and has none.
    pub(crate) fn expect_empty(&self, what: &'static str) -> Result<()> {
        if !self.incoming {
            let why = "the VM was not created to receive a guest".to_owned();
            return Err(Error::WrongState { what, why });
        }
        self.expect(what, &[Stage::Empty])
    }

    fn expect(&self, what: &'static str, stages: &[Stage]) -> Result<()> {
        if stages.contains(&self.stage) {
            return Ok(());
        }
        Err(Error::WrongState { what, why: self.stage.words().to_owned() })
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.stop();
    }
}
