//! Helper for tests of a terminal after a panic: runs another test, which panics, in its own
//! process on a pseudo-terminal.

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Termios, tcgetattr};
use std::fs::File;
use std::io::Read;
use std::process::Command;

/// Output on the terminal, and its settings before and afterwards.
pub(crate) struct Left {
    pub(crate) text: String,
    pub(crate) before: Termios,
    pub(crate) after: Termios,
}

impl Left {
    /// Returns whether the settings are the previous ones.
    pub(crate) fn as_it_was(&self) -> bool {
        let modes = |termios: &Termios| {
            (termios.input_modes, termios.output_modes, termios.control_modes, termios.local_modes)
        };
        modes(&self.before) == modes(&self.after)
    }
}

/// Runs the ignored test of this name until its end.
pub(crate) fn run(test: &str) -> Left {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let open = || File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    let slave = open();
    let before = tcgetattr(&slave).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]).env("TERM", "xterm-256color");
    let mut child = command.stdin(open()).stdout(open()).stderr(open()).spawn().unwrap();
    drop(command);
    let reader = std::thread::spawn(move || {
        let (mut text, mut piece) = (Vec::new(), [0; 4096]);
        let mut master = File::from(master);
        // The read fails when no process has the slave open any more.
        while let Ok(read @ 1..) = master.read(&mut piece) {
            text.extend_from_slice(&piece[..read]);
        }
        text
    });
    let status = child.wait().unwrap();
    let after = tcgetattr(&slave).unwrap();
    drop(slave);
    let text = String::from_utf8_lossy(&reader.join().unwrap()).into_owned();
    assert!(!status.success() && text.contains("out of luck"), "{status}: {text}");
    Left { text, before, after }
}
