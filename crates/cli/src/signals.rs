//! Signals to `vmferry run`: SIGTERM asks the guest to shut down, as whoever ends a service means it; everything else, and SIGTERM to a guest
//! that does not listen, ends the process in the ordinary way, with the terminal as it was and the control socket removed.

use crate::api::{Place, Shared};
use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::sync::Arc;

/// Watches for signals from now on.
///
/// # Errors
/// If they cannot be caught.
pub(crate) fn watch(shared: &Arc<Shared>) -> Result<()> {
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
            shared.ask_to_quit("host-signal");
        }
    };
    vmferry_thread::spawn(vmferry_thread::Role::Watch, "signals", watch)?;
    Ok(())
}

/// Presses the guest's power button.
///
/// # Errors
/// If nobody would hear it.
pub(crate) fn press_power_button(shared: &Shared) -> Result<()> {
    if !matches!(shared.place(), Place::Running | Place::Moving) {
        bail!("the guest does not run here, or stands still");
    }
    let guest = shared.probe.kvm().context("this kind of guest has no power button")?;
    if guest.press_power_button()? {
        shared.tell.power_button();
        return Ok(());
    }
    bail!(
        "the guest does not listen for its power button (Linux: the driver `button`, and somebody who acts on it); `quit` ends it \
         without asking it"
    )
}
