//! Emulator failures: a machine, or a guest in it, ended in a way that only the emulator can have
//! caused.
//!
//! An emulator failure needs a proof in a log. Without one, the end is a failure of the scenario
//! that was running, and the scenario is not tried again.
//!
//! The proof in an outer kernel's log is an exception or an interrupt inside the world switch.
//! Between `vmrun` and the return of `svm_vcpu_enter_exit`, the global interrupt flag is clear, and
//! the kernel accesses only memory that is always mapped. Therefore no interrupt can arrive and no
//! instruction can fault between these points, unless the emulator delivers an event of the guest,
//! or delivers an event at the wrong time. The first handler then runs with the guest's GS base,
//! faults at its first access to per-CPU data, and faults again in the handler of that fault, until
//! the stack is used up.

use serde::Serialize;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Record of an emulator failure.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Death {
    /// Name of the scenario that was running.
    pub scenario: String,
    /// Line of a log that proves the failure.
    pub proof: String,
    /// Seconds from the start of the machine.
    pub seconds: f64,
    /// File name of the machine's console. The file is in the folder of the summary.
    pub log: String,
}

/// First messages of a kernel that panics because of an exception.
const FATAL: [&str; 5] = ["BUG:", "Oops", "general protection fault", "double fault", "traps: PANIC"];
/// Last message of a kernel that panics.
const PANIC: &str = "Kernel panic";
/// Functions around `vmrun`, as frames of a call trace and as the place of an exception.
const WORLD_SWITCH: [&str; 4] =
    [" svm_vcpu_enter_exit+", " __svm_vcpu_run+", ":svm_vcpu_enter_exit+", ":__svm_vcpu_run+"];
/// Signals that end a program after an error of its own.
const OWN_FAULTS: [i32; 6] = [
    4,  // SIGILL
    5,  // SIGTRAP
    6,  // SIGABRT
    7,  // SIGBUS
    8,  // SIGFPE
    11, // SIGSEGV
];

/// Returns the line of an outer kernel's log that proves that the emulator caused the kernel's
/// panic.
#[must_use]
pub fn in_console(log: &str) -> Option<String> {
    let mut lines = kernel(log).skip_while(|line| !FATAL.iter().any(|word| line.contains(word)));
    let first = lines.next()?;
    let mut lines = lines.skip_while(|line| !in_world_switch(line));
    let frame = lines.next()?;
    lines.any(|line| line.contains(PANIC)).then(|| format!("{}; {}", first.trim(), text(frame)))
}

/// Returns the lines of a console that the agent did not write. The agent quotes error reports of a
/// guest's kernel.
pub fn kernel(log: &str) -> impl Iterator<Item = &str> {
    log.lines().filter(|line| !line.starts_with("LAB "))
}

/// Returns whether a line is a frame in the world switch. A question mark means a frame that may be
/// left over from an earlier call.
fn in_world_switch(line: &str) -> bool {
    !line.contains('?') && WORLD_SWITCH.iter().any(|place| line.contains(place))
}

/// Returns a kernel's line without its time.
fn text(line: &str) -> &str {
    line.split_once(']').map_or(line, |(_, text)| text).trim()
}

/// Returns the reason why the end of QEMU itself is an emulator failure. An end by SIGKILL is not,
/// because QEMU does not send that signal to itself.
#[must_use]
pub fn in_status(status: ExitStatus) -> Option<String> {
    status.signal().filter(|signal| OWN_FAULTS.contains(signal)).map(|_| format!("QEMU ended with {status}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crash(first: &str, frame: &str) -> String {
        format!(
            "[ 1.0] fine\n[ 7.1] {first}\n[ 7.2] CPU: 0 PID: 9 Comm: vcpu 0\n[ 7.2]  ? svm_vcpu_enter_exit+0x1/0x80\n\
             [ 7.3]  {frame}\n[ 7.4] Kernel panic - not syncing: Fatal exception\n"
        )
    }

    #[test]
    fn exception_in_the_world_switch_is_an_emulator_failure() {
        let stack = "BUG: TASK stack guard page was hit at 0000000055ca685b";
        let frame = "svm_vcpu_enter_exit+0x4a/0x80 [kvm_amd]";
        let found = in_console(&crash(stack, frame)).unwrap();
        assert_eq!(found, format!("[ 7.1] {stack}; {frame}"));
        for first in ["BUG: unable to handle page fault for address: 0", "traps: PANIC: double fault"] {
            assert!(in_console(&crash(first, "RIP: 0010:__svm_vcpu_run+0x90/0x190 [kvm_amd]")).is_some());
        }
    }

    #[test]
    fn any_other_end_is_no_emulator_failure() {
        let stack = "BUG: TASK stack guard page was hit";
        let frame = "svm_vcpu_enter_exit+0x4a/0x80 [kvm_amd]";
        assert_eq!(in_console(&crash(stack, "tun_get_user+0x10/0x20 [tun]")), None);
        assert_eq!(in_console(&crash(stack, "? svm_vcpu_enter_exit+0x4a/0x80")), None);
        assert_eq!(in_console(&crash("WARNING: CPU: 0", frame)), None);
        let whole = crash(stack, frame);
        assert_eq!(in_console(whole.split("[ 7.4]").next().unwrap()), None, "the kernel has not ended");
        assert_eq!(in_console("LAB ended with status 0\n"), None);
        let quoted = whole
            .replace("[ 7.1] BUG", "LAB 3.2 FAILED linux-boot (1.0 s): its kernel reports an error: BUG");
        assert_eq!(in_console(&quoted), None, "the error is of a guest's kernel");
    }

    #[test]
    fn only_a_fault_of_qemu_itself_is_an_emulator_failure() {
        assert!(in_status(ExitStatus::from_raw(6)).unwrap().contains("SIGABRT"));
        assert!(in_status(ExitStatus::from_raw(11)).is_some());
        assert_eq!(in_status(ExitStatus::from_raw(9)), None);
        assert_eq!(in_status(ExitStatus::from_raw(1 << 8)), None);
        assert_eq!(in_status(ExitStatus::from_raw(0)), None);
    }
}
