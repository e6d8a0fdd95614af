//! Processor time of the calling thread.

use std::time::Duration;

/// Returns the processor time that the calling thread has used since it started
/// (`CLOCK_THREAD_CPUTIME_ID`).
#[must_use]
pub fn cpu_time() -> Duration {
    let mut spent = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure belongs to the call and to this function.
    let done = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut spent) };
    debug_assert_eq!(done, 0, "every Linux has this clock");
    Duration::new(u64::try_from(spent.tv_sec).unwrap_or(0), u32::try_from(spent.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_counts_work_but_not_sleep() {
        let before = cpu_time();
        std::thread::sleep(Duration::from_millis(30));
        let slept = cpu_time() - before;
        assert!(slept < Duration::from_millis(20), "{slept:?}");
        while cpu_time() - before < Duration::from_millis(5) {
            std::hint::spin_loop();
        }
    }
}
