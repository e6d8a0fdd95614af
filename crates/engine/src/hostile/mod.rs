//! A peer, and a file, that say what bytes say: anything. For the fuzz targets and for the tests, which run them on seeded noise; behind
//! the feature `hostile`, nothing that ships has it.

mod frames;
mod memory;
mod snapshot;

pub use crate::channel::{drive_lanes, drive_tls};
pub use crate::sim::{drive_source, drive_target};
pub use frames::drive_frames;
pub use snapshot::drive_snapshot;
