//! Frames from the guest.

use super::device::{Net, NetControl, NetState, lock};
use super::metrics::add;
use super::slices::{self, Slice};
use super::{ETHERNET, FRAME_MAX, FramePort, HEADER, PortError, TX};
use crate::device::Progress;
use crate::mmio::MmioTransport;
use crate::queue::{Buffer, PORTION, Part, RingError, VirtQueue};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vm_memory::{GuestMemory, VolatileSlice};

/// Result of a transmit step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum TxStep {
    /// The queue is empty, and the driver notifies when it is not.
    Done,
    /// More frames may be in the queue.
    More,
    /// The port has no room at the moment.
    Busy,
    /// No driver is ready.
    Off,
    /// The port no longer exists, and frames are lost.
    Gone,
}

/// Frame that was taken out of the queue.
#[derive(Debug, Clone, Copy)]
struct Chain {
    head: u16,
    /// Index of the frame's first part in the list of all parts, and the number of its parts; 0 if
    /// the chain is not a frame.
    first: usize,
    parts: usize,
    bytes: usize,
}

/// Carrier of frames from the driver to the port.
#[derive(Debug)]
pub struct Transmitter<P> {
    control: NetControl<P>,
    epoch: u64,
    chains: Vec<Chain>,
    parts: Vec<Part>,
    buffer: Buffer,
    used: Vec<(u16, u32)>,
    scratch: Vec<u8>,
}

impl<P: FramePort> Transmitter<P> {
    /// Returns the transmitter for the device of `control`.
    #[must_use]
    pub fn new(control: NetControl<P>) -> Self {
        Self {
            control,
            epoch: 0,
            chains: Vec::new(),
            parts: Vec::new(),
            buffer: Buffer::default(),
            used: Vec::new(),
            scratch: Vec::new(),
        }
    }

    /// Sends a portion of the frames in the queue. After this call, the transmitter holds no buffer
    /// of the driver.
    ///
    /// If `sheltered` is true, because pages of guest memory may be missing, a frame is copied
    /// before it is sent. If such a guest is ended, the threads that wait for its pages wake and
    /// find other content in them. The frame is not sent then, because the device is
    /// [halted](NetControl::halt) before.
    pub fn transmit<M: GuestMemory>(
        &mut self,
        transport: &MmioTransport<Net<P>>,
        memory: &M,
        sheltered: bool,
    ) -> TxStep {
        let shared = Arc::clone(self.control.shared());
        let taken = transport.with_queue(TX, |queue| {
            self.take(&shared, queue, memory)?;
            Ok(lock(&shared.way))
        });
        let Some(way) = taken else { return TxStep::Off };
        let (sent, step) = self.carry(&shared, memory, sheltered);
        drop(way);
        let given = transport.with_queue(TX, |queue| self.give(&shared, queue, memory, sent, step));
        given.unwrap_or(TxStep::Off)
    }

    fn take<M: GuestMemory>(
        &mut self,
        shared: &NetState<P>,
        queue: &mut VirtQueue,
        memory: &M,
    ) -> Result<(), RingError> {
        self.chains.clear();
        self.parts.clear();
        self.epoch = shared.epoch.load(Ordering::Acquire);
        queue.quiet(memory)?;
        while self.chains.len() < PORTION as usize && queue.pop(memory, &mut self.buffer)? {
            let (head, parts) = (self.buffer.head(), self.buffer.parts());
            let bytes = usize::try_from(slices::total(parts)).unwrap_or(usize::MAX);
            let frame = HEADER + ETHERNET..=FRAME_MAX;
            let (first, mut count) = (self.parts.len(), 0);
            if frame.contains(&bytes) && slices::sound(memory, parts, false) {
                self.parts.extend(parts.iter().filter(|part| part.len > 0));
                count = self.parts.len() - first;
            }
            self.chains.push(Chain { head, first, parts: count, bytes });
        }
        Ok(())
    }

    /// Sends the frames that were taken. Returns the number of chains that are done.
    fn carry<M: GuestMemory>(
        &mut self,
        shared: &NetState<P>,
        memory: &M,
        sheltered: bool,
    ) -> (usize, TxStep) {
        let metrics = &shared.metrics;
        let mut pieces: Vec<Slice<'_, M>> = Vec::new();
        let mut gone = false;
        for (sent, chain) in self.chains.iter().enumerate() {
            if shared.halted() {
                return (sent, TxStep::More);
            }
            if chain.parts == 0 {
                add(&metrics.tx_malformed, 1);
                continue;
            }
            pieces.clear();
            for part in &self.parts[chain.first..chain.first + chain.parts] {
                slices::push(memory, part, &mut pieces);
            }
            let result = if sheltered {
                self.scratch.resize(chain.bytes, 0);
                slices::read(&pieces, 0, &mut self.scratch);
                if shared.halted() {
                    return (sent, TxStep::More);
                }
                shared.port.send(&[VolatileSlice::from(&mut self.scratch[..])])
            } else {
                shared.port.send(&pieces)
            };
            match result {
                Ok(()) => {
                    add(&metrics.tx_frames, 1);
                    add(&metrics.tx_bytes, (chain.bytes - HEADER) as u64);
                }
                Err(PortError::NotNow) => {
                    add(&metrics.tx_busy, 1);
                    return (sent, TxStep::Busy);
                }
                Err(PortError::Refused(error)) => {
                    tracing::trace!(%error, "a frame of the guest's is lost");
                    add(&metrics.tx_refused, 1);
                }
                Err(PortError::Gone(_)) => {
                    add(&metrics.tx_refused, 1);
                    gone = true;
                }
            }
        }
        (self.chains.len(), if gone { TxStep::Gone } else { TxStep::More })
    }

    /// Gives back the buffers that were sent, and puts back the rest.
    fn give<M: GuestMemory>(
        &mut self,
        shared: &NetState<P>,
        queue: &mut VirtQueue,
        memory: &M,
        sent: usize,
        step: TxStep,
    ) -> Result<TxStep, RingError> {
        if shared.epoch.load(Ordering::Acquire) != self.epoch {
            // The buffers belonged to another driver.
            return Ok(TxStep::More);
        }
        let (done, rest) = self.chains.split_at(sent);
        queue.put_back(u16::try_from(rest.len()).unwrap_or(u16::MAX));
        self.used.clear();
        self.used.extend(done.iter().map(|chain| (chain.head, 0)));
        if !done.is_empty() {
            queue.give_back_all(memory, &self.used)?;
            if queue.wants_interrupt(memory)? {
                shared.signals.used_buffer();
            }
        }
        if step == TxStep::Busy || !rest.is_empty() || done.len() == PORTION as usize {
            return Ok(step);
        }
        Ok(match (queue.empty(memory)?, step) {
            (_, TxStep::Gone) => TxStep::Gone,
            (Progress::More, _) => TxStep::More,
            (Progress::Done, _) => TxStep::Done,
        })
    }
}
