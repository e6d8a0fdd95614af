//! Guests whose pages still arrive: such a guest must be neither moved again nor saved.
//!
//! A page that has not arrived is not populated. To the VM it looks like a page that was never
//! touched, so the next target would get zeros for it. Only the engine knows both the migration
//! that still brings pages and the one that is to begin.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use vmferry_core::GuestMemory;

/// Memories of this process whose pages still arrive. The list changes at the beginning and at the
/// end of a postcopy. It keeps no memory alive.
static ARRIVING: Mutex<Vec<Weak<dyn GuestMemory>>> = Mutex::new(Vec::new());

/// Memory whose pages still arrive. If the value is dropped before [`complete`](Self::complete),
/// the memory never becomes complete.
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

/// Returns true if pages of `memory` still arrive.
pub(crate) fn still_arrives(memory: &Arc<dyn GuestMemory>) -> bool {
    arriving().iter().any(|arriving| is(arriving, memory))
}

/// Returns the list without the memories that no longer exist: another memory may have the address
/// of one of them.
fn arriving() -> MutexGuard<'static, Vec<Weak<dyn GuestMemory>>> {
    // A panic while the lock is held cannot leave the list inconsistent.
    let mut arriving = ARRIVING.lock().unwrap_or_else(PoisonError::into_inner);
    arriving.retain(|memory| memory.strong_count() > 0);
    arriving
}

fn is(arriving: &Weak<dyn GuestMemory>, memory: &Arc<dyn GuestMemory>) -> bool {
    std::ptr::addr_eq(arriving.as_ptr(), Arc::as_ptr(memory))
}
