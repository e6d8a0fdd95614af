//! Restore of a guest from a file, before the guest runs.

use super::open::{RestoreError, SnapshotPages, open};
use super::shares::{Shares, on_threads, threads};
use super::{identity, ms, uri};
use crate::MigrateError;
use crate::handle::thread_cpu_us;
use crate::target::{ReceiveFailure, Received};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;
use vmferry_core::{GuestMemory, PAGE_BYTES, RunState, Section, TargetVm, VmError};
use vmferry_wire::{Refusal, RefusalCode, RegionOffsets};

/// Reads the whole guest in the file at `path` into `vm`, and starts the guest.
///
/// The memory of `vm` must read as zeros, because the file does not contain pages of zeros.
///
/// # Errors
/// If the file cannot be read, or does not contain a complete guest that fits the machine of `vm`.
/// The guest has not run, and the file is unchanged.
pub fn restore(vm: &mut dyn TargetVm, path: &Path) -> Result<Received, ReceiveFailure> {
    let source = uri(path);
    let broken =
        |why: String| ReceiveFailure::Failed(Refusal::new(RefusalCode::Memory, format!("{source}: {why}")));
    let pages = open(path, vm).map_err(|error| match error {
        MigrateError::Snapshot { source, .. } => broken(source.to_string()),
        other => other.into(),
    })?;
    let (id, copy_of) = identity(&pages)?;
    let sections = pages.sections().map_err(|error| broken(error.to_string()))?;
    let memory = vm.memory();
    let reading = Reading {
        memory: &*memory,
        pages: &pages,
        shares: Shares::new(1),
        stop: AtomicBool::new(false),
        found: AtomicU64::new(0),
        cpu_us: AtomicU64::new(0),
    };
    reading.read().map_err(|error| broken(error.to_string()))?;
    let began = Instant::now();
    load(vm, &sections, copy_of.is_some()).map_err(|error| broken(error.to_string()))?;
    let load_ms = ms(began.elapsed());
    vm.start(RunState::Running).map_err(|error| broken(error.to_string()))?;
    let cpu_ms = reading.cpu_us.into_inner() as f64 / 1e3;
    Ok(Received {
        id,
        copy_of,
        pages: reading.found.into_inner(),
        load_ms,
        cpu_ms,
        source,
        known_pages: 0,
        paused: false,
        postcopy: None,
    })
}

/// Loads the device state of the guest, and gives the guest a new identity if `copy` is true.
pub(super) fn load(vm: &mut dyn TargetVm, sections: &[Section], copy: bool) -> Result<(), VmError> {
    vm.load(sections)?;
    if copy { vm.renew_identity() } else { Ok(()) }
}

/// Reading of all pages by several threads. Each thread repeatedly takes the next table and its
/// pages.
struct Reading<'a> {
    memory: &'a dyn GuestMemory,
    pages: &'a SnapshotPages,
    shares: Shares,
    stop: AtomicBool,
    found: AtomicU64,
    cpu_us: AtomicU64,
}

impl Reading<'_> {
    fn read(&self) -> Result<(), RestoreError> {
        on_threads(
            threads(),
            "restore",
            || self.stop.store(true, Ordering::Relaxed),
            || {
                let before = thread_cpu_us();
                let done = self.work();
                self.cpu_us.fetch_add(thread_cpu_us() - before, Ordering::Relaxed);
                done
            },
        )?;
        let (found, expected) = (self.found.load(Ordering::Relaxed), self.pages.contents());
        if found == expected { Ok(()) } else { Err(RestoreError::Pages { found, expected }) }
    }

    fn work(&self) -> Result<(), RestoreError> {
        let mut scratch = Box::new([0; PAGE_BYTES]);
        while !self.stop.load(Ordering::Relaxed) {
            let Some((position, blocks)) = self.shares.take(self.pages.places()) else { break };
            for block in blocks {
                self.read_block(position, &self.pages.places()[position], block, &mut scratch)?;
            }
        }
        Ok(())
    }

    fn read_block(
        &self,
        position: usize,
        place: &RegionOffsets,
        block: u64,
        scratch: &mut [u8; PAGE_BYTES],
    ) -> Result<(), RestoreError> {
        let Some(pages) = self.pages.block(position, block)? else { return Ok(()) };
        for run in pages.runs(place.run(block)) {
            let window = self.memory.window(place.id, run)?;
            self.pages.read_into(position, run.first, window, &pages, scratch)?;
        }
        self.found.fetch_add(pages.contents(), Ordering::Relaxed);
        Ok(())
    }
}
