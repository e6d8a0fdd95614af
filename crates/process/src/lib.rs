//! Process guest: a guest that needs no KVM. Its vCPUs are threads that write to memory, and the
//! tracker `wp` finds their writes.
//!
//! The guest runs the workloads of the bare-metal guest (guest/abi), with the same stamps and
//! checks. It has the same statistics page at the same address, and the same engine migrates it.
//! Its guest-physical addresses are only names for offsets in its memory. A process guest cannot
//! show the effects of KVM: exits, interrupt controllers, and the cost of faults for dirty logging.

mod clock;
mod error;
mod free;
mod guest;
mod heap;
#[cfg(feature = "hostile")]
pub mod hostile;
mod memory;
mod migrate;
mod options;
mod ram;
mod state;
mod worker;

pub use error::Error;
pub use guest::{ProcessGuest, ProcessHandle};
pub use heap::HeapFigures;
pub use options::{Prealloc, ProcessOptions};
