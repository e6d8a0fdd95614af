//! Signals to `vmferry run`. SIGTERM asks the guest to shut down, as a service manager expects.
//! SIGINT and SIGHUP, and SIGTERM to a guest that ignores its power button, end the process in the
//! ordinary way: the terminal is restored and the control socket is removed.

use crate::api::{GuestPlace, RunContext};
use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use std::sync::Arc;

/// Starts to watch for signals.
///
/// # Errors
/// If the signals cannot be caught.
pub(crate) fn watch(shared: &Arc<RunContext>) -> Result<()> {
    outlive_file_limit().context("cannot catch SIGXFSZ")?;
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot catch signals")?;
    let shared = Arc::clone(shared);
    let watch = move || {
        let mut asked = false;
        for signal in &mut signals {
            if signal == SIGTERM && !asked && press_power_button(&shared).is_ok() {
                asked = true;
                eprintln!("vmferry: the guest was asked to shut down; SIGTERM again ends it at once");
                continue;
            }
            shared.request_quit("host-signal");
        }
    };
    vmferry_thread::spawn(vmferry_thread::Role::Watch, "signals", watch)?;
    Ok(())
}

/// Lets a write beyond the largest file size of this process (`RLIMIT_FSIZE`) fail with an error.
/// Without a handler, the kernel would end the process with SIGXFSZ, and with it the guest.
fn outlive_file_limit() -> std::io::Result<()> {
    // The error of the write says more than the signal, so the flag is not read.
    signal_hook::flag::register(SIGXFSZ, Arc::default()).map(drop)
}

/// Presses the guest's power button.
///
/// # Errors
/// If the guest would not notice.
pub(crate) fn press_power_button(shared: &RunContext) -> Result<()> {
    if !matches!(shared.place(), GuestPlace::Running | GuestPlace::Moving) {
        bail!("the guest does not run in this process, or is paused");
    }
    shared.require_not_handed_over()?;
    let guest = shared.probe.kvm().context("this kind of guest has no power button")?;
    if guest.press_power_button()? {
        shared.event_sender.power_button();
        return Ok(());
    }
    bail!(
        "the guest does not listen for its power button (Linux needs the driver `button` and a program that handles the button); `quit` \
         ends the guest without a shutdown"
    )
}
