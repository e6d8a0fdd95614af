//! Synchronization types that threads share in postcopy and in snapshots of running guests:
//! atomics, locks and bitmaps of claimed pages. Unit tests replace them by types of shuttle, a
//! scheduler that tries out interleavings: before each access, any other thread may run.

#[cfg(not(test))]
pub(crate) use std::sync::Mutex as SteppedMutex;
#[cfg(not(test))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, fence};
#[cfg(not(test))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, RwLock};
#[cfg(not(test))]
pub(crate) use vmferry_bitmap::{AtomicBitmap, ClaimBitmap};

#[cfg(test)]
pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, fence};
#[cfg(test)]
pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard, RwLock};
#[cfg(test)]
pub(crate) use stepped::{AtomicBitmap, ClaimBitmap, SteppedMutex, unscheduled};

/// Bitmaps that wrap the production bitmaps and make each call one step for the scheduler. The
/// interleavings within a call are tested separately.
#[cfg(test)]
mod stepped {
    use std::ops::Range;
    use std::sync::{LockResult, MutexGuard, TryLockError};
    use vmferry_bitmap::Bitmap;

    thread_local! {
        static UNSCHEDULED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }

    /// Calls `work`, which uses these bitmaps in one thread and outside the scheduler.
    pub(crate) fn unscheduled<T>(work: impl FnOnce() -> T) -> T {
        let before = UNSCHEDULED.replace(true);
        let done = work();
        UNSCHEDULED.set(before);
        done
    }

    fn step() {
        if !UNSCHEDULED.get() {
            shuttle::thread::yield_now();
        }
    }

    /// Lock that works outside the scheduler, too.
    #[derive(Debug)]
    pub(crate) struct SteppedMutex<T>(std::sync::Mutex<T>);

    impl<T> SteppedMutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(std::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
            loop {
                step();
                match self.0.try_lock() {
                    Ok(guard) => return Ok(guard),
                    Err(TryLockError::Poisoned(error)) => return Err(error),
                    Err(TryLockError::WouldBlock) => {}
                }
            }
        }
    }

    #[derive(Debug)]
    pub(crate) struct ClaimBitmap(vmferry_bitmap::ClaimBitmap);

    impl ClaimBitmap {
        pub(crate) fn new(set: Bitmap) -> Self {
            Self(vmferry_bitmap::ClaimBitmap::new(set))
        }

        pub(crate) fn empty(len: u64) -> Self {
            Self(vmferry_bitmap::ClaimBitmap::empty(len))
        }

        pub(crate) fn word(&self, index: usize) -> u64 {
            step();
            self.0.word(index)
        }

        pub(crate) fn next_block(&self, page: u64) -> Option<u64> {
            step();
            self.0.next_block(page)
        }

        pub(crate) fn len(&self) -> u64 {
            self.0.len()
        }

        pub(crate) fn left(&self) -> u64 {
            step();
            self.0.left()
        }

        pub(crate) fn test(&self, page: u64) -> bool {
            step();
            self.0.test(page)
        }

        pub(crate) fn any(&self, range: Range<u64>) -> bool {
            step();
            self.0.any(range)
        }

        pub(crate) fn take(&self, page: u64) -> bool {
            step();
            self.0.take(page)
        }

        pub(crate) fn take_64(&self, first: u64, wanted: u64) -> u64 {
            step();
            self.0.take_64(first, wanted)
        }

        pub(crate) fn give_64(&self, first: u64, pages: u64) {
            step();
            self.0.give_64(first, pages);
        }

        pub(crate) fn take_range(&self, range: Range<u64>) -> (u64, bool) {
            step();
            self.0.take_range(range)
        }

        pub(crate) fn take_range_into(&self, range: Range<u64>, into: &mut Bitmap) -> u64 {
            step();
            self.0.take_range_into(range, into)
        }

        pub(crate) fn snapshot(&self) -> Bitmap {
            step();
            self.0.snapshot()
        }
    }

    #[derive(Debug)]
    pub(crate) struct AtomicBitmap(vmferry_bitmap::AtomicBitmap);

    impl AtomicBitmap {
        pub(crate) fn new(len: u64) -> Self {
            Self(vmferry_bitmap::AtomicBitmap::new(len))
        }

        pub(crate) fn len(&self) -> u64 {
            self.0.len()
        }

        pub(crate) fn set(&self, page: u64) -> bool {
            step();
            self.0.set(page)
        }

        pub(crate) fn test_and_clear(&self, page: u64) -> bool {
            step();
            self.0.test_and_clear(page)
        }

        pub(crate) fn harvest(&self, into: &mut Bitmap) -> u64 {
            step();
            self.0.harvest(into)
        }
    }
}
