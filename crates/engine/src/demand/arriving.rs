//! Guests whose pages are still arriving. Such a guest must be neither moved again nor saved.
//!
//! A page that has not arrived is not populated, and therefore looks to the VM like a page that was
//! never touched. The next target would get zeros in place of such a page. The engine prevents
//! this, because only the engine knows both the postcopy in progress and the migration that is to
//! begin.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use vmferry_core::GuestMemory;

/// Memories of this process whose pages are still arriving. The list changes at the beginning and
/// at the end of a postcopy, and does not keep a memory alive.
static ARRIVING: Mutex<Vec<Weak<dyn GuestMemory>>> = Mutex::new(Vec::new());

/// Memory whose pages are still arriving. If the value is dropped before
/// [`complete`](Self::complete) is called, the memory counts as incomplete for ever.
pub(crate) struct Arriving(Arc<dyn GuestMemory>);

impl Arriving {
    pub(crate) fn new(memory: Arc<dyn GuestMemory>) -> Self {
        arriving().push(Arc::downgrade(&memory));
        Self(memory)
    }

    /// Records that all pages have arrived.
    pub(crate) fn complete(&self) {
        arriving().retain(|memory| !is(memory, &self.0));
    }
}

impl fmt::Debug for Arriving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Arriving").field(self.0.layout()).finish()
    }
}

/// Returns true if pages of `memory` are still arriving, or will never arrive.
pub(crate) fn still_arrives(memory: &Arc<dyn GuestMemory>) -> bool {
    arriving().iter().any(|arriving| is(arriving, memory))
}

/// Returns the list, after removing the memories that no longer exist. They must be removed,
/// because another memory may have the address of one of them.
fn arriving() -> MutexGuard<'static, Vec<Weak<dyn GuestMemory>>> {
    // A panic while the lock is held cannot leave the list inconsistent.
    let mut arriving = ARRIVING.lock().unwrap_or_else(PoisonError::into_inner);
    arriving.retain(|memory| memory.strong_count() > 0);
    arriving
}

fn is(arriving: &Weak<dyn GuestMemory>, memory: &Arc<dyn GuestMemory>) -> bool {
    std::ptr::addr_eq(arriving.as_ptr(), Arc::as_ptr(memory))
}
