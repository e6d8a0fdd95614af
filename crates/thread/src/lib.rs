//! Threads with a [`Role`], a [`Park`] that stops the event loops of devices while a guest is
//! paused, the [`ThrottleShares`] of a throttle, and the [`RunDelay`] of a thread.
//!
//! The crates of vmferry start all their threads with [`spawn`] or [`spawn_scoped`]. With
//! [`on_start`], a process can set one start hook, which each of these threads calls before its
//! work. The hook can, for example, install a seccomp filter, bind the thread to processors, or
//! count it. The crates themselves have no such policy.
//!
//! ```
//! use std::sync::atomic::{AtomicUsize, Ordering};
//! use vmferry_thread::{Role, on_start, spawn};
//!
//! static SENDERS: AtomicUsize = AtomicUsize::new(0);
//!
//! # fn main() -> std::io::Result<()> {
//! on_start(|role, _name| {
//!     if role == Role::Sender {
//!         SENDERS.fetch_add(1, Ordering::Relaxed);
//!     }
//! })
//! .expect("the process has no other hook");
//! let sum = spawn(Role::Sender, "sender 0", || 20 + 22)?.join().expect("the thread does not panic");
//! assert_eq!((sum, SENDERS.load(Ordering::Relaxed)), (42, 1));
//! # Ok(()) }
//! ```
#![deny(unsafe_code)]

mod delay;
mod park;
#[expect(unsafe_code, reason = "the system calls have no safe wrapper")]
pub mod scheduling;
mod throttle;
mod vcpus;

use std::io;
use std::sync::OnceLock;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

pub use delay::RunDelay;
pub use park::{Park, StillWorking, Working};
pub use throttle::ThrottleShares;
pub use vcpus::{VcpuThread, VcpuThreads};

/// Role of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Role {
    /// Owns the machine and its migrations, and starts most other threads.
    Owner,
    /// Runs a vCPU and handles the device accesses that complete at once.
    Vcpu,
    /// Acts as a vCPU of a process guest, which does not use KVM.
    Worker,
    /// Reads and writes disks.
    Disk,
    /// Carries frames between the guest and a tap.
    Network,
    /// Serves any other device.
    Device,
    /// Harvests dirty pages, or throttles vCPUs.
    Tracker,
    /// Sends to the peer of a migration.
    Sender,
    /// Receives from the source of a migration.
    Receiver,
    /// Reads the messages of the peer on a control channel.
    Control,
    /// Accepts connections of migrations and reads their greeting.
    Listener,
    /// Serves page faults.
    Fault,
    /// Saves a guest to a file, or restores a guest from a file.
    Snapshot,
    /// Asks an arbiter which host owns the guest.
    Arbiter,
    /// Serves the control socket.
    Api,
    /// Serves the metrics of the guest to scrapers.
    Metrics,
    /// Sends traces to a collector.
    Traces,
    /// Watches signals, the console, the host, and the end of the guest.
    Watch,
}

impl Role {
    /// All roles.
    pub const ALL: [Self; 18] = [
        Self::Owner,
        Self::Vcpu,
        Self::Worker,
        Self::Disk,
        Self::Network,
        Self::Device,
        Self::Tracker,
        Self::Sender,
        Self::Receiver,
        Self::Control,
        Self::Listener,
        Self::Fault,
        Self::Snapshot,
        Self::Arbiter,
        Self::Api,
        Self::Metrics,
        Self::Traces,
        Self::Watch,
    ];

    /// Returns the name of the role, in lower case. The name of [`Role::Arbiter`] is `fence`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::Vcpu => "vcpu",
            Self::Worker => "worker",
            Self::Disk => "disk",
            Self::Network => "network",
            Self::Device => "device",
            Self::Tracker => "tracker",
            Self::Sender => "sender",
            Self::Receiver => "receiver",
            Self::Control => "control",
            Self::Listener => "listener",
            Self::Fault => "fault",
            Self::Snapshot => "snapshot",
            Self::Arbiter => "fence",
            Self::Api => "api",
            Self::Metrics => "metrics",
            Self::Traces => "traces",
            Self::Watch => "watch",
        }
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Start hook: a function that each thread calls before its work, with the role and the name of the
/// thread.
pub type Hook = fn(Role, &str);

static HOOK: OnceLock<Hook> = OnceLock::new();

/// Sets the start hook of the process. Every thread that [`spawn`] or [`spawn_scoped`] starts
/// afterwards calls `hook` before its work.
///
/// If the hook panics, its thread ends as if the work of the thread had panicked. The process has
/// only one hook, which cannot be replaced, because a policy for threads concerns the whole
/// process, in which many crates start threads.
///
/// # Errors
/// Returns `hook` if the process already has a hook, which stays in force.
pub fn on_start(hook: Hook) -> Result<(), Hook> {
    HOOK.set(hook)
}

fn started(role: Role, name: &str) {
    if let Some(hook) = HOOK.get() {
        hook(role, name);
    }
}

/// Starts a thread with this role and name, which calls the start hook and then `work`. See
/// [`Builder::spawn`].
///
/// # Errors
/// Returns an error if the host cannot create another thread.
///
/// # Panics
/// Panics if `name` contains a null byte.
pub fn spawn<T: Send + 'static>(
    role: Role,
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let name = name.into();
    Builder::new().name(name.clone()).spawn(move || {
        started(role, &name);
        work()
    })
}

/// Starts a thread like [`spawn`], which ends before `scope` does. See [`Builder::spawn_scoped`].
///
/// # Errors
/// Returns an error if the host cannot create another thread.
///
/// # Panics
/// Panics if `name` contains a null byte.
pub fn spawn_scoped<'scope, 'env, T: Send + 'scope>(
    role: Role,
    name: impl Into<String>,
    scope: &'scope Scope<'scope, 'env>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    let name = name.into();
    Builder::new().name(name.clone()).spawn_scoped(scope, move || {
        started(role, &name);
        work()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    static SEEN: Mutex<Vec<(Role, String, std::thread::ThreadId)>> = Mutex::new(Vec::new());

    #[test]
    fn each_thread_calls_the_hook_before_its_work_and_the_hook_is_set_once() {
        let hook: Hook =
            |role, name| SEEN.lock().unwrap().push((role, name.to_owned(), std::thread::current().id()));
        let seen = |id| SEEN.lock().unwrap().iter().filter(|(_, _, thread)| *thread == id).count();
        on_start(hook).unwrap();
        assert!(on_start(hook).is_err());
        let work = move || {
            let own = std::thread::current();
            (own.name().map(str::to_owned), own.id(), seen(own.id()))
        };
        let (name, first, before) = spawn(Role::Disk, "disk-0", work).unwrap().join().unwrap();
        assert_eq!((name.as_deref(), before), (Some("disk-0"), 1));
        std::thread::scope(|scope| {
            let (_, _, before) = spawn_scoped(Role::Sender, "bulk", scope, work).unwrap().join().unwrap();
            assert_eq!(before, 1);
        });
        let seen = SEEN.lock().unwrap();
        assert_eq!(seen[0], (Role::Disk, "disk-0".to_owned(), first));
        assert_eq!((seen[1].0, &*seen[1].1, seen.len()), (Role::Sender, "bulk", 2));
    }

    #[test]
    fn names_are_different() {
        let names: std::collections::BTreeSet<_> = Role::ALL.iter().map(|role| role.name()).collect();
        assert_eq!(names.len(), Role::ALL.len());
    }
}
