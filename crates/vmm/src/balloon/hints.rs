//! Free pages that a guest has named since they were last taken.

use std::sync::{Mutex, MutexGuard, PoisonError};
use vmferry_core::{Layout, PageSet};
use vmferry_virtio::runs::GuestRun;

#[derive(Debug)]
struct Board {
    /// ID of the request that the hints are for.
    command: Option<u32>,
    /// Hinted pages that have not been taken yet.
    pages: PageSet,
    ended: bool,
    late: u64,
}

/// Board on which hints wait for the thread that asked for them.
#[derive(Debug)]
pub(super) struct HintBoard(Mutex<Board>);

impl HintBoard {
    pub(super) fn new(layout: &Layout) -> Self {
        Self(Mutex::new(Board { command: None, pages: PageSet::empty(layout), ended: false, late: 0 }))
    }

    fn lock(&self) -> MutexGuard<'_, Board> {
        // The sets only grow under the lock until they are taken, so a panic cannot leave them
        // inconsistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `request`, which makes a request. The lock is held meanwhile, so that the first hint
    /// finds the request on the board.
    pub(super) fn begin<E>(&self, request: impl FnOnce() -> Result<u32, E>) -> Result<u32, E> {
        let mut board = self.lock();
        let command = request()?;
        board.command = Some(command);
        board.pages.clear();
        board.ended = false;
        Ok(command)
    }

    /// Closes the request. Later hints are dropped.
    pub(super) fn close(&self) {
        let mut board = self.lock();
        board.command = None;
        board.pages.clear();
    }

    pub(super) fn add(&self, command: u32, runs: &[GuestRun]) {
        let mut board = self.lock();
        if board.command != Some(command) {
            board.late += 1;
            return;
        }
        for run in runs {
            if let Some(region) = board.pages.region_mut(run.region) {
                region.set_range(run.run.range());
            }
        }
    }

    pub(super) fn end(&self, command: u32) {
        let mut board = self.lock();
        if board.command == Some(command) {
            board.ended = true;
        }
    }

    /// Moves the pages that were hinted for `command` to `into`. Returns their number, and whether
    /// the guest has no more hints. Returns `None` if `command` is not the current request.
    pub(super) fn take(&self, command: u32, into: &mut PageSet) -> Option<(u64, bool)> {
        let mut board = self.lock();
        if board.command != Some(command) {
            return None;
        }
        let pages = board.pages.count();
        if pages > 0 {
            into.union(&board.pages);
            board.pages.clear();
        }
        Some((pages, board.ended))
    }

    pub(super) fn late(&self) -> u64 {
        self.lock().late
    }
}
