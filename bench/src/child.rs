//! Child process that cannot outlive the bench.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// Child process that is killed and waited for on drop.
///
/// The kernel also kills the child when the *thread* that spawned it ends. Therefore a bench that
/// is killed leaves no child behind. Spawn and use the child on one thread.
#[derive(Debug)]
pub(crate) struct Reaped(Child);

impl Reaped {
    /// Spawns `command`.
    ///
    /// # Errors
    ///
    /// Fails if the process cannot be started or the parent has ended before the death signal was
    /// set.
    pub(crate) fn spawn(command: &mut Command) -> io::Result<Self> {
        let parent = rustix::process::getpid();
        let arrange = move || {
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
            // If the parent died before the call above, the kernel never sends the signal.
            if rustix::process::getppid() != Some(parent) {
                return Err(io::Error::other("the parent is gone"));
            }
            Ok(())
        };
        // SAFETY: between fork and exec only async-signal-safe work is allowed. The closure makes
        // two system calls. Its error path builds an io::Error only when the parent is already
        // dead.
        unsafe { command.pre_exec(arrange) };
        command.spawn().map(Reaped)
    }

    /// Returns the process id.
    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// Returns the child itself, for access to its pipes.
    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.0
    }

    /// Waits up to `limit` for the child to end by itself. `None` means that it still runs.
    pub(crate) fn wait_for(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.0.try_wait()? {
                return Ok(Some(status));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Reaped {
    fn drop(&mut self) {
        // Killing a child that has ended is not an error. The kernel does not reuse the child's id
        // before it is waited for, so the signal cannot reach another process.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drop_kills_and_reaps_the_child() {
        let child = Reaped::spawn(Command::new("sleep").arg("60")).unwrap();
        let proc_entry = format!("/proc/{}", child.id());
        assert!(std::path::Path::new(&proc_entry).exists());
        drop(child);
        assert!(!std::path::Path::new(&proc_entry).exists());
    }

    #[test]
    fn wait_for_respects_its_limit_and_returns_the_exit_status() {
        let mut child = Reaped::spawn(Command::new("sleep").arg("60")).unwrap();
        assert!(child.wait_for(Duration::from_millis(20)).unwrap().is_none());
        let mut child = Reaped::spawn(&mut Command::new("true")).unwrap();
        assert!(child.wait_for(vmferry_testkit::PATIENCE).unwrap().unwrap().success());
    }
}
