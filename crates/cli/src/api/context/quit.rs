//! End of the process.

use super::{GuestPlace, RunContext, lock};
use crate::signals::press_power_button;
use std::sync::atomic::Ordering;

impl RunContext {
    /// Returns why the process ends, by the reason's QMP name.
    pub(crate) fn quit_reason(&self) -> &'static str {
        *lock(&self.quit_reason)
    }

    /// Ends the process as soon as its guest allows it, for `reason`.
    ///
    /// Does nothing while it is not known whether the target runs the guest: this process may have
    /// the only copy of the guest, which may come back and must not end for an earlier request.
    pub(crate) fn request_quit(&self, reason: &'static str) {
        if self.undecided() || self.place() == GuestPlace::Unknown {
            eprintln!(
                "vmferry: this process does not end, because it is not known whether the target runs the guest; decide with `vmferry recover`"
            );
            return;
        }
        if self.handed_over() {
            eprintln!(
                "vmferry: the guest runs at the target and still needs pages that only this process has; this process ends when the target has \
                 all, or with `vmferry recover --abandon` if the link is lost"
            );
        } else if self.place() == GuestPlace::Moving {
            eprintln!(
                "vmferry: the guest is being migrated; this process ends when the migration has ended, and the guest ends too if it has not \
                 moved (`vmferry cancel` ends both now)"
            );
        }
        if self.place() == GuestPlace::Awaited {
            self.quit_before_arrival.store(true, Ordering::Release);
        }
        self.quit_now(reason);
    }

    /// Does the same as [`request_quit`](Self::request_quit) for a guest that the operator has
    /// given up.
    pub(crate) fn quit_now(&self, reason: &'static str) {
        *lock(&self.quit_reason) = reason;
        self.quit.store(true, Ordering::Release);
        self.arrival.abandon();
        self.request_check();
    }

    /// Lets a guest continue that has arrived although this process was told to end before: it was
    /// too late to give the guest back to the source. The guest is asked to shut down.
    pub(crate) fn outlive_early_quit(&self) {
        if !self.quit_before_arrival.swap(false, Ordering::AcqRel) {
            return;
        }
        self.quit.store(false, Ordering::Release);
        let asked = match press_power_button(self) {
            Ok(()) => "it was asked to shut down".to_owned(),
            Err(why) => format!("it was not asked to shut down, because {why:#}"),
        };
        eprintln!(
            "vmferry: the guest had arrived before this process could end; {asked}. Tell the process again to end it at once"
        );
    }
}
