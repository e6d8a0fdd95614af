//! vCPUs: a thread each, which runs guest code, stops when told, and saves and loads its vCPU's state.
//!
//! # Why a pause is never lost
//! A vCPU that runs has to be brought out of `KVM_RUN`, wherever it is at that moment. The board does two things in
//! this order, holding the board's lock:
//! 1. it stores 1 into `kvm_run.immediate_exit`, through a mapping of its own ([`kick::KickPage`]);
//! 2. it sends the thread a signal whose handler does nothing.
//!
//! The thread may be
//! * *before `KVM_RUN`*, in user space: the signal, whenever it comes, is taken and does nothing; `KVM_RUN` then reads
//!   `immediate_exit`, which was stored before, and returns `EINTR` without running the guest.
//! * *inside `KVM_RUN`, having read 0*: the signal stays pending, because only a return to user space would deliver it;
//!   it takes the vCPU out of the guest, and the kernel looks for pending signals before each entry: `EINTR`.
//! * *after `KVM_RUN`*, handling an exit: as before `KVM_RUN`, once the exit is handled.
//!
//! `immediate_exit` stays 1 until the thread has seen `EINTR` and taken the lock to say that it is paused; so a kick is
//! spent exactly once, and it never outlives the pause that it asked for, because kicks go only to vCPUs in
//! [`board::Phase::Running`]. `EINTR` for another reason (a debugger, a stray signal) finds 0 there and changes nothing.
//!
//! # Why a pause leaves no I/O half done
//! The paused phase is entered from `KVM_RUN` returning `EINTR` with `immediate_exit` set, from nowhere else. The kernel
//! completes the port or memory access of the last exit before it looks at `immediate_exit`, and if that leads to another
//! exit (the second half of an access) it returns that one, which is handled before `KVM_RUN` is called again
//! (virt/kvm/api.rst, 4.10 and 5). So registers that are read after a pause are those after the access.

mod board;
mod kick;
#[cfg(test)]
mod kvm_tests;
mod msrs;
mod run;
mod throttle;
mod transfer;

pub(crate) use board::Board;
pub use board::{Exit, VcpuFault};
pub(crate) use kick::KickPage;
pub(crate) use msrs::{MsrPlan, set_as_firmware};
pub(crate) use run::{Command, Vcpu, VcpuContext};
pub(crate) use throttle::{Nudger, Throttle};
pub(crate) use transfer::{HostTsc, XsaveSize, now_ns};

/// How long a vCPU thread may take for anything it is asked. A vCPU answers within a millisecond; one that waits for
/// memory that does not come (a host that swaps, a hung file system) may take longer.
pub(crate) const PATIENCE: std::time::Duration = std::time::Duration::from_secs(10);
