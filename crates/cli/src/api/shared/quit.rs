//! Ending the process.

use super::{Place, Shared, lock};
use std::sync::atomic::Ordering;

impl Shared {
    /// Why the process ends, by the protocol's name.
    pub(crate) fn quit_reason(&self) -> &'static str {
        *lock(&self.quit_reason)
    }

    /// Ends the process as soon as its guest allows it, for `reason`.
    pub(crate) fn ask_to_quit(&self, reason: &'static str) {
        *lock(&self.quit_reason) = reason;
        if self.handed_over() {
            eprintln!(
                "vmferry: the guest runs on the target and still needs pages that are here only; this process ends when it has \
                 all, or with `vmferry recover --abandon` if its link is lost"
            );
        }
        if self.place() == Place::Moving && !self.handed_over() {
            eprintln!(
                "vmferry: the guest is being moved; this process ends when that is over, and its guest with it if it has not left \
                 (`vmferry cancel` ends both now)"
            );
        }
        self.quit.store(true, Ordering::Release);
        self.arrival.abandon();
        self.look();
    }
}
