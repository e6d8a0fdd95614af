//! What a thread says that made a forbidden system call, and what becomes of it.
//!
//! `SECCOMP_RET_KILL_PROCESS` would end the process without a word, and whoever runs the guest could only guess. So forbidden calls raise
//! SIGSYS (`SECCOMP_RET_TRAP`): the call is not made, and the handler here writes one line with what is async-signal-safe (a stack buffer and
//! `write`). Then the call fails with EPERM, as if the kernel had refused it: a call that is missing from a list is a bug of ours, and must not
//! cost a guest.
//!
//! Whoever would rather lose the guest than let somebody try again ([`Mode::Kill`](crate::Mode::Kill)) has the process end: the handler makes
//! a forbidden call itself. SIGSYS is blocked while its handler runs, and for a blocked SIGSYS the kernel puts the default action back
//! and ends the process (Linux `kernel/signal.c`, `force_sig_info_to_task`), which also leaves a core where the host keeps them. Nobody can
//! turn the handler into a way out: filters forbid to change what SIGSYS does, and ignoring or blocking it is what makes it deadly.

use super::names;
use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use vmferry_thread::Role;

/// Bytes of a thread's name that the kernel keeps.
const NAME: usize = 15;

thread_local! {
    // Without a destructor and made at compile time, so that a signal handler may look at it.
    static SELF: Cell<(&'static str, [u8; NAME])> = const { Cell::new(("setting up", *b"vmferry\0\0\0\0\0\0\0\0")) };
}

/// Whether a forbidden call ends the process.
static DEADLY: AtomicBool = AtomicBool::new(false);
/// Lines that are still written: a thread that tries again and again must not fill a log.
static LINES: AtomicU32 = AtomicU32::new(64);

/// Keeps what the calling thread is, for what it may have to say.
pub(crate) fn introduce(role: Role, name: &str) {
    let mut short = [0; NAME];
    let len = name.len().min(NAME);
    short[..len].copy_from_slice(&name.as_bytes()[..len]);
    SELF.set((role.name(), short));
}

/// Installs the handler, once in the process; `deadly` if a forbidden call is to end it.
///
/// # Errors
/// If the kernel refuses.
pub(crate) fn install(deadly: bool) -> io::Result<()> {
    DEADLY.store(deadly, Ordering::Relaxed);
    // SAFETY: zeros are a valid sigaction: an empty mask, no flags.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *const SysInfo, *mut libc::ucontext_t) = said;
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the action is complete, and its handler does only what is async-signal-safe.
    let failed = unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) };
    if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// `siginfo_t` of SIGSYS (sigaction(2)), of which libc gives no view.
#[repr(C)]
struct SysInfo {
    signal: i32,
    errno: i32,
    code: i32,
    _pad: i32,
    call_addr: u64,
    syscall: i32,
    arch: u32,
}

const _: () = assert!(std::mem::offset_of!(SysInfo, syscall) == 24);

/// `SYS_SECCOMP`: not a process that has sent the signal.
const BY_SECCOMP: i32 = 1;
/// No system call has this number, so every filter forbids it.
const FORBIDDEN: libc::c_long = 0x7fff;

extern "C" fn said(_: libc::c_int, info: *const SysInfo, context: *mut libc::ucontext_t) {
    // SAFETY: the kernel gives both to a handler with SA_SIGINFO, for it alone, and they live until it returns.
    let (info, registers) = unsafe { (&*info, &mut (*context).uc_mcontext.gregs) };
    let deadly = DEADLY.load(Ordering::Relaxed) || info.code != BY_SECCOMP;
    if deadly || LINES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    {
        describe(info, registers, deadly).write();
    }
    if deadly {
        // SAFETY: a call with a number that does not exist does nothing but what the filters make of it.
        unsafe { libc::syscall(FORBIDDEN) };
        // Only where somebody sent the signal and no filter is in force.
        // SAFETY: ends the process; async-signal-safe.
        unsafe { libc::_exit(128 + libc::SIGSYS) }
    }
    // What the call returns: it was not made, and the thread goes on behind it.
    if let Some(result) = usize::try_from(libc::REG_RAX).ok().and_then(|index| registers.get_mut(index)) {
        *result = -i64::from(libc::EPERM);
    }
}

/// A line on the call.
fn describe(info: &SysInfo, registers: &[i64], deadly: bool) -> Line {
    let mut line = Line::default();
    let (role, name) = SELF.try_with(Cell::get).unwrap_or(("ending", [0; NAME]));
    line.text("vmferry: thread '");
    line.bytes(&name);
    line.text("' (");
    line.text(role);
    line.text(if info.code == BY_SECCOMP { ") made system call " } else { ") was sent SIGSYS, number " });
    line.number(u64::from(info.syscall.unsigned_abs()), 10);
    line.text(" ");
    line.text(names::name(info.syscall.into()).unwrap_or("?"));
    for register in [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX] {
        line.text(if register == libc::REG_RDI { "(" } else { ", " });
        line.text("0x");
        let index = usize::try_from(register).unwrap_or(0);
        line.number(registers.get(index).map_or(0, |value| value.cast_unsigned()), 16);
    }
    line.text("), which its confinement forbids: ");
    line.text(if deadly { "this process ends" } else { "it fails" });
    line.text(
        ". Somebody may have broken into it; if not, this is a bug in vmferry: please report this line, and use --sandbox log until \
         it is mended (docs/confinement.md)\n",
    );
    line
}

/// A line in the making, without an allocation.
struct Line {
    bytes: [u8; 512],
    len: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self { bytes: [0; 512], len: 0 }
    }
}

impl Line {
    fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    /// Without zeros, and what is not printable as a dot.
    fn bytes(&mut self, bytes: &[u8]) {
        for byte in bytes.iter().filter(|byte| **byte != 0) {
            if let Some(place) = self.bytes.get_mut(self.len) {
                *place = if byte.is_ascii_graphic() || matches!(byte, b' ' | b'\n') { *byte } else { b'.' };
                self.len += 1;
            }
        }
    }

    fn number(&mut self, mut value: u64, base: u64) {
        let mut digits = [0; 20];
        let mut at = digits.len();
        loop {
            at -= 1;
            digits[at] = b"0123456789abcdef"[usize::try_from(value % base).unwrap_or(0)];
            value /= base;
            if value == 0 || at == 0 {
                break;
            }
        }
        self.bytes(&digits[at..]);
    }

    fn write(&self) {
        // SAFETY: the bytes are initialized and ours. Nobody is left to tell if it fails.
        let _ = unsafe { libc::write(libc::STDERR_FILENO, self.bytes.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_text_whatever_goes_into_them_and_never_too_long() {
        let mut line = Line::default();
        line.text("call ");
        line.number(59, 10);
        line.text(" 0x");
        line.number(u64::MAX, 16);
        line.number(0, 10);
        line.bytes(b"a\0b\x1b[");
        assert_eq!(std::str::from_utf8(&line.bytes[..line.len]), Ok("call 59 0xffffffffffffffff0ab.["));
        line.number(u64::MAX, 10);
        assert!(line.bytes[..line.len].ends_with(b"18446744073709551615"));
        for _ in 0..100 {
            line.text("0123456789");
        }
        assert_eq!(line.len, 512);
    }
}
