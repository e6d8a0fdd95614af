//! The heap of this process.

/// Has all threads allocate from one heap, which by default they do not with glibc: it gives threads heaps of their own, eight for each
/// processor, and each keeps what it once had. For a process that makes threads for each migration, and allocates little and nothing per
/// page, that is 20 MiB for nothing. Called before there is a second thread; without glibc it does nothing.
pub fn share_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number that the allocator looks at when a thread allocates for the first time.
    unsafe {
        // Refused by none that knows it; where it is refused all is as before.
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
