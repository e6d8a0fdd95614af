//! Requests as chains of descriptors (5.2.6): a header, data, and a byte for the status.
//!
//! The driver may split them into descriptors in any way (2.7.4). The header is the first bytes
//! that the device may read, the status is the last byte that it may write, and everything else is
//! data.

use crate::queue::{Buffer, BufferError, Part};
use virtio_bindings::virtio_blk as spec;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

/// Size of a sector in bytes, whatever the size of a block (5.2.4).
pub const SECTOR: u64 = 512;

/// Size of a header in bytes: type, reserved, sector.
const HEADER: usize = 16;

/// Status of a request, as the driver is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Ok,
    IoError,
    Unsupported,
}

impl Status {
    pub(super) fn byte(self) -> u8 {
        let value = match self {
            Self::Ok => spec::VIRTIO_BLK_S_OK,
            Self::IoError => spec::VIRTIO_BLK_S_IOERR,
            Self::Unsupported => spec::VIRTIO_BLK_S_UNSUPP,
        };
        value.to_le_bytes()[0]
    }
}

/// Operation of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    Read,
    Write,
    Flush,
    Id,
    Discard,
    Zeroes,
    /// No operation, only an answer with this status.
    Refuse(Status),
}

/// Limits of requests: the disk's size and the negotiated features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) sectors: u64,
    pub(super) read_only: bool,
    pub(super) discard: bool,
    pub(super) zeroes: bool,
}

impl Limits {
    /// Returns true if `bytes` from `sector` on are on the disk.
    pub(super) fn contain(&self, sector: u64, bytes: u64) -> bool {
        bytes.is_multiple_of(SECTOR)
            && sector.checked_add(bytes / SECTOR).is_some_and(|end| end <= self.sectors)
    }
}

/// Request. The value is used again for later requests, to save an allocation for each.
#[derive(Debug)]
pub(super) struct Request {
    /// First descriptor of the request's buffer, by which the buffer is given back.
    pub(super) head: u16,
    pub(super) op: Op,
    pub(super) sector: u64,
    /// Data, which the device reads or writes depending on `op`.
    pub(super) data: Vec<Part>,
    /// Guest address of the status byte.
    pub(super) status: u64,
    /// Number of bytes before the status that the device may write.
    pub(super) writable: u64,
}

impl Default for Request {
    fn default() -> Self {
        let op = Op::Refuse(Status::Unsupported);
        Self { head: 0, op, sector: 0, data: Vec::new(), status: 0, writable: 0 }
    }
}

impl Request {
    /// Returns the length of the data, in bytes.
    pub(super) fn len(&self) -> u64 {
        self.data.iter().map(|part| u64::from(part.len)).sum()
    }

    /// Parses `buffer`. A request that cannot be done becomes a request that is answered with an
    /// error.
    ///
    /// # Errors
    /// Returns an error if there is no place for the status, or if its place is not clear.
    pub(super) fn parse<M: GuestMemory>(
        &mut self,
        buffer: &Buffer,
        memory: &M,
        limits: &Limits,
    ) -> Result<(), BufferError> {
        self.head = buffer.head();
        let parts = buffer.parts();
        let readable = parts.iter().take_while(|part| !part.writable).count();
        let (readable, writable) = parts.split_at(readable);
        if writable.iter().any(|part| !part.writable) {
            return Err(BufferError::Direction);
        }
        // The status is the last byte of the last writable part that is not empty.
        let answer = writable.iter().rposition(|part| part.len > 0).ok_or(BufferError::Content)?;
        let (before, last) = (&writable[..answer], writable[answer]);
        self.status = last.gpa.checked_add(u64::from(last.len) - 1).ok_or(BufferError::Outside)?;
        let inbound = before.iter().copied().chain([Part { len: last.len - 1, ..last }]);
        self.writable = inbound.clone().map(|part| u64::from(part.len)).sum();

        let mut header = [0; HEADER];
        self.data.clear();
        let read = take_header(readable, memory, &mut header, &mut self.data);
        let outbound = self.data.len();
        self.data.extend(inbound.filter(|part| part.len > 0));
        self.op = match read {
            Ok(()) => self.op_of(&header, outbound, limits),
            Err(_) => Op::Refuse(Status::IoError),
        };
        Ok(())
    }

    /// Returns the operation that `header` requests. The first `outbound` parts of the data are
    /// sent by the driver.
    fn op_of(&mut self, header: &[u8; HEADER], outbound: usize, limits: &Limits) -> Op {
        let kind = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
        let sector = header.last_chunk().map_or(u64::MAX, |sector| u64::from_le_bytes(*sector));
        self.sector = sector;
        let (sends, gets) = (outbound > 0, self.data.len() > outbound);
        let (op, right, writes) = match kind {
            spec::VIRTIO_BLK_T_IN => (Op::Read, gets && !sends, false),
            spec::VIRTIO_BLK_T_OUT => (Op::Write, sends && !gets, true),
            spec::VIRTIO_BLK_T_FLUSH => (Op::Flush, true, false),
            spec::VIRTIO_BLK_T_GET_ID => (Op::Id, gets && !sends, false),
            spec::VIRTIO_BLK_T_DISCARD if limits.discard => (Op::Discard, sends && !gets, true),
            spec::VIRTIO_BLK_T_WRITE_ZEROES if limits.zeroes => (Op::Zeroes, sends && !gets, true),
            _ => return Op::Refuse(Status::Unsupported),
        };
        let on_disk = match op {
            Op::Read | Op::Write => limits.contain(sector, self.len()),
            _ => true,
        };
        if right && on_disk && !(writes && limits.read_only) { op } else { Op::Refuse(Status::IoError) }
    }
}

/// Reads the header from the beginning of `parts`. The rest of the parts goes to `data`.
fn take_header<M: GuestMemory>(
    parts: &[Part],
    memory: &M,
    header: &mut [u8; HEADER],
    data: &mut Vec<Part>,
) -> Result<(), BufferError> {
    let mut missing = &mut header[..];
    for part in parts {
        let take = missing.len().min(usize::try_from(part.len).unwrap_or(usize::MAX));
        let (into, rest) = missing.split_at_mut(take);
        memory.read_slice(into, GuestAddress(part.gpa)).map_err(|_| BufferError::Outside)?;
        missing = rest;
        let taken = u32::try_from(take).unwrap_or(u32::MAX);
        if part.len > taken {
            let gpa = part.gpa.checked_add(u64::from(taken)).ok_or(BufferError::Outside)?;
            data.push(Part { gpa, len: part.len - taken, writable: false });
        }
    }
    if missing.is_empty() { Ok(()) } else { Err(BufferError::Content) }
}
