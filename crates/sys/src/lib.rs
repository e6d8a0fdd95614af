//! Bindings to kernel interfaces that no other crate wraps, with one function for each call.
//!
//! The crate covers the dirty log and the dirty rings of KVM, userfaultfd, `PAGEMAP_SCAN`, the data
//! ranges of a memfd, the advice of `madvise`, locks of open files, tap interfaces, the processor
//! time of a thread, and the number of heaps of glibc.
//!
//! The crate contains the unsafe part of each call, and no policy. Buffers are checked against the
//! size that the kernel reads or writes, and structures have the size that the kernel expects,
//! which is asserted at compile time. A call that can change memory behind the back of safe code is
//! an `unsafe fn`.
//!
//! ```
//! use std::os::fd::AsFd;
//! use vmferry_sys::lock::{LockKind, try_lock};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let path = std::env::temp_dir().join(format!("vmferry-sys-example-{}", std::process::id()));
//! let open = || std::fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
//! let (first, second) = (open()?, open()?);
//! assert!(try_lock(first.as_fd(), LockKind::Exclusive)?);
//! assert!(!try_lock(second.as_fd(), LockKind::Exclusive)?, "the lock belongs to the open file, not to the process");
//! drop(first);
//! assert!(try_lock(second.as_fd(), LockKind::Exclusive)?);
//! std::fs::remove_file(&path)?;
//! # Ok(()) }
//! ```
//!
//! # Platform
//! The crate supports Linux on x86-64 and aarch64. Dirty tracking and demand paging need a kernel
//! with a page size of 4 KiB; with another one, the calls return [`SysError::HostPages`].

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

/// Page size that this crate requires of the kernel, in bytes.
pub const PAGE_SIZE: u64 = 4096;
