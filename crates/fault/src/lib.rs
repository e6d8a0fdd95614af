//! Guest memory whose pages come while the guest runs: [`UffdMemory`] implements the engine's
//! [`LazyMemory`](vmferry_core::LazyMemory) for memory that is mapped in this process, by userfaultfd.
//!
//! | module | what |
//! |---|---|
//! | `region` | the mappings |
//! | `stripes` | which userfaultfd a page belongs to; addresses to pages and back |
//! | `threads` | which thread is which vCPU |
//! | `discard` | making pages missing |
//! | `huge` | memory made of huge pages, which come in parts and are shown whole |
//! | `placing` | placing pages where the guest sees them |
//! | `memory` | all of it together |
//! | `slot` | where a VMM keeps it |
//!
//! # Why nobody waits for somebody else's page
//! A page that is touched makes a message on the userfaultfd of its stripe, which one thread reads; placing a page takes no
//! lock of ours. What is locked is only that it begins or ends.
//!
//! # What is not seen
//! Memory of a memfd that another process, or another mapping of this one, touches makes no fault: only the mappings given
//! here do.

mod discard;
mod error;
mod huge;
mod memory;
mod placing;
mod region;
mod slot;
mod stripes;
mod threads;

pub use error::FaultError;
pub use memory::{UffdMemory, UffdOptions};
pub use region::{Backing, LazyRegion};
pub use slot::LazySlot;
pub use threads::{VcpuThread, VcpuThreads};
