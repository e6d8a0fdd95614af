//! Probes without an echo, and the delay of the link that they show.
//!
//! An echo may be missing because of a queue on the link, or because of a busy processor of the
//! peer. The acknowledgements of the peer's kernel distinguish these cases, because the kernel
//! acknowledges bytes that have arrived even if no process reads them.

use std::collections::VecDeque;
use std::time::Duration;

/// Minimum number of overdue probes that counts as a queue. It is the number of probes in a window
/// of round trips. A single probe does not suffice, because one is overdue whenever the sending
/// thread was not scheduled after it had sent the probe.
const LEAST_OVERDUE: usize = 3;

/// Probes without an echo, in the order in which they were sent. Times are measured from an
/// arbitrary origin.
#[derive(Debug, Default)]
pub(super) struct ProbesInFlight {
    probes: VecDeque<(u64, Duration)>,
    /// Number of the last probe that the peer's kernel has acknowledged, together with all probes
    /// before it.
    reached: u64,
}

impl ProbesInFlight {
    /// Returns the number of probes without an echo.
    pub(super) fn len(&self) -> usize {
        self.probes.len()
    }

    /// Notes that probe `number` is sent at `now`. `number` must be larger than all numbers before.
    pub(super) fn sent(&mut self, number: u64, now: Duration) {
        self.probes.push_back((number, now));
    }

    /// Takes the probe that an echo belongs to, and all probes before it. Returns the time at which
    /// the probe was sent.
    ///
    /// Returns `None` if the probe is not outstanding: the echo is a duplicate, or an error of the
    /// peer.
    pub(super) fn echoed(&mut self, number: u64) -> Option<Duration> {
        // Probes are numbered in ascending order.
        let index = self.probes.binary_search_by_key(&number, |(number, _)| *number).ok()?;
        let sent = self.probes[index].1;
        self.probes.drain(..=index);
        Some(sent)
    }

    /// Notes that the peer's kernel has acknowledged all probes so far.
    pub(super) fn all_reached(&mut self) {
        self.reached = self.probes.back().map_or(self.reached, |(number, _)| *number);
    }

    /// Returns the age of the oldest probe that the peer's kernel has not acknowledged. Returns
    /// zero if fewer than [`LEAST_OVERDUE`] such probes exist.
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
    fn acknowledged_probe_does_not_wait_for_the_link() {
        let mut underway = ProbesInFlight::default();
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
    fn one_or_two_overdue_probes_are_no_queue() {
        let mut underway = ProbesInFlight::default();
        underway.sent(1, ms(0));
        underway.sent(2, ms(50));
        assert_eq!(underway.waiting(ms(100)), ms(0));
        underway.sent(3, ms(100));
        assert_eq!(underway.waiting(ms(100)), ms(100));
    }
}
