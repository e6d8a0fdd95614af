//! Hostile peers and files that consist of arbitrary bytes. The fuzz targets use this module, and
//! so do tests, with seeded noise. It is behind the feature `hostile` and in no released program.

mod frames;
mod memory;
mod snapshot;

pub use crate::channel::{drive_lanes, drive_tls};
pub use crate::sim::{drive_source, drive_target};
pub use frames::drive_frames;
pub use snapshot::drive_snapshot;
