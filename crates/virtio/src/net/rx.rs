//! Frames to the guest.

use super::device::{Net, NetControl, NetState, lock};
use super::metrics::add;
use super::slices::{self, Slice};
use super::{ETHERNET, FRAME_MAX, FramePort, HEADER, MTU, PortError, RX};
use crate::device::Progress;
use crate::mmio::MmioTransport;
use crate::queue::{Buffer, PORTION, Part, RingError, VirtQueue};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use virtio_bindings::virtio_net as net;
use vm_memory::bitmap::BitmapSlice;
use vm_memory::{GuestMemory, VolatileSlice};

/// Maximum number of parts for which buffers are taken: enough for a frame of 64 KiB in parts of
/// 128 bytes.
const PARTS: usize = 512;

/// Time for which a frame waits for room before it is dropped. A working driver adds buffers as
/// soon as it is interrupted. If a driver keeps too few buffers for a frame, it would never receive
/// another frame without this limit.
const GIVE_UP: Duration = Duration::from_secs(1);

/// Result of a receive step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum RxStep {
    /// No frame waits at the port.
    Dry,
    /// More frames may be waiting.
    More,
    /// The driver has no room, and will notify when it has. If a frame is held meanwhile, it is
    /// dropped at the given time.
    Full(Option<Instant>),
    /// No driver is ready.
    Off,
    /// The port no longer exists.
    Gone,
}

/// Buffer that was taken and is not used yet.
#[derive(Debug, Clone, Copy)]
struct PostedBuffer {
    head: u16,
    parts: usize,
    bytes: usize,
}

/// Next frame on its way to the guest.
enum Next {
    /// A frame of this many bytes is in the driver's buffers.
    Placed(usize),
    /// A frame is held in `scratch`.
    Held,
    /// A frame was lost.
    Lost,
    /// There is no frame, for this reason.
    None(RxStep),
}

/// Terms that a driver agreed to.
#[derive(Debug, Clone, Copy)]
struct Terms {
    /// True if a frame may occupy several buffers.
    mergeable: bool,
    /// Maximum size of a frame in bytes, header included.
    longest: usize,
    csum: bool,
    tso4: bool,
    tso6: bool,
    ecn: bool,
}

impl Terms {
    fn of<P: FramePort>(shared: &NetState<P>) -> Self {
        let csum = shared.has(net::VIRTIO_NET_F_GUEST_CSUM);
        let tso4 = csum && shared.has(net::VIRTIO_NET_F_GUEST_TSO4);
        let tso6 = csum && shared.has(net::VIRTIO_NET_F_GUEST_TSO6);
        let packet = HEADER + ETHERNET + 8 + usize::from(shared.options().mtu.max(MTU));
        Self {
            mergeable: shared.has(net::VIRTIO_NET_F_MRG_RXBUF),
            longest: if tso4 || tso6 { FRAME_MAX } else { packet },
            csum,
            tso4,
            tso6,
            ecn: csum && shared.has(net::VIRTIO_NET_F_GUEST_ECN),
        }
    }

    /// Returns true if a frame may have a header that begins with `flags` and `gso` (5.1.6.4.1).
    /// The offloads can change while frames wait.
    fn allow(self, [flags, gso]: [u8; 2]) -> bool {
        let (flags, gso) = (u32::from(flags), u32::from(gso));
        let kind = match gso & !net::VIRTIO_NET_HDR_GSO_ECN {
            net::VIRTIO_NET_HDR_GSO_NONE => true,
            net::VIRTIO_NET_HDR_GSO_TCPV4 => self.tso4,
            net::VIRTIO_NET_HDR_GSO_TCPV6 => self.tso6,
            _ => false,
        };
        let ecn = gso & net::VIRTIO_NET_HDR_GSO_ECN == 0 || self.ecn;
        kind && ecn && (self.csum || flags & net::VIRTIO_NET_HDR_F_NEEDS_CSUM == 0)
    }
}

/// Carrier of frames from the port to the driver.
#[derive(Debug)]
pub struct Receiver<P> {
    control: NetControl<P>,
    epoch: u64,
    /// Buffers in the order in which they were taken. They are used in this order, so that the last
    /// ones can be put back.
    posted: VecDeque<PostedBuffer>,
    /// Parts of the buffers: `parts.len() == sum of posted.parts`.
    parts: VecDeque<Part>,
    /// Room in bytes: `room == sum of posted.bytes`.
    room: usize,
    buffer: Buffer,
    used: Vec<(u16, u32)>,
    scratch: Vec<u8>,
    /// Size of the frame in `scratch`, and the time at which it arrived.
    held: Option<(usize, Instant)>,
}

impl<P: FramePort> Receiver<P> {
    /// Returns the receiver for the device of `control`.
    #[must_use]
    pub fn new(control: NetControl<P>) -> Self {
        Self {
            control,
            epoch: 0,
            posted: VecDeque::new(),
            parts: VecDeque::new(),
            room: 0,
            buffer: Buffer::default(),
            used: Vec::new(),
            scratch: vec![0; FRAME_MAX],
            held: None,
        }
    }

    /// Carries a portion of the frames that wait at the port.
    ///
    /// If `sheltered` is true, because pages of guest memory may be missing, frames are first
    /// received into a buffer of the VMM. Otherwise a system call could wait for a missing page,
    /// and such a wait cannot be interrupted.
    pub fn receive<M: GuestMemory>(
        &mut self,
        transport: &MmioTransport<Net<P>>,
        memory: &M,
        sheltered: bool,
    ) -> RxStep {
        let shared = Arc::clone(self.control.shared());
        let taken = transport.with_queue(RX, |queue| {
            self.take(&shared, queue, memory)?;
            Ok(lock(&shared.way))
        });
        let Some(way) = taken else {
            self.forget();
            return RxStep::Off;
        };
        let step = self.carry(&shared, memory, sheltered);
        drop(way);
        let given = transport.with_queue(RX, |queue| self.give(&shared, queue, memory, step));
        given.unwrap_or_else(|| {
            self.forget();
            RxStep::Off
        })
    }

    /// Puts back the buffers that were taken and not used. A frame that waits for room stays,
    /// because it belongs to the network of this host.
    pub fn park(&mut self, transport: &MmioTransport<Net<P>>) {
        let shared = Arc::clone(self.control.shared());
        let count = u16::try_from(self.posted.len()).unwrap_or(u16::MAX);
        let held = self.held;
        transport.with_queue(RX, |queue| {
            if shared.epoch.load(Ordering::Acquire) == self.epoch {
                queue.put_back(count);
            }
            Ok(())
        });
        self.forget();
        self.held = held;
    }

    /// Drops all buffers of a driver that is gone.
    fn forget(&mut self) {
        self.posted.clear();
        self.parts.clear();
        self.used.clear();
        self.room = 0;
        self.held = None;
    }

    /// Takes buffers until there are enough for a portion, and for any frame after it.
    fn take<M: GuestMemory>(
        &mut self,
        shared: &NetState<P>,
        queue: &mut VirtQueue,
        memory: &M,
    ) -> Result<(), RingError> {
        let epoch = shared.epoch.load(Ordering::Acquire);
        if self.epoch != epoch {
            self.forget();
            self.epoch = epoch;
        }
        queue.quiet(memory)?;
        let terms = Terms::of(shared);
        let least = if terms.mergeable { HEADER } else { HEADER + ETHERNET };
        let mut looked = 0;
        while looked < PARTS
            && self.parts.len() < PARTS
            && (self.posted.len() < PORTION as usize || terms.mergeable && self.room < terms.longest)
        {
            if !queue.pop(memory, &mut self.buffer)? {
                break;
            }
            looked += 1;
            let (head, parts) = (self.buffer.head(), self.buffer.parts());
            let bytes = usize::try_from(slices::total(parts)).unwrap_or(usize::MAX);
            if bytes < least || !slices::sound(memory, parts, true) {
                add(&shared.metrics.rx_malformed, 1);
                self.refuse(head);
                continue;
            }
            // A buffer beyond the size of any frame is never used completely. The limit keeps sums
            // small.
            let bytes = bytes.min(FRAME_MAX);
            let before = self.parts.len();
            self.parts.extend(parts.iter().filter(|part| part.len > 0));
            self.posted.push_back(PostedBuffer { head, parts: self.parts.len() - before, bytes });
            self.room += bytes;
        }
        self.hand_back(shared, queue, memory)
    }

    /// Refuses the buffer at `head`. The buffers before it are given back unused as well, because
    /// [put back](VirtQueue::put_back) works only on the buffers that were taken last.
    fn refuse(&mut self, head: u16) {
        self.used.extend(self.posted.drain(..).map(|posted| (posted.head, 0)));
        self.used.push((head, 0));
        self.parts.clear();
        self.room = 0;
    }

    fn hand_back<M: GuestMemory>(
        &mut self,
        shared: &NetState<P>,
        queue: &mut VirtQueue,
        memory: &M,
    ) -> Result<(), RingError> {
        if !self.used.is_empty() {
            queue.give_back_all(memory, &self.used)?;
            self.used.clear();
            if queue.wants_interrupt(memory)? {
                shared.signals.used_buffer();
            }
        }
        Ok(())
    }

    fn give<M: GuestMemory>(
        &mut self,
        shared: &NetState<P>,
        queue: &mut VirtQueue,
        memory: &M,
        step: RxStep,
    ) -> Result<RxStep, RingError> {
        if shared.epoch.load(Ordering::Acquire) != self.epoch {
            self.forget();
            return Ok(RxStep::More);
        }
        self.hand_back(shared, queue, memory)?;
        if matches!(step, RxStep::Full(_)) {
            add(&shared.metrics.rx_full, 1);
            // Buffers that would exceed the maximum number of parts stay in the queue and do not
            // count as room.
            if queue.empty(memory)? == Progress::More && self.parts.len() < PARTS {
                return Ok(RxStep::More);
            }
        }
        Ok(step)
    }

    /// Carries frames into the buffers that were taken.
    fn carry<M: GuestMemory>(&mut self, shared: &NetState<P>, memory: &M, sheltered: bool) -> RxStep {
        let terms = Terms::of(shared);
        let mut pieces: Vec<Slice<'_, M>> = Vec::with_capacity(self.parts.len());
        // Index of the last piece of each buffer, plus one.
        let mut ends = Vec::with_capacity(self.posted.len());
        let mut parts = self.parts.iter();
        for posted in &self.posted {
            parts.by_ref().take(posted.parts).for_each(|part| slices::push(memory, part, &mut pieces));
            ends.push(pieces.len());
        }
        let (mut from, mut buffers) = (0, 0);
        for _ in 0..PORTION {
            if shared.halted() {
                break;
            }
            // Pieces that the next frame may use: all, or those of the next buffer.
            let end = if terms.mergeable { pieces.len() } else { ends.get(buffers).copied().unwrap_or(from) };
            let bytes = match self.next(shared, terms, &pieces[from..end], sheltered) {
                Next::Placed(bytes) => bytes,
                Next::Held => match self.unload(shared, terms, &pieces[from..end]) {
                    Some(bytes) => bytes,
                    None if self.held.is_none() => continue,
                    None => return RxStep::Full(self.held.map(|(_, since)| since + GIVE_UP)),
                },
                Next::Lost => continue,
                Next::None(step) => return step,
            };
            if !terms.csum {
                // 5.1.6.4.1: such a driver is not even told that the host has checked the checksum.
                slices::write(&pieces[from..end], 0, &[0]);
            }
            let used = self.consume(bytes);
            slices::write(&pieces[from..end], HEADER - 2, &used.to_le_bytes());
            buffers += usize::from(used);
            from = ends[buffers - 1];
            add(&shared.metrics.rx_frames, 1);
            add(&shared.metrics.rx_bytes, (bytes - HEADER) as u64);
        }
        RxStep::More
    }

    /// Receives the next frame, into `pieces` if any frame fits there.
    fn next<B: BitmapSlice>(
        &mut self,
        shared: &NetState<P>,
        terms: Terms,
        pieces: &[VolatileSlice<'_, B>],
        sheltered: bool,
    ) -> Next {
        if self.held.is_some() {
            return Next::Held;
        }
        let Some(first) = self.posted.front() else { return Next::None(RxStep::Full(None)) };
        let room = if terms.mergeable { self.room } else { first.bytes };
        let direct = room >= terms.longest && !sheltered;
        let result = if direct {
            let result = shared.port.receive(pieces);
            let written = match &result {
                Ok(got) => got.bytes,
                Err(PortError::NotNow) => 0,
                // The number of bytes that were written is unknown.
                Err(_) => FRAME_MAX,
            };
            slices::mark(pieces, written);
            result
        } else {
            shared.port.receive(&[VolatileSlice::from(&mut self.scratch[..])])
        };
        let got = match result {
            Ok(got) => got,
            Err(PortError::NotNow) => return Next::None(RxStep::Dry),
            Err(PortError::Refused(error)) => {
                tracing::trace!(%error, "a frame for the guest is lost");
                return Next::Lost;
            }
            Err(PortError::Gone(_)) => return Next::None(RxStep::Gone),
        };
        let metrics = &shared.metrics;
        if got.cut || !(HEADER + ETHERNET..=FRAME_MAX).contains(&got.bytes) {
            add(&metrics.rx_too_long, 1);
            return Next::Lost;
        }
        let mut head = [0; 2];
        if direct {
            // The guest may have changed the header by now, which only harms the guest.
            slices::read(pieces, 0, &mut head);
        } else {
            head.copy_from_slice(&self.scratch[..2]);
        }
        if !terms.allow(head) {
            add(&metrics.rx_unwanted, 1);
            return Next::Lost;
        }
        if direct {
            return Next::Placed(got.bytes);
        }
        self.held = Some((got.bytes, Instant::now()));
        Next::Held
    }

    /// Copies the held frame into `pieces` if it fits, and returns its size. A frame that cannot
    /// fit, or has waited too long, is dropped.
    fn unload<B: BitmapSlice>(
        &mut self,
        shared: &NetState<P>,
        terms: Terms,
        pieces: &[VolatileSlice<'_, B>],
    ) -> Option<usize> {
        let (bytes, since) = self.held?;
        let metrics = &shared.metrics;
        let room =
            if terms.mergeable { self.room } else { self.posted.front().map_or(0, |first| first.bytes) };
        if bytes <= room {
            slices::write(pieces, 0, &self.scratch[..bytes]);
            add(&metrics.rx_copied, 1);
            self.held = None;
            return Some(bytes);
        }
        if !terms.mergeable && room > 0 {
            add(&metrics.rx_too_long, 1);
            self.held = None;
        } else if since.elapsed() >= GIVE_UP {
            add(&metrics.rx_given_up, 1);
            self.held = None;
        }
        None
    }

    /// Counts the buffers with the `bytes` of a frame as used. Returns their number.
    fn consume(&mut self, bytes: usize) -> u16 {
        let (mut left, mut count) = (bytes, 0);
        while left > 0 {
            let Some(posted) = self.posted.pop_front() else { break };
            self.parts.drain(..posted.parts);
            self.room -= posted.bytes;
            let here = posted.bytes.min(left);
            self.used.push((posted.head, u32::try_from(here).unwrap_or(u32::MAX)));
            left -= here;
            count += 1;
        }
        count
    }
}
