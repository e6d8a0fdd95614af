//! End of the process.

use super::{GuestPlace, RunContext, lock};
use std::sync::atomic::Ordering;

impl RunContext {
    /// Returns why the process ends, by the reason's QMP name.
    pub(crate) fn quit_reason(&self) -> &'static str {
        *lock(&self.quit_reason)
    }

    /// Ends the process as soon as its guest allows it, for `reason`.
    pub(crate) fn request_quit(&self, reason: &'static str) {
        *lock(&self.quit_reason) = reason;
        if self.handed_over() {
            eprintln!(
                "vmferry: the guest runs at the target and still needs pages that only this process has; this process ends when the target has \
                 all, or with `vmferry recover --abandon` if the link is lost"
            );
        }
        if self.place() == GuestPlace::Moving && !self.handed_over() {
            eprintln!(
                "vmferry: the guest is being migrated; this process ends when the migration has ended, and the guest ends too if it has not \
                 moved (`vmferry cancel` ends both now)"
            );
        }
        self.quit.store(true, Ordering::Release);
        self.arrival.abandon();
        self.request_check();
    }
}
