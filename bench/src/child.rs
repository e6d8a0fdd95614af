//! A child process that cannot outlive the bench.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// A child that is killed, by its own id, when this value goes.
///
/// The kernel kills it too when the *thread* that spawned it ends, so a bench that is itself killed
/// leaves nothing behind: spawn and use it on one thread.
#[derive(Debug)]
pub(crate) struct Reaped(Child);

impl Reaped {
    /// Starts `command`.
    pub(crate) fn spawn(command: &mut Command) -> io::Result<Self> {
        let parent = rustix::process::getpid();
        let arrange = move || {
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
            // The parent may have died before the line above: then nobody would send the signal.
            if rustix::process::getppid() != Some(parent) {
                return Err(io::Error::other("the parent is gone"));
            }
            Ok(())
        };
        // SAFETY: between fork and exec only async-signal-safe work is allowed. The closure makes two
        // system calls; its error path builds an io::Error only when the parent is already dead.
        unsafe { command.pre_exec(arrange) };
        command.spawn().map(Reaped)
    }

    /// The process id.
    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// The child itself, for its pipes.
    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.0
    }

    /// Waits up to `limit` for the child to end by itself. None: it still runs.
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
        // Killing one that has ended is not an error here, and the child is ours until waited for, so
        // its id cannot have passed to another process.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_child_is_gone() {
        let child = Reaped::spawn(Command::new("sleep").arg("60")).unwrap();
        let proc_entry = format!("/proc/{}", child.id());
        assert!(std::path::Path::new(&proc_entry).exists());
        drop(child);
        assert!(!std::path::Path::new(&proc_entry).exists());
    }

    #[test]
    fn waiting_is_bounded_and_sees_the_end() {
        let mut child = Reaped::spawn(Command::new("sleep").arg("60")).unwrap();
        assert!(child.wait_for(Duration::from_millis(20)).unwrap().is_none());
        let mut child = Reaped::spawn(&mut Command::new("true")).unwrap();
        assert!(child.wait_for(vmferry_testkit::PATIENCE).unwrap().unwrap().success());
    }
}
