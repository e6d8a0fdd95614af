//! The tracker of dirty pages.

use crate::vm::caught;
use std::sync::Arc;
use std::time::Duration;
use vmferry_core::{DirtyTracker, NothingToProtect, PageSet, Protect, VmError};

/// The tracker, and what is known while it tracks.
pub(super) struct Tracking {
    tracker: Box<dyn DirtyTracker>,
    /// `None` before the tracker was told to start. It is told to stop even if the start failed
    /// half-way.
    run: Option<Run>,
}

struct Run {
    /// Protects pages. `None` if the start failed.
    protect: Option<Arc<dyn Protect>>,
    /// Time at which the last harvest ended, or tracking began.
    since: Duration,
    /// Pages that each vCPU had written by the last harvest.
    written: Vec<u64>,
}

impl Tracking {
    pub(super) fn new(tracker: Box<dyn DirtyTracker>) -> Self {
        Self { tracker, run: None }
    }

    pub(super) fn tracker(&self) -> &dyn DirtyTracker {
        &*self.tracker
    }

    pub(super) fn start(&mut self, now: Duration) -> Result<(), VmError> {
        let run = self.run.insert(Run { protect: None, since: now, written: Vec::new() });
        self.tracker.start()?;
        let protect = self.tracker.protector();
        let chunk = protect.chunk_pages();
        if !chunk.is_power_of_two() {
            return Err(VmError::new(format!("its chunks are of {chunk} pages, which is no power of two")));
        }
        run.protect = Some(protect);
        Ok(())
    }

    /// Returns what protects pages that are postponed.
    pub(super) fn protect(&self) -> Option<&dyn Protect> {
        self.run.as_ref()?.protect.as_deref()
    }

    /// Returns what protects the pages of another channel. Nothing is protected where no page was sent
    /// before the switchover.
    pub(super) fn protector(&self) -> Arc<dyn Protect> {
        match &self.run {
            Some(_) => self.tracker.protector(),
            None => Arc::new(NothingToProtect),
        }
    }

    /// Adds the pages that were written since the last harvest.
    pub(super) fn harvest(&mut self, into: &mut PageSet) -> Result<(), VmError> {
        self.tracker.harvest(into)
    }

    /// Returns the seconds since the harvest before, and the pages that each vCPU wrote in them. The
    /// list is empty if the tracker cannot tell vCPUs apart.
    pub(super) fn harvested(&mut self, now: Duration) -> (f64, Vec<u64>) {
        let ring = self.tracker.ring();
        let Some(run) = &mut self.run else { return (0.0, Vec::new()) };
        let seconds = now.saturating_sub(std::mem::replace(&mut run.since, now)).as_secs_f64();
        let Some(ring) = ring else { return (seconds, Vec::new()) };
        let written: Vec<u64> = ring.vcpus.iter().map(|vcpu| vcpu.pages).collect();
        let before = std::mem::replace(&mut run.written, written);
        let before = before.iter().chain(std::iter::repeat(&0));
        (seconds, run.written.iter().zip(before).map(|(now, before)| now.saturating_sub(*before)).collect())
    }

    /// Stops tracking, if it was begun. No thread may protect pages any more.
    pub(super) fn stop(&mut self) {
        if self.run.take().is_some()
            && let Err(error) = caught(|| self.tracker.stop())
        {
            tracing::warn!("the guest may run slower, because tracking could not be stopped: {error}");
        }
    }
}
