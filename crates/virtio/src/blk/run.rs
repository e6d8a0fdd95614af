//! Doing a request, on a thread of the disk's own.

use super::Disk;
use super::metrics::{Metrics, add};
use super::request::{Limits, Op, Request, SECTOR, Status};
use crate::queue::Part;
use std::io;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP};
use vm_memory::bitmap::{BS, BitmapSlice};
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions, VolatileSlice};

/// Bytes of the name that a driver can ask for.
pub const ID_BYTES: usize = VIRTIO_BLK_ID_BYTES as usize;

/// Most ranges in one request to discard or to write zeros.
pub(super) const MAX_RANGES: u32 = 16;
/// Most sectors in one of them: 1 GiB. A file system that cannot make zeros by itself gets them written, and a pause waits for that.
pub(super) const MAX_RANGE_SECTORS: u32 = 1 << 21;
/// Longer requests are not tried at once: others that need more than a copy of memory would wait for them.
const AT_ONCE_MOST: u64 = 64 << 10;
/// Bytes of a range: first sector, number of sectors, flags.
const RANGE: usize = 16;

/// What requests are done with.
#[derive(Debug)]
pub(super) struct Job<'a, D> {
    pub(super) disk: &'a D,
    pub(super) limits: Limits,
    pub(super) id: [u8; ID_BYTES],
    /// Everything that is written is on stable storage before it is answered.
    pub(super) write_through: bool,
    pub(super) metrics: &'a Metrics,
}

impl<D: Disk> Job<'_, D> {
    /// Does `request` and writes its answer; says how many bytes of the buffer, from its beginning, were written.
    pub(super) fn run<M: GuestMemory>(&self, request: &Request, memory: &M) -> u32 {
        self.answer(request, memory, self.perform(request, memory))
    }

    /// The same, if it takes no waiting. What was tried in vain can be [run](Self::run).
    pub(super) fn run_at_once<M: GuestMemory>(&self, request: &Request, memory: &M) -> Option<u32> {
        let (len, offset) = (request.len(), request.sector.saturating_mul(SECTOR));
        let (done, counts) = match request.op {
            Op::Read if len <= AT_ONCE_MOST => {
                let into = slices(memory, &request.data, Permissions::Write).ok()?;
                let done = self.disk.read_at_once(offset, &into);
                // As in `read`: whatever came of it.
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
        // The data first, then the answer, then the used ring: a driver that sees one sees what came before.
        let answered = memory.write_obj(status.byte(), GuestAddress(request.status)).is_ok();
        let whole = answered && filled == request.writable;
        u32::try_from(filled + u64::from(whole)).unwrap_or(u32::MAX)
    }

    /// Says how many bytes were given to the driver.
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
        // The kernel wrote the guest's pages behind the back of every tracker (hazards.md 4): they are marked now that it has, and
        // all of them even if it failed, because it may have written some. A harvest that comes between finds the mark next time,
        // and the last one comes when nothing is under way any more.
        into.iter().for_each(mark);
        self.done(read)?;
        add(&self.metrics.reads, 1);
        add(&self.metrics.read_bytes, request.len());
        Ok(request.len())
    }

    fn write<M: GuestMemory>(&self, request: &Request, memory: &M) -> Result<(), Status> {
        // All of the data is found before any of it is written.
        let from = slices(memory, &request.data, Permissions::Read)?;
        self.done(self.disk.write(request.sector * SECTOR, &from))?;
        add(&self.metrics.writes, 1);
        add(&self.metrics.written_bytes, request.len());
        self.settle()
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

    /// Calls `each` with the ranges that the data names, once all of them were found to be on the disk.
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
        self.settle()?;
        Ok(0)
    }

    fn range(&self, op: Op, bytes: &[u8; RANGE]) -> Result<Range, Status> {
        let [sector, rest] = bytes.as_chunks::<8>().0 else { return Err(Status::IoError) };
        let (sector, rest) = (u64::from_le_bytes(*sector), u64::from_le_bytes(*rest));
        let (count, flags) = (rest & u64::from(u32::MAX), rest >> 32);
        // A discard unmaps anyway, and must not say so (5.2.6.2).
        let known = if op == Op::Zeroes { u64::from(VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP) } else { 0 };
        if flags & !known != 0 {
            return Err(Status::Unsupported);
        }
        if count > u64::from(MAX_RANGE_SECTORS) || !self.limits.contain(sector, count * SECTOR) {
            return Err(Status::IoError);
        }
        Ok(Range { offset: sector * SECTOR, len: count * SECTOR, unmap: flags != 0 })
    }

    fn settle(&self) -> Result<(), Status> {
        if self.write_through { self.done(self.disk.flush()) } else { Ok(()) }
    }

    fn done(&self, result: io::Result<()>) -> Result<(), Status> {
        result.map_err(|error| {
            // Whose disk it is says so to people, once for each kind.
            tracing::debug!(%error, disk = ?self.disk, "a guest's disk request failed");
            add(&self.metrics.host_errors, 1);
            Status::IoError
        })
    }
}

/// A range to discard or to fill with zeros, which is on the disk.
#[derive(Debug, Clone, Copy)]
struct Range {
    /// Bytes from the disk's beginning.
    offset: u64,
    /// Bytes.
    len: u64,
    unmap: bool,
}

/// `parts` in this process, if all of them are in memory.
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
