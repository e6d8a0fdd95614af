//! The network device.

use super::announce::Announce;
use super::metrics::{Metrics, NetFigures, add};
use super::persist::NetSaved;
use super::{CONTROL, FramePort, Mac, NetOptions, Offloads, RX, TX};
use crate::device::{Device, Progress, QueueSpec, Resume, read_bytes};
use crate::queue::{Buffer, PORTION, Part, RingError, VirtQueue};
use crate::signals::Signals;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net as net;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

/// Maximum number of entries of a queue for frames, as in Linux's driver and QEMU's device.
const QUEUE_SIZE: u16 = 256;
/// Maximum number of entries of the control queue. Commands come one at a time.
const CONTROL_SIZE: u16 = 64;

/// Offered features, which are the same on every host. A host whose tap has fewer offloads does
/// without them.
const FEATURES: [u32; 14] = [
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
];

/// Status field of the configuration. The bindings have its bits as 32-bit values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Status {
    /// True if the link is up.
    pub(super) link: bool,
    /// True if the driver has been asked to announce the guest.
    pub(super) announce: bool,
}

impl Status {
    fn bits(self) -> u16 {
        u16::from(self.link) | u16::from(self.announce) << 1
    }
}

/// State of the thread that carries frames.
#[derive(Debug, Clone, Copy)]
struct Gate {
    /// True if the thread must begin nothing new.
    halted: bool,
    /// True if the thread has put back all buffers that it had.
    parked: bool,
}

/// State that the device, the thread that carries frames, and other threads share. Locks are held
/// only for a copy, except `way`.
#[derive(Debug)]
pub(super) struct NetState<P> {
    pub(super) port: P,
    pub(super) signals: Arc<Signals>,
    pub(super) metrics: Metrics,
    /// Held while frames move between the port and the driver's buffers. Taken with the transport's
    /// lock held, and released without it. A reset, which holds that lock, waits until nothing
    /// reaches the driver's memory any more.
    pub(super) way: Mutex<()>,
    /// Number of the current driver. Buffers of one driver are not given to the next. Changes with
    /// the transport's lock held.
    pub(super) epoch: AtomicU64,
    /// Features that the driver accepted; 0 while no driver is ready.
    pub(super) features: AtomicU64,
    gate: Mutex<Gate>,
    options: Mutex<NetOptions>,
    status: Mutex<Status>,
    pub(super) announce: Announce,
    /// True if the guest is a copy with an address of its own, which its driver does not use yet.
    copied: AtomicBool,
}

impl<P: FramePort> NetState<P> {
    pub(super) fn has(&self, feature: u32) -> bool {
        self.features.load(Ordering::Acquire) >> feature & 1 == 1
    }

    pub(super) fn options(&self) -> NetOptions {
        *lock(&self.options)
    }

    pub(super) fn set_options(&self, options: NetOptions) {
        *lock(&self.options) = options;
    }

    pub(super) fn status(&self) -> Status {
        *lock(&self.status)
    }

    pub(super) fn set_announce(&self, announce: bool) {
        lock(&self.status).announce = announce;
    }

    pub(super) fn halted(&self) -> bool {
        lock(&self.gate).halted
    }

    /// Records that a driver accepted `features`, or that there is no driver any more (0).
    pub(super) fn set_features(&self, features: u128) {
        let low = u64::try_from(features & u128::from(u64::MAX)).unwrap_or(0);
        self.features.store(low, Ordering::Release);
        self.epoch.fetch_add(1, Ordering::AcqRel);
        let csum = self.has(net::VIRTIO_NET_F_GUEST_CSUM);
        let offloads = Offloads {
            csum,
            tso4: csum && self.has(net::VIRTIO_NET_F_GUEST_TSO4),
            tso6: csum && self.has(net::VIRTIO_NET_F_GUEST_TSO6),
            ecn: csum && self.has(net::VIRTIO_NET_F_GUEST_ECN),
        };
        if let Err(error) = self.port.set_offloads(offloads) {
            // Frames then arrive without offloads, which every driver accepts.
            tracing::warn!(%error, "the host's network interface does not support offloads; the guest's network is slower than with offloads");
        }
    }

    /// Asks the driver to announce the guest, if the driver supports it.
    pub(super) fn request_announce(&self) {
        if self.has(net::VIRTIO_NET_F_GUEST_ANNOUNCE) {
            self.set_announce(true);
            add(&self.metrics.announce_asked, 1);
            self.signals.config_changed();
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is a single assignment, so a panic cannot leave one half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Virtio network interface at the port `P`.
#[derive(Debug)]
pub struct Net<P> {
    shared: Arc<NetState<P>>,
    buffer: Buffer,
}

impl<P: FramePort> Net<P> {
    /// Returns a network interface without a driver. Its thread is [halted](NetControl::halted)
    /// until the guest runs.
    #[must_use]
    pub fn new(options: NetOptions, port: P, signals: Arc<Signals>) -> Self {
        let shared = NetState {
            port,
            signals,
            metrics: Metrics::default(),
            way: Mutex::new(()),
            epoch: AtomicU64::new(0),
            features: AtomicU64::new(0),
            gate: Mutex::new(Gate { halted: true, parked: true }),
            options: Mutex::new(options),
            status: Mutex::new(Status { link: true, announce: false }),
            announce: Announce::default(),
            copied: AtomicBool::new(false),
        };
        Self { shared: Arc::new(shared), buffer: Buffer::default() }
    }

    /// Returns the handle for other threads.
    #[must_use]
    pub fn control(&self) -> NetControl<P> {
        NetControl { shared: Arc::clone(&self.shared) }
    }

    pub(super) fn shared(&self) -> &NetState<P> {
        &self.shared
    }

    /// Executes one command. Returns the number of bytes that were written.
    fn command<M: GuestMemory>(&self, memory: &M) -> u32 {
        let metrics = &self.shared.metrics;
        add(&metrics.commands, 1);
        let parts = self.buffer.parts();
        let answer = parts.iter().find(|part| part.writable && part.len > 0);
        let sound = parts.is_sorted_by_key(|part| part.writable);
        let (Some(answer), true, Some(head)) = (answer, sound, command_head(parts, memory)) else {
            add(&metrics.commands_malformed, 1);
            return 0;
        };
        let ack = [net::VIRTIO_NET_CTRL_ANNOUNCE, net::VIRTIO_NET_CTRL_ANNOUNCE_ACK];
        let done = head.map(u32::from) == ack && self.shared.has(net::VIRTIO_NET_F_GUEST_ANNOUNCE);
        if done {
            self.shared.set_announce(false);
            add(&metrics.announce_done, 1);
        }
        let status = if done { net::VIRTIO_NET_OK } else { net::VIRTIO_NET_ERR };
        let written = memory.write_slice(&status.to_le_bytes()[..1], GuestAddress(answer.gpa));
        if written.is_err() {
            add(&metrics.commands_malformed, 1);
        }
        written.map_or(0, |()| 1)
    }

    fn serve_commands<M: GuestMemory>(
        &mut self,
        queue: &mut VirtQueue,
        memory: &M,
    ) -> Result<Progress, RingError> {
        let mut served = 0;
        let mut progress = Progress::More;
        while served < PORTION {
            if !queue.pop(memory, &mut self.buffer)? {
                progress = queue.empty(memory)?;
                break;
            }
            let written = self.command(memory);
            queue.give_back(memory, self.buffer.head(), written)?;
            served += 1;
        }
        if served > 0 && queue.wants_interrupt(memory)? {
            self.shared.signals.used_buffer();
        }
        Ok(progress)
    }
}

/// Returns class and command (5.1.6.5), however the driver has split them.
fn command_head<M: GuestMemory>(parts: &[Part], memory: &M) -> Option<[u8; 2]> {
    let mut head = [0; 2];
    let mut got = 0;
    for part in parts.iter().filter(|part| !part.writable) {
        let wanted = usize::try_from(part.len).unwrap_or(usize::MAX).min(head.len() - got);
        memory.read_slice(&mut head[got..got + wanted], GuestAddress(part.gpa)).ok()?;
        got += wanted;
    }
    (got == head.len()).then_some(head)
}

impl<P: FramePort> Device for Net<P> {
    type Saved = NetSaved;

    const ID: u32 = VIRTIO_ID_NET;

    const QUEUES: &'static [QueueSpec] = &[
        QueueSpec { index: RX, max_size: QUEUE_SIZE },
        QueueSpec { index: TX, max_size: QUEUE_SIZE },
        QueueSpec { index: CONTROL, max_size: CONTROL_SIZE },
    ];

    fn features(&self) -> u128 {
        FEATURES.iter().fold(0, |bits, bit| bits | 1 << bit)
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        // 5.1.4: address, status, number of queue pairs (needs a feature that is not offered; there
        // is one pair), packet size.
        let NetOptions { mac, mtu } = self.shared.options();
        let fields = [self.shared.status().bits(), 1, mtu].map(u16::to_le_bytes);
        let bytes = [&mac.bytes()[..], fields.as_flattened()].concat();
        read_bytes(&bytes, offset, data);
    }

    fn write_config(&mut self, _: u64, _: &[u8]) {
        // No field may be written by the driver (5.1.4.2: drivers before 1.0 may write the
        // address).
    }

    fn activate(&mut self, features: u128, ready: &[u16]) {
        self.shared.set_features(features);
        // Frames from before the driver was ready are old and may use offloads that the driver does
        // not support.
        self.shared.port.flush();
        self.shared.port.kicked();
        tracing::debug!(features, ?ready, "the guest's network driver is ready");
    }

    fn serve<M: GuestMemory>(&mut self, queue: &mut VirtQueue, memory: &M) -> Result<Progress, RingError> {
        if queue.index() == CONTROL {
            return self.serve_commands(queue, memory);
        }
        self.shared.port.kicked();
        Ok(Progress::Done)
    }

    fn quiesce(&mut self) -> bool {
        self.control().quiesce()
    }

    fn resumed(&mut self, how: Resume) -> Result<(), String> {
        self.control().resumed(how == Resume::Moved);
        Ok(())
    }

    fn taken_away(&mut self, _: u16) {
        // Waits until frames under way have arrived. Buffers that were taken from the queue are not
        // given back, because the queue no longer exists.
        drop(lock(&self.shared.way));
    }

    fn reset(&mut self) {
        // Waits until frames under way have arrived.
        let way = lock(&self.shared.way);
        self.shared.set_features(0);
        self.shared.set_announce(false);
        drop(way);
    }

    fn broken(&mut self, error: &RingError) {
        // Warns only once, because a guest could repeat the violation without limit.
        if self.shared.metrics.broken.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(%error, "the guest's network driver broke the virtio rules; the network interface stops until the driver resets it");
        }
    }

    fn save(&self) -> NetSaved {
        NetSaved::of(self)
    }

    fn load(&mut self, saved: &NetSaved, active: Option<(u128, &[QueueSpec])>) -> Result<bool, String> {
        saved.load(self, active)
    }
}

/// Handle of a network interface for threads other than those of the vCPUs. No method waits for a
/// request that is being processed, or for guest memory.
#[derive(Debug)]
pub struct NetControl<P> {
    shared: Arc<NetState<P>>,
}

impl<P> Clone for NetControl<P> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<P: FramePort> NetControl<P> {
    pub(super) fn shared(&self) -> &Arc<NetState<P>> {
        &self.shared
    }

    /// Returns the host's end of the interface.
    #[must_use]
    pub fn port(&self) -> &P {
        &self.shared.port
    }

    /// Returns the counters.
    #[must_use]
    pub fn figures(&self) -> NetFigures {
        self.shared.metrics.figures()
    }

    /// Returns the guest's address: the one that the interface was created with, or the one that
    /// was loaded.
    #[must_use]
    pub fn mac(&self) -> Mac {
        self.shared.options().mac
    }

    /// Gives the interface another MAC address, for a guest that is a copy and has not run on this
    /// host. The guest's state must have been loaded before.
    ///
    /// A driver reads the address when it starts. A running driver keeps the old address until it
    /// is started again, because Linux's driver reads only the link status again when the
    /// configuration changes. Therefore the copy is not announced when it starts: the announcements
    /// would redirect the frames for the original guest to the copy.
    pub fn renew_mac(&self, mac: Mac) {
        self.shared.copied.store(true, Ordering::Release);
        self.shared.set_options(NetOptions { mac, ..self.shared.options() });
        self.shared.set_announce(false);
        self.shared.signals.config_changed();
    }

    /// Returns true if the guest has a driver for the interface.
    #[must_use]
    pub fn driver(&self) -> bool {
        self.shared.features.load(Ordering::Acquire) != 0
    }

    /// Returns true if the thread that carries frames is halted, so that it must begin nothing new.
    #[must_use]
    pub fn halted(&self) -> bool {
        self.shared.halted()
    }

    /// Halts the thread that carries frames, until the device is resumed.
    pub fn halt(&self) {
        lock(&self.shared.gate).halted = true;
        self.shared.port.kicked();
    }

    /// Records that the thread has begun nothing since it was halted, and has
    /// [parked](super::Receiver::park).
    pub fn parked(&self) {
        let mut gate = lock(&self.shared.gate);
        gate.parked = gate.halted;
    }

    /// Halts the thread that carries frames. Returns true if the thread has parked.
    fn quiesce(&self) -> bool {
        let parked = {
            let mut gate = lock(&self.shared.gate);
            gate.halted = true;
            gate.parked
        };
        if !parked {
            self.shared.port.kicked();
        }
        parked
    }

    /// Lets the thread begin again. If `moved`, the guest's location is announced to the network.
    fn resumed(&self, moved: bool) {
        *lock(&self.shared.gate) = Gate { halted: false, parked: false };
        if moved && !self.shared.copied.load(Ordering::Acquire) {
            self.shared.announce.begin();
            self.shared.request_announce();
        }
        self.shared.port.kicked();
    }

    /// Reports that the host's end of the interface no longer exists. The guest then sees that the
    /// link is down.
    pub fn unplugged(&self) {
        let was = std::mem::replace(&mut lock(&self.shared.status).link, false);
        if was {
            self.shared.signals.config_changed();
        }
    }
}
