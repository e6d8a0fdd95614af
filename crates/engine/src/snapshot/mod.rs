//! Saving a guest to a file, which stops it or lets it run on, and restoring it. The memory of a
//! restored guest is read before the guest starts, or while it runs.
//!
//! `vmferry_wire` defines the format. The offset of every page is known before the page is written,
//! a table contains the digest of every page, and an index contains the checksums of the tables.
//! Therefore several threads can write and read a file, pages of zeros are holes in the file, and
//! one page can be read without the others.
//!
//! A snapshot can be an increment: a file with the pages that differ from those of another
//! snapshot. A restore reads all files of such a chain ([`open`]), and [`merge`] makes one file of
//! them.
//!
//! The file is written under a temporary name, and gets its final name once all of it has reached
//! the disk. Therefore a file with its final name is always complete. Until the file has its final
//! name, the guest can continue on this host.

// Input from a peer or from the host must not panic a thread of the engine. Tests may panic.
#![cfg_attr(
    not(test),
    warn(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)
)]

mod background;
mod file;
mod fill;
mod image;
mod merge;
mod on_demand;
mod open;
pub(crate) mod pio;
mod progress;
mod restore;
mod save;
mod shared;
mod shares;
mod working_set;
mod write;

pub use background::{PauseHook, SnapshotSettings, snapshot_background};
pub use merge::{Merged, merge_snapshot};
pub use on_demand::{OnDemandRestore, restore_on_demand};
pub use open::{RestoreError, snapshot_bases};
pub use progress::{FillState, RestoreProgress};
pub use restore::restore;
pub use save::{save, save_copy};
pub use shared::{SharedRestore, SharedSettings, restore_shared, restore_shared_with};
pub use working_set::{PrefetchProgress, read_working_set};

use crate::{MigrateError, random};
use open::SnapshotPages;
use std::path::Path;
use std::time::Duration;
use vmferry_wire::MigrationId;

fn uri(path: &Path) -> String {
    format!("file:{}", path.display())
}

/// Returns the id of the restored guest, and, if the snapshot is a copy, the id of the snapshot. A
/// restored copy needs a new id, because the original guest continued to run.
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
