//! Wait for the reason of a peer that has closed channels.
//!
//! A peer that ends a migration sends the reason on the control channel, and closes its channels.
//! The thread of another channel often finds the loss before the reader of the control channel has
//! reported the reason. A lost channel is therefore blamed on the link only after this wait.
//!
//! # Why the clock alone must not end the wait
//!
//! On a starved host, the driver's thread can be delayed for longer than [`LIMIT`]. The reason is
//! then in the queue of inputs, and the driver finds that the time has expired before it has read
//! the queue. The driver therefore takes what is queued before it blames the link.
//!
//! A peer that sends without end would keep the queue full. Only [`MOST_INPUTS`] inputs are taken
//! after the deadline, so such a peer delays the end of the wait by the time that handling these
//! inputs takes.

use std::time::Duration;

/// Time for which the driver waits for the reason.
pub(crate) const LIMIT: Duration = Duration::from_millis(500);
/// Maximum number of inputs that the driver takes after the deadline.
///
/// It covers the inputs that can be ahead of the reason when the driver is delayed: a queue of 8
/// inputs, and an input of each thread of 129 channels that waits for room in the queue.
pub(crate) const MOST_INPUTS: u32 = 256;

/// Wait for the peer's reason after the loss of a channel.
#[derive(Debug, Clone)]
pub(crate) struct ReasonWait {
    deadline: Duration,
    /// Description of the loss, for a peer that gave no reason.
    why: String,
    /// Number of inputs that may be taken after the deadline.
    inputs_left: u32,
}

impl ReasonWait {
    /// Begins the wait at `now`, after a loss that `why` describes.
    pub(crate) fn new(now: Duration, why: String) -> Self {
        Self { deadline: now.saturating_add(LIMIT), why, inputs_left: MOST_INPUTS }
    }

    /// Returns true if the time has expired at `now`. Inputs that are queued by then must still be
    /// taken.
    pub(crate) fn is_over(&self, now: Duration) -> bool {
        now >= self.deadline
    }

    /// Returns true if another input may be taken after the deadline, and counts that input.
    pub(crate) fn may_take(&mut self) -> bool {
        let left = self.inputs_left.checked_sub(1);
        self.inputs_left = left.unwrap_or(0);
        left.is_some()
    }

    /// Returns the description of the loss.
    pub(crate) fn into_why(self) -> String {
        self.why
    }
}
