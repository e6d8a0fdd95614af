//! The pace of the bulk stream: as fast as the link carries, and never so fast that a queue forms before the urgent
//! pages.
//!
//! [`Controller`] decides, from round trips and acknowledged bytes; it has no clock and no sockets. [`Pace`] is the loop
//! around it: probes, their echoes, the sockets' counters and their pacing rate. docs/pace.md has the reasons.

mod controller;
mod drive;
mod meter;
#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;
mod underway;

pub use controller::Controller;
pub use drive::{Bulk, Figures, Pace, Probe, TcpBulk};
use std::time::Duration;

/// What was seen since the last call.
#[derive(Debug, Clone, Copy)]
pub struct Observation<'a> {
    /// The time, from any beginning, never going back.
    pub now: Duration,
    /// The round trips that were completed since the last call, of probes and of urgent pages.
    pub round_trips: &'a [Duration],
    /// For how long the oldest probe has been on its way that the other side's kernel does not have, as far as that is known; zero if
    /// there are too few to say that it is late.
    pub waiting: Duration,
    /// Bytes of bulk that the peer has acknowledged, of all channels, since the beginning (where the kernel does not say:
    /// bytes written).
    pub acknowledged: u64,
    /// There is bulk to send. What is acknowledged meanwhile says nothing about the link otherwise.
    pub wanting: bool,
}

/// What to do until the next call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// For all bulk channels together, in bytes a second without headers.
    pub rate: u64,
    /// Why, for reports.
    pub phase: Phase,
}

/// What the controller is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The link's rate is unknown: raise fast until a queue forms.
    Startup,
    /// No queue: raise, slowly up to where a queue formed last, faster and faster beyond.
    Climb,
    /// A short queue: wait whether it stays, and until everybody who shares the link has seen it, too.
    Hold,
    /// A long queue: let it run off.
    Drain,
    /// A queue that does not run off whatever we do: somebody else fills it. Insist on the minimum share.
    Contended,
}
