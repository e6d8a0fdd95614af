//! Bringing a vCPU out of the guest, with `immediate_exit` and a signal.

use crate::error::{Error, Result};
use kvm_bindings::kvm_run;
use kvm_ioctls::VcpuFd;
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Once;
use std::sync::atomic::{AtomicU8, Ordering};

/// Second mapping of a vCPU's `kvm_run` page, of which only `immediate_exit` is used.
///
/// kvm-ioctls creates a `&mut kvm_run` from its own mapping. A store from another thread into that
/// mapping would be a data race for the compiler. This mapping is the same memory at another
/// address, and only an atomic byte is ever created from it. The mapping lives as long as the
/// value, even if the vCPU no longer exists.
#[derive(Debug)]
pub(crate) struct KickPage {
    start: NonNull<u8>,
}

const LEN: usize = 4096;
const IMMEDIATE_EXIT: usize = std::mem::offset_of!(kvm_run, immediate_exit);
const _: () = assert!(IMMEDIATE_EXIT < LEN);

// SAFETY: the page is used through an atomic only.
unsafe impl Send for KickPage {}
// SAFETY: the page is used through an atomic only.
unsafe impl Sync for KickPage {}

impl KickPage {
    /// Maps the page of `vcpu`.
    pub(crate) fn new(vcpu: &VcpuFd) -> Result<Self> {
        let failed =
            |source: io::Error| Error::Ioctl { what: "mapping a vCPU's kvm_run page".to_owned(), source };
        // SAFETY: the descriptor is open for as long as `vcpu` is borrowed.
        let fd = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses. Nothing else refers to it.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), LEN, access, MapFlags::SHARED, fd, 0) };
        let start = start.map_err(|e| failed(e.into()))?;
        let start =
            NonNull::new(start.cast()).ok_or_else(|| failed(io::ErrorKind::AddrNotAvailable.into()))?;
        Ok(Self { start })
    }

    /// Creates a separate page that belongs to no vCPU.
    #[cfg(test)]
    pub(crate) fn detached() -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: new anonymous memory, to which nothing else refers.
        let start =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), LEN, access, MapFlags::PRIVATE)? };
        Ok(Self { start: NonNull::new(start.cast()).ok_or(io::ErrorKind::AddrNotAvailable)? })
    }

    fn flag(&self) -> &AtomicU8 {
        // SAFETY: the byte is inside the mapping, which lives as long as `self`. This process
        // accesses the byte only here, the kernel reads it, and a byte is always aligned.
        unsafe { AtomicU8::from_ptr(self.start.as_ptr().add(IMMEDIATE_EXIT)) }
    }

    /// Makes `KVM_RUN` return at once, until [`clear`](Self::clear) is called.
    pub(crate) fn request(&self) {
        self.flag().store(1, Ordering::SeqCst);
    }

    /// Lets `KVM_RUN` run the guest.
    pub(crate) fn clear(&self) {
        self.flag().store(0, Ordering::SeqCst);
    }

    /// Returns whether a request is set.
    pub(crate) fn requested(&self) -> bool {
        self.flag().load(Ordering::SeqCst) != 0
    }
}

impl Drop for KickPage {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no reference outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), LEN) };
    }
}

/// Returns the signal that interrupts `KVM_RUN`: the first real-time signal, which no library
/// reserves.
fn signal() -> libc::c_int {
    libc::SIGRTMIN()
}

extern "C" fn ignore(_: libc::c_int) {}

/// Installs a handler that does nothing, once in the process. It is not enough to ignore the
/// signal, because an ignored signal does not interrupt system calls.
pub(crate) fn install_handler() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: zeros are a valid sigaction: no flags (so without SA_RESTART: system calls return
        // EINTR), empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        let handler: extern "C" fn(libc::c_int) = ignore;
        action.sa_sigaction = handler as libc::sighandler_t;
        // SAFETY: the action is complete and its handler accesses nothing, so it is safe at any
        // moment.
        let failed = unsafe { libc::sigaction(signal(), &raw const action, std::ptr::null_mut()) };
        debug_assert_eq!(failed, 0, "SIGRTMIN is a signal that may be handled");
    });
}

/// Unblocks the signal for the calling thread, whatever mask the thread inherited.
pub(crate) fn unblock_for_this_thread() {
    // SAFETY: sigemptyset initializes the set before it is used. Masks of other threads do not
    // change.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, signal());
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
    }
}

/// Returns the id of the calling thread, for [`interrupt`].
pub(crate) fn this_thread() -> rustix::thread::Pid {
    rustix::thread::gettid()
}

/// Sends the signal to `thread` of this process, which must not have ended.
pub(crate) fn interrupt(thread: rustix::thread::Pid) {
    let process = rustix::process::getpid();
    // SAFETY: tgkill takes numbers. The handler does nothing, so the signal harms no thread.
    unsafe {
        libc::syscall(
            libc::SYS_tgkill,
            process.as_raw_nonzero().get(),
            thread.as_raw_nonzero().get(),
            signal(),
        );
    }
}
