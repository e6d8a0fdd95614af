//! Disks: raw files and block devices as storage of `vmferry-virtio`'s [`Blk`].
//!
//! | module | content |
//! |---|---|
//! | `file` | reads and writes, straight from and into guest memory |
//! | `lease` | ownership: source and target never write to one disk at a time |
//! | `ahead` | writing out ahead of the pause of a migration |
//! | `flush` | writing out in that pause |
//!
//! A migration does not copy disks. They are on storage that both hosts reach. A branch of a guest
//! gets copy-on-write copies of its disks ([`copy`]).

mod ahead;
mod file;
mod flush;
mod lease;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use crate::kicks::Kicks;
use crate::kvm::Machine;
use crate::options::DiskOptions;
use crate::state::Saved;
use crate::virtio::{VirtioMmio, wire};
pub(crate) use ahead::WithWriteAhead;
use file::RawFile;
pub(crate) use flush::sync;
use rustix::event::EventfdFlags;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use vmferry_fault::PagingSlot;
use vmferry_virtio::blk::{Blk, BlkFigures, BlkOptions, BlkSaved, BlkWork, ID_BYTES, SECTOR};
use vmferry_virtio::mmio::TransportSaved;
use vmferry_virtio::signals::Interrupt;

/// Number of requests of one disk that are done at once. Each takes a thread, which sleeps while
/// the disk works. More than one helps where the storage is far away, and costs an idle guest only
/// the threads' stacks.
const THREADS: usize = 8;

/// Error with which a VM cannot use a disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The disk cannot be opened.
    #[error("cannot open the disk {}", .path.display())]
    Open {
        /// Path of the disk.
        path: PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// The path is neither a file nor a block device.
    #[error("the disk {} is neither a file nor a block device", .path.display())]
    Kind {
        /// Path that was given.
        path: PathBuf,
    },
    /// The size is not a whole number of sectors, or 0.
    #[error("the disk {} has {size} bytes: the size must be a multiple of {SECTOR} and not 0", .path.display())]
    Size {
        /// Path of the disk.
        path: PathBuf,
        /// Size in bytes.
        size: u64,
    },
    /// The size changed while the target waited for its guest.
    #[error("the disk {} had {was} bytes when it was opened, and has {now} now; restart this process", .path.display())]
    Changed {
        /// Path of the disk.
        path: PathBuf,
        /// Size in bytes when the disk was opened.
        was: u64,
        /// Size in bytes now.
        now: u64,
    },
    /// Another VM or process holds the disk.
    #[error(
        "the disk {} is in use by {by}: only one VM at a time can write to a disk; end that VM, or migrate its guest to this one",
        .path.display()
    )]
    InUse {
        /// Path of the disk.
        path: PathBuf,
        /// Description of the holder, as far as it is known.
        by: String,
    },
    /// The disk cannot be locked.
    #[error("cannot lock the disk {}", .path.display())]
    Lock {
        /// Path of the disk.
        path: PathBuf,
        /// Error of the system call.
        #[source]
        source: vmferry_sys::SysError,
    },
    /// Data that the guest wrote may not be on the storage.
    #[error("not all data that the guest wrote to the disk {} could be written to storage", .path.display())]
    Flush {
        /// Path of the disk.
        path: PathBuf,
        /// Error of the flush.
        #[source]
        source: io::Error,
    },
    /// The disk cannot be copied without copying its content.
    #[error("cannot make a copy-on-write copy of the disk {}: {source}; {}", .path.display(), copy_advice(source))]
    Copy {
        /// Path of the disk.
        path: PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// The flush did not end in time, so it is unknown whether all data is on the storage.
    #[error(
        "the disk {} did not take in time what the guest has written to it: move the guest when it writes less, or when the storage is \
         less busy",
        .path.display()
    )]
    Slow {
        /// Path of the disk.
        path: PathBuf,
    },
}

/// Returns the action to take after a copy has failed with `error`.
fn copy_advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EXDEV) => "place the copy on the file system of the disk",
        Some(libc::ENOSPC | libc::EDQUOT) => "free space on the file system of the disk",
        // A file system without reflinks returns one of these errors.
        Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::EINVAL | libc::ENOSYS) => {
            "place the disk on btrfs, or on XFS with reflinks, or take a snapshot of its volume"
        }
        _ => "check the file system of the disk",
    }
}

/// Status of a disk.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DiskStatus {
    /// Path of the disk.
    pub path: PathBuf,
    /// Size in bytes.
    pub size: u64,
    /// True if the guest cannot write to the disk.
    pub read_only: bool,
    /// Message of the latest error of the host, for which the guest got an I/O error. `None` if
    /// there was no error.
    pub last_error: Option<String>,
    /// Counters of the disk.
    pub figures: BlkFigures,
}

/// Saved state of a disk, registers and queue included. The disk's content is not part of it.
pub(crate) type DiskSection = TransportSaved<BlkSaved>;

impl Saved for DiskSection {
    const NAME: &'static str = "virtio-blk";
    const VERSION: u32 = 1;
}

/// Disk of a VM.
#[derive(Debug)]
pub(crate) struct VmDisk {
    device: Arc<VirtioMmio<Blk>>,
    work: Arc<BlkWork>,
    file: Arc<RawFile>,
    read_only: bool,
    threads: Vec<JoinHandle<()>>,
    /// Bell that wakes the thread that waits for notifications, if KVM passes them on.
    bell: Option<Arc<OwnedFd>>,
}

impl VmDisk {
    /// Returns disk number `instance` of a VM. Its file is open, but not yet owned by this VM: see
    /// [`take`].
    pub(crate) fn new(
        (machine, paging): (&Machine, &Arc<PagingSlot>),
        options: &DiskOptions,
        instance: u32,
        (line, kicks): (Box<dyn Interrupt>, Option<Kicks>),
    ) -> Result<Self> {
        let file = Arc::new(RawFile::open(options, paging)?);
        let mut id = [0; ID_BYTES];
        let name = format!("vmferry{instance}");
        id[..name.len()].copy_from_slice(name.as_bytes());
        let blk = BlkOptions { sectors: file.size() / SECTOR, read_only: options.read_only, id };
        let (wiring, socket) = wire(line);
        let device = Blk::new(blk, wiring);
        let work = device.work();
        let device = socket.plug(device, machine.ram(), instance);
        let (read_only, threads, bell) = (options.read_only, Vec::new(), None);
        let mut disk = Self { device, work, file, read_only, threads, bell };
        for _ in 0..THREADS {
            let (work, file, ram) =
                (Arc::clone(&disk.work), Arc::clone(&disk.file), Arc::clone(machine.ram()));
            disk.spawn(format!("disk-{instance}"), move || work.run(ram.map(), &*file))?;
        }
        if let Some(kicks) = kicks {
            disk.attend(machine, instance, &kicks)?;
        }
        Ok(disk)
    }

    /// Starts a thread that takes requests out of the ring when the driver notifies.
    fn attend(&mut self, machine: &Machine, instance: u32, kicks: &Kicks) -> Result<()> {
        let bell =
            rustix::event::eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| no_thread(error.into()))?;
        let bell = Arc::new(bell);
        if !kicks.ring(0, bell.as_fd()) {
            return Ok(());
        }
        let (work, file, ram) = (Arc::clone(&self.work), Arc::clone(&self.file), Arc::clone(machine.ram()));
        self.bell = Some(Arc::clone(&bell));
        self.spawn(format!("disk-{instance} bell"), move || work.attend(ram.map(), &*file, || wait(&bell)))
    }

    fn spawn(&mut self, name: String, live: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = vmferry_thread::spawn(vmferry_thread::Role::Disk, name, live);
        self.threads.push(thread.map_err(no_thread)?);
        Ok(())
    }

    pub(crate) fn device(&self) -> &Arc<VirtioMmio<Blk>> {
        &self.device
    }

    /// Returns the properties that source and target of a migration must have in common.
    pub(crate) fn description(&self) -> String {
        let mode = if self.read_only { "read-only" } else { "writable" };
        format!("{} bytes, {mode}", self.file.size())
    }

    /// Returns true if the guest cannot write to the disk.
    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only
    }

    pub(crate) fn status(&self) -> DiskStatus {
        DiskStatus {
            path: self.file.path().to_owned(),
            size: self.file.size(),
            read_only: self.read_only,
            last_error: self.file.last_error(),
            figures: self.figures(),
        }
    }

    /// Returns the counters of the disk.
    pub(crate) fn figures(&self) -> BlkFigures {
        self.work.figures()
    }
}

impl Drop for VmDisk {
    fn drop(&mut self) {
        self.file.abandon();
        self.work.end();
        if let Some(bell) = &self.bell {
            // The write fails only if the counter is full, and then the thread wakes in any case.
            let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
        }
        for thread in self.threads.drain(..) {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}

fn no_thread(source: io::Error) -> Error {
    Error::DeviceThread { name: DiskSection::NAME, source }
}

/// Waits until `bell` has been rung since the last wait.
fn wait(bell: &OwnedFd) {
    let mut count = [0; 8];
    // Otherwise only a signal ends the wait. A check for work that does not exist is harmless.
    let _ = rustix::io::read(bell, &mut count);
}

/// Makes all of `disks` this VM's own, or none.
///
/// # Errors
/// Returns the error of the disk that cannot be taken.
pub(crate) fn take(disks: &[VmDisk]) -> std::result::Result<(), DiskError> {
    let mut taken: Vec<&VmDisk> = Vec::new();
    for disk in disks {
        match disk.file.take() {
            Ok(true) => taken.push(disk),
            Ok(false) => {}
            Err(error) => {
                for disk in taken {
                    if let Err(error) = disk.file.give_up() {
                        tracing::warn!(%error, "cannot unlock a disk that is not needed");
                    }
                }
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Releases all of `disks`, whose requests must be quiesced.
///
/// # Errors
/// Returns an error if a disk may still be locked. All disks were tried.
pub(crate) fn give_up(disks: &[VmDisk]) -> std::result::Result<(), DiskError> {
    let mut all = Ok(());
    for disk in disks {
        all = all.and(disk.file.give_up());
    }
    all
}

/// Makes `copies` copy-on-write copies of those of `disks` that the guest can write to, in their
/// order. The content that the files had is lost.
///
/// The copies have all writes that were done before the call. If the guest is paused and its
/// requests are quiesced, they have the content of one instant.
///
/// # Errors
/// Returns an error if a disk cannot be copied, for example because its file system has no
/// reflinks. Some files may have been changed.
pub(crate) fn copy(disks: &[VmDisk], copies: &[File]) -> std::result::Result<(), DiskError> {
    let writable = disks.iter().filter(|disk| !disk.read_only);
    writable.zip(copies).try_for_each(|(disk, copy)| disk.file.copy(copy))
}

/// Records that the guest was ended. Threads that still work on its requests write nothing.
pub(crate) fn abandon(disks: &[VmDisk]) {
    disks.iter().for_each(|disk| disk.file.abandon());
}
