//! Confinement of a VMM process, which takes effect before a guest runs in the process and before
//! the process reads data from a peer.
//!
//! An attacker may take over a thread through a bug in a device, or in a parser of a peer's bytes,
//! and then has the rights of that thread. Therefore each thread keeps only the rights that its
//! role needs:
//!
//! | module | restricts |
//! |---|---|
//! | `seccomp` | system calls, by the [`Role`] of the thread |
//! | `files` | files, TCP ports and signals to other processes, with landlock |
//! | `capabilities` | capabilities of a process that runs as root |
//! | `jail` | root directory and user of a process that root has started |
//!
//! ```no_run
//! use vmferry_confine::{Confinement, File, Mode, Plan, Ports, Use};
//!
//! # fn main() -> Result<(), vmferry_confine::ConfineError> {
//! let mut plan = Plan::new(Mode::On);
//! plan.files.push(File::new("/dev/kvm", Use::Device));
//! plan.ports = Ports::Only(vec![]);
// Call this function while the process has one thread.
//! let mut confinement = Confinement::begin(&plan)?;
// Open what the guest needs, and start threads. Each thread confines itself. Then:
//! confinement.complete()?;
//! println!("{}", confinement.in_force().seccomp.detail);
//! # Ok(()) }
//! ```

mod capabilities;
mod files;
mod jail;
mod report;
mod seccomp;

pub use capabilities::KeptCapability;
pub use caps::Capability;
pub use files::{File, Ports, Use};
pub use jail::{Jail, JailError};
pub use report::{InForce, Measure};

use seccomp::{Programs, violation};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::OnceLock;
use vmferry_thread::Role;

/// Extent of the confinement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Mode {
    /// All restrictions that the host supports are in force. A forbidden system call fails and is
    /// reported on standard error.
    #[default]
    On,
    /// The same restrictions as [`On`](Self::On), but a forbidden system call ends the process.
    Kill,
    /// A thread can make system calls that its role does not need, and the kernel logs them. Files,
    /// ports and capabilities are not restricted.
    Log,
    /// The process is not confined, except by a jail if [`Plan::jail`] is set.
    Off,
}

impl Mode {
    /// Returns true if this mode forbids system calls, files and ports.
    #[must_use]
    pub const fn forbids(self) -> bool {
        matches!(self, Self::On | Self::Kill)
    }
}

/// Description of the rights that the process keeps.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Plan {
    /// Extent of the confinement.
    pub mode: Mode,
    /// Files that the process may use.
    pub files: Vec<File>,
    /// TCP ports at which the process may listen.
    pub ports: Ports,
    /// Capabilities that the process keeps if it has them.
    pub keep: Vec<KeptCapability>,
    /// Jail that the process enters, or `None` for no jail.
    pub jail: Option<Jail>,
}

impl Plan {
    /// Creates a plan that permits no files, ports and capabilities, and has no jail.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        Self { mode, files: Vec::new(), ports: Ports::Only(Vec::new()), keep: Vec::new(), jail: None }
    }
}

/// Error that confining a process returns.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfineError {
    /// The process cannot enter the jail.
    #[error(transparent)]
    Jail(#[from] JailError),
    /// A file with the use [`Use::Output`] cannot be created or opened.
    #[error("cannot write {}", .path.display())]
    Output {
        /// Path of the file.
        path: std::path::PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// The process is already confined, or other code has set the start hook of threads.
    #[error("this process was confined before, or other code has set the hook for the start of threads")]
    Twice,
    /// A restriction failed although the host supports it.
    #[error("cannot confine the process: {0}")]
    Refused(String),
}

/// Data with which each thread confines itself.
struct Common {
    mode: Mode,
    programs: Option<Programs>,
    keep: Vec<KeptCapability>,
}

static COMMON: OnceLock<Common> = OnceLock::new();

/// Confinement of this process.
#[derive(Debug)]
#[must_use]
pub struct Confinement {
    in_force: InForce,
    complete: bool,
}

impl Confinement {
    /// Confines the process as far as its setup permits. Each thread that starts after this call
    /// confines itself.
    ///
    /// The process must have only one thread, because landlock rules and capabilities apply only to
    /// the calling thread and to the threads that it starts. If the host does not support a
    /// restriction, the process runs without it, and [`in_force`](Self::in_force) gives the reason.
    ///
    /// # Errors
    /// Returns an error if the process cannot enter the jail, if an output file cannot be created,
    /// if the kernel refuses a landlock rule although it supports landlock, if the process is
    /// already confined, or if other code has set the start hook of threads.
    pub fn begin(plan: &Plan) -> Result<Self, ConfineError> {
        let mut in_force = InForce::nothing(plan.mode);
        make_outputs(plan)?;
        if let Some(jail) = &plan.jail {
            jail.enter(&plan.files, &plan.keep)?;
            in_force.jail = Measure::in_force(format!(
                "root {}, user {}, group {}",
                jail.folder.display(),
                jail.uid,
                jail.gid
            ));
            in_force.capabilities = capabilities::describe(&plan.keep);
        }
        if plan.mode != Mode::Off || plan.jail.is_some() {
            in_force.no_new_privs = match rustix::thread::set_no_new_privs(true) {
                Ok(()) => Measure::in_force("executed programs gain no privileges"),
                Err(error) => Measure::missing(error.to_string()),
            };
        }
        if plan.mode == Mode::Off {
            return Ok(Self { in_force, complete: true });
        }
        if plan.mode.forbids() {
            in_force.landlock = files::confine(&plan.files, &plan.ports).map_err(ConfineError::Refused)?;
            if let Err(why) = capabilities::narrow(&plan.keep) {
                in_force.capabilities = Measure::missing(why);
            }
        }
        let programs = filters(plan.mode, &mut in_force.seccomp);
        let keep = plan.keep.clone();
        COMMON.set(Common { mode: plan.mode, programs, keep }).map_err(|_| ConfineError::Twice)?;
        vmferry_thread::on_start(confine_thread).map_err(|_| ConfineError::Twice)?;
        Ok(Self { in_force, complete: false })
    }

    /// Confines the calling thread, which must be the one that has set up the process, to the
    /// rights of [`Role::Owner`].
    ///
    /// Call this method before a guest runs, and before the process reads a byte from a peer.
    /// Further calls do nothing.
    ///
    /// # Errors
    /// Returns an error if a restriction fails although the host supports it. The process must not
    /// continue then.
    pub fn complete(&mut self) -> Result<(), ConfineError> {
        if std::mem::replace(&mut self.complete, true) {
            return Ok(());
        }
        let Some(common) = COMMON.get() else { return Ok(()) };
        if self.in_force.mode.forbids() {
            capabilities::give_up(&common.keep).map_err(ConfineError::Refused)?;
            // If `narrow` failed, `capabilities` holds the reason, which must stay.
            if self.in_force.capabilities.in_force
                || self.in_force.capabilities == InForce::nothing(Mode::On).capabilities
            {
                self.in_force.capabilities = capabilities::describe(&common.keep);
            }
        }
        violation::set_thread(Role::Owner, "vmferry");
        if let Some(programs) = &common.programs {
            programs.confine_thread(Role::Owner).map_err(ConfineError::Refused)?;
        }
        Ok(())
    }

    /// Returns the state of each restriction.
    #[must_use]
    pub fn in_force(&self) -> &InForce {
        &self.in_force
    }
}

/// Makes each thread that starts after this call confine itself to its role. The process and its
/// existing threads are not confined.
///
/// This function is for tests of such threads. Further calls do nothing, and neither do calls on a
/// host without seccomp.
///
/// # Errors
/// Returns an error if other code has set the start hook of threads, or if the filters cannot be
/// compiled.
pub fn confine_threads() -> Result<(), ConfineError> {
    static DONE: std::sync::Mutex<bool> = std::sync::Mutex::new(false);
    let mut done = DONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if *done || !available()[0].in_force {
        return Ok(());
    }
    let programs = Programs::compile(Mode::Kill).map_err(ConfineError::Refused)?;
    violation::install(true).map_err(|error| ConfineError::Refused(error.to_string()))?;
    // Tests may start threads with any capability, so no capability is dropped.
    let keep = caps::all().into_iter().map(|capability| (capability, "")).collect();
    let common = Common { mode: Mode::Kill, programs: Some(programs), keep };
    COMMON.set(common).map_err(|_| ConfineError::Twice)?;
    vmferry_thread::on_start(confine_thread).map_err(|_| ConfineError::Twice)?;
    *done = true;
    Ok(())
}

/// Returns the support of this host for seccomp and landlock, in this order. Each of them is tried
/// on a separate thread, so the caller is not confined.
#[must_use]
pub fn available() -> [Measure; 2] {
    let seccomp = std::thread::spawn(|| {
        let programs = Programs::compile(Mode::On)?;
        programs.confine_thread(Role::Watch)
    });
    let seccomp = match seccomp.join() {
        Ok(Ok(())) => Measure::in_force("system call filters for each thread"),
        Ok(Err(why)) => Measure::missing(why),
        Err(_) => Measure::missing("the trial failed"),
    };
    [seccomp, files::probe()]
}

/// Closes all descriptors of this process except the standard streams and those in `keep`.
///
/// If the kernel has no close_range(2) (Linux before 5.9, or a container that forbids the call),
/// the open descriptors are found in `/proc/self/fd`. Without `/proc`, they stay open then.
///
/// Call this function before the process opens a descriptor. Otherwise code that owns a closed
/// number would use whatever descriptor other code opens later under that number.
pub fn close_inherited(keep: &[RawFd]) {
    let mut kept: Vec<u32> =
        keep.iter().filter_map(|fd| u32::try_from(*fd).ok()).filter(|fd| *fd > 2).collect();
    kept.sort_unstable();
    let mut first = 3;
    for next in kept.into_iter().map(Some).chain([None]) {
        let last = next.map_or(u32::MAX, |next| next - 1);
        if first <= last {
            // SAFETY: the call takes numbers, not memory. No code in this process owns a descriptor
            // among them: the caller calls this function before the process opens one.
            let closed = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0u32) };
            if closed != 0 {
                return close_one_by_one(keep);
            }
        }
        first = next.map_or(u32::MAX, |next| next.saturating_add(1));
    }
}

/// Closes the descriptors that `/proc/self/fd` lists, except the standard streams and those in
/// `keep`.
fn close_one_by_one(keep: &[RawFd]) {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return };
    // The list is complete before the first descriptor is closed. It also has the descriptor of the
    // folder, which is closed by then.
    let open: Vec<RawFd> =
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    for fd in open.into_iter().filter(|fd| *fd > 2 && !keep.contains(fd)) {
        // SAFETY: no code in this process owns the descriptor: the caller of `close_inherited`
        // calls it before the process opens one.
        unsafe { libc::close(fd) };
    }
}

/// Takes ownership of the open descriptors among `numbers`, except the standard streams, and makes
/// sure that programs that this process executes do not inherit them.
///
/// # Safety
/// Nothing else in this process may own a descriptor with one of the numbers. Therefore the caller
/// must call this function only once, and before the process opens a descriptor.
pub unsafe fn take_inherited(numbers: &[RawFd]) -> BTreeMap<RawFd, OwnedFd> {
    let mut taken = BTreeMap::new();
    for number in numbers.iter().copied().filter(|number| *number > 2) {
        // SAFETY: the call takes numbers, and fails for a descriptor that is not open.
        let open = unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } == 0;
        if open && !taken.contains_key(&number) {
            // SAFETY: the descriptor is open, and the caller promises that nothing else owns it.
            taken.insert(number, unsafe { OwnedFd::from_raw_fd(number) });
        }
    }
    taken
}

/// Compiles the filters and installs the process-wide ones.
fn filters(mode: Mode, measure: &mut Measure) -> Option<Programs> {
    let install = || {
        let programs = Programs::compile(mode)?;
        violation::install(mode == Mode::Kill).map_err(|error| error.to_string())?;
        programs.confine_process()?;
        Ok::<_, String>(programs)
    };
    match install() {
        Ok(programs) => {
            *measure = match mode {
                Mode::Log => Measure::missing("forbidden system calls are made, and the kernel logs them"),
                Mode::Kill => Measure::in_force(
                    "each thread can make the system calls of its role; other calls end the process",
                ),
                _ => Measure::in_force(
                    "each thread can make the system calls of its role; other calls fail and are reported",
                ),
            };
            Some(programs)
        }
        Err(why) => {
            *measure = Measure::missing(why);
            None
        }
    }
}

/// Confines the calling thread, which has just started. If the thread cannot be confined, it
/// panics, because it must not run.
fn confine_thread(role: Role, name: &str) {
    let Some(common) = COMMON.get() else { return };
    violation::set_thread(role, name);
    leave_signals_to_owner();
    // Give up the capabilities even if the host has no filters.
    let given_up = if common.mode.forbids() { capabilities::give_up(&common.keep) } else { Ok(()) };
    let confined = given_up.and_then(|()| match &common.programs {
        Some(programs) => programs.confine_thread(role),
        None => Ok(()),
    });
    if let Err(why) = confined {
        panic!("the thread '{name}' cannot be confined and does not run: {why}");
    }
}

/// Blocks, on the calling thread, the signals that ask the process to end.
///
/// The kernel runs the handler of such a signal on any thread that does not block the signal. The
/// handler of the crate `signal-hook` wakes its reader with `sendto`, which the filters of most
/// roles forbid. The filter of the owner permits this call. The owner, which is the first thread of
/// the process, does not call this function and therefore runs the handlers.
fn leave_signals_to_owner() {
    // SAFETY: sigemptyset initializes the set before it is used. Masks of other threads do not
    // change.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM] {
            libc::sigaddset(&raw mut set, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
    }
}

/// Creates the output files while their folders can still be reached.
///
/// If the plan has a jail, the files must already exist. Root must not create a file in a folder
/// that another user owns, because that user may have placed a link there.
fn make_outputs(plan: &Plan) -> Result<(), ConfineError> {
    for File { path, .. } in plan.files.iter().filter(|file| file.use_for == Use::Output) {
        let mut options = std::fs::File::options();
        // The output of a console may be confidential, so only this user can read the file.
        options.append(true).create(plan.jail.is_none()).mode(0o600);
        let made = match &plan.jail {
            None => options.open(path),
            // That user may also have placed a named pipe there, which root must not wait for.
            Some(jail) => jail.as_user(|| options.custom_flags(libc::O_NONBLOCK).open(path))?,
        };
        made.map_err(|source| match plan.jail {
            None => ConfineError::Output { path: path.clone(), source },
            Some(_) => JailError::Output { path: path.clone(), source }.into(),
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::IntoRawFd;
    use vmferry_testkit::alone;

    #[test]
    fn descriptors_are_closed_one_by_one_without_close_range() {
        // The call would close the descriptors of other tests.
        if !alone("tests::descriptors_are_closed_one_by_one_without_close_range") {
            return;
        }
        let open = || std::fs::File::open("/dev/null").unwrap().into_raw_fd();
        let (kept, closed) = (open(), open());
        close_one_by_one(&[kept]);
        // SAFETY: the call takes numbers, and fails for a descriptor that is not open.
        let is_open = |fd: RawFd| unsafe { libc::fcntl(fd, libc::F_GETFD) } != -1;
        assert!(is_open(kept) && is_open(2) && !is_open(closed));
    }
}
