//! Thread of a vCPU.

use super::exit::{Exit, VcpuFault};
use super::{Throttle, VcpuBoard};
use crate::boot::BootState;
use crate::devices::{Devices, Request};
use crate::error::{Error, Result};
use crate::state::StateError;
use kvm_bindings::CpuId;
use kvm_ioctls::{VcpuExit, VcpuFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use vmferry_dirty::RingVcpu;
use vmferry_fault::VcpuThreads;
use vmferry_kvm::{VcpuRunner, VcpuSaver, VcpuState};
use vmferry_sys::ring::EXIT_RING_FULL;

/// Request to a vCPU thread. Results go to the sender. A thread whose vCPU runs responds when it is
/// paused.
#[derive(Debug)]
pub(crate) enum Command {
    /// Run the guest until the thread is kicked.
    Run,
    /// Set the registers with which a kernel is entered.
    Boot(BootState, Sender<Result<()>>),
    /// Read the whole state.
    Save(Sender<std::result::Result<VcpuState, StateError>>),
    /// Set the CPUID table, if it is given, and then the whole state.
    Load(Box<(VcpuState, Option<CpuId>)>, Sender<std::result::Result<(), StateError>>),
    /// End the thread.
    Quit,
}

/// Context that all vCPU threads share.
#[derive(Debug)]
pub(crate) struct VcpuContext {
    pub(crate) board: Arc<VcpuBoard>,
    pub(crate) devices: Arc<Devices>,
    pub(crate) throttle: Arc<Throttle>,
    /// Registry of the threads that run vCPUs.
    pub(crate) threads: Arc<VcpuThreads>,
}

/// Handle of a vCPU's thread. Dropping it ends the thread, once the thread is paused.
#[derive(Debug)]
pub(crate) struct Vcpu {
    cpu: u32,
    commands: Sender<Command>,
    thread: Option<JoinHandle<()>>,
}

impl Vcpu {
    /// Starts the thread of `vcpu`, number `cpu`, in the paused state.
    pub(crate) fn spawn(
        cpu: u32,
        (vcpu, ring): (VcpuFd, Option<RingVcpu>),
        saver: VcpuSaver,
        context: Arc<VcpuContext>,
    ) -> Result<Self> {
        let (commands, inbox) = channel();
        let live = move || {
            let runner = context.board.enter(cpu as usize);
            let threads = Arc::clone(&context.threads);
            let _registered = threads.register(cpu);
            Worker { cpu, vcpu, ring, runner, saver, context, inbox }.live();
        };
        let thread = vmferry_thread::spawn(vmferry_thread::Role::Vcpu, format!("vcpu {cpu}"), live);
        let thread = thread.map_err(|source| Error::Thread { cpu, source })?;
        Ok(Self { cpu, commands, thread: Some(thread) })
    }

    /// Sends `command`. If the thread is gone, the command is lost, which [`Vcpu::call`] and the
    /// board notice.
    pub(crate) fn send(&self, command: Command) {
        let _ = self.commands.send(command);
    }

    /// Sends the command that `make` creates with a sender for the result.
    pub(crate) fn call<T>(&self, what: &'static str, make: impl FnOnce(Sender<T>) -> Command) -> Answer<T> {
        let (sender, receiver) = channel();
        self.send(make(sender));
        Answer { cpu: self.cpu, what, receiver }
    }

    /// Ends the thread, which must be paused, and waits for it.
    pub(crate) fn join(&mut self) {
        self.send(Command::Quit);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed when it happened, and the board shows that the vCPU
            // is gone.
            let _ = thread.join();
        }
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        self.join();
    }
}

/// Pending result of a vCPU thread.
#[derive(Debug)]
#[must_use]
pub(crate) struct Answer<T> {
    cpu: u32,
    what: &'static str,
    receiver: Receiver<T>,
}

impl<T> Answer<T> {
    /// Waits for the result.
    pub(crate) fn wait(self) -> Result<T> {
        let Self { cpu, what, receiver } = self;
        receiver.recv_timeout(super::PATIENCE).map_err(|error| match error {
            RecvTimeoutError::Timeout => Error::Unresponsive { cpu, what },
            RecvTimeoutError::Disconnected => {
                Error::WrongState { what, why: format!("vCPU {cpu} has ended") }
            }
        })
    }
}

/// Result of one `KVM_RUN`.
enum Step {
    /// Call `KVM_RUN` again.
    Again,
    /// A pause was requested.
    Kicked,
    /// The guest has ended.
    End(Exit),
}

struct Worker {
    cpu: u32,
    vcpu: VcpuFd,
    ring: Option<RingVcpu>,
    runner: VcpuRunner<Exit>,
    saver: VcpuSaver,
    context: Arc<VcpuContext>,
    inbox: Receiver<Command>,
}

impl Worker {
    fn live(mut self) {
        while let Ok(command) = self.inbox.recv() {
            match command {
                Command::Run if !self.runner.may_run() => {}
                Command::Run => {
                    // Tells a guest with a paravirtual clock that it was paused, so that its
                    // watchdogs do not report a lockup when it continues. A guest without such a
                    // clock, or one that has not run yet, cannot be told.
                    let _ = self.vcpu.kvmclock_ctrl();
                    match self.run() {
                        Some(exit) => {
                            self.complete(&exit);
                            self.runner.ended(exit);
                        }
                        None => self.runner.paused(),
                    }
                }
                Command::Boot(boot, answer) => {
                    let _ = answer.send(self.boot(&boot));
                }
                Command::Save(answer) => {
                    let _ = answer.send(self.save());
                }
                Command::Load(load, answer) => {
                    let (saved, table) = *load;
                    let _ = answer.send(self.load(&saved, table.as_ref()));
                }
                Command::Quit => break,
            }
        }
    }

    fn save(&self) -> std::result::Result<VcpuState, StateError> {
        self.saver.save(self.cpu, &self.vcpu)
    }

    fn load(&mut self, saved: &VcpuState, table: Option<&CpuId>) -> std::result::Result<(), StateError> {
        self.saver.load(self.cpu, &self.vcpu, saved, table)
    }

    fn boot(&self, boot: &BootState) -> Result<()> {
        let mut sregs = self.vcpu.get_sregs().map_err(|e| Error::kvm("KVM_GET_SREGS", e))?;
        (boot.sregs)(&mut sregs);
        self.vcpu.set_sregs(&sregs).map_err(|e| Error::kvm("KVM_SET_SREGS", e))?;
        self.vcpu.set_regs(&boot.regs).map_err(|e| Error::kvm("KVM_SET_REGS", e))
    }

    /// Runs the guest until the thread is kicked (`None`) or the guest has ended.
    fn run(&mut self) -> Option<Exit> {
        let mut held = None;
        loop {
            let step = self.step();
            if matches!(step, Step::Again) {
                self.context.throttle.pass(&self.runner, &mut held);
            }
            match step {
                Step::Again => {}
                Step::Kicked => return None,
                Step::End(exit) => return Some(exit),
            }
        }
    }

    /// Has KVM complete the access by which the guest has ended, without running the guest further.
    /// A restart loads state, which nothing may change afterwards.
    fn complete(&mut self, exit: &Exit) {
        if matches!(exit, Exit::Reset | Exit::SwitchedOff | Exit::PoweredOff(_)) {
            // `KVM_RUN` returns at once with an error. The board takes the request back.
            self.runner.request_completion();
            let _ = self.vcpu.run();
        }
    }

    fn step(&mut self) -> Step {
        let devices = &self.context.devices;
        // Does work that a device left over from an earlier exit, one portion at a time. A
        // requested pause is not delayed. The exit itself is completed below, by entering KVM once
        // more.
        while devices.bus().due() && !self.runner.pause_requested() && devices.bus().work() {}
        let exit = match self.vcpu.run() {
            Ok(exit) => exit,
            Err(error) => return self.interrupted(error),
        };
        if let Some(ring) = &self.ring {
            ring.on_exit();
        }
        let what = match exit {
            VcpuExit::IoOut(port, data) => {
                return match devices.write_port(port, data) {
                    None => Step::Again,
                    Some(Request::Exit(code)) => Step::End(Exit::PoweredOff(code)),
                    Some(Request::Reset) => Step::End(Exit::Reset),
                    Some(Request::Off) => Step::End(Exit::SwitchedOff),
                };
            }
            VcpuExit::IoIn(port, data) => {
                devices.read_port(port, data);
                return Step::Again;
            }
            VcpuExit::MmioRead(gpa, data) => {
                devices.bus().read(gpa, data);
                return Step::Again;
            }
            VcpuExit::MmioWrite(gpa, data) => {
                devices.bus().write(gpa, data);
                return Step::Again;
            }
            // All interrupt controllers are in the kernel.
            VcpuExit::Intr | VcpuExit::IoapicEoi(_) | VcpuExit::IrqWindowOpen => {
                return Step::Again;
            }
            VcpuExit::Shutdown => {
                return Step::End(Exit::TripleFault(self.fault("triple fault".to_owned())));
            }
            VcpuExit::Hlt => "the vCPU halted outside the kernel's interrupt controller".to_owned(),
            VcpuExit::FailEntry(reason, host) => {
                format!("the processor refused to enter the guest, reason {reason:#x}, on host CPU {host}")
            }
            VcpuExit::InternalError => self.internal_error(),
            VcpuExit::MemoryFault { gpa, .. } => {
                format!("KVM cannot reach guest memory at {gpa:#x}; the host may be out of memory")
            }
            VcpuExit::Unsupported(EXIT_RING_FULL) => match self.ring.as_ref().map(RingVcpu::on_full) {
                Some(Ok(())) => return Step::Again,
                Some(Err(error)) => format!("the dirty ring is full and cannot be emptied: {error}"),
                None => "KVM reported a full dirty ring for a vCPU without a ring".to_owned(),
            },
            VcpuExit::Unsupported(reason) => format!("unexpected KVM exit {reason}"),
            other => format!("unexpected KVM exit {other:?}"),
        };
        Step::End(Exit::Failed(self.fault(what)))
    }

    /// Handles an error of `KVM_RUN`.
    fn interrupted(&self, error: kvm_ioctls::Error) -> Step {
        match error.errno() {
            libc::EINTR if self.runner.pause_requested() => Step::Kicked,
            // A signal for another purpose, or a vCPU that waited for its start and was started.
            libc::EINTR | libc::EAGAIN => Step::Again,
            libc::EFAULT => Step::End(Exit::Failed(
                self.fault("KVM cannot reach guest memory; the host may be out of memory".to_owned()),
            )),
            _ => Step::End(Exit::Failed(self.fault(format!("KVM_RUN: {error}")))),
        }
    }

    fn fault(&self, what: String) -> VcpuFault {
        VcpuFault { cpu: self.cpu, what, rip: self.vcpu.get_regs().ok().map(|regs| regs.rip) }
    }

    /// Describes what KVM could not do: virt/kvm/api.rst, `KVM_EXIT_INTERNAL_ERROR`.
    fn internal_error(&mut self) -> String {
        // SAFETY: the exit reason says that this member of the union is valid; it is plain numbers.
        let internal = unsafe { self.vcpu.get_kvm_run().__bindgen_anon_1.internal };
        match internal.suberror {
            1 => "KVM cannot emulate an instruction of the guest".to_owned(),
            2 => "KVM cannot deliver exceptions that happened at the same time".to_owned(),
            3 => "KVM could not deliver an event to the guest".to_owned(),
            other => format!("internal error {other} of KVM"),
        }
    }
}
