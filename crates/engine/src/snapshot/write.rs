//! Writing of a paused guest to a file. Several threads write the pages, and the header is written
//! last.

use super::image::{Identity, Image, ImageFigures};
use super::open::RestoreError;
use super::pio;
use super::shares::{Shares, on_threads, threads};
use crate::handle::MigrationHandle;
use crate::vm;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmferry_bitmap::Bitmap;
use vmferry_core::{GuestMemory, PAGE_BYTES, PAGE_SIZE, PageRun, SourceVm, VmError, Window};
use vmferry_wire::{
    MigrationId, PageTable, RegionOffsets, SnapshotError, TABLE_PAGES, encode_machine, encode_state,
};

/// Number of tables that a thread takes at a time, with their 16 MiB of pages. The number is small,
/// so that all threads end at about the same time.
const SHARE_BLOCKS: u64 = 8;
/// Maximum number of pages of one write. This size, 1 MiB, still fits into a second-level cache, so
/// that the kernel copies bytes that computing the digest has just brought there.
const PIECE_PAGES: usize = 256;
/// Maximum number of times that a piece is written, if it changes during each write.
const MOST_TRIES: u32 = 4;

/// Reason why writing stopped.
#[derive(Debug, thiserror::Error)]
pub(super) enum Stop {
    #[error("cancelled on request")]
    Cancelled,
    #[error("the file could not be written: {0}; the guest continues on this host")]
    File(io::Error),
    #[error("{0}")]
    Read(RestoreError),
    #[error("{0}")]
    Vm(#[from] VmError),
    #[error("{0}")]
    Format(#[from] SnapshotError),
}

/// Amount of data that was written, and the times of the steps.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) pause: Duration,
    pub(super) state: Duration,
    pub(super) took: Duration,
    pub(super) bytes: u64,
    pub(super) raw_pages: u64,
    pub(super) zero_pages: u64,
}

/// Pauses the guest and writes all of it to `file`. The guest is left paused, even after an error.
pub(super) fn write(
    vm: &mut dyn SourceVm,
    file: &File,
    (id, copy): (MigrationId, bool),
    handle: &MigrationHandle,
) -> Result<Written, Stop> {
    let machine = encode_machine(&vm.config())?;
    let pausing = Instant::now();
    vm.pause()?;
    let paused = Instant::now();
    let state = encode_state(&vm::save(vm, Duration::MAX)?)?;
    let saved = Instant::now();
    let memory = vm.memory();
    let layout = memory.layout();
    handle.begin_pass(0, layout.pages());
    let image = Image::new(file, layout, machine, state);
    let pages = Pages {
        memory: &*memory,
        image: &image,
        handle,
        shares: Shares::new(SHARE_BLOCKS),
        stop: AtomicBool::new(false),
    };
    pages.write()?;
    let ImageFigures { bytes, raw_pages, .. } = image.finish(layout, Identity { id, copy, base: None })?;
    Ok(Written {
        pause: paused - pausing,
        state: saved - paused,
        took: saved.elapsed(),
        bytes,
        raw_pages,
        zero_pages: layout.pages() - raw_pages,
    })
}

/// Pages that are being written into the file.
struct Pages<'a> {
    memory: &'a dyn GuestMemory,
    image: &'a Image<'a>,
    handle: &'a MigrationHandle,
    shares: Shares,
    stop: AtomicBool,
}

impl Pages<'_> {
    fn write(&self) -> Result<(), Stop> {
        on_threads(
            threads(),
            "snapshot",
            || self.stop.store(true, Ordering::Relaxed),
            || {
                let done = self.work();
                self.handle.counters.add_thread_cpu();
                done
            },
        )
    }

    /// Writes the shares that one thread takes.
    fn work(&self) -> Result<(), Stop> {
        let mut scratch = Box::new([0; PAGE_BYTES]);
        let mut touched: Option<(usize, Bitmap)> = None;
        while let Some((position, blocks)) = self.shares.take(self.image.places()) {
            let place = &self.image.places()[position];
            let map = match &mut touched {
                Some((own, map)) if *own == position => map,
                other => &mut other.insert((position, Bitmap::new(place.pages))).1,
            };
            let run = place.run(blocks.start).first.0..place.run(blocks.end - 1).end();
            self.memory.touched(place.id, run.into(), map)?;
            for block in blocks {
                self.write_block(position, place, block, map, &mut scratch)?;
            }
        }
        Ok(())
    }

    fn write_block(
        &self,
        position: usize,
        place: &RegionOffsets,
        block: u64,
        touched: &Bitmap,
        scratch: &mut [u8; PAGE_BYTES],
    ) -> Result<(), Stop> {
        let (run, mut table) = (place.run(block), PageTable::default());
        for some in touched.runs_in(run.range()) {
            let window = self.memory.window(place.id, some.clone().into())?;
            for at in (0..window.pages()).step_by(PIECE_PAGES) {
                let piece = window.slice(at, PIECE_PAGES.min(window.pages() - at));
                self.write_piece(place, some.start + at as u64, piece, &mut table, scratch)?;
            }
        }
        let contents = table.contents();
        self.image.put_table(position, block, &table, contents)?;
        let counters = &self.handle.counters;
        let wrote = usize::try_from(contents * PAGE_SIZE).unwrap_or(usize::MAX);
        counters.count_frame(wrote, contents, run.count - contents);
        Ok(())
    }

    /// Writes the pages of `window`, of which `first` is the first, and stores their digests in
    /// `table`.
    ///
    /// Although the guest is paused, a device or the control socket may change a page after its
    /// digest was computed and before the page was written. Such a page would fail its check only
    /// at the restore. Therefore the digest of each page is computed again after the write.
    fn write_piece(
        &self,
        place: &RegionOffsets,
        first: u64,
        window: Window<'_>,
        table: &mut PageTable,
        scratch: &mut [u8; PAGE_BYTES],
    ) -> Result<(), Stop> {
        if self.stop.load(Ordering::Relaxed) || self.handle.cancelled() {
            return Err(Stop::Cancelled);
        }
        let slot = |page: usize| usize::try_from(first % TABLE_PAGES as u64).unwrap_or(0) + page;
        for _ in 0..MOST_TRIES {
            for page in 0..window.pages() {
                table.set(slot(page), window.digest(page, scratch));
            }
            let mut page = 0;
            while page < window.pages() {
                let count = (page..window.pages()).take_while(|page| table.has_content(slot(*page))).count();
                if count > 0 {
                    let at = place.data + (first + page as u64) * PAGE_SIZE;
                    pio::write_at(self.image.file(), window.slice(page, count), at).map_err(Stop::File)?;
                }
                page += count.max(1);
            }
            if (0..window.pages()).all(|page| table.fits(slot(page), window.digest(page, scratch))) {
                return Ok(());
            }
        }
        let run = PageRun::from(first..first + window.pages() as u64);
        Err(VmError::new(format!("{} {run} change although the guest is paused", place.id)).into())
    }
}
