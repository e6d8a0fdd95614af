//! Device state as streams of bytes.
//!
//! A [`Section`](crate::Section) is read and loaded as a whole while the guest is paused. A stream
//! is for a device whose state is larger than a section may be, or whose state can be read while
//! the guest runs, such as a passed-through device. The bytes of a stream go to the target in
//! pieces: some during the passes over memory, and the rest while the guest is paused. Source and
//! target each keep no more than a few pieces in memory.

use crate::{VmError, bounded};
use serde::{Deserialize, Serialize};

/// Name of a stream: which state it is, and how to read it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamName {
    /// The device, for example `vfio`. At most [`MAX_NAME_BYTES`](bounded::MAX_NAME_BYTES).
    #[serde(deserialize_with = "bounded::name")]
    pub name: String,
    /// Number of the device among those of this name.
    pub instance: u32,
    /// Version of the format.
    pub version: u32,
}

impl std::fmt::Display for StreamName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "'{}' {} (version {})", self.name, self.instance, self.version)
    }
}

/// Source's end of a stream. The thread that called the engine makes the calls. The engine drops
/// the reader at the end of the migration.
pub trait StateReader {
    /// Returns the name. It does not change.
    fn name(&self) -> StreamName;

    /// Returns the number of bytes that [`read`](Self::read) would still return if the guest were
    /// paused now. The engine uses the number to predict the downtime.
    ///
    /// # Errors
    /// If the device does not answer. The migration fails, and the guest stays on the source.
    fn left(&mut self) -> Result<u64, VmError>;

    /// Reads the next bytes into `buffer`, and returns their number. The call must not write guest
    /// memory.
    ///
    /// The engine calls this during the passes, while the guest runs, and after
    /// [`SourceVm::save`](crate::SourceVm::save), while it is paused. 0 says that nothing is left:
    /// for now if the guest runs, and for good if it is paused. A device whose state cannot be read
    /// while the guest runs returns 0 until the guest is paused.
    ///
    /// # Errors
    /// If the state cannot be read. The migration fails, and the guest stays on the source.
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, VmError>;
}

/// Target's end of a stream. The thread that called the engine makes the calls.
pub trait StateWriter {
    /// Takes the next bytes. The guest may still run on the source.
    ///
    /// # Errors
    /// If the state is not valid. The guest stays on the source.
    fn write(&mut self, bytes: &[u8]) -> Result<(), VmError>;

    /// Takes note that the stream is complete. The engine calls this before
    /// [`TargetVm::load`](crate::TargetVm::load), and then drops the writer.
    ///
    /// # Errors
    /// If the state is not complete or not valid. The guest stays on the source.
    fn finish(&mut self) -> Result<(), VmError>;
}
