//! Device state as streams of bytes.
//!
//! A [`Section`](crate::Section) is read and loaded as a whole while the guest is paused. Use a
//! stream for a device, such as a passed-through device, whose state does not fit into a section,
//! or whose state can be read while the guest runs. The bytes of a stream go to the target in
//! pieces: some during the passes over memory, and the rest while the guest is paused. Source and
//! target each keep no more than a few pieces in memory.

use crate::{VmError, bounded};
use serde::{Deserialize, Serialize};

/// Name of a stream, which identifies the device and the format of its state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamName {
    /// Name of the kind of device, for example `vfio`. At most
    /// [`MAX_NAME_BYTES`](bounded::MAX_NAME_BYTES) bytes.
    #[serde(deserialize_with = "bounded::name")]
    pub name: String,
    /// Number of the device among the devices of this kind.
    pub instance: u32,
    /// Version of the format.
    pub version: u32,
}

impl std::fmt::Display for StreamName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "'{}' {} (version {})", self.name, self.instance, self.version)
    }
}

/// Source's end of a stream. The engine calls the methods on the thread that called the engine, and
/// drops the reader at the end of the migration.
pub trait StateReader {
    /// Returns the name of the stream. The result never changes.
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
    /// [`SourceVm::save`](crate::SourceVm::save), while it is paused. The result 0 means that no
    /// bytes are left: for the moment if the guest runs, and for good if it is paused. A device
    /// whose state cannot be read while the guest runs returns 0 until the guest is paused.
    ///
    /// # Errors
    /// If the state cannot be read. The migration fails, and the guest stays on the source.
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, VmError>;
}

/// Target's end of a stream. The engine calls the methods on the thread that called the engine.
pub trait StateWriter {
    /// Receives the next bytes of the stream. The guest may still be running on the source.
    ///
    /// # Errors
    /// If the state is not valid. The guest stays on the source.
    fn write(&mut self, bytes: &[u8]) -> Result<(), VmError>;

    /// Completes the stream. The engine calls this method before
    /// [`TargetVm::load`](crate::TargetVm::load), and then drops the writer.
    ///
    /// # Errors
    /// If the state is not complete or not valid. The guest stays on the source.
    fn finish(&mut self) -> Result<(), VmError>;
}
