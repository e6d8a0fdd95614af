//! Pages that a guest uses.

use crate::{PageSet, VmError};

/// Finder of the pages that a guest has used, for a
/// [working set](crate::TargetVm::used_pages).
pub trait UsedPages: Send {
    /// Adds to `used` all pages that this process has used since its memory was mapped, and that it
    /// still has mapped. Reads and writes of the vCPUs and of the VMM count as use.
    ///
    /// The engine calls this method periodically, on one thread. A page that the host has taken
    /// back since the last call may be missing.
    ///
    /// # Errors
    /// If the host cannot determine which pages were used.
    fn find(&mut self, used: &mut PageSet) -> Result<(), VmError>;
}
