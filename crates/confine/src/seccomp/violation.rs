//! Report of a forbidden system call, and its effect.
//!
//! `SECCOMP_RET_KILL_PROCESS` would end the process without a message, and the operator would not
//! learn the cause. Therefore forbidden calls raise SIGSYS (`SECCOMP_RET_TRAP`): the call is not
//! made, and the handler in this module writes one line. The handler uses only async-signal-safe
//! means: a stack buffer and `write`. Then the call fails with EPERM, as if the kernel had refused
//! it. A call that is missing from a list is a bug of vmferry, and must not cost a guest.
//!
//! With [`Mode::Kill`](crate::Mode::Kill), the process ends, so that an attacker has no second
//! attempt. To end it, the handler itself makes a forbidden call. SIGSYS is blocked while its
//! handler runs. For a blocked SIGSYS, the kernel restores the default action and ends the process
//! (Linux `kernel/signal.c`, `force_sig_info_to_task`), which also writes a core dump if the host
//! is configured for it. An attacker cannot disable the handler, because the filters do not permit
//! a change of the action of SIGSYS, and if SIGSYS is ignored or blocked, the kernel ends the
//! process.

use super::names;
use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use vmferry_thread::Role;

/// Maximum length of a thread's name in the kernel, in bytes.
const NAME: usize = 15;

thread_local! {
    // Without a destructor and initialized at compile time, so that a signal handler may read it.
    static SELF: Cell<(&'static str, [u8; NAME])> = const { Cell::new(("setting up", *b"vmferry\0\0\0\0\0\0\0\0")) };
}

/// True if a forbidden call ends the process.
static DEADLY: AtomicBool = AtomicBool::new(false);
/// Number of lines that may still be written, because a thread that repeats a forbidden call must
/// not fill a log.
static LINES: AtomicU32 = AtomicU32::new(64);

/// Stores the role and the name of the calling thread for its reports.
pub(crate) fn set_thread(role: Role, name: &str) {
    let mut short = [0; NAME];
    let len = name.len().min(NAME);
    short[..len].copy_from_slice(&name.as_bytes()[..len]);
    SELF.set((role.name(), short));
}

/// Installs the handler for this process. If `deadly` is true, a forbidden call ends the process.
///
/// # Errors
/// Returns an error if the kernel refuses the handler.
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

/// `siginfo_t` of SIGSYS (sigaction(2)), for which libc has no accessors.
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

/// Code `SYS_SECCOMP` of a SIGSYS that a filter raised. A SIGSYS that a process sent has another
/// code.
const BY_SECCOMP: i32 = 1;
/// Number that no system call has, so that every filter forbids it.
const FORBIDDEN: libc::c_long = 0x7fff;

extern "C" fn said(_: libc::c_int, info: *const SysInfo, context: *mut libc::ucontext_t) {
    // SAFETY: for SA_SIGINFO the kernel passes valid pointers to both, for this handler alone, and
    // they live until it returns.
    let (info, registers) = unsafe { (&*info, &mut (*context).uc_mcontext.gregs) };
    let deadly = DEADLY.load(Ordering::Relaxed) || info.code != BY_SECCOMP;
    if deadly || LINES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    {
        describe(info, registers, deadly).write();
    }
    if deadly {
        // SAFETY: no system call has this number, so the call has no effect but that of the
        // filters.
        unsafe { libc::syscall(FORBIDDEN) };
        // Reached only if a process sent the signal and no filter is in force. SAFETY: `_exit` ends
        // the process and is async-signal-safe.
        unsafe { libc::_exit(128 + libc::SIGSYS) }
    }
    // Result of the call. The call was not made, and the thread continues after it.
    if let Some(result) = usize::try_from(libc::REG_RAX).ok().and_then(|index| registers.get_mut(index)) {
        *result = -i64::from(libc::EPERM);
    }
}

/// Returns the line that reports the call.
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
        ". An attacker may have broken into the process; if not, this is a bug in vmferry: report this line, and confine the process in \
         the mode `log` until the bug is fixed (docs/confinement.md)\n",
    );
    line
}

/// Line under construction, which needs no allocation.
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

    /// Appends `bytes` without zeros. Bytes that are not printable become dots. Excess bytes are
    /// dropped.
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
        // SAFETY: the bytes are initialized and belong to this value. A failure cannot be reported.
        let _ = unsafe { libc::write(libc::STDERR_FILENO, self.bytes.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_bounded_and_printable_for_any_input() {
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
