//! Writing out disks ahead of the pause.
//!
//! The pause of a migration includes a flush of the disks. The host's page cache then contains
//! everything that the guest has written since the migration began and that the host did not write
//! out. This module makes the host write out the data for as long as the migration runs.

use super::VmDisk;
use super::file::RawFile;
use crate::error::{Error, Result};
use crate::state::Saved as _;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use vmferry_core::PageSet;
use vmferry_engine::{DirtyTracker, Protect, RingFigures, TrackerKind, VmError};
use vmferry_virtio::blk::BlkWork;

/// Interval of writing out. On storage that keeps up, the pause has to write only what the guest
/// writes in this time. A shorter interval would cost the guest's disk the advantage of combined
/// writes.
const EVERY: Duration = Duration::from_millis(200);

/// Thread that writes out ahead. The thread ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct WriteAhead {
    /// Closed when this value is dropped, which the thread notices.
    _ending: Sender<()>,
}

impl WriteAhead {
    /// Starts the thread for `disks`. Returns `None` if none of them can be written.
    ///
    /// # Errors
    /// Returns an error if the host cannot create the thread.
    pub(crate) fn start(disks: &[VmDisk]) -> Result<Option<Self>> {
        let written: Vec<_> = disks.iter().filter(|disk| !disk.read_only).map(Written::new).collect();
        if written.is_empty() {
            return Ok(None);
        }
        let (ending, ended) = channel();
        // The thread is not joined: it may be in a system call that takes as long as the storage
        // does.
        vmferry_thread::spawn(vmferry_thread::Role::Disk, "write-ahead", move || live(written, &ended))
            .map_err(|source| Error::DeviceThread { name: super::DiskSection::NAME, source })?;
        Ok(Some(Self { _ending: ending }))
    }
}

/// Disk, and the number of bytes that had been written to it when it was last written out.
struct Written {
    file: Arc<RawFile>,
    work: Arc<BlkWork>,
    bytes: Option<u64>,
}

impl Written {
    fn new(disk: &VmDisk) -> Self {
        Self { file: Arc::clone(&disk.file), work: Arc::clone(&disk.work), bytes: None }
    }

    fn out(&mut self) {
        let figures = self.work.figures();
        let now = Some(figures.written_bytes + figures.zeroes);
        if self.bytes != now {
            self.bytes = now;
            self.file.write_out();
        }
    }
}

fn live(mut disks: Vec<Written>, ended: &mpsc::Receiver<()>) {
    loop {
        disks.iter_mut().for_each(Written::out);
        if ended.recv_timeout(EVERY) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}

/// Dirty tracker that starts and stops writing out together with the tracking. The tracker exists
/// as long as the memory passes of a migration.
pub(crate) struct WithWriteAhead {
    tracker: Box<dyn DirtyTracker>,
    ahead: Option<WriteAhead>,
}

impl WithWriteAhead {
    /// Returns `tracker` with writing out of `disks`.
    pub(crate) fn new(tracker: Box<dyn DirtyTracker>, disks: &[VmDisk]) -> Result<Self> {
        Ok(Self { tracker, ahead: WriteAhead::start(disks)? })
    }
}

impl DirtyTracker for WithWriteAhead {
    fn kind(&self) -> TrackerKind {
        self.tracker.kind()
    }

    fn start(&mut self) -> std::result::Result<(), VmError> {
        self.tracker.start()
    }

    fn harvest(&mut self, dirty: &mut PageSet) -> std::result::Result<(), VmError> {
        self.tracker.harvest(dirty)
    }

    fn protector(&self) -> Arc<dyn Protect> {
        self.tracker.protector()
    }

    fn ring(&self) -> Option<RingFigures> {
        self.tracker.ring()
    }

    fn harvest_kernel_time(&self) -> Option<Duration> {
        self.tracker.harvest_kernel_time()
    }

    fn stop(&mut self) -> std::result::Result<(), VmError> {
        self.ahead = None;
        self.tracker.stop()
    }
}
