//! Guest with a network interface for tests, and a wire that is a list of frames.

use super::{
    Announcer, FramePort, HEADER, Mac, Net, NetControl, NetOptions, Offloads, PortError, RX, ReceivedFrame,
    Receiver, RxStep, TX, Transmitter, TxStep,
};
use crate::testing::{AVAIL, Driver, SIZE, USED, WRITE, memory, rings};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use virtio_bindings::virtio_net as net;
use vm_memory::bitmap::BitmapSlice;
use vm_memory::{Bytes, GuestAddress, VolatileSlice};

/// Features that Linux's driver accepts.
pub(crate) const ALL: [u32; 15] = [
    net::VIRTIO_NET_F_CSUM,
    net::VIRTIO_NET_F_GUEST_CSUM,
    net::VIRTIO_NET_F_MTU,
    net::VIRTIO_NET_F_MAC,
    net::VIRTIO_NET_F_GUEST_TSO4,
    net::VIRTIO_NET_F_GUEST_TSO6,
    net::VIRTIO_NET_F_GUEST_ECN,
    net::VIRTIO_NET_F_HOST_TSO4,
    net::VIRTIO_NET_F_HOST_TSO6,
    net::VIRTIO_NET_F_HOST_ECN,
    net::VIRTIO_NET_F_MRG_RXBUF,
    net::VIRTIO_NET_F_STATUS,
    net::VIRTIO_NET_F_CTRL_VQ,
    net::VIRTIO_NET_F_GUEST_ANNOUNCE,
    // EVENT_IDX
    29,
];

pub(crate) const MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];

/// Host's end: frames that were sent, and frames to be received.
#[derive(Debug, Default)]
pub(crate) struct Wire {
    pub(crate) sent: Mutex<Vec<Vec<u8>>>,
    /// Frames to be received, with their headers.
    pub(crate) coming: Mutex<VecDeque<Vec<u8>>>,
    pub(crate) offloads: Mutex<Offloads>,
    pub(crate) kicks: AtomicU32,
    /// Number of frames that are accepted before there is no room; `None` for no limit.
    pub(crate) room: Mutex<Option<u32>>,
    pub(crate) gone: AtomicBool,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no panic")
}

impl FramePort for Wire {
    fn send<B: BitmapSlice>(&self, pieces: &[VolatileSlice<'_, B>]) -> Result<(), PortError> {
        if self.gone.load(Ordering::Relaxed) {
            return Err(PortError::Gone(io::ErrorKind::NotFound.into()));
        }
        if let Some(room) = &mut *lock(&self.room) {
            *room = room.checked_sub(1).ok_or(PortError::NotNow)?;
        }
        let mut frame = Vec::new();
        for piece in pieces {
            let at = frame.len();
            frame.resize(at + piece.len(), 0);
            piece.read_slice(&mut frame[at..], 0).expect("memory");
        }
        assert!(frame.len() >= HEADER, "a header");
        lock(&self.sent).push(frame);
        Ok(())
    }

    fn receive<B: BitmapSlice>(&self, pieces: &[VolatileSlice<'_, B>]) -> Result<ReceivedFrame, PortError> {
        if self.gone.load(Ordering::Relaxed) {
            return Err(PortError::Gone(io::ErrorKind::NotFound.into()));
        }
        let frame = lock(&self.coming).pop_front().ok_or(PortError::NotNow)?;
        let mut done = 0;
        for piece in pieces {
            let here = piece.len().min(frame.len() - done);
            piece.write_slice(&frame[done..done + here], 0).expect("memory");
            done += here;
        }
        Ok(ReceivedFrame { bytes: done, cut: done < frame.len() })
    }

    fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        *lock(&self.offloads) = offloads;
        Ok(())
    }

    fn flush(&self) {
        lock(&self.coming).clear();
    }

    fn kicked(&self) {
        self.kicks.fetch_add(1, Ordering::Relaxed);
    }
}

/// Guest with a network interface and the state of the thread that carries frames.
#[derive(Debug)]
pub(crate) struct NetGuest {
    pub(crate) driver: Driver<Net<Wire>>,
    pub(crate) control: NetControl<Wire>,
    pub(crate) receiver: Receiver<Wire>,
    pub(crate) transmitter: Transmitter<Wire>,
    pub(crate) announcer: Announcer<Wire>,
    pub(crate) sheltered: bool,
    /// Parts of the buffer at each head of a queue, as they were added.
    buffers: BTreeMap<(u16, u16), Vec<(u64, u32)>>,
    /// Index of the next entry of each used ring.
    seen: BTreeMap<u16, u16>,
}

impl NetGuest {
    /// Returns a running guest without a driver.
    pub(crate) fn new() -> Self {
        let guest = Self::halted();
        guest.driver.device.resumed(crate::device::Resume::First).expect("the device needs nothing");
        guest
    }

    /// Returns a guest that does not run yet.
    pub(crate) fn halted() -> Self {
        let mut control = None;
        let driver = Driver::new(memory(), |wiring| {
            let options = NetOptions { mac: Mac::new(MAC).expect("an address"), mtu: 1500 };
            let net = Net::new(options, Wire::default(), wiring.signals);
            control = Some(net.control());
            net
        });
        let control = control.expect("was made");
        Self {
            driver,
            receiver: Receiver::new(control.clone()),
            transmitter: Transmitter::new(control.clone()),
            announcer: Announcer::new(control.clone()),
            control,
            sheltered: false,
            buffers: BTreeMap::new(),
            seen: BTreeMap::new(),
        }
    }

    /// Returns a guest whose driver accepts `bits`.
    pub(crate) fn ready(bits: &[u32]) -> Self {
        let mut guest = Self::new();
        guest.driver.start(bits, &[RX, TX, 2]);
        guest
    }

    pub(crate) fn wire(&self) -> &Wire {
        self.control.port()
    }

    /// Adds a buffer to `queue`. The driver's rings are small, so the caller makes sure that there
    /// is room.
    pub(crate) fn offer(&mut self, queue: u16, parts: &[(u64, u32)]) {
        let flags = if queue == RX { WRITE } else { 0 };
        let at = GuestAddress(rings(queue) + AVAIL + 2);
        let place: u16 = self.driver.memory.read_obj(at).expect("memory");
        let parts: Vec<_> = parts.iter().map(|(gpa, len)| (*gpa, *len, flags)).collect();
        self.driver.offer(queue, &parts);
        let head = GuestAddress(at.0 + 2 + 2 * u64::from(place % SIZE));
        let head: u16 = self.driver.memory.read_obj(head).expect("memory");
        let parts = parts.iter().map(|(gpa, len, _)| (*gpa, *len)).collect();
        self.buffers.insert((queue, head), parts);
    }

    /// Receives until nothing more can be done.
    pub(crate) fn receive(&mut self) -> RxStep {
        for _ in 0..100 {
            let step = self.receiver.receive(&self.driver.device, &self.driver.memory, self.sheltered);
            if step != RxStep::More {
                return step;
            }
        }
        RxStep::More
    }

    /// Transmits until nothing more can be done.
    pub(crate) fn transmit(&mut self) -> TxStep {
        for _ in 0..100 {
            let step = self.transmitter.transmit(&self.driver.device, &self.driver.memory, self.sheltered);
            if step != TxStep::More {
                return step;
            }
        }
        TxStep::More
    }

    /// Returns the next buffer of `queue` that was given back: its head and the number of bytes
    /// written.
    pub(crate) fn next_used(&mut self, queue: u16) -> Option<(u16, u32)> {
        let seen = self.seen.entry(queue).or_default();
        if *seen == self.driver.used(queue) {
            return None;
        }
        let at = rings(queue) + USED + 4 + 8 * u64::from(*seen % SIZE);
        *seen = seen.wrapping_add(1);
        let head: u32 = self.driver.memory.read_obj(GuestAddress(at)).expect("memory");
        let len: u32 = self.driver.memory.read_obj(GuestAddress(at + 4)).expect("memory");
        Some((u16::try_from(head).expect("a head"), len))
    }

    /// Returns the content of the next buffer of the receive queue that was given back.
    fn next_piece(&mut self) -> Option<Vec<u8>> {
        let (head, len) = self.next_used(RX)?;
        let (mut bytes, mut left) = (Vec::new(), usize::try_from(len).expect("small"));
        for (gpa, len) in &self.buffers[&(RX, head)] {
            let here = left.min(usize::try_from(*len).expect("small"));
            let at = bytes.len();
            bytes.resize(at + here, 0);
            self.driver.memory.read_slice(&mut bytes[at..], GuestAddress(*gpa)).expect("memory");
            left -= here;
        }
        assert_eq!(left, 0, "no more was written than the buffer has");
        Some(bytes)
    }

    /// Returns the next frame that the driver received, header included; empty for a buffer that
    /// came back unused.
    pub(crate) fn got(&mut self) -> Option<Vec<u8>> {
        let mut frame = self.next_piece()?;
        if frame.is_empty() {
            return Some(frame);
        }
        let count = u16::from_le_bytes([frame[HEADER - 2], frame[HEADER - 1]]);
        for n in 1..count {
            let more = self.next_piece();
            frame.extend(more.unwrap_or_else(|| panic!("only {n} of {count} buffers of a frame")));
        }
        Some(frame)
    }

    /// Returns the same guest on another host: parked, saved, with memory and state moved, and
    /// running.
    pub(crate) fn moved(self) -> Self {
        let there = self.loaded();
        there.driver.device.resumed(crate::device::Resume::Moved).expect("the device needs nothing");
        there
    }

    /// Moves the guest's state to a new device, which does not run yet.
    pub(crate) fn loaded(mut self) -> Self {
        let now = std::time::Instant::now();
        assert!(!self.driver.device.quiesce(now), "quiesced before the thread has parked");
        self.receiver.park(&self.driver.device);
        self.control.parked();
        assert!(self.driver.device.quiesce(now), "not quiesced after the thread has parked");
        let mut there = Self::halted();
        self.driver.move_to(&there.driver);
        there.driver.adopt(&self.driver);
        // On a real network, frames that wait at the old host's tap are lost. The tests move them
        // to the new host.
        *lock(&there.wire().coming) = std::mem::take(&mut lock(&self.wire().coming));
        *lock(&there.wire().sent) = std::mem::take(&mut lock(&self.wire().sent));
        (there.buffers, there.seen, there.sheltered) = (self.buffers, self.seen, self.sheltered);
        there
    }
}

/// Returns a frame of `len` bytes after its header, whose content is unique for `number`.
pub(crate) fn frame(number: u32, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; HEADER];
    let pattern =
        |at: usize| number.wrapping_mul(0x9e37_79b1).wrapping_add(u32::try_from(at).expect("small"));
    bytes.extend((0..len).map(|at| pattern(at).to_le_bytes()[at % 3]));
    bytes
}

/// Returns the frame as a driver receives it, in `buffers` buffers.
pub(crate) fn as_got(mut frame: Vec<u8>, buffers: u16) -> Vec<u8> {
    frame[HEADER - 2..HEADER].copy_from_slice(&buffers.to_le_bytes());
    frame
}
