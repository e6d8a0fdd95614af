//! The probes that have no echo yet, and what that says of the link.
//!
//! A probe that stays away was held up by a queue or by the processor that is to send it back. The other side's kernel knows which: it
//! acknowledges what has arrived, whether a process reads it or not.

use std::collections::VecDeque;
use std::time::Duration;

/// Fewer overdue probes say nothing: one alone is overdue whenever our own thread was not run since it sent it. As many as a window
/// of round trips has.
const LEAST_OVERDUE: usize = 3;

/// Probes on their way, in the order in which they were sent. Times are from any beginning.
#[derive(Debug, Default)]
pub(super) struct Underway {
    probes: VecDeque<(u64, Duration)>,
    /// Up to this number, and with it, the other side's kernel has all.
    reached: u64,
}

impl Underway {
    /// How many have no echo.
    pub(super) fn len(&self) -> usize {
        self.probes.len()
    }

    /// `number`, which is above all before, is sent at `now`.
    pub(super) fn sent(&mut self, number: u64, now: Duration) {
        self.probes.push_back((number, now));
    }

    /// When the probe of this echo was sent; it and those before are underway no more. None: it is not underway, so this is somebody's
    /// mistake, or an echo that was echoed.
    pub(super) fn echoed(&mut self, number: u64) -> Option<Duration> {
        // They come in order.
        let index = self.probes.binary_search_by_key(&number, |(number, _)| *number).ok()?;
        let sent = self.probes[index].1;
        self.probes.drain(..=index);
        Some(sent)
    }

    /// All that was sent so far has reached the other side's kernel.
    pub(super) fn all_reached(&mut self) {
        self.reached = self.probes.back().map_or(self.reached, |(number, _)| *number);
    }

    /// For how long the link has had what should long be there: zero while too few are overdue to say so.
    pub(super) fn waiting(&self, now: Duration) -> Duration {
        let mut overdue = self.probes.iter().filter(|(number, _)| *number > self.reached);
        let oldest = overdue.next().map_or(now, |(_, sent)| *sent);
        if overdue.count() + 1 < LEAST_OVERDUE { Duration::ZERO } else { now.saturating_sub(oldest) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn what_the_other_kernel_has_does_not_wait_for_the_link() {
        let mut underway = Underway::default();
        (1..=4).for_each(|number| underway.sent(number, ms(2 * number)));
        assert_eq!(underway.waiting(ms(10)), ms(8));
        underway.all_reached();
        assert_eq!(underway.waiting(ms(10)), ms(0));
        (5..=7).for_each(|number| underway.sent(number, ms(2 * number)));
        assert_eq!(underway.waiting(ms(20)), ms(10), "those that were sent later do");
        assert_eq!(underway.echoed(6), Some(ms(12)));
        assert_eq!((underway.len(), underway.waiting(ms(20))), (1, ms(0)));
        assert_eq!(underway.echoed(6), None);
    }

    #[test]
    fn a_probe_alone_says_nothing() {
        let mut underway = Underway::default();
        underway.sent(1, ms(0));
        underway.sent(2, ms(50));
        assert_eq!(underway.waiting(ms(100)), ms(0));
        underway.sent(3, ms(100));
        assert_eq!(underway.waiting(ms(100)), ms(100));
    }
}
