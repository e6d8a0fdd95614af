//! Target's part of measuring a link: receives frames like those of a pass, into memory that is
//! dropped afterwards.
//!
//! Because the peer has not proved that it belongs to a migration, its use of resources is bounded:
//! the number of channels at the same time, and the bytes and the time of each channel. The VM and
//! its memory are not used.

use super::frames::FrameSource;
use super::receiver::{Arrivals, Mark, ReceiveError, Receiver};
use crate::channel::{Greeted, IoBuf, Stream, answer};
use crate::scratch::Scratch;
use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use vmferry_wire::{RefusalCode, Request};

/// Maximum number of channels that are measured at the same time, of all peers together.
const MOST_CHANNELS: usize = 8;
/// Maximum duration of one measurement.
const LONGEST: Duration = Duration::from_secs(10);
/// Maximum time for which the peer does not take an answer.
const SILENCE: Duration = Duration::from_secs(2);
/// Maximum number of bytes of one measurement.
const MOST_BYTES: usize = 256 << 20;

/// Number of channels that are being measured.
#[derive(Debug, Clone, Default)]
pub(super) struct Measuring(Arc<AtomicUsize>);

/// Guard that counts one channel that is being measured, until it is dropped.
struct MeasurementSlot(Arc<AtomicUsize>);

impl Drop for MeasurementSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Measuring {
    /// Serves a channel on a thread of its own, or refuses it.
    pub(super) fn take(&self, incoming: Greeted) {
        let free = self.0.fetch_add(1, Ordering::AcqRel) < MOST_CHANNELS;
        let slot = MeasurementSlot(Arc::clone(&self.0));
        let serve = move || {
            let verdict = if free { Ok(()) } else { Err(RefusalCode::Busy) };
            let peer = incoming.stream.peer.clone();
            let done = answer(&incoming.stream, &incoming.hello, verdict).map_err(ReceiveError::from);
            if let Err(error) = done.and_then(|()| if free { serve(&incoming.stream) } else { Ok(()) }) {
                tracing::debug!("{peer}: a measurement ended: {error}");
            }
            drop(slot);
        };
        if let Err(error) = vmferry_thread::spawn(vmferry_thread::Role::Receiver, "target-measure", serve) {
            tracing::warn!("a measurement was refused: its thread could not be started: {error}");
        }
    }
}

/// Receives frames, and confirms each barrier after all frames before it.
fn serve(stream: &Stream) -> Result<(), ReceiveError> {
    stream.set_timeouts(None, Some(SILENCE))?;
    let scratch = Scratch::new().map_err(io::Error::other)?;
    let arrivals = Arrivals::new(scratch.memory());
    let bounded = Bounded { stream, until: Instant::now() + LONGEST, left: Cell::new(MOST_BYTES) };
    let mut receiver = Receiver::new(scratch.memory(), &arrivals, bounded);
    loop {
        let Mark::Barrier(pass) = receiver.receive()? else { return Ok(()) };
        let answer = Request::Echo { number: pass.into(), held_ns: 0 }.encode();
        stream.send(&mut [IoBuf::from_bytes(&answer)]).map_err(|failed| failed.error)?;
    }
}

/// Stream that ends after a time limit and a byte limit.
struct Bounded<'a> {
    stream: &'a Stream,
    until: Instant,
    left: Cell<usize>,
}

impl FrameSource for Bounded<'_> {
    fn fill(&self, bufs: &mut [IoBuf<'_>]) -> io::Result<()> {
        let bytes = bufs.iter().map(IoBuf::len).sum();
        let Some(left) = self.left.get().checked_sub(bytes).filter(|_| Instant::now() < self.until) else {
            return Err(io::Error::other(format!(
                "the measurement sent more than {MOST_BYTES} bytes, or took longer than {LONGEST:?}"
            )));
        };
        self.left.set(left);
        self.stream.receive_before(bufs, self.until)
    }
}
