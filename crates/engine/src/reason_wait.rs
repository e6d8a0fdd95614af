//! Wait for the reason with which a peer has closed its channels.
//!
//! A peer that ends a migration sends the reason on the control channel, and then closes its
//! channels. The thread of another channel often notices the loss before the reader of the control
//! channel has reported the reason. Therefore, the driver waits for the reason before it reports
//! that the link has failed.
//!
//! # Why the clock alone must not end the wait
//!
//! On an overloaded host, the driver's thread can be delayed for longer than [`LIMIT`]. The time
//! has then expired before the driver has read the queue of inputs, although the reason is in that
//! queue. Therefore, the driver takes all queued inputs before it reports that the link has failed.
//!
//! A peer that sends without end could keep the queue full. Therefore, only [`MOST_INPUTS`] inputs
//! are taken after the deadline, and such a peer can delay the end of the wait only by the time
//! that handling these inputs takes.

use std::time::Duration;

/// Time for which the driver waits for the reason.
pub(crate) const LIMIT: Duration = Duration::from_millis(500);
/// Maximum number of inputs that the driver takes after the deadline.
///
/// This number covers the inputs that can be ahead of the reason when the driver is delayed: the 8
/// inputs of the queue, and one input of each of the threads of 129 channels, which wait for room
/// in the queue.
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
