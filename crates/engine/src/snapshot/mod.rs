//! Saving a guest into a file and restoring it, before it runs or while it already runs.
//!
//! `vmferry_wire` defines the format: every page has an offset that is known before it is written,
//! and a digest in a table, and an index has the tables' checksums. A file can therefore be written
//! and read by several threads, pages of zeros are holes, and one page can be read without the
//! others. The file is written under a temporary name and gets its own name when all of it has
//! reached the disk. A file with its own name is therefore always complete. Until then the guest
//! can continue on this host.

// Input from a peer or from the host must not panic a thread of the engine. Tests may panic.
#![cfg_attr(
    not(test),
    warn(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)
)]

mod fill;
mod on_demand;
mod open;
mod pio;
mod progress;
mod restore;
mod save;
mod write;

pub use on_demand::{OnDemandRestore, restore_on_demand};
pub use open::RestoreError;
pub use progress::{FillState, RestoreProgress};
pub use restore::restore;
pub use save::{save, save_copy};

use crate::{MigrateError, random};
use open::SnapshotPages;
use std::path::Path;
use std::time::Duration;
use vmferry_wire::MigrationId;

/// Maximum number of threads that read or write one file. Further threads would wait for the disk
/// or for memory.
const MOST_THREADS: usize = 4;

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(MOST_THREADS)
}

fn uri(path: &Path) -> String {
    format!("file:{}", path.display())
}

/// Returns the id of the guest in `pages` from now on, and the id of the snapshot if it is a copy.
/// A restored copy needs an id of its own, because the original guest continued to run.
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
