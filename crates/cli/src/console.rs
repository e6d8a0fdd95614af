//! Serial console of the guest on this process's terminal: `run --serial stdio`.
//!
//! Input goes to the guest unchanged, Ctrl-C too; [`ESCAPE`] ends vmferry. Input that is no
//! terminal (a pipe, a file) goes to the guest unchanged and completely, and has no escape
//! character.

use crate::api::{GuestPlace, RunContext};
use anyhow::{Context, Result};
use rustix::termios::{InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios};
use rustix::termios::{isatty, tcgetattr, tcgetpgrp, tcsetattr};
use std::io::Read;
use std::os::fd::AsFd;
use std::sync::Arc;
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

#[cfg(test)]
mod tests {
    use super::*;

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
