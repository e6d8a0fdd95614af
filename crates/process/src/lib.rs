//! A guest that needs no KVM: threads that write to memory, tracked by write protection.
//!
//! The guest runs the workloads of the bare-metal guest (guest/abi) with the same stamps and
//! checks. It keeps the same statistics page at the same address and is migrated by the same
//! engine. Its vCPUs are threads, and its guest-physical addresses are only names. A process guest
//! cannot show what KVM adds: exits, interrupt controllers, and the cost of a fault for dirty
//! logging.

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
pub use options::ProcessOptions;
