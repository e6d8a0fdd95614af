//! Heap of this process.

/// Makes all threads allocate from one heap.
///
/// By default, glibc creates separate heaps for threads, up to eight for each processor, and each
/// heap keeps its memory. A process that starts threads for each migration, but allocates little,
/// would waste 20 MiB. Call this function before the process starts a second thread. Without glibc,
/// the function does nothing.
pub fn share_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number that the allocator reads when a thread allocates for the first time.
    unsafe {
        // No glibc that has this parameter rejects the value. If it is rejected, the default stays
        // in force.
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
