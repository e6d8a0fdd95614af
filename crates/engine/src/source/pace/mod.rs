//! Rate control of the bulk stream in postcopy: as fast as the link allows, but without a queue
//! that delays the urgent pages.
//!
//! [`Controller`] derives the rate from round trips and acknowledged bytes. It has no clock and no
//! sockets. [`RateControl`] is the loop around the controller: it sends probes, receives their
//! echoes, reads the counters of the sockets, and sets their pacing rate. docs/pace.md explains the
//! reasons.

mod controller;
mod drive;
mod meter;
#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;
mod underway;

pub use controller::Controller;
pub use drive::{Bulk, Figures, Probe, RateControl, TcpBulk};
use std::time::Duration;

/// Measurements since the last call of [`Controller::observe`].
#[derive(Debug, Clone, Copy)]
pub struct Observation<'a> {
    /// Current time, measured from an arbitrary origin. It must never go back.
    pub now: Duration,
    /// Round trips of probes and of urgent pages that were completed since the last call.
    pub round_trips: &'a [Duration],
    /// Age of the oldest probe that the peer's kernel has not acknowledged, as far as the sender
    /// can know. Zero if too few probes are overdue.
    pub waiting: Duration,
    /// Number of bulk bytes that the peer has acknowledged since the beginning, on all channels.
    /// Number of bytes written, if the kernel does not count acknowledged bytes.
    pub acknowledged: u64,
    /// True if there is bulk to send. Without bulk, the acknowledged bytes say nothing about the
    /// link.
    pub wanting: bool,
}

/// Decision of the controller for the time until the next call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// Rate of all bulk channels together, in bytes per second without headers.
    pub rate: u64,
    /// Phase of the controller, for reports.
    pub phase: Phase,
}

/// Phase of the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The rate of the link is unknown. The rate is raised fast until a queue forms.
    Startup,
    /// There is no queue. The rate is raised slowly up to the level at which a queue formed last,
    /// and ever faster beyond.
    Climb,
    /// There is a short queue. The controller waits to find out whether the queue stays, and until
    /// all streams on the link have seen the queue.
    Hold,
    /// There is a long queue. The rate is low until the queue has drained.
    Drain,
    /// There is a queue that does not drain, whatever the rate is, because another stream fills it.
    /// The bulk keeps its minimum share.
    Contended,
}
