//! The guest that needs no KVM: threads that write to memory, tracked by write protection.
//!
//! It runs the workloads of the bare-metal guest (guest/abi) with the same stamps and checks, keeps the same statistics
//! page at the same place, and moves by the same engine. Its "vCPUs" are threads; its guest-physical addresses are only
//! names. What it cannot show is what KVM adds: exits, interrupt controllers, the cost of a dirty-logging fault.

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
