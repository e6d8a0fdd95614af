//! Tracker of dirty pages.

use crate::vm::{caught, shielded};
use std::sync::Arc;
use std::time::Duration;
use vmferry_core::{DirtyTracker, NothingToProtect, PageSet, Protect, VmError};

/// Tracker, and its state while it tracks.
pub(super) struct Tracking {
    tracker: Box<dyn DirtyTracker>,
    /// State while the tracker tracks. `None` before the tracker was told to start. The state
    /// exists even if the start failed halfway, so that the tracker is told to stop in that case,
    /// too.
    run: Option<Run>,
}

struct Run {
    /// Object that protects pages. `None` if the start failed.
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
            return Err(VmError::new(format!(
                "the tracker's chunk size of {chunk} pages is not a power of two"
            )));
        }
        run.protect = Some(protect);
        Ok(())
    }

    /// Returns the object that protects pages that are postponed.
    pub(super) fn protect(&self) -> Option<&dyn Protect> {
        self.run.as_ref()?.protect.as_deref()
    }

    /// Returns an object with which the sender of a channel protects pages. The object protects
    /// nothing if no page is sent before the switchover.
    pub(super) fn protector(&self) -> Arc<dyn Protect> {
        match &self.run {
            Some(_) => self.tracker.protector(),
            None => Arc::new(NothingToProtect),
        }
    }

    /// Adds the pages that were written since the last harvest to `into`.
    pub(super) fn harvest(&mut self, into: &mut PageSet) -> Result<(), VmError> {
        self.tracker.harvest(into)
    }

    /// Returns the part of the last harvest's time that the tracker spent on getting the written
    /// pages from the kernel, or `None` if the tracker does not measure it.
    pub(super) fn harvest_kernel_time(&self) -> Option<Duration> {
        let time = || self.tracker.harvest_kernel_time();
        shielded("reading the kernel time of a harvest failed", time)
    }

    /// Returns the seconds since the previous harvest, and the number of pages that each vCPU wrote
    /// in that time. The list is empty if the tracker cannot distinguish vCPUs.
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

    /// Stops tracking, if it was started. No thread may protect pages any more.
    pub(super) fn stop(&mut self) {
        if self.run.take().is_some()
            && let Err(error) = caught(|| self.tracker.stop())
        {
            tracing::warn!("cannot stop tracking dirty pages, so the guest may run slower: {error}");
        }
    }
}
