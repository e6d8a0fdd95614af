//! The thread of a vCPU.

use super::exit::{Exit, VcpuFault};
use super::{Board, Throttle};
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

/// What a vCPU thread can be asked. Answers go to the sender; a thread whose vCPU runs answers when it is paused.
#[derive(Debug)]
pub(crate) enum Command {
    /// Run the guest until kicked.
    Run,
    /// Set the registers that a kernel is entered with.
    Boot(BootState, Sender<Result<()>>),
    /// Read all state.
    Save(Sender<std::result::Result<VcpuState, StateError>>),
    /// Set what CPUID says, if that is to change, then all state.
    Load(Box<(VcpuState, Option<CpuId>)>, Sender<std::result::Result<(), StateError>>),
    /// End the thread.
    Quit,
}

/// What every vCPU thread needs.
#[derive(Debug)]
pub(crate) struct VcpuContext {
    pub(crate) board: Arc<Board>,
    pub(crate) devices: Arc<Devices>,
    pub(crate) throttle: Arc<Throttle>,
    /// Where each says which thread it is.
    pub(crate) threads: Arc<VcpuThreads>,
}

/// A vCPU's thread, from outside. Dropping it ends the thread, once it is paused.
#[derive(Debug)]
pub(crate) struct Vcpu {
    cpu: u32,
    commands: Sender<Command>,
    thread: Option<JoinHandle<()>>,
}

impl Vcpu {
    /// Starts the thread of `vcpu`, number `cpu`, paused.
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

    /// Sends `command`. A thread that is gone takes nothing, which [`Vcpu::ask`] and the board notice.
    pub(crate) fn send(&self, command: Command) {
        let _ = self.commands.send(command);
    }

    /// Sends the command that `make` makes of an answer's sender.
    pub(crate) fn ask<T>(&self, what: &'static str, make: impl FnOnce(Sender<T>) -> Command) -> Answer<T> {
        let (sender, receiver) = channel();
        self.send(make(sender));
        Answer { cpu: self.cpu, what, receiver }
    }

    /// Ends the thread, which must be paused, and waits for it.
    pub(crate) fn join(&mut self) {
        self.send(Command::Quit);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed when it happened, and the board says that the vCPU is gone.
            let _ = thread.join();
        }
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        self.join();
    }
}

/// An answer that a vCPU thread will give.
#[derive(Debug)]
#[must_use]
pub(crate) struct Answer<T> {
    cpu: u32,
    what: &'static str,
    receiver: Receiver<T>,
}

impl<T> Answer<T> {
    /// Waits for it.
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

/// What one `KVM_RUN` led to.
enum Step {
    /// Call it again.
    Again,
    /// Somebody asked for a pause.
    Kicked,
    /// The guest is over.
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
                    // Tells a guest with a paravirtual clock that it stood still, so that its watchdogs do not bark when it goes on. To
                    // a guest that has none, or did not run yet, it cannot be told.
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

    /// Runs the guest until somebody kicks it (`None`) or it is over.
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

    /// Has KVM complete the access by which the guest has ended, without running it on: whoever starts it anew loads state, which
    /// nothing must change afterwards.
    fn complete(&mut self, exit: &Exit) {
        if matches!(exit, Exit::Reset | Exit::SwitchedOff | Exit::PoweredOff(_)) {
            // It returns at once, with the error that says so; the board takes the request back.
            self.runner.request_completion();
            let _ = self.vcpu.run();
        }
    }

    fn step(&mut self) -> Step {
        let devices = &self.context.devices;
        // What a device left of an earlier exit, a portion at a time. Whoever asks for a pause is not kept waiting; the exit itself is
        // then completed by entering KVM once more, below.
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
            // No interrupt controller of ours is outside the kernel.
            VcpuExit::Intr | VcpuExit::IoapicEoi(_) | VcpuExit::IrqWindowOpen => {
                return Step::Again;
            }
            VcpuExit::Shutdown => {
                return Step::End(Exit::TripleFault(self.fault("triple fault".to_owned())));
            }
            VcpuExit::Hlt => "it halted outside the kernel's interrupt controller".to_owned(),
            VcpuExit::FailEntry(reason, host) => {
                format!("the processor refused to enter the guest, reason {reason:#x}, on host CPU {host}")
            }
            VcpuExit::InternalError => self.internal_error(),
            VcpuExit::MemoryFault { gpa, .. } => {
                format!("KVM cannot reach guest memory at {gpa:#x}; is the host out of memory?")
            }
            VcpuExit::Unsupported(EXIT_RING_FULL) => match self.ring.as_ref().map(RingVcpu::on_full) {
                Some(Ok(())) => return Step::Again,
                Some(Err(error)) => format!("its dirty ring is full and cannot be emptied: {error}"),
                None => "its dirty ring is full, and it was given none".to_owned(),
            },
            VcpuExit::Unsupported(reason) => format!("KVM exit {reason}, which is not expected"),
            other => format!("KVM exit {other:?}, which is not expected"),
        };
        Step::End(Exit::Failed(self.fault(what)))
    }

    /// `KVM_RUN` returned an error.
    fn interrupted(&self, error: kvm_ioctls::Error) -> Step {
        match error.errno() {
            libc::EINTR if self.runner.pause_requested() => Step::Kicked,
            // Somebody else's signal; or a vCPU that waited to be started and was.
            libc::EINTR | libc::EAGAIN => Step::Again,
            libc::EFAULT => Step::End(Exit::Failed(
                self.fault("KVM cannot reach guest memory; is the host out of memory?".to_owned()),
            )),
            _ => Step::End(Exit::Failed(self.fault(format!("KVM_RUN: {error}")))),
        }
    }

    fn fault(&self, what: String) -> VcpuFault {
        VcpuFault { cpu: self.cpu, what, rip: self.vcpu.get_regs().ok().map(|regs| regs.rip) }
    }

    /// Says what KVM could not do: virt/kvm/api.rst, `KVM_EXIT_INTERNAL_ERROR`.
    fn internal_error(&mut self) -> String {
        // SAFETY: the exit reason says that this member of the union is the valid one; it is plain numbers.
        let internal = unsafe { self.vcpu.get_kvm_run().__bindgen_anon_1.internal };
        match internal.suberror {
            1 => "KVM cannot emulate an instruction of the guest".to_owned(),
            2 => "exceptions came at the same time in a way that KVM cannot deliver".to_owned(),
            3 => "KVM could not deliver an event to the guest".to_owned(),
            other => format!("internal error {other} of KVM"),
        }
    }
}
