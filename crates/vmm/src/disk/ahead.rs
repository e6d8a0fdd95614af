//! Writing out ahead of the pause.
//!
//! The pause of a move includes a flush of the disks. What the host's page cache holds then is all that the guest has written since the
//! move began and the host saw no reason to write out, unless somebody makes it: here, for as long as the move goes on.

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

/// How much the guest writes in this time is what is left for the pause, on storage that keeps up. Often costs the guest's disk what it
/// saves by putting writes together.
const EVERY: Duration = Duration::from_millis(200);

/// A thread that does it; ends when this is dropped.
#[derive(Debug)]
pub(crate) struct WriteAhead {
    /// Closed with this, which the thread sees.
    _ending: Sender<()>,
}

impl WriteAhead {
    /// For `disks`; `None` if none of them can be written.
    ///
    /// # Errors
    /// If the host has no thread for it.
    pub(crate) fn start(disks: &[VmDisk]) -> Result<Option<Self>> {
        let written: Vec<_> = disks.iter().filter(|disk| !disk.read_only).map(Written::new).collect();
        if written.is_empty() {
            return Ok(None);
        }
        let (ending, ended) = channel();
        // Nobody waits for it: it may be in the middle of a system call that takes as long as the storage does.
        vmferry_thread::spawn(vmferry_thread::Role::Disk, "write-ahead", move || live(written, &ended))
            .map_err(|source| Error::DeviceThread { name: super::DiskSection::NAME, source })?;
        Ok(Some(Self { _ending: ending }))
    }
}

/// A disk, and how much had been written to it when that was last begun to be written out.
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

/// A tracker, with which writing out ahead begins and ends: it is there as long as the move's memory passes.
pub(crate) struct WithWriteAhead {
    tracker: Box<dyn DirtyTracker>,
    ahead: Option<WriteAhead>,
}

impl WithWriteAhead {
    /// `tracker`, and that.
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

    fn stop(&mut self) -> std::result::Result<(), VmError> {
        self.ahead = None;
        self.tracker.stop()
    }
}
