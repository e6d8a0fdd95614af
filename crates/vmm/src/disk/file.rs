//! Raw file, or block device, as a disk.

use super::flush::{Losses, UnfinishedFlush};
use super::{DiskError, lease};
use crate::options::DiskOptions;
use rustix::fs::{Advice, FallocateFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use vm_memory::bitmap::BitmapSlice;
use vm_memory::{Bytes, VolatileSlice};
use vmferry_core::PAGE_BYTES;
use vmferry_fault::PagingSlot;
use vmferry_sys::lock::LockKind;
use vmferry_virtio::blk::{Disk, SECTOR};

/// Maximum number of pieces of memory that the kernel accepts in one call.
const IOV_MAX: usize = 1024;
/// Number of zeros that are written at once where the file system cannot make zeros, in bytes.
const ZEROS: usize = 64 << 10;

/// Open file of a disk.
///
/// # While pages are missing
/// A thread that touches a missing page sleeps until the page arrives (postcopy). If the guest is
/// ended instead, the thread wakes and finds zeros instead of the guest's data. These zeros must
/// not reach the disk, which outlives the guest. A write therefore first touches all of its data
/// and then checks whether the guest was [abandoned](Self::abandon). The flag is set before any
/// sleeping thread is woken.
///
/// Touching first also keeps a sleeping thread out of the file system, where it would hold the
/// file's lock.
#[derive(Debug)]
pub(super) struct RawFile {
    path: PathBuf,
    file: File,
    /// Same file, opened for the flushes of migrations ([`Losses`]).
    moving: File,
    losses: Losses,
    late: UnfinishedFlush,
    /// Size in bytes.
    size: u64,
    read_only: bool,
    block_device: bool,
    /// True if this VM holds the lock, so that I/O is allowed.
    held: AtomicBool,
    abandoned: AtomicBool,
    /// True if the file system does not report whether an operation would wait; for reads, and for
    /// writes.
    never_at_once: [AtomicBool; 2],
    /// Latest error of the host.
    refused: Mutex<Option<Refused>>,
    paging: Arc<PagingSlot>,
}

impl RawFile {
    /// Opens the file of `options`. Neither locks nor reads the file.
    pub(super) fn open(options: &DiskOptions, paging: &Arc<PagingSlot>) -> Result<Self, DiskError> {
        let path = options.path.clone();
        let failed = |source| DiskError::Open { path: options.path.clone(), source };
        let mut open = File::options();
        // Opens without waiting: opening a pipe would wait for its other end.
        open.read(true).write(!options.read_only).custom_flags(libc::O_NONBLOCK);
        let file = open.open(&path).map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        let kind = meta.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(DiskError::Kind { path });
        }
        let size = size(&file).map_err(failed)?;
        if size == 0 || !size.is_multiple_of(SECTOR) {
            return Err(DiskError::Size { path, size });
        }
        let moving = open.open(&path).map_err(failed)?;
        let also = moving.metadata().map_err(failed)?;
        if (also.dev(), also.ino()) != (meta.dev(), meta.ino()) {
            return Err(failed(io::Error::other("the file was replaced while it was opened")));
        }
        Ok(Self {
            path,
            file,
            moving,
            losses: Losses::default(),
            late: UnfinishedFlush::default(),
            size,
            read_only: options.read_only,
            block_device: kind.is_block_device(),
            held: false.into(),
            abandoned: false.into(),
            never_at_once: Default::default(),
            refused: Mutex::default(),
            paging: Arc::clone(paging),
        })
    }

    /// Returns this disk with another file, as held.
    #[cfg(test)]
    pub(super) fn on(self, file: File) -> Self {
        let moving = file.try_clone().unwrap();
        Self { file, moving, held: true.into(), ..self }
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the latest error of the host as a message.
    pub(super) fn last_error(&self) -> Option<String> {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused.as_ref().map(|refused| refused.words.clone())
    }

    /// Records an error of the host, and logs it when it differs from the previous one, because a
    /// full or broken disk fails on every request.
    fn note<T>(&self, what: &str, result: io::Result<T>) -> io::Result<T> {
        if let Err(error) = &result
            && self.check().is_ok()
        {
            let words = match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => format!(
                    "{what}: no room left on the storage ({error}); the guest gets I/O errors until there is room"
                ),
                _ => format!("{what}: {error}; the guest gets an I/O error"),
            };
            let mut last = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
            if last.as_ref().is_none_or(|last| last.kind != error.kind()) {
                tracing::warn!(disk = %self.path.display(), "{words}");
            }
            *last = Some(Refused { kind: error.kind(), words });
        }
        result
    }

    /// Makes the disk this VM's own. Returns true if it was not before.
    pub(super) fn take(&self) -> Result<bool, DiskError> {
        if self.held.load(Ordering::Acquire) {
            return Ok(false);
        }
        let kind = if self.read_only { LockKind::Shared } else { LockKind::Exclusive };
        lease::take(&self.file, &self.path, kind)?;
        let size = size(&self.file);
        if !size.as_ref().is_ok_and(|size| *size == self.size) {
            let _ = lease::give_up(&self.file, &self.path);
            return Err(match size {
                Ok(now) => DiskError::Changed { path: self.path.clone(), was: self.size, now },
                Err(source) => DiskError::Open { path: self.path.clone(), source },
            });
        }
        if self.block_device {
            // This host's page cache may have older data than another host wrote. A file system
            // handles this itself when the lock is taken.
            let _ = rustix::fs::fadvise(&self.file, 0, None, Advice::DontNeed);
        }
        self.held.store(true, Ordering::Release);
        Ok(true)
    }

    /// Gives the disk up. Requests must be quiesced.
    pub(super) fn give_up(&self) -> Result<(), DiskError> {
        if self.held.swap(false, Ordering::AcqRel) {
            lease::give_up(&self.file, &self.path)?;
        }
        Ok(())
    }

    /// Writes all data to where another host finds it.
    pub(super) fn sync(&self) -> Result<(), DiskError> {
        if self.read_only || !self.held.load(Ordering::Acquire) {
            return Ok(());
        }
        let flushed = self.moving.sync_data().inspect_err(|_| self.losses.found());
        let whole = flushed.and_then(|()| {
            if self.losses.untold() {
                return Err(io::Error::other(
                    "an earlier flush failed, and the guest has not flushed the disk since",
                ));
            }
            Ok(())
        });
        whole.map_err(|source| DiskError::Flush { path: self.path.clone(), source })
    }

    /// Makes `copy` a copy-on-write copy of this disk (ioctl_ficlone(2)). The kernel first writes
    /// out the cached data of this disk.
    pub(super) fn copy(&self, copy: &File) -> Result<(), DiskError> {
        rustix::fs::ioctl_ficlone(copy, &self.file)
            .map_err(|error| DiskError::Copy { path: self.path.clone(), source: error.into() })
    }

    pub(super) fn late(&self) -> &UnfinishedFlush {
        &self.late
    }

    /// Makes the host begin to write out its cached data, without waiting for the end.
    pub(super) fn write_out(&self) {
        if !self.read_only {
            // SAFETY: takes numbers only. The call is a hint: if it fails, a later flush takes
            // longer.
            let _ =
                unsafe { libc::sync_file_range(self.file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
        }
    }

    /// Records that the guest was ended. Nothing is written any more.
    pub(super) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
    }

    /// Returns an error if requests are not allowed. A write must call this after all of its data
    /// was touched.
    fn check(&self) -> io::Result<()> {
        if !self.held.load(Ordering::Acquire) {
            return Err(io::Error::other("this VM does not hold the disk"));
        }
        if self.abandoned.load(Ordering::Acquire) {
            return Err(io::Error::other("the guest was ended"));
        }
        Ok(())
    }

    /// Sleeps until all pages of `slices` are present.
    fn touch<B: BitmapSlice>(&self, slices: &[VolatileSlice<'_, B>]) {
        // Pages can only become missing before a guest runs, so a settled memory stays settled.
        if self.paging.if_complete(|| ()).is_some() {
            return;
        }
        for slice in slices {
            let start = slice.ptr_guard().as_ptr().addr();
            let pages = start / PAGE_BYTES..=(start + slice.len().saturating_sub(1)) / PAGE_BYTES;
            for page in pages {
                let at = (page * PAGE_BYTES).saturating_sub(start);
                // The address is outside the slice only if the slice is empty.
                let _ = std::hint::black_box(slice.load::<u8>(at, Ordering::Relaxed));
            }
        }
    }

    /// Does a whole request by one `call` that does not wait. Returns false if this was not
    /// possible.
    fn at_once<B: BitmapSlice>(
        &self,
        slices: &[VolatileSlice<'_, B>],
        offset: u64,
        never: &AtomicBool,
        call: impl Fn(&[libc::iovec], libc::off_t) -> isize,
    ) -> bool {
        // While pages are missing, the call could sleep on one.
        let may = !never.load(Ordering::Relaxed)
            && self.paging.if_complete(|| ()).is_some()
            && self.check().is_ok();
        let (pieces, Ok(at)) = (Pieces::new(slices).all, libc::off_t::try_from(offset)) else { return false };
        if !may || pieces.len() > IOV_MAX {
            return false;
        }
        let moved = call(&pieces, at);
        if moved < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EOPNOTSUPP) {
            never.store(true, Ordering::Relaxed);
        }
        usize::try_from(moved) == Ok(slices.iter().map(VolatileSlice::len).sum())
    }

    fn fallocate(&self, flags: FallocateFlags, offset: u64, len: u64) -> io::Result<bool> {
        loop {
            return match rustix::fs::fallocate(&self.file, flags | FallocateFlags::KEEP_SIZE, offset, len) {
                Ok(()) => Ok(true),
                Err(Errno::INTR) => continue,
                // Not supported by this file system, or for these addresses (block devices have
                // larger units than sectors).
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::NODEV) => Ok(false),
                Err(error) => Err(error.into()),
            };
        }
    }
}

/// Error of the host.
#[derive(Debug)]
struct Refused {
    kind: io::ErrorKind,
    words: String,
}

/// Returns the size of a file or a block device, in bytes. Seeking works for both.
fn size(file: &File) -> io::Result<u64> {
    let mut file = file;
    file.seek(SeekFrom::End(0))
}

/// Pieces of memory of one request, some of which the kernel has done.
struct Pieces {
    /// All pieces: `0 <= first <= all.len()`, and all before `first` are done.
    all: Vec<libc::iovec>,
    first: usize,
}

impl Pieces {
    fn new<B: BitmapSlice>(slices: &[VolatileSlice<'_, B>]) -> Self {
        let iovec = |slice: &VolatileSlice<'_, B>| libc::iovec {
            iov_base: slice.ptr_guard().as_ptr().cast_mut().cast(),
            iov_len: slice.len(),
        };
        Self { all: slices.iter().map(iovec).collect(), first: 0 }
    }

    /// Calls `call` with the remaining pieces and their offset, until none is left.
    fn each(
        mut self,
        mut offset: u64,
        nothing: io::ErrorKind,
        call: impl Fn(&[libc::iovec], libc::off_t) -> isize,
    ) -> io::Result<()> {
        self.advance(0);
        while self.first < self.all.len() {
            let now = &self.all[self.first..][..(self.all.len() - self.first).min(IOV_MAX)];
            let at = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::FileTooLarge)?;
            match usize::try_from(call(now, at)) {
                Ok(0) => return Err(nothing.into()),
                Ok(moved) => {
                    offset += moved as u64;
                    self.advance(moved);
                }
                Err(_) => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error => return Err(error),
                },
            }
        }
        Ok(())
    }

    fn advance(&mut self, mut moved: usize) {
        while let Some(piece) = self.all.get_mut(self.first) {
            if moved < piece.iov_len {
                piece.iov_base = piece.iov_base.wrapping_byte_add(moved);
                piece.iov_len -= moved;
                return;
            }
            moved -= piece.iov_len;
            self.first += 1;
        }
    }
}

impl Disk for RawFile {
    fn read<B: BitmapSlice>(&self, offset: u64, into: &[VolatileSlice<'_, B>]) -> io::Result<()> {
        self.check()?;
        let read = Pieces::new(into).each(offset, io::ErrorKind::UnexpectedEof, |pieces, at| {
            let count = libc::c_int::try_from(pieces.len()).unwrap_or(libc::c_int::MAX);
            // SAFETY: the pieces are parts of `into`, guest memory that is mapped writable for as
            // long as the slices live, and to which there are no references; a volatile slice
            // allows the guest to use the memory meanwhile.
            unsafe { libc::preadv(self.file.as_raw_fd(), pieces.as_ptr(), count, at) }
        });
        self.note("reading", read)
    }

    fn write<B: BitmapSlice>(&self, offset: u64, from: &[VolatileSlice<'_, B>]) -> io::Result<()> {
        self.touch(from);
        self.check()?;
        let written = Pieces::new(from).each(offset, io::ErrorKind::WriteZero, |pieces, at| {
            let count = libc::c_int::try_from(pieces.len()).unwrap_or(libc::c_int::MAX);
            // SAFETY: as for reading; the kernel only reads the pieces.
            unsafe { libc::pwritev(self.file.as_raw_fd(), pieces.as_ptr(), count, at) }
        });
        self.note("writing", written)
    }

    fn read_at_once<B: BitmapSlice>(&self, offset: u64, into: &[VolatileSlice<'_, B>]) -> bool {
        self.at_once(into, offset, &self.never_at_once[0], |pieces, at| {
            let count = libc::c_int::try_from(pieces.len()).unwrap_or(libc::c_int::MAX);
            // SAFETY: as for reading.
            unsafe { libc::preadv2(self.file.as_raw_fd(), pieces.as_ptr(), count, at, libc::RWF_NOWAIT) }
        })
    }

    fn write_at_once<B: BitmapSlice>(&self, offset: u64, from: &[VolatileSlice<'_, B>]) -> bool {
        self.at_once(from, offset, &self.never_at_once[1], |pieces, at| {
            let count = libc::c_int::try_from(pieces.len()).unwrap_or(libc::c_int::MAX);
            // SAFETY: as for writing.
            unsafe { libc::pwritev2(self.file.as_raw_fd(), pieces.as_ptr(), count, at, libc::RWF_NOWAIT) }
        })
    }

    fn flush(&self) -> io::Result<()> {
        self.check()?;
        if self.read_only {
            return Ok(());
        }
        self.note("flushing", self.losses.telling(|| self.file.sync_data()))
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check()?;
        if len > 0 {
            // A range that cannot be punched out keeps its content, which a discard allows.
            self.note("discarding", self.fallocate(FallocateFlags::PUNCH_HOLE, offset, len))?;
        }
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        self.check()?;
        if len == 0 {
            return Ok(());
        }
        let ways = if unmap {
            &[FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE][..]
        } else {
            &[FallocateFlags::ZERO_RANGE]
        };
        for way in ways {
            if self.note("writing zeros", self.fallocate(*way, offset, len))? {
                return Ok(());
            }
        }
        let (zeros, mut at) = (vec![0; ZEROS], offset);
        while at < offset + len {
            let now = usize::try_from(offset + len - at).unwrap_or(ZEROS).min(ZEROS);
            self.note("writing zeros", self.file.write_all_at(&zeros[..now], at))?;
            at += now as u64;
        }
        Ok(())
    }
}
