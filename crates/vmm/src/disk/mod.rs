//! Disks: raw files and block devices behind `vmferry-virtio`'s [`Blk`].
//!
//! | module | what |
//! |---|---|
//! | `file` | reading and writing it, straight out of and into guest memory |
//! | `lease` | whose it is: two sides of a move never write one disk |
//! | `ahead` | writing out ahead of the pause of a move |
//! | `flush` | writing out in that pause |
//!
//! A move does not copy disks: they are on storage that both sides reach.

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
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use vmferry_fault::LazySlot;
use vmferry_virtio::blk::{Blk, BlkFigures, BlkOptions, BlkSaved, BlkWork, ID_BYTES, SECTOR};
use vmferry_virtio::mmio::TransportSaved;
use vmferry_virtio::signals::Interrupt;

/// Requests of one disk that are done at once. Each takes a thread, which sleeps while the disk works; more than this help where the
/// storage is far away, and cost an idle guest nothing but their stacks.
const THREADS: usize = 8;

/// Why a VM cannot have a disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// It cannot be opened.
    #[error("cannot open the disk {}", .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is something else.
    #[error("the disk {} is neither a file nor a block device", .path.display())]
    Kind {
        /// What was given.
        path: PathBuf,
    },
    /// It is not whole sectors.
    #[error("the disk {} has {size} bytes: it must have a multiple of {SECTOR}, and some", .path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// Its size.
        size: u64,
    },
    /// Its size changed while this side waited for its guest.
    #[error("the disk {} had {was} bytes when it was opened, and has {now} now; start this side again", .path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// The size when it was opened.
        was: u64,
        /// And now.
        now: u64,
    },
    /// Somebody else has it.
    #[error(
        "the disk {} is in use by {by}: a disk is written by one VM at a time; end that one, or move its guest here",
        .path.display()
    )]
    InUse {
        /// The file.
        path: PathBuf,
        /// Who, as far as is known.
        by: String,
    },
    /// It cannot be locked.
    #[error("the disk {} cannot be locked against others", .path.display())]
    Lock {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: vmferry_sys::SysError,
    },
    /// What was written may not be on it.
    #[error("not all that the guest wrote to the disk {} could be brought there", .path.display())]
    Flush {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is not known yet whether what was written is on it.
    #[error(
        "the disk {} did not take in time what the guest has written to it: move the guest when it writes less, or when the storage is \
         less busy",
        .path.display()
    )]
    Slow {
        /// The file.
        path: PathBuf,
    },
}

/// How a disk is doing.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DiskStatus {
    /// Its file.
    pub path: PathBuf,
    /// Its size in bytes.
    pub size: u64,
    /// Whether the guest cannot write it.
    pub read_only: bool,
    /// What the host refused last, in words; the guest was told of an I/O error then.
    pub last_error: Option<String>,
    /// What happened so far.
    pub figures: BlkFigures,
}

/// A saved disk, registers and queue included; not what is on it.
pub(crate) type DiskSection = TransportSaved<BlkSaved>;

impl Saved for DiskSection {
    const NAME: &'static str = "virtio-blk";
    const VERSION: u32 = 1;
}

/// A VM's disk.
#[derive(Debug)]
pub(crate) struct VmDisk {
    device: Arc<VirtioMmio<Blk>>,
    work: Arc<BlkWork>,
    file: Arc<RawFile>,
    read_only: bool,
    threads: Vec<JoinHandle<()>>,
    /// Wakes the thread that waits for notifications, if KVM passes them on.
    bell: Option<Arc<OwnedFd>>,
}

impl VmDisk {
    /// Disk number `instance` of a VM. Its file is opened, and not this VM's yet: see [`take`].
    pub(crate) fn new(
        (machine, lazy): (&Machine, &Arc<LazySlot>),
        options: &DiskOptions,
        instance: u32,
        (line, kicks): (Box<dyn Interrupt>, Option<Kicks>),
    ) -> Result<Self> {
        let file = Arc::new(RawFile::open(options, lazy)?);
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

    /// Has a thread of its own take requests out of the ring when the driver notifies.
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

    /// What both sides of a move must agree upon.
    pub(crate) fn description(&self) -> String {
        let mode = if self.read_only { "read-only" } else { "writable" };
        format!("{} bytes, {mode}", self.file.size())
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

    /// What it did so far.
    pub(crate) fn figures(&self) -> BlkFigures {
        self.work.figures()
    }
}

impl Drop for VmDisk {
    fn drop(&mut self) {
        self.file.abandon();
        self.work.end();
        if let Some(bell) = &self.bell {
            // It fails only if nobody has waited for ages, and then it need not.
            let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
        }
        for thread in self.threads.drain(..) {
            // Its panic was printed when it happened.
            let _ = thread.join();
        }
    }
}

fn no_thread(source: io::Error) -> Error {
    Error::DeviceThread { name: DiskSection::NAME, source }
}

/// Waits until `bell` was rung since it was last waited for.
fn wait(bell: &OwnedFd) {
    let mut count = [0; 8];
    // Nothing but a signal ends this otherwise, and looking for work that is not there is harmless.
    let _ = rustix::io::read(bell, &mut count);
}

/// Makes all of `disks` this VM's, or none.
///
/// # Errors
/// Which cannot be, and why.
pub(crate) fn take(disks: &[VmDisk]) -> std::result::Result<(), DiskError> {
    let mut taken: Vec<&VmDisk> = Vec::new();
    for disk in disks {
        match disk.file.take() {
            Ok(true) => taken.push(disk),
            Ok(false) => {}
            Err(error) => {
                for disk in taken {
                    if let Err(error) = disk.file.give_up() {
                        tracing::warn!(%error, "a disk that is not needed stays locked");
                    }
                }
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Leaves all of `disks`, whose requests are at rest, to somebody else.
///
/// # Errors
/// If one may still be locked. All were tried.
pub(crate) fn give_up(disks: &[VmDisk]) -> std::result::Result<(), DiskError> {
    let mut all = Ok(());
    for disk in disks {
        all = all.and(disk.file.give_up());
    }
    all
}

/// The guest is over: whatever a thread still does, it writes nothing.
pub(crate) fn abandon(disks: &[VmDisk]) {
    disks.iter().for_each(|disk| disk.file.abandon());
}
