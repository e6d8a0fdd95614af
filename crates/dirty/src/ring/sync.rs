//! The locks of [`core`](super::core), which unit tests run under a scheduler that tries out interleavings (shuttle).

#[cfg(test)]
pub(crate) use shuttle::sync::{Mutex, MutexGuard};
use std::sync::PoisonError;
#[cfg(not(test))]
pub(crate) use std::sync::{Mutex, MutexGuard};

/// Locks. What is behind these locks is whole at any moment, also when a thread panics that holds one.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
