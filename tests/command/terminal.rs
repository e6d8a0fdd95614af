//! A pseudo-terminal for commands that need a terminal, and a record of its output.

use crate::support::{VMFERRY, wait_for};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// A command on its own terminal. It is ended when this value is dropped.
pub(crate) struct Terminal {
    child: Child,
    master: Option<File>,
    written: Arc<Mutex<Vec<u8>>>,
    gone: Arc<AtomicBool>,
    reading: Option<JoinHandle<()>>,
}

impl Terminal {
    pub(crate) fn start(columns: u16, args: &[&str], environment: &[(&str, &str)]) -> Self {
        Self::run(columns, args, environment, |command| {
            command.process_group(0);
        })
    }

    /// Starts the command as a shell does: with the terminal as its controlling terminal, and in
    /// the foreground.
    pub(crate) fn foreground(args: &[&str]) -> Self {
        Self::run(80, args, &[], |command| {
            let lead = || {
                rustix::process::setsid()?;
                Ok(rustix::process::ioctl_tiocsctty(std::io::stdin())?)
            };
            // SAFETY: the closure makes two system calls between fork and exec, allocates nothing
            // and takes no lock.
            unsafe { command.pre_exec(lead) };
        })
    }

    fn run(
        columns: u16,
        args: &[&str],
        environment: &[(&str, &str)],
        group: impl FnOnce(&mut Command),
    ) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let open = || File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let slave = open();
        tcsetwinsize(&slave, Winsize { ws_row: 40, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let mut command = Command::new(VMFERRY);
        command
            .args(args)
            .stdin(open())
            .stdout(open())
            .stderr(open())
            .env("TERM", "xterm-256color")
            .env_remove("NO_COLOR");
        command.envs(environment.iter().copied());
        group(&mut command);
        let child = command.spawn().unwrap();
        drop((command, slave));
        let master = File::from(master);
        let (mut reader, written) = (master.try_clone().unwrap(), Arc::new(Mutex::new(Vec::new())));
        let (to, gone) = (Arc::clone(&written), Arc::new(AtomicBool::new(false)));
        let stop = Arc::clone(&gone);
        let reading = std::thread::spawn(move || {
            let (mut piece, tick) = ([0; 4096], Timespec { tv_sec: 0, tv_nsec: 20_000_000 });
            while !stop.load(Ordering::Acquire) {
                if poll(&mut [PollFd::new(&reader, PollFlags::IN)], Some(&tick)).unwrap() == 0 {
                    continue;
                }
                // The read fails when the other end is closed.
                let Ok(read @ 1..) = reader.read(&mut piece) else { return };
                to.lock().unwrap().extend_from_slice(&piece[..read]);
            }
        });
        Self { child, master: Some(master), written, gone, reading: Some(reading) }
    }

    /// Closes the other end of the terminal, as a closed window or a lost connection does.
    pub(crate) fn hang_up(&mut self) {
        self.gone.store(true, Ordering::Release);
        self.reading.take().unwrap().join().unwrap();
        self.master = None;
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.written.lock().unwrap()).into_owned()
    }

    pub(crate) fn wait_for(&self, what: &str) {
        wait_for(&format!("{what:?} on a terminal"), || {
            let text = self.text();
            if text.contains(what) { Ok(()) } else { Err(text) }
        });
    }

    pub(crate) fn press(&mut self, keys: &str) {
        self.master.as_mut().unwrap().write_all(keys.as_bytes()).unwrap();
    }

    pub(crate) fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap()
    }

    pub(crate) fn end(&mut self) -> ExitStatus {
        wait_for("the end of a command on a terminal", || {
            self.child.try_wait().unwrap().ok_or_else(|| self.text())
        })
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
