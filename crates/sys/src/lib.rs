//! The kernel interfaces that no crate wraps, one call each: KVM's dirty log and rings, userfaultfd, `PAGEMAP_SCAN`,
//! the data ranges of a memfd, what a mapping holds, locks of open files, tap interfaces, and how many heaps there are.
//!
//! No policy and no state here. What is unsafe about a call is fenced in this crate: buffers are checked against what
//! the kernel will write, structures have the size that the kernel expects (asserted at compile time), and a call that
//! can take memory away from safe code is an `unsafe fn`. Linux on x86-64 only: ioctl numbers and page size are its.

mod error;
mod heap;
mod ioctl;
pub mod kvm;
pub mod lock;
pub mod mapping;
pub mod memfd;
pub mod pagemap;
pub mod ring;
pub mod tap;
mod thread;
pub mod uffd;

pub use error::SysError;
pub use heap::share_one_heap;
pub use thread::cpu_time;

/// Bytes in the page that all of these interfaces count in.
pub const PAGE_SIZE: u64 = 4096;
