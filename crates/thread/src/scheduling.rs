//! Time slices and niceness of threads, for a guest that waits for single pages.

/// Length of a short slice in ns. The threads that request such a slice work for only a few
/// microseconds at a time.
const SLICE: u64 = 100_000;

/// `struct sched_attr`, first version (Linux `include/uapi/linux/sched/types.h`).
#[repr(C)]
#[derive(Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const _: () = assert!(size_of::<Attributes>() == 48);

/// Gives the thread with the Linux thread id `thread` short time slices if `prefer` is true, and
/// default time slices if it is false. Does nothing if `thread` is 0, or if the thread does not
/// have the policy `SCHED_OTHER`.
///
/// Use this function for a vCPU that waits for pages. After its page has arrived, such a vCPU
/// should not have to wait again until the threads that fetch pages have used up their slices.
pub fn prefer_latency_of(thread: u32, prefer: bool) {
    // For the kernel, 0 is the calling thread.
    if thread != 0 {
        change(thread, |attributes| attributes.runtime = if prefer { SLICE } else { 0 });
    }
}

/// Asks the scheduler for short slices for the calling thread, so that the thread runs soon after
/// it is woken.
///
/// A shorter slice gives the thread an earlier deadline (Linux 6.12,
/// `Documentation/scheduler/sched-eevdf.rst`). The thread's share of a processor does not change.
/// An older kernel refuses or ignores the request.
pub fn prefer_latency() {
    change(0, |attributes| attributes.runtime = SLICE);
}

/// Niceness of a thread that gives way to others.
///
/// With this value, a thread gets about a tenth of an ordinary thread's share if both want a
/// processor, and a whole processor if no other thread wants it. `SCHED_IDLE` is not used, because
/// on a busy host a thread with this policy could claim pages that the guest needs, and then not
/// run for seconds.
const NICE: i32 = 10;

/// Makes the calling thread give way to other threads from now on. An unprivileged process usually
/// cannot undo the change.
///
/// Use it for a thread that sends or places pages for which the guest does not wait. Such a thread
/// must not keep a processor from the guest or from the threads that fetch other pages.
pub fn give_way() {
    change(0, |attributes| {
        attributes.policy = libc::SCHED_BATCH.unsigned_abs();
        attributes.nice = attributes.nice.max(NICE);
        // Only a thread with a shorter slice can interrupt a running thread before the end of its
        // slice.
        attributes.runtime = SLICE;
    });
}

/// Returns the id of the calling thread.
pub(crate) fn current_thread() -> u32 {
    // SAFETY: the call takes no arguments and cannot fail.
    unsafe { libc::gettid() }.unsigned_abs()
}

fn change(thread: u32, how: impl FnOnce(&mut Attributes)) {
    let mut attributes = Attributes { size: 48, ..Attributes::default() };
    // SAFETY: the kernel writes at most `size` bytes of `attributes`.
    let known = unsafe { libc::syscall(libc::SYS_sched_getattr, thread, &raw mut attributes, 48u32, 0u32) };
    // A policy that the operator chose (real time, idle) stays.
    if known != 0 || attributes.policy != libc::SCHED_OTHER.unsigned_abs() {
        return;
    }
    how(&mut attributes);
    // SAFETY: the kernel reads `size` bytes of `attributes`.
    unsafe { libc::syscall(libc::SYS_sched_setattr, thread, &raw const attributes, 0u32) };
}

#[cfg(test)]
mod tests {
    use vmferry_testkit::{Need, skip};

    #[test]
    fn give_way_changes_only_the_calling_thread() {
        // SAFETY: this call accesses no memory of the process.
        let nice = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let before = nice();
        let there = std::thread::spawn(move || {
            super::give_way();
            nice()
        });
        assert_eq!((there.join().unwrap(), nice()), (before.max(super::NICE), before));
    }

    #[test]
    fn prefer_latency_of_sets_and_resets_the_slices_of_another_thread() {
        let slice = |thread: u32| {
            let mut attributes = super::Attributes::default();
            // SAFETY: the kernel writes at most 48 bytes, which is the size of the structure.
            let known =
                unsafe { libc::syscall(libc::SYS_sched_getattr, thread, &raw mut attributes, 48u32, 0u32) };
            assert_eq!(known, 0);
            attributes.runtime
        };
        // SAFETY: this call accesses no memory of the process.
        let own = u32::try_from(unsafe { libc::gettid() }).unwrap();
        let another = std::thread::spawn(move || {
            let before = slice(own);
            super::prefer_latency_of(own, true);
            let short = slice(own);
            super::prefer_latency_of(own, false);
            (before, short, slice(own))
        });
        let (before, short, after) = another.join().unwrap();
        if before == 0 {
            return skip(Need::Kernel, "no slices that a thread can request (before Linux 6.12)");
        }
        assert_eq!((short, after), (super::SLICE, before));
    }

    #[test]
    fn prefer_latency_changes_neither_policy_nor_niceness() {
        std::thread::spawn(|| {
            // SAFETY: these calls access no memory of the process.
            let of_thread =
                || unsafe { (libc::sched_getscheduler(0), libc::getpriority(libc::PRIO_PROCESS, 0)) };
            let before = of_thread();
            super::prefer_latency();
            assert_eq!(of_thread(), before);
        })
        .join()
        .unwrap();
    }
}
