//! A virtqueue and the buffers in it, as far as a driver can be trusted: not at all.

use crate::device::Progress;
use crate::signals::Signals;
use std::sync::atomic::{Ordering, fence};
use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory};

/// Most buffers that are served in one go, before somebody looks whether the vCPU is to do something else: a hostile driver on
/// another vCPU can fill a ring as fast as it is emptied.
pub const PORTION: u32 = 64;

/// A ring that cannot be followed. Only a reset helps.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The rings themselves.
    #[error("the rings of queue {queue} cannot be used")]
    Ring {
        /// Which queue.
        queue: u16,
        /// What is wrong.
        #[source]
        source: virtio_queue::Error,
    },
    /// A chain of descriptors that loops, is longer than its queue, or leaves its table.
    #[error("the chain at descriptor {head} of queue {queue} has no end")]
    Chain {
        /// Which queue.
        queue: u16,
        /// Its first descriptor.
        head: u16,
    },
    /// Addresses that are not aligned or not in memory, when a queue is set up.
    #[error("queue {queue} was set up where no rings can be")]
    Setup {
        /// Which queue.
        queue: u16,
    },
}

/// What is wrong with a buffer that came over a sound ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BufferError {
    /// A descriptor that is for the device to write where one to read is due, or the reverse.
    #[error("a descriptor is of the wrong direction")]
    Direction,
    /// More bytes than any sensible driver sends.
    #[error("it has more than {0} bytes")]
    TooLong(usize),
    /// It is not in memory.
    #[error("it is not all in memory")]
    Outside,
    /// What is in it is not what its kind is made of.
    #[error("its content is malformed")]
    Content,
}

/// One descriptor of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Where it begins, as the driver says.
    pub gpa: u64,
    /// Its length in bytes, likewise.
    pub len: u32,
    /// Whether it is for the device to write.
    pub writable: bool,
}

/// A buffer: a chain of descriptors. Used again for the next, so that none is allocated for each.
#[derive(Debug, Default)]
pub struct Buffer {
    head: u16,
    /// `parts.len() <= ` size of the queue.
    parts: Vec<Part>,
}

impl Buffer {
    /// Its descriptors, in order.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The index of its first descriptor, by which it is given back.
    #[must_use]
    pub fn head(&self) -> u16 {
        self.head
    }

    /// Reads all of it into `bytes`, which is cleared first.
    ///
    /// # Errors
    /// If a part is for writing, it is longer than `most`, or not in memory.
    pub fn read<M: GuestMemory>(
        &self,
        memory: &M,
        most: usize,
        bytes: &mut Vec<u8>,
    ) -> Result<(), BufferError> {
        bytes.clear();
        for part in &self.parts {
            if part.writable {
                return Err(BufferError::Direction);
            }
            let (from, len) = (bytes.len(), usize::try_from(part.len).unwrap_or(usize::MAX));
            if len > most - from {
                return Err(BufferError::TooLong(most));
            }
            bytes.resize(from + len, 0);
            let read = memory.read_slice(&mut bytes[from..], GuestAddress(part.gpa));
            read.map_err(|_| BufferError::Outside)?;
        }
        Ok(())
    }
}

/// A virtqueue that the driver has set up.
#[derive(Debug)]
pub struct VirtQueue {
    index: u16,
    queue: Queue,
    /// The place for the next buffer that is given back, when the driver was last thought of.
    told: u16,
}

impl VirtQueue {
    pub(crate) fn new(index: u16, queue: Queue) -> Self {
        let told = queue.next_used();
        Self { index, queue, told }
    }

    /// Its index in the device.
    #[must_use]
    pub fn index(&self) -> u16 {
        self.index
    }

    /// How many entries it has.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    pub(crate) fn queue(&self) -> &Queue {
        &self.queue
    }

    pub(crate) fn queue_mut(&mut self) -> &mut Queue {
        &mut self.queue
    }

    fn ring_error(&self) -> impl FnOnce(virtio_queue::Error) -> RingError + use<> {
        let queue = self.index;
        move |source| RingError::Ring { queue, source }
    }

    /// Takes the next buffer; `false` if there is none.
    ///
    /// # Errors
    /// If rings or chain cannot be followed.
    pub fn pop<M: GuestMemory>(&mut self, memory: &M, buffer: &mut Buffer) -> Result<bool, RingError> {
        let (index, size) = (self.index, usize::from(self.queue.size()));
        let failed = self.ring_error();
        let Some(chain) = self.queue.iter(memory).map_err(failed)?.next() else { return Ok(false) };
        let head = chain.head_index();
        buffer.head = head;
        buffer.parts.clear();
        // The iterator ends at a loop, at a table's end, at what is not in memory, and at a good end alike: the last descriptor
        // tells which, as only a good end has no next. (An indirect table may be longer than the queue, a chain must not:
        // 2.7.5.3.1.)
        let mut ended = false;
        for descriptor in chain {
            if buffer.parts.len() == size {
                return Err(RingError::Chain { queue: index, head });
            }
            ended = !descriptor.has_next();
            let (gpa, writable) = (descriptor.addr().0, descriptor.is_write_only());
            buffer.parts.push(Part { gpa, len: descriptor.len(), writable });
        }
        if ended { Ok(true) } else { Err(RingError::Chain { queue: index, head }) }
    }

    /// Gives the buffer at `head` back, `written` bytes of which the device wrote.
    ///
    /// # Errors
    /// If the ring cannot be written.
    pub fn give_back<M: GuestMemory>(
        &mut self,
        memory: &M,
        head: u16,
        written: u32,
    ) -> Result<(), RingError> {
        let failed = self.ring_error();
        self.queue.add_used(memory, head, written).map_err(failed)
    }

    /// Gives several buffers back at once, each with the bytes that the device wrote: the driver sees all of them or none.
    ///
    /// # Errors
    /// If the ring cannot be written.
    pub fn give_back_all<M: GuestMemory>(
        &mut self,
        memory: &M,
        used: &[(u16, u32)],
    ) -> Result<(), RingError> {
        let (ring, size) = (self.queue.used_ring(), self.queue.size());
        let outside = |_| RingError::Ring { queue: self.index, source: virtio_queue::Error::AddressOverflow };
        let mut next = self.queue.next_used();
        for (head, written) in used {
            // 2.7.8: flags, index, then the entries.
            let at = ring + 4 + 8 * u64::from(next % size);
            let entry = u64::from(*head) | u64::from(*written) << 32;
            memory.write_slice(&entry.to_le_bytes(), GuestAddress(at)).map_err(outside)?;
            next = next.wrapping_add(1);
        }
        memory.store(next.to_le(), GuestAddress(ring + 2), Ordering::Release).map_err(outside)?;
        self.queue.set_next_used(next);
        Ok(())
    }

    /// Puts the last `count` buffers that were taken, and not given back, where they were: they are taken again.
    pub fn put_back(&mut self, count: u16) {
        self.queue.set_next_avail(self.queue.next_avail().wrapping_sub(count));
    }

    /// The driver need not notify until the queue is seen [empty](Self::empty): somebody is looking.
    ///
    /// # Errors
    /// If the ring cannot be written.
    pub fn quiet<M: GuestMemory>(&mut self, memory: &M) -> Result<(), RingError> {
        let failed = self.ring_error();
        self.queue.disable_notification(memory).map_err(failed)
    }

    /// Whether the driver wants to hear of the buffers given back since this was last asked.
    ///
    /// # Errors
    /// If the ring cannot be read.
    pub fn wants_interrupt<M: GuestMemory>(&mut self, memory: &M) -> Result<bool, RingError> {
        let event_idx = self.queue.event_idx_enabled();
        // The index at which it wants to hear stands behind the ring's entries (2.7.6).
        let behind = if event_idx { 4 + 2 * u64::from(self.queue.size()) } else { 0 };
        // Everything that was given back is visible before what the driver wants is read (2.7.7.2).
        fence(Ordering::SeqCst);
        let wants: u16 = memory
            .load(GuestAddress(self.queue.avail_ring() + behind), Ordering::Acquire)
            .map_err(|source| self.ring_error()(virtio_queue::Error::GuestMemory(source)))?;
        let wants = u16::from_le(wants);
        let now = self.queue.next_used();
        let before = std::mem::replace(&mut self.told, now);
        if !event_idx {
            return Ok(u32::from(wants) & VRING_AVAIL_F_NO_INTERRUPT == 0);
        }
        // Whether it was passed: before <= wants < now, around the end of 16 bits.
        Ok(now.wrapping_sub(wants).wrapping_sub(1) < now.wrapping_sub(before))
    }

    /// Serves the queue as most devices do: takes each buffer, lets `each` see it, gives it back; at most a [`PORTION`]. The driver
    /// is interrupted once, if it wants that.
    ///
    /// # Errors
    /// If rings or a chain cannot be followed. Buffers served before are given back.
    pub fn serve<M: GuestMemory>(
        &mut self,
        memory: &M,
        buffer: &mut Buffer,
        signals: &Signals,
        mut each: impl FnMut(&Buffer),
    ) -> Result<Progress, RingError> {
        let mut served = false;
        let mut result = Ok(Progress::More);
        for _ in 0..PORTION {
            let step = self.pop(memory, buffer).and_then(|some| {
                if !some {
                    return self.empty(memory);
                }
                each(buffer);
                served = true;
                self.give_back(memory, buffer.head(), 0).map(|()| Progress::More)
            });
            if !matches!(step, Ok(Progress::More)) {
                result = step;
                break;
            }
        }
        if served && self.wants_interrupt(memory)? {
            signals.used_buffer();
        }
        result
    }

    /// The queue was seen empty: asks to be notified of the next buffer, and looks whether one has come before that was said.
    ///
    /// # Errors
    /// If the ring cannot be written or read.
    pub fn empty<M: GuestMemory>(&mut self, memory: &M) -> Result<Progress, RingError> {
        let failed = self.ring_error();
        let more = self.queue.enable_notification(memory).map_err(failed)?;
        Ok(if more { Progress::More } else { Progress::Done })
    }
}
