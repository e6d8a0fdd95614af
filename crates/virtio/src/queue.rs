//! A virtqueue and its buffers, all of which are checked because drivers are not trusted.

use crate::device::Progress;
use crate::signals::Signals;
use std::sync::atomic::{Ordering, fence};
use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory};

/// Maximum number of buffers that are served before the caller checks whether the vCPU has other
/// work. The limit is necessary because a hostile driver on another vCPU can fill a ring as fast as
/// it is emptied.
pub const PORTION: u32 = 64;

/// Error of an invalid ring. The device must be reset.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The rings themselves are invalid.
    #[error("the rings of queue {queue} cannot be used")]
    Ring {
        /// Index of the queue.
        queue: u16,
        /// Reason.
        #[source]
        source: virtio_queue::Error,
    },
    /// A chain of descriptors loops, is longer than its queue, or leaves its table.
    #[error("the chain at descriptor {head} of queue {queue} has no valid end")]
    Chain {
        /// Index of the queue.
        queue: u16,
        /// First descriptor of the chain.
        head: u16,
    },
    /// An address is not aligned or not in memory when a queue is set up.
    #[error("the addresses or the size of queue {queue} are invalid")]
    Setup {
        /// Index of the queue.
        queue: u16,
    },
}

/// Error of a buffer on a valid ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BufferError {
    /// A descriptor is writable by the device although a readable one is required, or vice versa.
    #[error("a descriptor has the wrong direction")]
    Direction,
    /// The buffer has more bytes than the device accepts.
    #[error("the buffer has more than {0} bytes")]
    TooLong(usize),
    /// A part of the buffer is not in memory.
    #[error("a part of the buffer is not in guest memory")]
    Outside,
    /// The content of the buffer is malformed.
    #[error("the content of the buffer is malformed")]
    Content,
}

/// Descriptor of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Guest address, as the driver wrote it.
    pub gpa: u64,
    /// Length in bytes, as the driver wrote it.
    pub len: u32,
    /// True if the device may write to the part, and false if the device may read it.
    pub writable: bool,
}

/// Buffer, which is a chain of descriptors. The value can be reused for later buffers, which saves
/// an allocation for each.
#[derive(Debug, Default)]
pub struct Buffer {
    head: u16,
    /// Descriptors: `parts.len() <=` size of the queue.
    parts: Vec<Part>,
}

impl Buffer {
    /// Returns the descriptors, in order.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Returns the index of the first descriptor, by which the buffer is given back.
    #[must_use]
    pub fn head(&self) -> u16 {
        self.head
    }

    /// Reads the whole buffer into `bytes`, which is cleared first.
    ///
    /// # Errors
    /// Returns an error if a part is writable, if the buffer is longer than `most`, or if a part is
    /// not in memory.
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

/// Virtqueue that the driver has set up.
#[derive(Debug)]
pub struct VirtQueue {
    index: u16,
    queue: Queue,
    /// Index of the next buffer to be given back when the driver's wish for an interrupt was last
    /// checked.
    told: u16,
}

impl VirtQueue {
    pub(crate) fn new(index: u16, queue: Queue) -> Self {
        let told = queue.next_used();
        Self { index, queue, told }
    }

    /// Returns the queue's index in the device.
    #[must_use]
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Returns the number of entries.
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

    /// Takes the next buffer. Returns false if there is none.
    ///
    /// # Errors
    /// Returns an error if the rings or the chain are invalid.
    pub fn pop<M: GuestMemory>(&mut self, memory: &M, buffer: &mut Buffer) -> Result<bool, RingError> {
        let (index, size) = (self.index, usize::from(self.queue.size()));
        let failed = self.ring_error();
        let Some(chain) = self.queue.iter(memory).map_err(failed)?.next() else { return Ok(false) };
        let head = chain.head_index();
        buffer.head = head;
        buffer.parts.clear();
        // The iterator ends in the same way at a loop, at the end of a table, at an address outside
        // memory, and at a valid end. The last descriptor tells these apart, because only a valid
        // end has no next descriptor. An indirect table may be longer than the queue, but a chain
        // must not (2.7.5.3.1).
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

    /// Gives back the buffer with the first descriptor `head`, to which the device wrote `written`
    /// bytes.
    ///
    /// # Errors
    /// Returns an error if the ring cannot be written.
    pub fn give_back<M: GuestMemory>(
        &mut self,
        memory: &M,
        head: u16,
        written: u32,
    ) -> Result<(), RingError> {
        let failed = self.ring_error();
        self.queue.add_used(memory, head, written).map_err(failed)
    }

    /// Gives back several buffers at once, each with the number of bytes that the device wrote to
    /// it. The driver sees either all of them or none.
    ///
    /// # Errors
    /// Returns an error if the ring cannot be written.
    pub fn give_back_all<M: GuestMemory>(
        &mut self,
        memory: &M,
        used: &[(u16, u32)],
    ) -> Result<(), RingError> {
        let (ring, size) = (self.queue.used_ring(), self.queue.size());
        let outside = |_| RingError::Ring { queue: self.index, source: virtio_queue::Error::AddressOverflow };
        let mut next = self.queue.next_used();
        for (head, written) in used {
            // 2.7.8: flags and index, then the entries.
            let at = ring + 4 + 8 * u64::from(next % size);
            let entry = u64::from(*head) | u64::from(*written) << 32;
            memory.write_slice(&entry.to_le_bytes(), GuestAddress(at)).map_err(outside)?;
            next = next.wrapping_add(1);
        }
        memory.store(next.to_le(), GuestAddress(ring + 2), Ordering::Release).map_err(outside)?;
        self.queue.set_next_used(next);
        Ok(())
    }

    /// Puts back the last `count` buffers that were taken and not given back. Later calls of
    /// [`pop`](Self::pop) return them again.
    pub fn put_back(&mut self, count: u16) {
        self.queue.set_next_avail(self.queue.next_avail().wrapping_sub(count));
    }

    /// Tells the driver that it need not notify, because the device checks the ring by itself. This
    /// holds until [`empty`](Self::empty) is called.
    ///
    /// # Errors
    /// Returns an error if the ring cannot be written.
    pub fn quiet<M: GuestMemory>(&mut self, memory: &M) -> Result<(), RingError> {
        let failed = self.ring_error();
        self.queue.disable_notification(memory).map_err(failed)
    }

    /// Returns true if the driver wants an interrupt for the buffers that were given back since the
    /// last call.
    ///
    /// # Errors
    /// Returns an error if the ring cannot be read.
    pub fn wants_interrupt<M: GuestMemory>(&mut self, memory: &M) -> Result<bool, RingError> {
        let event_idx = self.queue.event_idx_enabled();
        // The index at which the driver wants an interrupt follows the ring's entries (2.7.6).
        let behind = if event_idx { 4 + 2 * u64::from(self.queue.size()) } else { 0 };
        // The buffers that were given back must be visible before the driver's wish is read
        // (2.7.7.2).
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
        // True if the index was passed: before <= wants < now, modulo 2^16.
        Ok(now.wrapping_sub(wants).wrapping_sub(1) < now.wrapping_sub(before))
    }

    /// Serves up to [`PORTION`] buffers: takes each of them, calls `each` with it, and gives it
    /// back. At the end, the driver is interrupted once if it wants an interrupt.
    ///
    /// # Errors
    /// Returns an error if the rings or a chain are invalid. Buffers that were served before are
    /// given back.
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

    /// Asks the driver to notify when it adds the next buffer, because the queue was found empty.
    /// Then checks whether a buffer arrived before the driver could see this request.
    ///
    /// # Errors
    /// Returns an error if the ring cannot be written or read.
    pub fn empty<M: GuestMemory>(&mut self, memory: &M) -> Result<Progress, RingError> {
        let failed = self.ring_error();
        let more = self.queue.enable_notification(memory).map_err(failed)?;
        Ok(if more { Progress::More } else { Progress::Done })
    }
}
