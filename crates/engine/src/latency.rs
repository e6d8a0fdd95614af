//! Threads that somebody waits for.

/// The slice that a thread of ours asks for, in ns: it works for some microseconds at a time.
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

/// Short slices for a thread of this process that somebody else made, by its id: a vCPU that waits for pages, and must
/// not wait again for the end of a slice of those who bring them. `false` takes it back.
pub fn prefer_latency_of(thread: u32, prefer: bool) {
    // 0 is the calling thread to the kernel, and nobody to us.
    if thread != 0 {
        change(thread, |attributes| attributes.runtime = if prefer { SLICE } else { 0 });
    }
}

/// Asks the scheduler for short slices for this thread, and in return to be run soon when it is woken (Linux 6.12,
/// `Documentation/scheduler/sched-eevdf.rst`: a shorter slice is an earlier deadline). It gets no larger share of a
/// processor. A kernel that does not know it refuses, or takes no notice.
pub(crate) fn prefer_latency() {
    change(0, |attributes| attributes.runtime = SLICE);
}

/// How much a thread that nobody waits for gives way: about a tenth of an ordinary thread's share where both want a processor,
/// and all of it where nobody else does. Not `SCHED_IDLE`: what such a thread has claimed could then wait for seconds on a
/// busy host, and somebody may come to need it.
const NICE: i32 = 10;

/// Gives way to other threads from now on: this one sends or places pages that nobody waits for, and must not keep a processor
/// from those that somebody does, or from the guest. There is no way back for an ordinary user.
pub(crate) fn give_way() {
    change(0, |attributes| {
        attributes.policy = libc::SCHED_BATCH.unsigned_abs();
        attributes.nice = attributes.nice.max(NICE);
        // Who runs is not interrupted before the end of its slice by whoever has one that is no shorter.
        attributes.runtime = SLICE;
    });
}

fn change(thread: u32, how: impl FnOnce(&mut Attributes)) {
    let mut attributes = Attributes { size: 48, ..Attributes::default() };
    // SAFETY: the kernel writes at most `size` bytes of `attributes`.
    let known = unsafe { libc::syscall(libc::SYS_sched_getattr, thread, &raw mut attributes, 48u32, 0u32) };
    // Whoever gave us a policy of his own (real time, idle) knows better.
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
    fn giving_way_lowers_this_thread_only() {
        // SAFETY: this call reads nothing of ours.
        let nice = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let before = nice();
        let there = std::thread::spawn(move || {
            super::give_way();
            nice()
        });
        assert_eq!((there.join().unwrap(), nice()), (before.max(super::NICE), before));
    }

    #[test]
    fn another_thread_is_given_short_slices_and_its_own_again() {
        let slice = |thread: u32| {
            let mut attributes = super::Attributes::default();
            // SAFETY: the kernel writes at most 48 bytes, as many as there are.
            let known =
                unsafe { libc::syscall(libc::SYS_sched_getattr, thread, &raw mut attributes, 48u32, 0u32) };
            assert_eq!(known, 0);
            attributes.runtime
        };
        // SAFETY: this call reads nothing of ours.
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
            return skip(Need::Kernel, "no slices that can be asked for (before Linux 6.12)");
        }
        assert_eq!((short, after), (super::SLICE, before));
    }

    #[test]
    fn it_changes_neither_policy_nor_niceness() {
        std::thread::spawn(|| {
            // SAFETY: these calls read nothing of ours.
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
