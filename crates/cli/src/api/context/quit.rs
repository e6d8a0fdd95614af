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
    /// While this process may get the only copy of the guest from its source, or back from its
    /// target, the request does not end that guest: see [`take_early_quit`](Self::take_early_quit).
    pub(crate) fn request_quit(&self, reason: &'static str) {
        if self.undecided() || self.place() == GuestPlace::Unknown {
            eprintln!(
                "vmferry: this process does not end, because it is not known yet whether the target runs the guest; if that lasts, decide with \
                 `vmferry recover`"
            );
            self.quit_early.store(true, Ordering::Release);
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
        let comes_from_a_source = self.incoming().is_some();
        // The place changes under this lock when a guest arrives.
        let place = lock(&self.place);
        if *place != GuestPlace::Awaited || !comes_from_a_source {
            drop(place);
            return self.quit_now(reason);
        }
        *lock(&self.quit_reason) = reason;
        self.quit_early.store(true, Ordering::Release);
        self.quit.store(true, Ordering::Release);
        drop(place);
        // A guest that this process has begun to start needs its pages.
        self.arrival.stop();
        self.request_check();
    }

    /// Ends the process and its guest, for `reason`.
    pub(crate) fn quit_now(&self, reason: &'static str) {
        *lock(&self.quit_reason) = reason;
        self.quit.store(true, Ordering::Release);
        self.arrival.abandon();
        self.request_check();
    }

    /// Forgets a request to end the process that came while the guest was elsewhere, or may have
    /// been.
    pub(crate) fn forget_quit(&self) {
        self.quit_early.store(false, Ordering::Release);
        self.quit.store(false, Ordering::Release);
    }

    /// If this process was told to end before its guest arrived or came back, asks the guest to
    /// shut down, as the first SIGTERM does. Without this, the only copy of the guest would end at
    /// once.
    pub(crate) fn take_early_quit(&self) {
        let place = lock(&self.place);
        let here = matches!(*place, GuestPlace::Running | GuestPlace::Paused);
        if !here || !self.quit_early.swap(false, Ordering::AcqRel) {
            return;
        }
        self.quit.store(false, Ordering::Release);
        drop(place);
        let asked = match press_power_button(self) {
            Ok(()) => "it was asked to shut down".to_owned(),
            Err(why) => format!("it was not asked to shut down, because {why:#}"),
        };
        eprintln!(
            "vmferry: this process was told to end before its guest was here; {asked}. Tell the process again to end the guest at once"
        );
    }
}
