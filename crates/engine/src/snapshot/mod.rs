//! A guest moved into a file, and out of it again, at once or while it already runs.
//!
//! `vmferry_wire` has the format: every page at an offset known before it is written, with a digest in a table, and the
//! tables' checksums in an index. So a file is written and read by several threads, pages of zeros are holes, and one page
//! can be read without the others. It is written under a temporary name and takes its own only when all of it has reached
//! the disk, so a file of that name is always whole; until then the guest can go on here.

// What a peer or the host says must not panic a thread of the engine. Tests may.
#![cfg_attr(
    not(test),
    warn(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)
)]

mod fill;
mod lazy;
mod open;
mod pio;
mod progress;
mod restore;
mod save;
mod write;

pub use lazy::{LazyRestore, restore_lazy};
pub use open::RestoreError;
pub use progress::{FillState, LazyProgress};
pub use restore::restore;
pub use save::{save, save_copy};

use crate::{MigrateError, random};
use open::SnapshotPages;
use std::path::Path;
use std::time::Duration;
use vmferry_wire::MigrationId;

/// Most threads that read or write one file: further ones wait for the disk or for memory.
const MOST_THREADS: usize = 4;

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(MOST_THREADS)
}

fn uri(path: &Path) -> String {
    format!("file:{}", path.display())
}

/// The name that the guest in `pages` has from now on, and the snapshot's if it is only a copy: whoever runs a copy must
/// not be taken for the one that went on.
fn identity(pages: &SnapshotPages) -> Result<(String, Option<String>), MigrateError> {
    let snapshot = pages.id().to_string();
    if !pages.is_copy() {
        return Ok((snapshot, None));
    }
    Ok((MigrationId(random()?).to_string(), Some(snapshot)))
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
