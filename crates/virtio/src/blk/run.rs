//! Execution of a request, on a thread of the disk.

use super::Disk;
use super::metrics::{Metrics, add};
use super::request::{Limits, Op, Request, SECTOR, Status};
use crate::queue::Part;
use std::io;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP};
use vm_memory::bitmap::{BS, BitmapSlice};
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions, VolatileSlice};

/// Length of the ID that a driver can request, in bytes.
pub const ID_BYTES: usize = VIRTIO_BLK_ID_BYTES as usize;

/// Maximum number of ranges in one request to discard or to write zeros.
pub(super) const MAX_RANGES: u32 = 16;
/// Maximum number of sectors in one range: 1 GiB. On a file system that cannot make zeros by
/// itself, zeros are written, and a pause waits for the write.
pub(super) const MAX_RANGE_SECTORS: u32 = 1 << 21;
/// Maximum length of a request that is tried without waiting, in bytes. Requests that need more
/// than a copy of memory would wait for longer ones.
const AT_ONCE_MOST: u64 = 64 << 10;
/// Size of a range in bytes: first sector, number of sectors, flags.
const RANGE: usize = 16;

/// Context in which requests are executed.
#[derive(Debug)]
pub(super) struct Job<'a, D> {
    pub(super) disk: &'a D,
    pub(super) limits: Limits,
    pub(super) id: [u8; ID_BYTES],
    /// True if everything that is written must be on stable storage before it is answered.
    pub(super) write_through: bool,
    pub(super) metrics: &'a Metrics,
}

impl<D: Disk> Job<'_, D> {
    /// Executes `request` and writes its status. Returns the number of bytes at the start of the
    /// buffer that were written.
    pub(super) fn run<M: GuestMemory>(&self, request: &Request, memory: &M) -> u32 {
        self.answer(request, memory, self.perform(request, memory))
    }

    /// Executes `request` as [`run`](Self::run) does, if this needs no wait. A request that needs a
    /// wait returns `None` and can then be [run](Self::run).
    pub(super) fn run_at_once<M: GuestMemory>(&self, request: &Request, memory: &M) -> Option<u32> {
        let (len, offset) = (request.len(), request.sector.saturating_mul(SECTOR));
        let (done, counts) = match request.op {
            Op::Read if len <= AT_ONCE_MOST => {
                let into = slices(memory, &request.data, Permissions::Write).ok()?;
                let done = self.disk.read_at_once(offset, &into);
                // As in `read`: the pages are marked whatever the result.
                into.iter().for_each(mark);
                (done, (&self.metrics.reads, &self.metrics.read_bytes))
            }
            Op::Write if len <= AT_ONCE_MOST && !self.write_through => {
                let from = slices(memory, &request.data, Permissions::Read).ok()?;
                let done = self.disk.write_at_once(offset, &from);
                (done, (&self.metrics.writes, &self.metrics.written_bytes))
            }
            _ => return None,
        };
        done.then(|| {
            add(counts.0, 1);
            add(counts.1, len);
            add(&self.metrics.at_once, 1);
            self.answer(request, memory, Ok(if request.op == Op::Read { len } else { 0 }))
        })
    }

    fn answer<M: GuestMemory>(&self, request: &Request, memory: &M, result: Result<u64, Status>) -> u32 {
        let (status, filled) = match result {
            Ok(filled) => (Status::Ok, filled),
            Err(status) => (status, 0),
        };
        match status {
            Status::Ok => {}
            Status::IoError => add(&self.metrics.io_errors, 1),
            Status::Unsupported => add(&self.metrics.unsupported, 1),
        }
        // The data is written first, then the status, then the used ring. A driver that sees one of
        // them also sees the earlier ones.
        let answered = memory.write_obj(status.byte(), GuestAddress(request.status)).is_ok();
        let whole = answered && filled == request.writable;
        u32::try_from(filled + u64::from(whole)).unwrap_or(u32::MAX)
    }

    /// Executes the request and returns the number of bytes that were given to the driver.
    fn perform<M: GuestMemory>(&self, request: &Request, memory: &M) -> Result<u64, Status> {
        match request.op {
            Op::Refuse(status) => Err(status),
            Op::Read => self.read(request, memory),
            Op::Write => self.write(request, memory).map(|()| 0),
            Op::Flush => {
                add(&self.metrics.flushes, 1);
                self.done(self.disk.flush()).map(|()| 0)
            }
            Op::Id => self.id(request, memory),
            Op::Discard => self.ranges(request, memory, |range| {
                add(&self.metrics.discards, 1);
                self.disk.discard(range.offset, range.len)
            }),
            Op::Zeroes => self.ranges(request, memory, |range| {
                add(&self.metrics.zeroes, 1);
                self.disk.write_zeroes(range.offset, range.len, range.unmap)
            }),
        }
    }

    fn read<M: GuestMemory>(&self, request: &Request, memory: &M) -> Result<u64, Status> {
        let into = slices(memory, &request.data, Permissions::Write)?;
        let read = self.disk.read(request.sector * SECTOR, &into);
        // The kernel wrote to guest pages, and no dirty tracker detects such writes (hazards.md 4).
        // Mark all of the pages after the read, even if it failed, because it may have written
        // some. A harvest between the write and the mark misses the page, but the next one finds
        // it. The last harvest comes only after no request is under way any more.
        into.iter().for_each(mark);
        self.done(read)?;
        add(&self.metrics.reads, 1);
        add(&self.metrics.read_bytes, request.len());
        Ok(request.len())
    }

    fn write<M: GuestMemory>(&self, request: &Request, memory: &M) -> Result<(), Status> {
        // All of the data is located before any of it is written.
        let from = slices(memory, &request.data, Permissions::Read)?;
        self.done(self.disk.write(request.sector * SECTOR, &from))?;
        add(&self.metrics.writes, 1);
        add(&self.metrics.written_bytes, request.len());
        self.flush_if_write_through()
    }

    fn id<M: GuestMemory>(&self, request: &Request, memory: &M) -> Result<u64, Status> {
        let mut rest = &self.id[..];
        for part in &request.data {
            let (now, later) = rest.split_at(rest.len().min(usize::try_from(part.len).unwrap_or(usize::MAX)));
            memory.write_slice(now, GuestAddress(part.gpa)).map_err(|_| Status::IoError)?;
            rest = later;
        }
        Ok((ID_BYTES - rest.len()) as u64)
    }

    /// Calls `each` with the ranges that the data names, after all of them were found to be on the
    /// disk.
    fn ranges<M: GuestMemory>(
        &self,
        request: &Request,
        memory: &M,
        each: impl Fn(&Range) -> io::Result<()>,
    ) -> Result<u64, Status> {
        let mut bytes = [0; MAX_RANGES as usize * RANGE];
        let len = usize::try_from(request.len()).unwrap_or(usize::MAX);
        let bytes = bytes.get_mut(..len).filter(|bytes| bytes.len().is_multiple_of(RANGE));
        let bytes = bytes.ok_or(Status::IoError)?;
        let mut rest = &mut bytes[..];
        for part in &request.data {
            let (now, later) = rest.split_at_mut(usize::try_from(part.len).unwrap_or(usize::MAX));
            memory.read_slice(now, GuestAddress(part.gpa)).map_err(|_| Status::IoError)?;
            rest = later;
        }
        let ranges = bytes.as_chunks::<RANGE>().0.iter().map(|bytes| self.range(request.op, bytes));
        let ranges = ranges.collect::<Result<Vec<_>, _>>()?;
        ranges.iter().try_for_each(|range| self.done(each(range)))?;
        self.flush_if_write_through()?;
        Ok(0)
    }

    fn range(&self, op: Op, bytes: &[u8; RANGE]) -> Result<Range, Status> {
        let [sector, rest] = bytes.as_chunks::<8>().0 else { return Err(Status::IoError) };
        let (sector, rest) = (u64::from_le_bytes(*sector), u64::from_le_bytes(*rest));
        let (count, flags) = (rest & u64::from(u32::MAX), rest >> 32);
        // A discard always unmaps, and must not set the flag (5.2.6.2).
        let known = if op == Op::Zeroes { u64::from(VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP) } else { 0 };
        if flags & !known != 0 {
            return Err(Status::Unsupported);
        }
        if count > u64::from(MAX_RANGE_SECTORS) || !self.limits.contain(sector, count * SECTOR) {
            return Err(Status::IoError);
        }
        Ok(Range { offset: sector * SECTOR, len: count * SECTOR, unmap: flags != 0 })
    }

    fn flush_if_write_through(&self) -> Result<(), Status> {
        if self.write_through { self.done(self.disk.flush()) } else { Ok(()) }
    }

    fn done(&self, result: io::Result<()>) -> Result<(), Status> {
        result.map_err(|error| {
            // The implementation of the disk reports each kind of error once to the operator.
            tracing::debug!(%error, disk = ?self.disk, "a guest's disk request failed");
            add(&self.metrics.host_errors, 1);
            Status::IoError
        })
    }
}

/// Range to discard or to fill with zeros. The range is on the disk.
#[derive(Debug, Clone, Copy)]
struct Range {
    /// Offset from the start of the disk, in bytes.
    offset: u64,
    /// Length in bytes.
    len: u64,
    unmap: bool,
}

/// Returns the memory of `parts` in this process, if all of them are in guest memory.
fn slices<'a, M: GuestMemory>(
    memory: &'a M,
    parts: &[Part],
    access: Permissions,
) -> Result<Vec<VolatileSlice<'a, BS<'a, M::Bitmap>>>, Status> {
    let mut slices = Vec::with_capacity(parts.len());
    for part in parts {
        let len = usize::try_from(part.len).map_err(|_| Status::IoError)?;
        let found = memory.get_slices(GuestAddress(part.gpa), len, access);
        for slice in found.map_err(|_| Status::IoError)? {
            slices.push(slice.map_err(|_| Status::IoError)?);
        }
    }
    Ok(slices)
}

fn mark<B: BitmapSlice>(slice: &VolatileSlice<'_, B>) {
    slice.bitmap().mark_dirty(0, slice.len());
}
