//! Serial console of the guest on this process's terminal: `run --serial stdio`.
//!
//! Input goes to the guest unchanged, Ctrl-C too; [`ESCAPE`] ends vmferry. Input that is no
//! terminal (a pipe, a file) goes to the guest unchanged and completely, and has no escape
//! character.

use crate::api::{GuestPlace, RunContext};
use anyhow::{Context, Result};
use rustix::termios::{InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios};
use rustix::termios::{isatty, tcgetattr, tcgetpgrp, tcsetattr};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Character that ends vmferry: Ctrl-], as in telnet and virsh.
const ESCAPE: u8 = 0x1d;

/// Interval of attempts to pass input to a guest that has not read earlier input, or does not run
/// at the moment.
const RETRY: Duration = Duration::from_millis(5);
/// Attempts to pass typed input. A guest that hangs must not keep the operator from typing the
/// escape character.
const TRIES: u32 = 200;

/// A console in use. Dropping it restores the terminal.
#[derive(Debug)]
pub(crate) struct Console {
    before: Option<Termios>,
}

impl Console {
    /// Sends standard input to the guest from now on.
    ///
    /// # Errors
    /// If the terminal cannot be set up, or a thread cannot be started.
    pub(crate) fn start(shared: &Arc<RunContext>) -> Result<Self> {
        let stdin = std::io::stdin();
        let terminal = isatty(&stdin);
        if terminal && tcgetpgrp(&stdin).ok() != Some(rustix::process::getpgrp()) {
            // In the background, reading from the terminal would stop this process.
            return Ok(Self { before: None });
        }
        let console = Self { before: if terminal { Some(raw(&stdin)?) } else { None } };
        if terminal {
            eprintln!("vmferry: this is the guest's serial console; Ctrl-] ends vmferry");
        }
        let shared = Arc::clone(shared);
        let read = move || feed(&mut stdin.lock(), terminal, &shared);
        // The thread is never joined: it reads until the process ends.
        vmferry_thread::spawn(vmferry_thread::Role::Watch, "console", read)?;
        Ok(console)
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        if let Some(before) = self.before.take() {
            // A failure cannot be reported usefully.
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &before);
        }
    }
}

/// Makes the terminal deliver every byte at once and unchanged, without echo. Returns the previous
/// settings. Output processing stays as it is.
fn raw(terminal: &impl AsFd) -> Result<Termios> {
    let before = tcgetattr(terminal).context("cannot read the terminal's settings")?;
    let mut now = before.clone();
    now.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG | LocalModes::IEXTEN;
    now.input_modes -= InputModes::ICRNL | InputModes::INLCR | InputModes::IGNCR | InputModes::IXON;
    now.special_codes[SpecialCodeIndex::VMIN] = 1;
    now.special_codes[SpecialCodeIndex::VTIME] = 0;
    tcsetattr(terminal, OptionalActions::Now, &now).context("cannot set up the terminal")?;
    Ok(before)
}

/// Reads until the end of the input. The escape character requests the end of the process.
fn feed(input: &mut impl Read, terminal: bool, shared: &RunContext) {
    let mut buffer = [0; 256];
    loop {
        let len = match input.read(&mut buffer) {
            Ok(0) => return,
            Ok(len) => len,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => {
                tracing::warn!(%error, "reading standard input failed; the guest gets no more input");
                return;
            }
        };
        let typed = &buffer[..len];
        let end = if terminal { typed.iter().position(|byte| *byte == ESCAPE) } else { None };
        let tries = if terminal { TRIES } else { u32::MAX };
        pass(&typed[..end.unwrap_or(len)], tries, shared);
        if end.is_some() {
            shared.request_quit("host-ui");
        }
    }
}

/// Passes `bytes` to the guest, as fast as the guest reads them.
fn pass(mut bytes: &[u8], tries: u32, shared: &RunContext) {
    let Some(guest) = shared.probe.kvm() else { return };
    let mut failed = 0;
    while !bytes.is_empty() && failed < tries {
        let taken = match shared.place() {
            GuestPlace::Running | GuestPlace::Moving => guest.serial_input(bytes),
            GuestPlace::Moved | GuestPlace::Ended => return,
            _ => 0,
        };
        bytes = &bytes[taken..];
        if taken == 0 {
            failed = failed.saturating_add(1);
            std::thread::sleep(RETRY);
        }
    }
}

/// Most output that waits for its reader.
const MOST_WAITING: usize = 64 << 10;
/// Time for which the end of the process waits for the reader.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// The output of this process's guest, if it has a reader.
static OUTPUT: OnceLock<Arc<Pending>> = OnceLock::new();

/// Waits until the reader has taken all output, for at most a second.
pub(crate) fn drain() {
    if let Some(pending) = OUTPUT.get() {
        let waits = |waiting: &mut Waiting| !waiting.failed && (waiting.writing || !waiting.bytes.is_empty());
        drop(pending.changed.wait_timeout_while(pending.lock(), LAST_WAIT, waits));
    }
}

/// Output of the serial port to a terminal or a pipe.
///
/// A thread writes, because a reader that stalls must not stop the vCPU that writes to its serial
/// port: the guest could not be paused or moved then. While the reader stalls, output beyond 64 KiB
/// is lost and counted. While there is no reader, output is lost, and counted except for the bytes
/// with which the thread tries whether there is one.
#[derive(Debug)]
pub(crate) struct Output(Arc<Pending>);

#[derive(Debug, Default)]
struct Pending {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    bytes: VecDeque<u8>,
    /// True while the thread writes bytes that it has taken.
    writing: bool,
    /// True if the last write failed, for example because the reader is gone.
    failed: bool,
}

impl Pending {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes all output to `out`. Output that cannot be written is dropped.
    fn write_to(&self, out: &mut impl Write) {
        loop {
            let idle = |waiting: &mut Waiting| waiting.bytes.is_empty();
            let waiting = self.changed.wait_while(self.lock(), idle);
            let mut waiting = waiting.unwrap_or_else(PoisonError::into_inner);
            let bytes: Vec<u8> = std::mem::take(&mut waiting.bytes).into();
            waiting.writing = true;
            drop(waiting);
            let written = write_patiently(out, &bytes);
            let mut waiting = self.lock();
            let failed_before = std::mem::replace(&mut waiting.failed, written.is_err());
            waiting.writing = false;
            drop(waiting);
            self.changed.notify_all();
            if let Err(error) = written
                && !failed_before
            {
                tracing::warn!(%error, "the serial output cannot be written, and is lost until it can be");
            }
        }
    }
}

/// Writes all of `bytes`, also to a descriptor that does not wait, because another process has
/// changed it.
fn write_patiently(out: &mut impl Write, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        match out.write(bytes) {
            Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => std::thread::sleep(RETRY),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    out.flush()
}

impl Output {
    /// Starts the thread that writes to `out`.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn start(mut out: impl Write + Send + 'static) -> Result<Self> {
        let pending = Arc::<Pending>::default();
        let own = Arc::clone(&pending);
        // The thread is never joined: it writes until the process ends.
        vmferry_thread::spawn(vmferry_thread::Role::Watch, "console-output", move || own.write_to(&mut out))?;
        // A process has one serial port.
        let _ = OUTPUT.set(Arc::clone(&pending));
        Ok(Self(pending))
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let mut waiting = self.0.lock();
        if waiting.failed && (waiting.writing || !waiting.bytes.is_empty()) {
            return Err(std::io::ErrorKind::BrokenPipe.into());
        }
        let taken = bytes.len().min(MOST_WAITING - waiting.bytes.len());
        if taken == 0 && !bytes.is_empty() {
            return Err(std::io::ErrorKind::WouldBlock.into());
        }
        waiting.bytes.extend(&bytes[..taken]);
        drop(waiting);
        self.0.changed.notify_all();
        Ok(taken)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn output_reaches_the_next_reader_of_a_named_pipe() {
        let folder = vmferry_testkit::Folder::new();
        let path = folder.file("serial");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).unwrap();
        let reader = std::thread::spawn({
            let path = path.clone();
            move || File::open(path).unwrap()
        });
        let mut output = Output::start(File::options().write(true).open(&path).unwrap()).unwrap();
        drop(reader.join().unwrap());
        vmferry_testkit::wait_for("the end of the reader", || {
            let taken = output.write(b"x");
            if output.0.lock().failed { Ok(()) } else { Err(taken) }
        });
        let mut next = File::options().read(true).open(&path).unwrap();
        vmferry_testkit::wait_for("a byte that is taken", || output.write(b"y").map(drop));
        let mut byte = [0];
        next.read_exact(&mut byte).unwrap();
        assert!(b"xy".contains(&byte[0]), "{byte:?}");
    }

    #[test]
    fn output_waits_for_no_reader_that_is_gone() {
        let pending = |failed, writing| {
            let waiting = Waiting { failed, writing, ..Waiting::default() };
            Output(Arc::new(Pending { waiting: Mutex::new(waiting), ..Pending::default() }))
        };
        let refused = pending(true, true).write(b"x").unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::BrokenPipe);
        assert_eq!(pending(true, false).write(b"x").unwrap(), 1, "the next write is an attempt");
        assert_eq!(pending(false, true).write(b"x").unwrap(), 1);
    }

    #[test]
    fn output_never_waits_for_its_reader() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut output = Output::start(writer).unwrap();
        // The pipe takes 64 KiB, the thread has taken some bytes, and the rest waits.
        let mut taken = 0;
        while let Ok(count) = output.write(&[b'x'; 1000]) {
            taken += count;
            assert!(taken < 1 << 20, "a reader that stalls takes everything");
        }
        assert!(taken >= MOST_WAITING);
        assert_eq!(output.write(b"x").unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        let mut bytes = vec![0; taken];
        reader.read_exact(&mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == b'x'));
        vmferry_testkit::wait_for("room", || output.write(b"y").map(drop));
        reader.read_exact(&mut bytes[..1]).unwrap();
        assert_eq!(bytes[0], b'y');
    }

    /// Subject of `terminal_is_restored_after_a_panic`.
    #[test]
    #[ignore = "panics on a terminal that another test gives it"]
    fn panics() {
        let console = Console { before: Some(raw(&std::io::stdin()).unwrap()) };
        let now = tcgetattr(std::io::stdin()).unwrap();
        assert!(!now.local_modes.contains(LocalModes::ECHO));
        println!("raw");
        panic!("out of luck, with {console:?}");
    }

    #[test]
    fn terminal_is_restored_after_a_panic() {
        let left = crate::on_terminal::run("console::tests::panics");
        assert!(left.text.contains("raw"), "{}", left.text);
        assert!(left.as_it_was(), "{:?}\n{:?}\n{}", left.before, left.after, left.text);
    }
}
