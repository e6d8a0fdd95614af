//! Guest in KVM: the VM, its vCPUs, and their threads.

use crate::error::{Error, Result};
use crate::{
    CpuChoice, CpuModel, GuestState, KvmChips, KvmVm, NotPaused, Sections, Throttle, VcpuPark, VcpuRunner,
    VcpuSaver, VcpuState, VmState,
};
use kvm_bindings::CpuId;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use std::fmt;
use std::io;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmferry_core::{
    DemandPaging, DirtyTracker, GuestMemory, MachineConfig, RegionId, RunState, Section, TrackerKind, VmError,
};
use vmferry_dirty::{DirtyRings, Marks, RingTracker, RingVcpu};
use vmferry_sys::ring::{EXIT_RING_FULL, RingEntries};
use vmferry_thread::VcpuThreads;

/// Reason why a guest has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestExit<E> {
    /// The exit handler of a vCPU ended the guest.
    Handler(E),
    /// A vCPU cannot continue.
    Failed {
        /// Number of the vCPU.
        cpu: u32,
        /// Error of KVM or of the exit handler.
        why: String,
    },
}

impl<E: fmt::Display> fmt::Display for GuestExit<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Handler(exit) => exit.fmt(f),
            Self::Failed { cpu, why } => write!(f, "vCPU {cpu} cannot continue: {why}"),
        }
    }
}

/// Options of a [`Guest`]. The defaults are one vCPU with all features of the host, a VM that boots
/// its guest, and KVM's dirty log.
#[derive(Debug, Clone)]
#[must_use]
pub struct GuestOptions {
    vcpus: u32,
    cpu: CpuChoice,
    incoming: bool,
    rings: Option<RingEntries>,
}

impl Default for GuestOptions {
    fn default() -> Self {
        Self { vcpus: 1, cpu: CpuChoice::Host, incoming: false, rings: None }
    }
}

impl GuestOptions {
    /// Returns the default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the number of vCPUs, at least 1. The vCPUs have the numbers 0 to `vcpus` - 1.
    pub fn vcpus(mut self, vcpus: u32) -> Self {
        self.vcpus = vcpus;
        self
    }

    /// Sets the processor that the guest is shown. A VM that waits for a guest accepts the guest
    /// only if this processor has all of the guest's features.
    pub fn cpu(mut self, cpu: CpuChoice) -> Self {
        self.cpu = cpu;
        self
    }

    /// Sets whether the VM waits for a guest from another VM, instead of booting a guest. Such a VM
    /// also accepts guests that an earlier version showed a feature which this version hides.
    pub fn incoming(mut self, incoming: bool) -> Self {
        self.incoming = incoming;
        self
    }

    /// Gives each vCPU a dirty ring of `entries` entries. The VM then has no dirty log.
    pub fn dirty_rings(mut self, entries: RingEntries) -> Self {
        self.rings = Some(entries);
        self
    }
}

/// Guest in KVM: the VM, its vCPUs, and their threads.
///
/// The type has a method for almost every method of [`SourceVm`](vmferry_core::SourceVm) and
/// [`TargetVm`](vmferry_core::TargetVm). A VMM that already has its own vCPU threads uses the
/// [parts](crate#parts-for-a-vmm-with-its-own-vcpu-threads) instead.
///
/// | moment | call |
/// |---|---|
/// | the VMM creates a VM | create the `VmFd` with its interrupt controllers, then call [`new`](Self::new) |
/// | a guest boots | load its kernel, set the registers of [`vcpu`](Self::vcpu), call [`spawn`](Self::spawn) and [`run`](Self::run) |
/// | a guest arrives | call [`spawn`](Self::spawn); the engine calls [`load`](Self::load) and [`start`](Self::start) |
/// | a guest leaves | the engine calls [`tracker`](Self::tracker), [`pause`](Self::pause), [`save`](Self::save), [`run`](Self::run) |
///
/// `E` is the type of the value with which an exit handler ends the guest.
///
/// Dropping the guest ends the threads of its vCPUs, even if a vCPU waits for a page that never
/// arrives ([`demand_paging`](Self::demand_paging)). A device thread that waits for such a page
/// then wakes and reads zeros. Therefore device threads must check
/// [`Working::has_ended`](vmferry_thread::Working::has_ended) before they act on what they have
/// read.
///
/// ```no_run
/// use kvm_ioctls::{Kvm, VcpuExit};
/// use std::ops::ControlFlow;
/// use std::sync::Arc;
/// use vmferry_core::GuestMemory;
/// use vmferry_kvm::{Guest, GuestOptions};
///
/// fn make(kvm: &Kvm, memory: Arc<dyn GuestMemory>) -> vmferry_kvm::Result<Guest<u8>> {
///     let vm = kvm.create_vm().expect("a VM");
///     vm.create_irq_chip().expect("interrupt controllers");
///     // SAFETY: the VM is new, and no other code creates vCPUs in it.
///     let mut guest = unsafe { Guest::new(kvm, vm, memory, |_| None, &GuestOptions::new()) }?;
///     guest.spawn(|_cpu| {
///         |exit: VcpuExit<'_>| match exit {
///             VcpuExit::IoOut(0xf4, data) => ControlFlow::Break(data[0]),
///             VcpuExit::IoIn(_, data) => {
///                 data.fill(0xff);
///                 ControlFlow::Continue(())
///             }
///             _ => ControlFlow::Continue(()),
///         }
///     })?;
///     Ok(guest)
/// }
/// ```
#[derive(Debug)]
pub struct Guest<E: Clone> {
    vcpus: Vec<Vcpu>,
    park: Arc<VcpuPark<GuestExit<E>>>,
    throttle: Arc<Throttle<GuestExit<E>>>,
    rings: Option<DirtyRings>,
    /// CPUID of the guest or, before a guest has arrived, the CPUID that this host offers.
    cpu: CpuModel,
    chips: KvmChips,
    /// Ids of the vCPU threads, for demand paging.
    ids: Arc<VcpuThreads>,
    /// Demand paging for the memory, after the first call of `demand_paging`.
    paging: Option<Arc<dyn DemandPaging>>,
    threads: Vec<JoinHandle<()>>,
    // Last field, so that the vCPUs are closed before the VM releases its memory.
    vm: Arc<KvmVm>,
}

#[derive(Debug)]
struct Vcpu {
    /// vCPU. Its thread holds the lock while the vCPU runs.
    fd: Arc<Mutex<VcpuFd>>,
    saver: VcpuSaver,
}

impl Vcpu {
    /// Returns the vCPU, whose number is `cpu` and which must be paused.
    fn paused(&self, cpu: u32) -> Result<MutexGuard<'_, VcpuFd>> {
        match self.fd.try_lock() {
            Ok(vcpu) => Ok(vcpu),
            Err(TryLockError::WouldBlock) => Err(Error::Running { cpu }),
            Err(TryLockError::Poisoned(_)) => Err(Error::Panicked { cpu }),
        }
    }

    fn load(&mut self, cpu: u32, state: &VcpuState, cpuid: &CpuId) -> Result<()> {
        let mut saver = self.saver.clone();
        saver.load(cpu, &*self.paused(cpu)?, state, Some(cpuid))?;
        self.saver = saver;
        Ok(())
    }
}

impl<E: Clone + Send + 'static> Guest<E> {
    /// Creates the memory slots for `memory`, and the vCPUs. The vCPUs are paused and have no
    /// threads yet.
    ///
    /// `marks` is called with the number of each region. It returns the [`Marks`] that record the
    /// pages which the VMM itself writes in this region, or `None` if there are no such writes.
    ///
    /// # Errors
    /// Returns an [`Error`] that names the refused request.
    ///
    /// # Panics
    /// Panics if the options have no vCPUs.
    ///
    /// # Safety
    /// `vm` must have no vCPUs, and the caller must not create any. A vCPU that outlives this value
    /// could write to memory that is no longer mapped.
    pub unsafe fn new(
        kvm: &Kvm,
        vm: VmFd,
        memory: Arc<dyn GuestMemory>,
        marks: impl Fn(RegionId) -> Option<Arc<dyn Marks>>,
        options: &GuestOptions,
    ) -> Result<Self> {
        assert!(options.vcpus > 0, "a guest has at least one vCPU");
        let chips = KvmChips::of(&vm)?;
        // SAFETY: the vCPUs of this value are the only ones (guaranteed by the caller). This value
        // ends their threads and closes them before it releases the VM.
        let vm = Arc::new(unsafe { KvmVm::new(vm, memory, marks, options.rings) }?);
        let cpu = CpuModel::new(kvm, options.cpu, options.vcpus, options.incoming)?;
        let mut fds = Vec::new();
        for number in 0..options.vcpus {
            let created = vm.fd().create_vcpu(number.into());
            let vcpu = created.map_err(|e| Error::ioctl(format!("KVM_CREATE_VCPU {number}"), e))?;
            cpu.set_up(number, &vcpu)?;
            fds.push(vcpu);
        }
        let saver = VcpuSaver::probe(kvm, vm.fd(), &fds[0])?;
        let rings = options.rings.map(|_| vm.map_rings(&fds)).transpose()?;
        let park = Arc::new(VcpuPark::new(&fds)?);
        let throttle = Arc::new(Throttle::new(Arc::clone(&park)));
        let vcpu = |fd| Vcpu { fd: Arc::new(Mutex::new(fd)), saver: saver.clone() };
        let vcpus = fds.into_iter().map(vcpu).collect();
        let ids = Arc::new(VcpuThreads::new(options.vcpus));
        Ok(Self { vcpus, park, throttle, rings, cpu, chips, ids, paging: None, threads: Vec::new(), vm })
    }

    /// Starts a thread for each vCPU. The vCPUs stay paused.
    ///
    /// `handler` creates the exit handler of each vCPU. A handler receives every exit except those
    /// that pauses and full dirty rings cause. To end the guest, the handler returns
    /// [`ControlFlow::Break`].
    ///
    /// # Errors
    /// Returns [`Error::Thread`] if the host cannot start a thread. Drop the guest in this case.
    ///
    /// # Panics
    /// Panics if the vCPUs already have threads.
    pub fn spawn<H>(&mut self, mut handler: impl FnMut(u32) -> H) -> Result<()>
    where
        H: FnMut(VcpuExit<'_>) -> ControlFlow<E> + Send + 'static,
    {
        assert!(self.threads.is_empty(), "the vCPUs have threads already");
        for (cpu, vcpu) in (0..).zip(&self.vcpus) {
            let worker = Worker {
                cpu,
                vcpu: Arc::clone(&vcpu.fd),
                ring: self.rings.as_ref().map(|rings| rings.vcpu(cpu as usize)),
                throttle: Arc::clone(&self.throttle),
                handler: handler(cpu),
            };
            let (park, ids) = (Arc::clone(&self.park), Arc::clone(&self.ids));
            let live = move || {
                let _registered = ids.register(cpu);
                worker.live(&park.enter(cpu as usize));
            };
            let thread = vmferry_thread::spawn(vmferry_thread::Role::Vcpu, format!("vcpu {cpu}"), live);
            self.threads.push(thread.map_err(|source| Error::Thread { cpu, source })?);
        }
        Ok(())
    }

    /// Returns the VM.
    #[must_use]
    pub fn vm(&self) -> &Arc<KvmVm> {
        &self.vm
    }

    /// Returns the guest's memory, for [`Migratable::memory`](vmferry_core::Migratable::memory).
    #[must_use]
    pub fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::clone(self.vm.memory())
    }

    /// Returns the CPUID of the guest or, before a guest has arrived, the CPUID that this host
    /// offers.
    #[must_use]
    pub fn cpu(&self) -> &CpuModel {
        &self.cpu
    }

    /// Returns the frequency of this host's time stamp counter in kHz, which a guest that boots on
    /// this host has.
    #[must_use]
    pub fn tsc_khz(&self) -> u32 {
        self.vcpus[0].saver.tsc_khz()
    }

    /// Returns the [`VcpuPark`], which pauses the vCPUs and records the end of the guest.
    #[must_use]
    pub fn park(&self) -> &Arc<VcpuPark<GuestExit<E>>> {
        &self.park
    }

    /// Returns demand paging for the guest's memory, for
    /// [`TargetVm::demand_paging`](vmferry_core::TargetVm::demand_paging). The first call creates
    /// it by calling `make` with the table of the vCPU threads. Later calls return a clone of the
    /// same `Arc`.
    ///
    /// ```text
    /// self.guest.demand_paging(|threads| Ok(Arc::new(self.memory.demand_paging(&UffdOptions::new(threads))?)))
    /// ```
    ///
    /// # Errors
    /// Returns the error of `make`.
    pub fn demand_paging(
        &mut self,
        make: impl FnOnce(Arc<VcpuThreads>) -> Result<Arc<dyn DemandPaging>, VmError>,
    ) -> Result<Arc<dyn DemandPaging>, VmError> {
        let paging = match &self.paging {
            Some(paging) => Arc::clone(paging),
            None => make(Arc::clone(&self.ids))?,
        };
        Ok(Arc::clone(self.paging.insert(paging)))
    }

    /// Returns vCPU `cpu`, so that the caller can set its registers.
    ///
    /// # Errors
    /// Returns [`Error::Running`] if the vCPU is not paused, and [`Error::Panicked`] if its exit
    /// handler has panicked.
    ///
    /// # Panics
    /// Panics if the guest has no such vCPU.
    pub fn vcpu(&self, cpu: u32) -> Result<MutexGuard<'_, VcpuFd>> {
        self.vcpus[cpu as usize].paused(cpu)
    }

    /// Returns the description of this machine, for
    /// [`Migratable::config`](vmferry_core::Migratable::config).
    ///
    /// `kind` names the VMM and its kind of machine. If properties of your devices must be equal on
    /// source and target, add these properties to [`extra`](MachineConfig::extra).
    #[must_use]
    pub fn config(&self, kind: &str) -> MachineConfig {
        let vcpus = u32::try_from(self.vcpus.len()).unwrap_or(u32::MAX);
        let mut machine = MachineConfig::new(kind, vcpus, self.vm.memory().layout());
        machine.extra =
            vec![("cpu".to_owned(), self.cpu.vendor()), ("kvm".to_owned(), self.chips.to_string())];
        machine.features = self.cpu.features();
        machine
    }

    /// Returns a tracker, for [`SourceVm::tracker`](vmferry_core::SourceVm::tracker). The tracker
    /// uses dirty rings if the VM has them, and otherwise KVM's dirty log.
    ///
    /// # Errors
    /// Returns an error if this VM has no tracker of this `kind`.
    pub fn tracker(&self, kind: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError> {
        match (kind, &self.rings) {
            (None | Some(TrackerKind::Ring), Some(rings)) => Ok(Box::new(RingTracker::new(rings))),
            (None | Some(TrackerKind::Log), None) => Ok(Box::new(self.vm.log_tracker()?)),
            (Some(kind), rings) => {
                let usual = if rings.is_some() { TrackerKind::Ring } else { TrackerKind::Log };
                Err(VmError::new(format!("this VM has no tracker `{kind}`; use `{usual}`")))
            }
        }
    }

    /// Throttles the vCPUs, for [`SourceVm::throttle`](vmferry_core::SourceVm::throttle).
    ///
    /// # Errors
    /// Returns an error if the host cannot start the thread of the throttle.
    pub fn throttle(&self, shares: &[f64]) -> io::Result<()> {
        self.throttle.set(shares)
    }

    /// Returns the total time for which [`throttle`](Self::throttle) has stopped each vCPU.
    #[must_use]
    pub fn throttled(&self) -> Vec<Duration> {
        self.throttle.totals()
    }

    /// Returns the total time for which each vCPU has waited for a processor, for
    /// [`SourceVm::run_delays`](vmferry_core::SourceVm::run_delays).
    #[must_use]
    pub fn run_delays(&self) -> Vec<Duration> {
        self.ids.run_delays()
    }

    /// Lets the vCPUs run, for [`SourceVm::resume`](vmferry_core::SourceVm::resume).
    pub fn run(&self) {
        self.park.run_all();
    }

    /// Lets the vCPUs run unless the operator has paused the guest, for
    /// [`TargetVm::start`](vmferry_core::TargetVm::start).
    pub fn start(&self, state: RunState) {
        if state == RunState::Running {
            self.run();
        }
    }

    /// Pauses the vCPUs, for [`SourceVm::pause`](vmferry_core::SourceVm::pause). Waits for at most
    /// `patience`.
    ///
    /// # Errors
    /// Returns [`NotPaused`], which names the first vCPU that still runs. Other vCPUs may still run
    /// as well.
    pub fn pause(&self, patience: Duration) -> Result<(), NotPaused> {
        self.park.pause_all(patience)
    }

    /// Returns all state of the paused guest that is in KVM, for
    /// [`SourceVm::save`](vmferry_core::SourceVm::save). Add the sections of your devices.
    ///
    /// # Errors
    /// Returns [`Error::Running`] if the guest is not paused, [`Error::Ended`] if it has ended,
    /// [`Error::Panicked`] if an exit handler has panicked, and [`Error::State`] if KVM does not
    /// return a part of the state.
    pub fn save(&self) -> Result<Vec<Section>> {
        if self.park.exit().is_some() {
            return Err(Error::Ended);
        }
        let mut vcpus = Vec::with_capacity(self.vcpus.len());
        for (cpu, vcpu) in (0..).zip(&self.vcpus) {
            vcpus.push(vcpu.saver.save(cpu, &*vcpu.paused(cpu)?)?);
        }
        let vm = VmState::save(self.vm.fd(), self.chips)?;
        Ok(GuestState { vcpus, vm, cpu: self.cpu.clone() }.sections()?)
    }

    /// Takes the state that [`save`](Self::save) returned out of `parts`, for [`load`](Self::load).
    /// Before you load anything, also take the sections of your devices, and call
    /// [`Sections::finish`].
    ///
    /// # Errors
    /// Returns [`Error::State`] if a section is missing or damaged. If this host does not offer a
    /// feature of the guest, the error names it.
    pub fn take(&self, parts: &mut Sections<'_>) -> Result<GuestState> {
        let cpus = u32::try_from(self.vcpus.len()).unwrap_or(u32::MAX);
        Ok(GuestState::take(parts, cpus, self.chips, &self.cpu)?)
    }

    /// Loads `state`. Load your devices first, because a pending interrupt of a device is part of
    /// the state of the interrupt controllers.
    ///
    /// # Errors
    /// Returns [`Error::State`] if KVM refuses a part of the state, [`Error::Running`] if a vCPU is
    /// not paused, [`Error::Panicked`] if an exit handler has panicked, and [`Error::CpuidFull`] if
    /// the CPUID has too many entries. Loading can be retried.
    ///
    /// # Panics
    /// Panics if the state and the guest have different numbers of vCPUs.
    pub fn load(&mut self, state: GuestState) -> Result<()> {
        assert_eq!(state.vcpus.len(), self.vcpus.len(), "the state has another number of vCPUs");
        for (cpu, (vcpu, saved)) in (0..).zip(self.vcpus.iter_mut().zip(&state.vcpus)) {
            let cpuid = state.cpu.of_vcpu(cpu)?;
            vcpu.load(cpu, saved, &cpuid)?;
        }
        state.vm.load(self.vm.fd())?;
        self.cpu = state.cpu;
        Ok(())
    }
}

/// Time within which every vCPU stops that does not wait for a page.
const STOPPING: Duration = Duration::from_millis(100);

impl<E: Clone> Drop for Guest<E> {
    fn drop(&mut self) {
        if let Some(paging) = &self.paging {
            // A vCPU that does not stop now waits for a page, or its exit handler still runs. It
            // has been kicked, so it runs no instruction of the guest when it wakes.
            let _ = self.park.pause_all(STOPPING);
            if let Err(error) = paging.end() {
                tracing::error!("a vCPU that waits for a missing page may wait for ever: {error}");
            }
        }
        self.park.quit();
        for thread in self.threads.drain(..) {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}

/// Guard that ends the guest if the exit handler of a vCPU panics, because the other vCPUs must not
/// continue without this one.
struct EndAtPanic<'a, E: Clone> {
    cpu: u32,
    runner: &'a VcpuRunner<GuestExit<E>>,
}

impl<E: Clone> Drop for EndAtPanic<'_, E> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let why = "its exit handler panicked".to_owned();
            self.runner.ended(GuestExit::Failed { cpu: self.cpu, why });
        }
    }
}

/// Thread of a vCPU.
struct Worker<E, H> {
    cpu: u32,
    vcpu: Arc<Mutex<VcpuFd>>,
    ring: Option<RingVcpu>,
    throttle: Arc<Throttle<GuestExit<E>>>,
    handler: H,
}

impl<E, H> Worker<E, H>
where
    E: Clone + Send + 'static,
    H: FnMut(VcpuExit<'_>) -> ControlFlow<E>,
{
    fn live(mut self, runner: &VcpuRunner<GuestExit<E>>) {
        // The guard is dropped after the lock of the vCPU, which a panic poisons.
        let _end = EndAtPanic { cpu: self.cpu, runner };
        while runner.wait_to_run() {
            let vcpu = Arc::clone(&self.vcpu);
            let mut vcpu = vcpu.lock().unwrap_or_else(PoisonError::into_inner);
            // Tells a guest with a paravirtual clock that it was stopped, so that its watchdogs do
            // not fire. KVM refuses the call for a guest without such a clock.
            let _ = vcpu.kvmclock_ctrl();
            let exit = self.run(runner, &mut vcpu);
            if let Some(GuestExit::Handler(_)) = &exit {
                // Completes the access with which the guest has ended, so that the access does not
                // change state that is loaded later. KVM_RUN returns without running the guest.
                runner.request_completion();
                let _ = vcpu.run();
            }
            drop(vcpu);
            match exit {
                None => runner.paused(),
                Some(exit) => runner.ended(exit),
            }
        }
    }

    /// Runs the vCPU until a pause is requested (`None`) or the guest ends.
    fn run(&mut self, runner: &VcpuRunner<GuestExit<E>>, vcpu: &mut VcpuFd) -> Option<GuestExit<E>> {
        let mut held: Option<Instant> = None;
        loop {
            let exit = match vcpu.run() {
                Ok(exit) => exit,
                Err(error) if error.errno() == libc::EINTR && runner.pause_requested() => return None,
                // Another signal arrived, or the vCPU waited for its start by another vCPU and was
                // started.
                Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => continue,
                Err(error) => return Some(self.failed(format!("KVM_RUN failed: {error}"))),
            };
            if let Some(ring) = &self.ring {
                ring.on_exit();
            }
            match (exit, &self.ring) {
                (VcpuExit::Unsupported(EXIT_RING_FULL), Some(ring)) => {
                    if let Err(error) = ring.on_full() {
                        return Some(self.failed(format!("its dirty ring cannot be emptied: {error}")));
                    }
                }
                (exit, _) => {
                    if let ControlFlow::Break(exit) = (self.handler)(exit) {
                        return Some(GuestExit::Handler(exit));
                    }
                }
            }
            self.throttle.pass(runner, &mut held);
        }
    }

    fn failed(&self, why: String) -> GuestExit<E> {
        GuestExit::Failed { cpu: self.cpu, why }
    }
}

#[cfg(test)]
#[path = "guest_tests.rs"]
mod tests;
