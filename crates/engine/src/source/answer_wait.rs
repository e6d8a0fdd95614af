//! Bounded wait for the guest's answer about free pages, before the first page is sent.
//!
//! A guest that answers itself first walks its free lists. Without a wait, the senders send pages
//! during that time, and some of these pages are free. On a fast link the first pass can end before
//! the answer arrives. The wait trades a later first page for fewer pages.

use std::time::Duration;

/// Wait for the answer to the question of a pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AnswerWait {
    began: Duration,
    limit: Duration,
}

impl AnswerWait {
    /// Begins a wait of at most `limit` at `now`. Returns `None` if there is nothing to wait for:
    /// `awaits_guest` is false, or `limit` is 0.
    pub(crate) fn begin(now: Duration, limit: Duration, awaits_guest: bool) -> Option<Self> {
        (awaits_guest && !limit.is_zero()).then_some(Self { began: now, limit })
    }

    /// Returns the time that is left at `now`. `None` if the wait is over, because the guest has no
    /// question left to answer (`awaits_guest` is false) or because the limit has passed.
    pub(crate) fn left(self, now: Duration, awaits_guest: bool) -> Option<Duration> {
        let left = self.limit.saturating_sub(self.waited(now));
        (awaits_guest && !left.is_zero()).then_some(left)
    }

    /// Returns the time since the beginning of the wait.
    pub(crate) fn waited(self, now: Duration) -> Duration {
        now.saturating_sub(self.began)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn there_is_no_wait_without_a_question_or_a_limit() {
        assert!(AnswerWait::begin(ms(5), ms(50), false).is_none());
        assert!(AnswerWait::begin(ms(5), Duration::ZERO, true).is_none());
    }

    #[test]
    fn wait_ends_with_the_answer_and_at_its_limit() {
        let wait = AnswerWait::begin(ms(5), ms(50), true).unwrap();
        assert_eq!(wait.left(ms(5), true), Some(ms(50)));
        assert_eq!(wait.left(ms(54), true), Some(ms(1)));
        assert_eq!(wait.left(ms(6), false), None, "the guest has answered");
        assert_eq!(wait.left(ms(55), true), None, "the limit has passed");
        assert_eq!(wait.left(ms(1000), true), None);
        assert_eq!(wait.waited(ms(35)), ms(30));
    }
}
