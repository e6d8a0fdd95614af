//! How a VMM's process confines itself before a guest runs in it or a peer is heard.
//!
//! Whoever gets hold of a thread, by a bug in a device or in what reads a peer's bytes, gets what that thread can do. So each can do
//! little:
//!
//! | module | what |
//! |---|---|
//! | `seccomp` | which system calls, by what the thread is for ([`Role`]) |
//! | `files` | which files, ports and processes: landlock |
//! | `capabilities` | what root may do besides: nothing |
//! | `jail` | a root of its own and another user, for a process that root has started |
//!
//! ```no_run
//! use vmferry_confine::{Confinement, File, Mode, Plan, Ports, Use};
//!
//! # fn main() -> Result<(), vmferry_confine::ConfineError> {
//! let mut plan = Plan::new(Mode::On);
//! plan.files.push(File::new("/dev/kvm", Use::Device));
//! plan.ports = Ports::Only(vec![]);
//! // The process has one thread.
//! let mut confinement = Confinement::begin(&plan)?;
//! // It opens what it needs, and starts threads, each of which confines itself. And then:
//! confinement.settle()?;
//! println!("{}", confinement.in_force().seccomp.detail);
//! # Ok(()) }
//! ```

mod capabilities;
mod files;
mod jail;
mod report;
mod seccomp;

pub use capabilities::Kept;
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

/// Whether there is to be confinement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Mode {
    /// Yes, as far as the host can. A forbidden system call fails, and is told of.
    #[default]
    On,
    /// The same, and a forbidden system call ends the process.
    Kill,
    /// System calls that would be forbidden are made, and the kernel logs them; nothing else is forbidden.
    Log,
    /// No.
    Off,
}

impl Mode {
    /// Whether anything is forbidden.
    #[must_use]
    pub const fn forbids(self) -> bool {
        matches!(self, Self::On | Self::Kill)
    }
}

/// What a process is to be left with.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Plan {
    /// Whether.
    pub mode: Mode,
    /// The files that it was told of.
    pub files: Vec<File>,
    /// Where it may listen.
    pub ports: Ports,
    /// The capabilities that it keeps, if it has them.
    pub keep: Vec<Kept>,
    /// Its jail, if it is to have one.
    pub jail: Option<Jail>,
}

impl Plan {
    /// Nothing but what every process has.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        Self { mode, files: Vec::new(), ports: Ports::Only(Vec::new()), keep: Vec::new(), jail: None }
    }
}

/// Why a process cannot be confined as it was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfineError {
    /// The jail.
    #[error(transparent)]
    Jail(#[from] JailError),
    /// A file that is to be made.
    #[error("cannot write {}", .path.display())]
    Output {
        /// Which.
        path: std::path::PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It happens once in a process, and before others do something at the start of threads.
    #[error("this process was confined before, or does something else at the start of its threads")]
    Twice,
    /// What was in force cannot be made tighter.
    #[error("the process cannot be confined any further: {0}; --sandbox off goes without")]
    Refused(String),
}

/// What each thread needs to confine itself.
struct Common {
    programs: Option<Programs>,
    keep: Vec<Kept>,
}

static COMMON: OnceLock<Common> = OnceLock::new();

/// The confinement of this process.
#[derive(Debug)]
#[must_use]
pub struct Confinement {
    in_force: InForce,
    settled: bool,
}

impl Confinement {
    /// Confines the process, as far as it does not hinder setting up; each thread that it starts from now on confines itself. To be
    /// called while the process has one thread: landlock and capabilities are that thread's, and of those that it starts.
    ///
    /// What the host cannot do is left out, and said by [`in_force`](Self::in_force).
    ///
    /// # Errors
    /// If a jail was asked for that cannot be, or an output cannot be made; nothing else.
    pub fn begin(plan: &Plan) -> Result<Self, ConfineError> {
        let mut in_force = InForce::nothing(plan.mode);
        make_outputs(plan)?;
        if let Some(jail) = &plan.jail {
            jail.enter(&plan.files)?;
            in_force.jail = Measure::there(format!(
                "root {}, user {}, group {}",
                jail.folder.display(),
                jail.uid,
                jail.gid
            ));
        }
        if plan.mode == Mode::Off {
            return Ok(Self { in_force, settled: true });
        }
        in_force.no_new_privs = match rustix::thread::set_no_new_privs(true) {
            Ok(()) => Measure::there("nothing gains privileges by being executed"),
            Err(error) => Measure::missing(error.to_string()),
        };
        if plan.mode.forbids() {
            in_force.landlock = files::confine(&plan.files, &plan.ports);
            if let Err(why) = capabilities::narrow(&plan.keep) {
                in_force.capabilities = Measure::missing(why);
            }
        }
        let programs = filters(plan.mode, &mut in_force.seccomp);
        let keep = plan.keep.clone();
        COMMON.set(Common { programs, keep }).map_err(|_| ConfineError::Twice)?;
        vmferry_thread::on_start(confine_thread).map_err(|_| ConfineError::Twice)?;
        Ok(Self { in_force, settled: false })
    }

    /// Confines the calling thread, which has set up the process, to what its owner needs from then on. To be called before a guest runs,
    /// and before a byte of a peer is read. Does nothing the second time.
    ///
    /// # Errors
    /// If something that the host can do fails: the process must not go on.
    pub fn settle(&mut self) -> Result<(), ConfineError> {
        if std::mem::replace(&mut self.settled, true) {
            return Ok(());
        }
        let Some(common) = COMMON.get() else { return Ok(()) };
        if self.in_force.mode.forbids() {
            capabilities::give_up(&common.keep).map_err(ConfineError::Refused)?;
            // What could not be taken out of reach for good has its reason there already.
            if self.in_force.capabilities.in_force
                || self.in_force.capabilities == InForce::nothing(Mode::On).capabilities
            {
                self.in_force.capabilities = capabilities::describe(&common.keep);
            }
        }
        violation::introduce(Role::Owner, "vmferry");
        if let Some(programs) = &common.programs {
            programs.confine_thread(Role::Owner).map_err(ConfineError::Refused)?;
        }
        Ok(())
    }

    /// What is in force.
    #[must_use]
    pub fn in_force(&self) -> &InForce {
        &self.in_force
    }
}

/// Has each thread that is started from now on confine itself by its role, and nothing else: the process, and the threads that it has, stay
/// as they are. For tests of what such threads do. Does nothing the second time, and where the host cannot.
///
/// # Errors
/// If the process does something else at the start of its threads.
pub fn confine_threads() -> Result<(), ConfineError> {
    static DONE: std::sync::Mutex<bool> = std::sync::Mutex::new(false);
    let mut done = DONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if *done || !available()[0].in_force {
        return Ok(());
    }
    let programs = Programs::compile(Mode::Kill).map_err(ConfineError::Refused)?;
    violation::install(true).map_err(|error| ConfineError::Refused(error.to_string()))?;
    // Whoever starts threads here may start them as it likes: nothing is given up for good.
    let keep = caps::all().into_iter().map(|capability| (capability, "")).collect();
    COMMON.set(Common { programs: Some(programs), keep }).map_err(|_| ConfineError::Twice)?;
    vmferry_thread::on_start(confine_thread).map_err(|_| ConfineError::Twice)?;
    *done = true;
    Ok(())
}

/// What this host can do of it, found out on threads of their own: seccomp, landlock.
#[must_use]
pub fn available() -> [Measure; 2] {
    let seccomp = std::thread::spawn(|| {
        let programs = Programs::compile(Mode::On)?;
        programs.confine_thread(Role::Watch)
    });
    let seccomp = match seccomp.join() {
        Ok(Ok(())) => Measure::there("filters of system calls, thread by thread"),
        Ok(Err(why)) => Measure::missing(why),
        Err(_) => Measure::missing("it could not be tried"),
    };
    [seccomp, files::probe()]
}

/// Closes all descriptors but the first three and `keep`. Only before the process has opened any: whoever has one of them would use what is
/// another's then. Does nothing on a kernel before 5.9.
pub fn close_inherited(keep: &[RawFd]) {
    let mut keep: Vec<u32> =
        keep.iter().filter_map(|fd| u32::try_from(*fd).ok()).filter(|fd| *fd > 2).collect();
    keep.sort_unstable();
    let mut first = 3;
    for next in keep.into_iter().map(Some).chain([None]) {
        let last = next.map_or(u32::MAX, |next| next - 1);
        if first <= last {
            // SAFETY: takes numbers; nobody in this process has any of them, as the caller says.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, 0u32) };
        }
        first = next.map_or(u32::MAX, |next| next.saturating_add(1));
    }
}

/// Takes over the open descriptors among `numbers`, except the standard streams. Programs that this
/// process executes do not inherit these descriptors.
///
/// # Safety
/// Nothing else in this process may own one of the numbers. The caller calls this function once, before
/// the process has opened any descriptor.
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

/// Makes the filters, and confines the process by its own.
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
                Mode::Log => Measure::missing(
                    "forbidden system calls are made, and logged by the kernel (--sandbox log)",
                ),
                Mode::Kill => {
                    Measure::there("each thread makes the system calls of its role; others end the process")
                }
                _ => Measure::there(
                    "each thread makes the system calls of its role; others fail, and are told of",
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

/// What each thread passes at its start. One that cannot be confined must not work, so it ends here.
fn confine_thread(role: Role, name: &str) {
    let Some(common) = COMMON.get() else { return };
    violation::introduce(role, name);
    // Also where there are no filters.
    let confined = capabilities::give_up(&common.keep).and_then(|()| match &common.programs {
        Some(programs) => programs.confine_thread(role),
        None => Ok(()),
    });
    if let Err(why) = confined {
        panic!("the thread '{name}' cannot be confined and does not run: {why}");
    }
}

/// Makes the files that are to be written, before their folders are out of reach. Not for a jail: root would make a file in a folder that
/// may be somebody else's, who has perhaps put a link there.
fn make_outputs(plan: &Plan) -> Result<(), ConfineError> {
    for File { path, .. } in plan.files.iter().filter(|file| file.use_for == Use::Output) {
        let mut options = std::fs::File::options();
        // A console shows what is nobody else's.
        let made = options.append(true).create(plan.jail.is_none()).mode(0o600).open(path);
        made.map_err(|source| match plan.jail {
            None => ConfineError::Output { path: path.clone(), source },
            Some(_) => JailError::Output { path: path.clone(), source }.into(),
        })?;
    }
    Ok(())
}
