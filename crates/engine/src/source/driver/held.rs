//! The first pass, while its pages are held back until the guest has named its free pages.

use super::channels::Job;
use super::{Driver, Ordering};
use crate::run::Host;
use crate::source::answer_wait::AnswerWait;
use crate::source::pending::PassPages;
use crate::source::sender::PassKind;
use std::sync::Arc;
use std::time::Duration;

/// First pass that no sender has received yet.
pub(super) struct HeldPass {
    wait: AnswerWait,
    number: u32,
    pages: Arc<PassPages>,
}

impl Driver<'_, '_> {
    /// Holds `pages` back while the guest still has to answer the question of the pass. If there is
    /// nothing to wait for, passes the pages to the senders at once.
    ///
    /// Only the senders wait. The driver handles messages, pings and requests as usual.
    pub(super) fn hold(&mut self, number: u32, pages: Arc<PassPages>) {
        self.context.handle.begin_pass(number, pages.pages());
        let (limit, awaits_guest) = (self.context.settings.free_pages_wait, self.pages.awaits_guest());
        match AnswerWait::begin(self.now(), limit, awaits_guest) {
            Some(wait) => self.held = Some(HeldPass { wait, number, pages }),
            None => self.give_out_first(number, pages),
        }
    }

    /// Continues to skip free pages, for about a millisecond, and ends the wait of a held pass when
    /// the wait is over. Returns the time after which this function must be called again.
    pub(super) fn skip_free_pages(&mut self) -> Duration {
        let idle = self.pages.leave_out_free(self.tracking.protect(), self.context);
        let Some(held) = &self.held else { return idle };
        match held.wait.left(self.now(), self.pages.awaits_guest()) {
            Some(left) => idle.min(left),
            None => {
                self.release_held();
                idle
            }
        }
    }

    /// Ends the wait of a held pass, if there is one, and passes its pages to the senders.
    pub(super) fn release_held(&mut self) {
        let Some(HeldPass { wait, number, pages }) = self.held.take() else { return };
        let waited = wait.waited(self.now());
        self.pages.held_back(waited, self.context.handle);
        // The migration may have ended during the wait. Its senders are then about to end, too.
        if !self.context.stop.load(Ordering::Acquire) {
            self.account.timings.held_back(waited);
            self.give_out_first(number, pages);
        }
    }

    fn give_out_first(&mut self, number: u32, pages: Arc<PassPages>) {
        self.account.timings.begin_pass(number, pages.pages(), self.context.handle);
        self.give_out(&Job::Pages { pass: number, pages, kind: PassKind::First, guest_runs: true });
    }
}
