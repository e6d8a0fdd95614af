//! Free pages that a guest has named since they were last taken.

use std::sync::{Mutex, MutexGuard, PoisonError};
use vmferry_core::{Layout, PageSet};
use vmferry_virtio::runs::GuestRun;

#[derive(Debug)]
struct Board {
    /// The request that hints are for.
    command: Option<u32>,
    /// What was hinted for it and not taken yet.
    pages: PageSet,
    ended: bool,
    late: u64,
}

/// Where hints wait for whoever asked for them.
#[derive(Debug)]
pub(super) struct HintBoard(Mutex<Board>);

impl HintBoard {
    pub(super) fn new(layout: &Layout) -> Self {
        Self(Mutex::new(Board { command: None, pages: PageSet::empty(layout), ended: false, late: 0 }))
    }

    fn lock(&self) -> MutexGuard<'_, Board> {
        // Sets only grow under it, until they are taken: a panic elsewhere leaves nothing that is wrong.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has `ask` make a request. Locked meanwhile, so that its first hint finds it here.
    pub(super) fn begin<E>(&self, ask: impl FnOnce() -> Result<u32, E>) -> Result<u32, E> {
        let mut board = self.lock();
        let command = ask()?;
        board.command = Some(command);
        board.pages.clear();
        board.ended = false;
        Ok(command)
    }

    /// No hint counts any more.
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

    /// Moves what was hinted for `command` to `into`: how many pages, and whether the guest has no more. `None` if it is not the
    /// request under way.
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
